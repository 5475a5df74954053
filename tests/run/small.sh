#!/bin/sh
# A folder with room for twelve files: a mount that only this process and what it becomes can see, in namespaces of its own.
# What cannot be mounted is said on standard error, in mount's words or unshare's.
exec unshare --user --map-root-user --mount sh -c \
  'mount -t tmpfs -o nr_inodes=12 small "$SMALL_FOLDER" && exec "$LINKWISE_UNDER_TEST" "$@"' sh "$@"
