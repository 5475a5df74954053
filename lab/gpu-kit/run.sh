#!/usr/bin/env bash
# Tries linkwise on a machine with a GPU and writes a report: run.sh REPORT. Needs bash and NVIDIA's driver, takes less
# than eight minutes, changes no setting and resets nothing. A program of the kit faults on a GPU on purpose, as a
# broken CUDA program does. As root, or if users may make namespaces, it does so again with only the device nodes and
# mounts of a claim's CDI spec. linkwise releases the driver and resumes it. The driver and other programs are left as
# they are.
#
# REPORT becomes a folder: summary.txt, every NVML call with code and time (nvml-calls*.tsv), the machine as a node file
# without serial numbers (machine.yaml), doctor, topology, labels, the answer to an admission (allocate.txt), with DRA
# the slices and a claim's CDI spec (slices.json, cdi-claim.json), memory, wake-ups and system calls (footprint.txt,
# idle.tsv, system-calls.tsv), metrics.txt, logs.
set -uo pipefail
report=${1:?run.sh REPORT: the folder for the report}
kit=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
link=/tmp/linkwise-kit
limit=120
most=470 # seconds in all: under eight minutes

mkdir -p "$report" || exit 1
report=$(cd "$report" && pwd)
exec > >(tee "$report/summary.txt") 2>&1
library=${LINKWISE_NVML_LIBRARY:-}
if [[ -z $library ]]; then
  folders=$(ldconfig -p 2>/dev/null | awk '/libnvidia-ml\.so\.1/ {print $NF}' | xargs -r -n1 dirname)
  folders+=" /usr/lib/x86_64-linux-gnu /usr/lib64 /usr/lib /usr/local/nvidia/lib64"
  folders+=" /run/nvidia/driver/usr/lib/x86_64-linux-gnu"
  for folder in ${LINKWISE_KIT_FOLDERS:-$folders}; do
    if [[ -e $folder/libnvidia-ml.so.1 ]]; then
      library=$folder/libnvidia-ml.so.1
      break
    fi
  done
fi
if [[ -z $library ]]; then
  echo "no GPU: there is no libnvidia-ml.so.1, and nothing was done"
  exit 0
fi
ln -sfn "$kit" "$link" || exit 1
[[ $(readlink "$link") == "$kit" ]] || { echo "$link is not ours: remove it"; exit 1; }
export LINKWISE_NVML_LIBRARY=$library
# Only the kit's programs get the kit's libraries, because the system's programs need the system's C library. libcuda is
# beside the driver's library.
ours=(env "LD_LIBRARY_PATH=$kit/lib:$(dirname "$library")")
failed=0
# A driver container has a root of its own.
if [[ $library == /run/nvidia/driver/* ]]; then export NVIDIA_DRIVER_ROOT=${NVIDIA_DRIVER_ROOT:-/run/nvidia/driver}; fi

# Prints the seconds that a step may take: its limit, or the rest of the whole time.
left() {
  local left=$((most - SECONDS))
  ((left > 0)) || left=1
  echo $((left < limit ? left : limit))
}

# Runs a command and writes its output to a file of the report.
step() {
  local file=$1 begin=$SECONDS status
  shift
  timeout "$(left)" "${ours[@]}" "$@" >"$report/$file" 2>"$report/$file.err"
  status=$?
  [[ -s $report/$file.err ]] || rm -f "$report/$file.err"
  if ((status == 0)); then echo "ok: $file ($((SECONDS - begin)) s)"; else
    echo "LOOK: $file: ended with $status ($((SECONDS - begin)) s)"
    failed=1
  fi
}

echo "library: $library"
echo "kernel: $(uname -r); driver: $(head -1 /proc/driver/nvidia/version 2>/dev/null || echo unknown)"
step version.txt "$link/bin/linkwise" --version
LINKWISE_NVML_CALLS=$report/nvml-calls-snapshot.tsv step machine.yaml "$link/bin/linkwise" snapshot --redact
step topology.txt "$link/bin/linkwise" topology
step labels.txt "$link/bin/linkwise" labels --oneshot --output-file ""
# The doctor ends with 1 if it finds something, and it finds that there is no kubelet.
timeout "$(left)" "${ours[@]}" "$link/bin/linkwise" doctor >"$report/doctor.txt" 2>&1
echo "ok: doctor.txt (ended with $?)"
limit=$most step kit.txt "$link/bin/linkwise-lab" kit --linkwise "$link/bin/linkwise" --report "$report" \
  --kit "$link" --system-calls "$link/bin/system-calls" --driver-root "${NVIDIA_DRIVER_ROOT:-/}" \
  --idle-seconds "${LINKWISE_KIT_IDLE:-30}" --fault "31=$link/bin/fault mmu" --fault "13=$link/bin/fault misaligned"
cat "$report/kit.txt"
calls=$(cat "$report"/nvml-calls*.tsv 2>/dev/null | cut -f1,3 | sort | uniq -c | sort -rn)
printf 'NVML calls by function and code:\n%s\n' "$calls"
rm -f "$link"
if ((failed)); then echo "some steps failed: send us the folder"; else echo "all steps passed"; fi
echo "$SECONDS seconds in all"
if grep -q '^LOOK' "$report/kit.txt"; then echo "lines that begin with LOOK are worth a look"; fi
exit "$failed"
