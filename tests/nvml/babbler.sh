#!/bin/sh
# Stands in for an NVML child: says what is no message, and stays.
echo '"hello"' >&0
exec sleep 1000
