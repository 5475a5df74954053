#!/usr/bin/env bash
# Runs linkwise for arm64 by qemu's user mode: the core's tests, then what `make build-arm64` builds, on the
# machine that is an Arm one, and in the image's Debian packages. Called by `make test-arm64`, below tools/arm64.sh.
#
# usage: arm64.sh PROFILE CARGO...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

profile=$1 cargo=("${@:2}") machine=gb200-nvl72-node
built=${CARGO_TARGET_DIR:-target}/aarch64-unknown-linux-gnu/${profile/#dev/debug}
read -ra runner <<<"${ARM64_RUNNER:-}"
arm64() { "${runner[@]}" "$built/$1" "${@:2}"; }
fail() { echo "arm64: $*" >&2; exit 1; }
# The output of a command has some words.
has() {
  local words=$1 output
  shift
  output=$("$@" 2>&1) || fail "$*: $output"
  grep -qF -- "$words" <<<"$output" || fail "$*: no '$words' in: $output"
}

echo "== the core's tests"
"${cargo[@]}" test --locked --target aarch64-unknown-linux-gnu -p linkwise-core

echo "== the programs, built"
make build-arm64 CARGO="${cargo[*]}" PROFILE="$profile"

echo "== the programs, on $machine"
version="linkwise $(sed -n 's/^version = "\(.*\)"/\1/p;T;q' Cargo.toml)"
has "$version" arm64 linkwise --version
has 'GPU 3  0019:01:00.0  NVIDIA GB200' arm64 linkwise topology --node $machine
has 'GPU 0,1 (2 of 4): collective 721800 MB/s' arm64 linkwise allocate --node $machine --size 2 --explain
has 'NVIDIA GB200' arm64 linkwise-lab demo --machine $machine

echo "== linkwise starts itself: the process that loads NVML"
# There is no NVML: that process says so, and this one hands it on.
library=/nonexistent/libnvidia-ml.so
if said=$(arm64 linkwise topology --nvml-library $library 2>&1); then fail "NVML from nowhere: $said"; fi
grep -qF "dlopen: cannot load $library" <<<"$said" || fail "its word is missing: $said"

if (($(id -u))); then echo "== the image's root file system: skipped, needs root"; exit 0; fi
echo "== the image's root file system"
tests/tools/debian.sh --alone mmdebstrap mmdebstrap=usr/bin/mmdebstrap || { echo "== skipped: no mmdebstrap"; exit 0; }
# Unpacked only: what packages run when they are installed would need the kernel to start arm64 programs.
packages=$(sed -n 's/.*apt-get install -y --no-install-recommends \(.*\) \\$/\1/p' Dockerfile | tail -1)
suite=$(sed -n 's/^FROM .*debian:\(.*\)-slim$/\1/p' Dockerfile | tail -1)
root=target/image/arm64 base=target/image/arm64-$suite-${packages// /-}.tar
mkdir -p target/image
if [[ ! -f $base ]]; then
  target/tools/mmdebstrap --quiet --architectures=arm64 --variant=extract --include="${packages// /,}" \
    "$suite" target/image/arm64-draft.tar
  mv target/image/arm64-draft.tar "$base"
fi
rm -rf --one-file-system "$root"
mkdir "$root"
tar -xf "$base" -C "$root" --exclude './dev/*'
install -D "$built/linkwise" "$root/usr/bin/linkwise"
inside=(env -u QEMU_LD_PREFIX chroot "$root")
if ((${#runner[@]})); then
  install "$EXEC_BY_QEMU" "$root/qemu"
  inside+=(/qemu)
fi
has "$version" "${inside[@]}" /usr/bin/linkwise --version
has 'GPU 3  0019:01:00.0  NVIDIA GB200' "${inside[@]}" /usr/bin/linkwise topology --node $machine
echo "== arm64: all passed"
