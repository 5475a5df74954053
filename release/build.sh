#!/usr/bin/env bash
# Builds linkwise and linkwise-lab for x86-64 into target/release, with the same bytes from any folder. build.sh
# COMMAND... runs another build so.
#
# A program names source files where it panics. These names become the same on every machine: those of the repository,
# of cargo's registry (its crates' C code too) and of Rust's own library.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cargo=${CARGO:-cargo}
from=("$PWD" "${CARGO_HOME:-$HOME/.cargo}" "$(rustc --print sysroot)")
to=(/linkwise /cargo /rust)

export RUSTFLAGS="" CFLAGS=""
for i in "${!from[@]}"; do
  [[ ${from[i]} != *[[:space:]]* ]] || { echo "release: a space in the path ${from[i]}"; exit 1; }
  RUSTFLAGS+="${RUSTFLAGS:+ }--remap-path-prefix=${from[i]}=${to[i]}"
  CFLAGS+="${CFLAGS:+ }-ffile-prefix-map=${from[i]}=${to[i]}"
done
if (($#)); then exec "$@"; fi
# Leaves no name in a program. Not for arm64, whose linker would take minutes.
RUSTFLAGS+=" -C link-arg=-T$PWD/release/hot.ld"
"$cargo" build --release --locked -p linkwise -p linkwise-lab --bin linkwise --bin linkwise-lab
