#!/usr/bin/env bash
# Packs the kit for the first GPU into a folder: pack.sh BUILT FOLDER. BUILT has linkwise and linkwise-lab.
#
# The machine with the GPU needs bash and a driver. The programs bring their libraries and their loader, because the
# machine's C library may be older. A program names its loader by an absolute path, which becomes a path below LINK, a
# link to the kit that run.sh makes. Naming the loader on the command line would not do, because linkwise starts itself
# again.
set -euo pipefail
built=$1 kit=$2
link=/tmp/linkwise-kit
loader=/lib64/ld-linux-x86-64.so.2
most=$((${GPU_KIT_MOST_MIB:-56} << 20))

[[ $(uname -m) == x86_64 ]] || { echo "gpu-kit: for x86-64 only, so far"; exit 1; }
command -v perl >/dev/null || { echo "gpu-kit: perl is missing"; exit 1; }
rm -rf "$kit"
mkdir -p "$kit/bin" "$kit/lib"
for program in linkwise linkwise-lab; do
  strip -s -o "$kit/bin/$program" "$built/$program"
done
for program in fault system-calls; do
  cc -O1 -s -o "$kit/bin/$program" "$(dirname "${BASH_SOURCE[0]}")/$program.c" -ldl
done
for program in "$kit"/bin/*; do
  ldd "$program" | awk '$2 == "=>" {print $3}' | while read -r library; do cp -L "$library" "$kit/lib/"; done
done
# The driver's libraries also need these parts of glibc, of the same version. Our programs do not name them.
folder=$(dirname "$(ldd "$kit/bin/linkwise" | awk '$1 == "libc.so.6" {print $3}')")
for library in libdl.so.2 libpthread.so.0 librt.so.1; do
  [[ -e $folder/$library ]] || { echo "gpu-kit: no $library beside libc.so.6: glibc is needed"; exit 1; }
  cp -L "$folder/$library" "$kit/lib/"
done
cp -L "$loader" "$kit/lib/ld.so"
for program in "$kit"/bin/*; do
  LOADER=$loader LINK=$link/lib/ld.so perl -0777 -pi -e '
    my ($from, $to) = @ENV{qw(LOADER LINK)};
    my $free = length($from) - length($to);
    die "the path of the loader is too long\n" if $free < 0;
    s/\Q$from\E\0/$to . "\0" x ($free + 1)/e or die "no loader is named\n"' "$program"
done
cp "$(dirname "${BASH_SOURCE[0]}")/run.sh" "$kit/"
size=$(du -sb "$kit" | cut -f1)
((size <= most)) || { echo "gpu-kit: $size bytes, more than $most"; exit 1; }
echo "gpu-kit: $kit, $((size >> 20)) MiB; on the machine with the GPU: $(basename "$kit")/run.sh REPORT"
