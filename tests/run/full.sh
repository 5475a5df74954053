#!/bin/sh
# SIGXFSZ ignored, also by what runs after this (exec keeps what is ignored): a file that may not grow is an error then.
trap '' XFSZ
exec "$LINKWISE_UNDER_TEST" "$@"
