#!/usr/bin/env bash
# Packs the chart: chart.sh VERSION FOLDER. `helm package` stamps the time, so that its archive is packed again.
set -euo pipefail
version=$1
mkdir -p "$2"
folder=$(realpath "$2")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
helm=${HELM:-target/tools/helm}
[[ -x $helm ]] || helm=$(command -v helm) || { echo "release: no helm; 'make tools' brings it"; exit 1; }
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
owner=$(<release/owner)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cp -R charts/linkwise "$work/linkwise"
sed -i "s|OWNER|$owner|g" "$work/linkwise/Chart.yaml"
"$helm" package "$work/linkwise" --version "$version" --app-version "$version" --destination "$work/packed" >/dev/null
mkdir "$work/again"
tar --touch -xzf "$work/packed/linkwise-$version.tgz" -C "$work/again"
release/tar.sh "$folder/linkwise-chart-$version.tgz" "$work/again" linkwise
