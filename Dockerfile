# linkwise: the image of the DaemonSet. Two stages: build with Rust and hwloc's headers, run with
# glibc, hwloc and udev's library. NVML is not in it: the NVIDIA container runtime mounts the
# library of the host's driver (see NVIDIA_VISIBLE_DEVICES below).

FROM docker.io/library/rust:1-bookworm AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends libhwloc-dev libudev-dev pkg-config \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
# A relative relocation in a bit instead of 24 bytes, which each process would read and keep: 0.3 MiB less. It takes glibc 2.36, which
# both stages have; so it is here and not in Cargo.toml.
ENV RUSTFLAGS="-C link-arg=-Wl,-z,pack-relative-relocs"

# The dependencies first, against empty sources: a layer that only the manifests, Cargo.lock and what is made of proto/ can
# make stale.
COPY Cargo.toml Cargo.lock ./
COPY proto proto
COPY crates/kubelet-api crates/kubelet-api
COPY crates/api-server-box/Cargo.toml crates/api-server-box/Cargo.toml
COPY crates/cluster/Cargo.toml crates/cluster/Cargo.toml
COPY crates/core/Cargo.toml crates/core/Cargo.toml
COPY crates/kubelet-box/Cargo.toml crates/kubelet-box/Cargo.toml
COPY crates/scheduler-box/Cargo.toml crates/scheduler-box/Cargo.toml
COPY tests/fake-nvml/Cargo.toml tests/fake-nvml/Cargo.toml
RUN for member in . crates/api-server-box crates/cluster crates/core crates/kubelet-box crates/scheduler-box \
        tests/fake-nvml; do \
      mkdir -p "$member/src" && touch "$member/src/lib.rs"; done \
 && echo 'fn main() {}' | tee src/main.rs > crates/cluster/src/main.rs \
 && for member in . crates/cluster; do \
      for bench in $(sed -n '/^\[\[bench\]\]/,/^$/s/^name = "\(.*\)"/\1/p' "$member/Cargo.toml"); do \
        mkdir -p "$member/benches" && echo 'fn main() {}' > "$member/benches/$bench.rs"; done; done \
 && cargo build --release --locked --bin linkwise \
 && cargo build --release --locked -p linkwise-cluster \
 && rm -rf src

COPY crates crates
# The demo shows what these do.
COPY manifests/dra manifests/dra
COPY src src
# The copied files may be older than what was just built.
RUN find src crates -name '*.rs' -exec touch {} + \
 && cargo build --release --locked --bin linkwise \
 && cargo build --release --locked -p linkwise-cluster
# The programs, their manual and the completions of shells.
COPY Makefile Makefile
RUN make install PROFILE= BUILT=target/release PREFIX=/usr DESTDIR=/installed

FROM docker.io/library/debian:bookworm-slim
# Not libhwloc-plugins: it probes OpenCL and X.
RUN apt-get update \
 && apt-get install -y --no-install-recommends libhwloc15 libudev1 \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /installed /
COPY LICENSE /usr/share/doc/linkwise/LICENSE
# The commands of NVIDIA's image, as its chart and others call them: `linkwise run`, `labels`, `mps-control-daemon`, and
# `config-manager`, which needs the API server.
RUN for name in nvidia-device-plugin gpu-feature-discovery mps-control-daemon; do ln -s linkwise "/usr/bin/$name"; done \
 && ln -s linkwise-cluster /usr/bin/config-manager

# As NVIDIA's image has it, so that a changed image is all there is to a swap: all GPUs for the container runtime to hand in;
# NVML by utility, nvidia-uvm (which --pass-device-specs names) and the MPS programs by compute; and no refusal to start for
# what a driver may be too old for.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_DISABLE_REQUIRE=true

ARG VERSION=unknown
LABEL org.opencontainers.image.title="linkwise" \
      org.opencontainers.image.description="A topology-aware Kubernetes device plugin for NVIDIA GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"

# Root, without any capability (manifests/base): the kubelet's device-plugins folder is root's with
# mode 0750, and our socket has to be made in it.
USER 0:0

ENTRYPOINT ["/usr/bin/linkwise"]
CMD ["run"]
