# `make demo` and `make test` are all that is needed on a fresh Debian 12 with Rust: both first
# install the Debian packages that are missing, and say which.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

CARGO ?= cargo
IMAGE ?= linkwise:dev
MACHINE ?= dgx-h100

# To build: hwloc's headers, udev's (hwloc's pkg-config file asks for them), pkg-config itself.
PACKAGES := libhwloc-dev libudev-dev pkg-config

.PHONY: help
help: ## say what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

.PHONY: setup
setup: ## install what the build needs (Debian packages), where missing
	@missing=(); \
	for package in $(PACKAGES); do \
	  dpkg-query -W -f='$${Status}' "$$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$$package"); \
	done; \
	if ! command -v dpkg-query >/dev/null; then \
	  pkg-config --exists hwloc || { echo "setup: not a Debian; install the hwloc headers and pkg-config"; exit 1; }; \
	elif (($${#missing[@]})); then \
	  echo "setup: installing $${missing[*]}"; \
	  as_root=(); if (($$(id -u) != 0)); then as_root=(sudo); fi; \
	  "$${as_root[@]}" apt-get update -q; \
	  "$${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$${missing[@]}"; \
	fi
	@command -v $(CARGO) >/dev/null || { echo "setup: no $(CARGO) on the PATH; see https://rustup.rs"; exit 1; }
	@command -v cc >/dev/null || { echo "setup: no C linker (cc) on the PATH; install gcc"; exit 1; }

.PHONY: demo
demo: setup ## a whole node in one process: kubelet, pods, a fault (MACHINE=dgx-h100)
	$(CARGO) build --release --locked --bin linkwise
	target/release/linkwise demo --machine $(MACHINE)

.PHONY: test
test: setup ## everything that must pass
	@echo "== format"
	$(CARGO) fmt --all --check
	@echo "== clippy, warnings are errors"
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	@echo "== tests: unit, property, golden, integration, layering, examples in the docs"
	$(CARGO) test --locked --workspace
	@echo "== docs, warnings are errors"
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --workspace --no-deps
	@echo "== all passed"

.PHONY: bench
bench: setup ## measure the choice and the RPC; prints numbers, judges none
	$(CARGO) bench --locked

.PHONY: image
image: ## build the container image (IMAGE=linkwise:dev) with buildah or docker
	@if command -v buildah >/dev/null; then set -x; buildah build --layers -t $(IMAGE) .; \
	elif command -v docker >/dev/null; then set -x; docker build -t $(IMAGE) .; \
	else echo "image: neither buildah nor docker on the PATH"; exit 1; fi

.PHONY: clean
clean: ## remove what was built
	$(CARGO) clean
