#!/bin/sh
# Stands in for an NVML agent: closes its socket, and stays.
exec sleep 1000 0<&-
