#!/usr/bin/env bash
# Prints the SBOM of a version, CycloneDX 1.5: sbom.sh VERSION. It names the crates that are linked into the programs,
# with the checksums of Cargo.lock, and the libraries that the programs load.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. release/crates.sh

sums=$(awk '$1 == "name" {name = $3} $1 == "version" {version = $3} $1 == "checksum" {print name, version, $3}' \
  Cargo.lock | tr -d '"' | jq -Rn '[inputs | split(" ") | {key: "\(.[0]) \(.[1])", value: .[2]}] | from_entries')
linked | jq -s --arg version "$1" --argjson sums "$sums" '{
  bomFormat: "CycloneDX", specVersion: "1.5", version: 1,
  metadata: {component: {type: "application", "bom-ref": "linkwise", name: "linkwise", version: $version,
    licenses: [{license: {id: "Apache-2.0"}}]}},
  components: ([.[] | "pkg:cargo/\(.name)@\(.version)" as $purl | {
    type: "library", "bom-ref": $purl, name, version, purl: $purl,
    hashes: [{alg: "SHA-256", content: $sums["\(.name) \(.version)"]}],
    licenses: (if .license then [{expression: (.license | gsub("/"; " OR "))}] else [] end)
  }] + [("libhwloc.so.15", "libudev.so.1") | {type: "library", "bom-ref": ., name: ., description: "from the system"}])
}'
