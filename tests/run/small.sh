#!/bin/sh
# Mounts a folder with room for twelve inodes, in namespaces of this process and linkwise. If that fails, mount or
# unshare prints the cause.
exec unshare --user --map-root-user --mount sh -c \
  'mount -t tmpfs -o nr_inodes=12 small "$SMALL_FOLDER" && exec "$LINKWISE_UNDER_TEST" "$@"' sh "$@"
