#!/usr/bin/env bash
# Packs what a release has into a folder: pack.sh FOLDER ARCH=BUILT... BUILT has linkwise and linkwise-lab for ARCH; the
# first one has to run here, since linkwise itself writes its manual and completions.
set -euo pipefail
[[ $# -gt 1 ]] || { echo "usage: pack.sh FOLDER ARCH=BUILT..."; exit 2; }
rm -rf "$1"
mkdir -p "$1"
folder=$(realpath "$1")
shift
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
version=$("$root/release/version.sh")
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [[ $version != *-snapshot.* ]]; then
  for arch in x86_64 aarch64; do
    [[ " $*" == *" $arch="* ]] || { echo "release: $version needs both architectures, and $arch is missing"; exit 1; }
  done
fi
"$root/release/third-parties.sh" "$work/third-parties"
native=$(realpath "${1#*=}")
for pair in "$@"; do
  arch=${pair%%=*} built=$(realpath "${pair#*=}") name=linkwise-$version-${pair%%=*}
  make --no-print-directory -s -C "$root" install PROFILE= BUILT="$native" PREFIX= DESTDIR="$work/$name"
  for program in linkwise linkwise-lab; do
    [[ -x $built/$program ]] || { echo "release: no $program for $arch in $built"; exit 1; }
    install "$built/$program" "$work/$name/bin/$program"
  done
  cp "$root/LICENSE" "$work/$name/"
  cp -R "$work/third-parties" "$work/$name/"
  "$root/release/tar.sh" "$folder/$name.tar.gz" "$work" "$name"
done
"$root/release/chart.sh" "$version" "$folder"
"$root/release/sbom.sh" "$version" >"$folder/linkwise-$version.cdx.json"
(cd "$folder" && sha256sum -- linkwise-* >SHA256SUMS)
echo "release: $version in $folder"
