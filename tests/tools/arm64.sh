#!/usr/bin/env bash
# Runs a command in the environment in which cargo builds for arm64 on an x86-64 Debian, and runs what it has built.
# Brings what that takes: Debian's cross gcc and qemu's user mode, the libraries for arm64 as a root file system, and
# Rust's standard library (by rustup). Only the last changes anything outside of target/. On an arm64 machine nothing
# is brought, and nothing changes.
#
# usage: arm64.sh COMMAND...
# Ends with 77, and the reason, where a tool cannot be had.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

lacks() { echo "arm64: $*" >&2; exit 77; }

target=aarch64-unknown-linux-gnu
if [[ ! -d $(rustc --print target-libdir --target $target) ]]; then
  command -v rustup >/dev/null || \
    lacks "this Rust has no standard library for $target: use rustup's, or install your distribution's"
  echo "arm64: rustup target add $target"
  rustup target add $target || lacks "rustup cannot bring the standard library for $target"
fi
if [[ $(uname -m) == aarch64 ]]; then exec "$@"; fi

tools=$PWD/target/tools sysroot=$PWD/target/tools/arm64
[[ $(uname -m) == x86_64 ]] || lacks "no cross build on $(uname -m)"
tests/tools/debian.sh --sysroot arm64 libc6-dev libhwloc-dev libudev-dev || lacks "no libraries for arm64"
tests/tools/debian.sh --with "--sysroot=$sysroot" gcc-aarch64-linux-gnu \
  aarch64-linux-gnu-gcc=usr/bin/aarch64-linux-gnu-gcc || lacks "no cross gcc"
tests/tools/debian.sh binutils-aarch64-linux-gnu aarch64-linux-gnu-ar=usr/bin/aarch64-linux-gnu-ar || \
  lacks "no cross ar"
tests/tools/debian.sh --alone qemu-user-static qemu-aarch64=usr/bin/qemu-aarch64-static || lacks "no qemu-user-static"

# The kernel starts no arm64 program, unless the machine's binfmt_misc says by what. This does, in those that run.
preload=$tools/exec-by-qemu.so
[[ $preload -nt tests/tools/exec_by_qemu.c ]] || \
  "$tools/aarch64-linux-gnu-gcc" -Wall -Wextra -Werror -O1 -shared -fPIC -o "$preload" tests/tools/exec_by_qemu.c

export PKG_CONFIG_LIBDIR=$sysroot/usr/lib/aarch64-linux-gnu/pkgconfig:$sysroot/usr/share/pkgconfig
export PKG_CONFIG_SYSROOT_DIR=$sysroot
export CC_aarch64_unknown_linux_gnu=$tools/aarch64-linux-gnu-gcc
export AR_aarch64_unknown_linux_gnu=$tools/aarch64-linux-gnu-ar
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=$tools/aarch64-linux-gnu-gcc
export QEMU_LD_PREFIX=$sysroot EXEC_BY_QEMU=$tools/debian/qemu-user-static/usr/bin/qemu-aarch64-static
export ARM64_RUNNER="$EXEC_BY_QEMU -E LD_PRELOAD=$preload"
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=$ARM64_RUNNER
exec "$@"
