#!/bin/sh
# Stands in for an NVML agent: sends an invalid message, and stays.
echo '"hello"' >&0
exec sleep 1000
