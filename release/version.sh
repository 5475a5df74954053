#!/usr/bin/env bash
# Prints the version that a release of this tree has, or says what disagrees and fails.
#
# The manifests, the chart and the changelog's newest version have to name the same one. A commit with the tag vVERSION
# is that version. Any other is a snapshot, VERSION-snapshot.gCOMMIT, with .dirty behind where files were changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
fail() { echo "release: $*" >&2; exit 1; }
first() { sed -nE "s/$1/\1/p" "$2" | head -n 1; }

version=$(first '^version = "(.*)"$' Cargo.toml)
[[ $version ]] || fail "Cargo.toml has no version"
agree() { [[ $2 == "$version" ]] || fail "Cargo.toml has version $version, $1 ${2:-none}"; }
agree lab/Cargo.toml "$(first '^version = "(.*)"$' lab/Cargo.toml)"
agree "version in charts/linkwise/Chart.yaml" "$(first '^version: (.*)$' charts/linkwise/Chart.yaml)"
agree "appVersion in charts/linkwise/Chart.yaml" "$(first '^appVersion: (.*)$' charts/linkwise/Chart.yaml)"
agree "the newest section of CHANGELOG.md" "$(first '^## ([0-9].*)$' CHANGELOG.md)"

commit=$(git rev-parse --short=12 HEAD) || fail "no commit: a release is made of a git clone"
dirty=$(git status --porcelain)
tags=$(git tag --points-at HEAD --list 'v[0-9]*')
if [[ ! $tags ]]; then
  # A part of a version that has digits only may not begin with 0: hence the g.
  echo "$version-snapshot.g$commit${dirty:+.dirty}"
  exit
fi
agree "the tag" "${tags#v}"
[[ ! $dirty ]] || fail "the tag $tags is at HEAD, but files were changed"
echo "$version"
