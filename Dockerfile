# The last stage is linkwise's image for the DaemonSet: glibc, hwloc, udev's library, and the program that the first
# stage builds. It has no NVML: the NVIDIA container runtime mounts the library of the host's driver (see
# NVIDIA_VISIBLE_DEVICES below). The stage `lab` is an image of its own (`make image-lab`).
#
# The steps are the same for linux/amd64 and linux/arm64. Each stage runs on the image's platform, emulated if the
# machine has another one, because `make install` runs the program that was built.

FROM docker.io/library/rust:1.95.0-bookworm AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends libhwloc-dev libudev-dev pkg-config \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
# The first flag packs a relative relocation into a bit instead of 24 bytes: each process reads and keeps 0.3 MiB less.
# The program then needs glibc 2.36, which both stages have, so the flag is here and not in Cargo.toml. The second flag
# places the code that runs in each process together. On arm64 Debian 12's linker ignores the first flag with a warning,
# and would take minutes for the second, so that hot.ld is emptied there.
COPY release/hot.ld release/hot.ld
RUN [ "$(uname -m)" = x86_64 ] || echo 'SECTIONS { } INSERT BEFORE .text;' > release/hot.ld
ENV RUSTFLAGS="-C link-arg=-Wl,-z,pack-relative-relocs -C link-arg=-T/src/release/hot.ld"

# The dependencies are built first, with empty sources: only the manifests, Cargo.lock, proto/ and crates/kubelet-api
# can make this layer stale.
COPY Cargo.toml Cargo.lock ./
COPY proto proto
COPY crates/kubelet-api crates/kubelet-api
COPY crates/cluster/Cargo.toml crates/cluster/Cargo.toml
COPY crates/core/Cargo.toml crates/core/Cargo.toml
COPY crates/host/Cargo.toml crates/host/Cargo.toml
COPY crates/kubelet/Cargo.toml crates/kubelet/Cargo.toml
COPY crates/node/Cargo.toml crates/node/Cargo.toml
COPY crates/nvml/Cargo.toml crates/nvml/Cargo.toml
COPY crates/system/Cargo.toml crates/system/Cargo.toml
COPY lab/Cargo.toml lab/Cargo.toml
COPY lab/api-server-box/Cargo.toml lab/api-server-box/Cargo.toml
COPY lab/fake-nvml/Cargo.toml lab/fake-nvml/Cargo.toml
COPY lab/kubelet-box/Cargo.toml lab/kubelet-box/Cargo.toml
COPY lab/scheduler-box/Cargo.toml lab/scheduler-box/Cargo.toml
RUN for member in . crates/* lab lab/*-box lab/fake-nvml; do \
      mkdir -p "$member/src" && [ -e "$member/src/lib.rs" ] || touch "$member/src/lib.rs"; done \
 && echo 'fn main() {}' | tee src/main.rs > lab/src/main.rs \
 && mkdir benches \
 && for bench in $(sed -n '/^\[\[bench\]\]/,/^$/s/^name = "\(.*\)"/\1/p' Cargo.toml); do \
      echo 'fn main() {}' > "benches/$bench.rs"; done \
 && cargo build --release --locked --bin linkwise \
 && rm -rf src

COPY crates crates
COPY src src
# The copied files may be older than what was just built.
RUN find src crates -name '*.rs' -exec touch {} + \
 && cargo build --release --locked --bin linkwise
# The program, its manual and the completions of shells.
COPY Makefile Makefile
RUN make install PROFILE= BUILT=target/release PREFIX=/usr DESTDIR=/installed

# The laboratory: the demo and simulations, for people. Nothing of it is in the DaemonSet's image.
FROM build AS build-lab
COPY lab lab
# The demo shows these manifests.
COPY manifests/dra manifests/dra
RUN find lab -name '*.rs' -exec touch {} + \
 && cargo build --release --locked -p linkwise-lab

FROM docker.io/library/debian:bookworm-slim AS lab
RUN apt-get update \
 && apt-get install -y --no-install-recommends libhwloc15 libudev1 \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build-lab /src/target/release/linkwise-lab /usr/bin/linkwise-lab
COPY LICENSE /usr/share/doc/linkwise/LICENSE
USER 65534:65534
ENTRYPOINT ["/usr/bin/linkwise-lab"]
CMD ["demo"]

FROM docker.io/library/debian:bookworm-slim
# Not libhwloc-plugins: it probes OpenCL and X.
RUN apt-get update \
 && apt-get install -y --no-install-recommends libhwloc15 libudev1 \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /installed /
COPY LICENSE /usr/share/doc/linkwise/LICENSE
# The commands of NVIDIA's images, as charts and operators call them: `linkwise run` for the first two, `labels`,
# `mps-control-daemon` and `config-manager`.
RUN for name in nvidia-device-plugin gpu-kubelet-plugin gpu-feature-discovery mps-control-daemon config-manager; do ln -s linkwise "/usr/bin/$name"; done
# NVIDIA's GPU Operator starts the plugin by a script that looks for kernel modules in the first words of lsmod's lines.
# Debian's package of lsmod, kmod, would bring OpenSSL.
RUN printf '#!/bin/sh\n[ ! -f /proc/modules ] || exec cat /proc/modules\n' > /usr/bin/lsmod && chmod 755 /usr/bin/lsmod

# `sh -c` starts that script. dash would stay as the container's first process and pass no SIGTERM on, so that each pod
# would be killed after its grace period. bash gives its place to the script, and the script to the plugin.
RUN ln -sf bash /bin/sh

# The variables of NVIDIA's image, so that a swap of the two plugins changes only the image. The container runtime gives
# the container all GPUs, NVML (utility), and nvidia-uvm (which --pass-device-specs names) and the MPS programs
# (compute). It does not refuse to start the container if the driver is too old for a requirement.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_DISABLE_REQUIRE=true

ARG VERSION=unknown
LABEL org.opencontainers.image.title="linkwise" \
      org.opencontainers.image.description="A topology-aware Kubernetes device plugin for NVIDIA GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"

# Root, without any capability (manifests/base): linkwise makes its socket in the kubelet's device-plugins folder, which
# is root's with mode 0750.
USER 0:0

ENTRYPOINT ["/usr/bin/linkwise"]
CMD ["run"]
