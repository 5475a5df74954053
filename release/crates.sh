# shellcheck shell=bash
# The crates of others that are linked into linkwise and linkwise-lab, for x86-64 or arm64. A script sources it in the
# repository's root.

# Prints a crate a line, as cargo's metadata has it, in an order that no machine changes.
linked() {
  local cargo=${CARGO:-cargo} names
  command -v jq >/dev/null || { echo "release: jq is missing" >&2; return 1; }
  names=$(for target in x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu; do
    "$cargo" tree --locked -p linkwise -p linkwise-lab -e normal --target "$target" --prefix none --format '{p}' |
      cut -d' ' -f1,2 || exit 1
  done | LC_ALL=C sort -u) || return 1
  "$cargo" metadata --locked --format-version 1 | jq -c --arg names "$names" '
    ($names | split("\n")) as $names
    | [.packages[] | select(.source != null and ("\(.name) v\(.version)" | IN($names[])))]
    | sort_by(.name, .version) | .[]'
}
