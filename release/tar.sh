#!/usr/bin/env bash
# Packs a folder so that the same files give the same bytes: tar.sh ARCHIVE PARENT FOLDER.
set -euo pipefail
: "${SOURCE_DATE_EPOCH:?release: no time of the commit}"
LC_ALL=C tar --create --format=ustar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner \
  --mode='u=rwX,go=rX' --directory "$2" "$3" | gzip -9n >"$1"
