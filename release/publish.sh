#!/usr/bin/env bash
# Publishes a tagged commit, or says where it goes; refuses a snapshot, and the placeholder in release/owner.
#
# usage: publish.sh image|version           prints the image's name, the version
#        publish.sh push-image PLATFORMS    builds and pushes the image, for platforms such as linux/amd64,linux/arm64
#        publish.sh push-chart [OPTION...]  pushes the chart that pack.sh has packed; the options are helm's
# The digests come into target/release-files, to be signed. LINKWISE_REGISTRY is another registry than the owner's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
files=target/release-files
owner=$(<release/owner)
fail() { echo "release: $*" >&2; exit 1; }
[[ $owner != OWNER ]] || fail "release/owner is still the placeholder OWNER; write yours there"
version=$(release/version.sh)
[[ $version != *-snapshot.* ]] || fail "$version is a snapshot; tag the commit v${version%%-*}"
registry=${LINKWISE_REGISTRY:-ghcr.io/$owner}
case ${1:-} in
  image) echo "$registry/linkwise:v$version" ;;
  version) echo "$version" ;;
  push-image)
    mkdir -p "$files"
    # The image's own SBOM has Debian's packages, and its provenance the digests of the base images.
    docker buildx build --platform "$2" --build-arg VERSION="$version" --sbom=true --provenance=mode=max --push \
      -t "$registry/linkwise:v$version" --metadata-file target/image.json .
    jq -r '."containerimage.digest"' target/image.json >"$files/image.digest"
    ;;
  push-chart)
    helm=${HELM:-target/tools/helm}
    [[ -x $helm ]] || helm=helm
    pushed=$("$helm" push "$files/linkwise-chart-$version.tgz" "oci://$registry/charts" "${@:2}" 2>&1) || {
      echo "$pushed" >&2; exit 1; }
    echo "$pushed"
    echo "$registry/charts/linkwise@$(sed -n 's/^Digest: //p' <<<"$pushed")" >"$files/chart.digest"
    ;;
  *) echo "usage: publish.sh image|version|push-image|push-chart" >&2; exit 2 ;;
esac
