#!/bin/sh
# Stands in for an NVML child: closes its socket, and stays.
exec sleep 1000 0<&-
