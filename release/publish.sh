#!/usr/bin/env bash
# Prints where this release goes, or refuses: publish.sh image|chart|version. The owner stands in release/owner.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
owner=$(<release/owner)
[[ $owner != OWNER ]] || { echo "release: release/owner is still the placeholder OWNER; write yours there" >&2; exit 1; }
version=$(release/version.sh)
[[ $version != *-snapshot.* ]] || { echo "release: $version is a snapshot; tag the commit v${version%%-*}" >&2; exit 1; }
registry=${LINKWISE_REGISTRY:-ghcr.io/$owner}
case ${1:-} in
  image) echo "$registry/linkwise:v$version" ;;
  chart) echo "oci://$registry/charts" ;;
  version) echo "$version" ;;
  *) echo "usage: publish.sh image|chart|version" >&2; exit 2 ;;
esac
