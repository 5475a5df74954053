#!/usr/bin/env bash
# Builds the site: docs/build.sh MDBOOK FOLDER. The pages keep their places in the repository, so that links are the same on
# both. The contents are those of the four pages below, and a page that none of them has is refused. Then each link, picture
# and heading that a page names must exist.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mdbook=$1 folder=$2
rm -rf "$folder"
mkdir -p "$folder/src"
cp docs/book.toml "$folder/"
pages=(README.md ARCHITECTURE.md CHANGELOG.md CONTRIBUTING.md SECURITY.md docs/*.md {benches,manifests,manifests/examples,tests}/README.md)
# Pages link to these too.
others=(LICENSE docs/images/* docs/traces/* manifests/{monitoring,examples,examples/claims}/*.yaml tests/nvml/real.rs)
cp --parents "${pages[@]}" "${others[@]}" "$folder/src/"

# The links of a page to other pages, a line each: depth, page, title.
contents() {
  local page=$1 link
  grep -oP '\]\(\K[^)#:]+\.md(?=\))' "$page" | while read -r link; do
    link=$(realpath --relative-to=. "$(dirname "$page")/$link")
    echo "  - [$(sed -n '1s/^# //p' "$link")]($link)"
  done
}
{
  echo "# Summary"
  echo
  echo "[linkwise](README.md)"
  echo
  for page in docs/{install,run,understand,change}.md; do
    echo "- [$(sed -n '1s/^# //p' "$page")]($page)"
    contents "$page"
  done
} >"$folder/src/SUMMARY.md"
for page in "${pages[@]}"; do
  count=$(grep -cF "]($page)" "$folder/src/SUMMARY.md" || true)
  ((count == 1)) || { echo "docs: $page is $count times on docs/{install,run,understand,change}.md"; exit 1; }
done

"$mdbook" build "$folder"
python3 docs/links.py "$folder/book"
