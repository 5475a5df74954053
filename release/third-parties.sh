#!/usr/bin/env bash
# Copies the licences of what is linked into the programs into a folder: third-parties.sh FOLDER. Each crate has a
# folder with the files that it ships; the list LICENCES names every crate, its licence and its repository.
set -euo pipefail
mkdir -p "$1"
folder=$(realpath "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. release/crates.sh

crates=$(linked | jq -r '[.name, .version, .license // "see its files", .repository // "no repository", .manifest_path]
  | @tsv')
: >"$folder/LICENCES"
while IFS=$'\t' read -r name version licence repository manifest; do
  echo "$name $version: $licence, $repository" >>"$folder/LICENCES"
  crate=${manifest%/*}
  found=$(cd "$crate" && find . -maxdepth 2 -type f \
    -iregex '.*/\(licen[cs]e\|copying\|copyright\|notice\|unlicense\)[^/]*' -not -name '*.rs' -not -name '*.py')
  if [[ ! $found ]]; then
    echo "  (the crate ships no text of its licence)" >>"$folder/LICENCES"
    continue
  fi
  mkdir "$folder/$name-$version"
  # Two texts of one name in two folders of a crate stay two.
  mapfile -t texts <<<"$found"
  (cd "$crate" && cp --parents -t "$folder/$name-$version" "${texts[@]}")
done <<<"$crates"
# Rust's own library.
cp "$(rustc --print sysroot)/share/doc/rust/COPYRIGHT-library.html" "$folder/rust-library.html" 2>/dev/null || {
  echo "release: Rust's installation has no COPYRIGHT-library.html"; exit 1; }
