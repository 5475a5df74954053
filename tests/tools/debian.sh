#!/usr/bin/env bash
# Brings programs out of a Debian package into target/tools, for tests. Nothing is installed, no service starts, and it
# needs no root: apt keeps its lists in target/tools/debian and only downloads, dpkg only unpacks. The system's packages
# are read, never changed: of a package's dependencies, those that the system has are taken from there.
#
# usage: debian.sh [--alone] [--suite SUITE] [--with ARGUMENT] PACKAGE NAME=PROGRAM...
#        debian.sh --sysroot ARCHITECTURE PACKAGE...
#   --alone   without its dependencies, where the programs need none
#   SUITE     the Debian suite that has the package, where the system's own has none, or one too old; it comes alone,
#             because dependencies would bring that suite's C library
#   ARGUMENT  what the programs are always called with, words by spaces
#   NAME      how tests call a program: target/tools/NAME
#   PROGRAM   its path in the package
#   ARCHITECTURE  another one, as Debian calls it: the packages and all that they depend on are unpacked as a root file
#             system, target/tools/ARCHITECTURE, to build and run programs against; nothing in it is started
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

alone='' suite='' argument='' architecture=''
while [[ $1 == --* ]]; do
  case $1 in
    --alone) alone=yes ;;
    --suite) alone=yes suite=$2; shift ;;
    --with) argument=$2; shift ;;
    --sysroot) architecture=$2; shift ;;
    *) echo "debian.sh: unknown option $1" >&2; exit 2 ;;
  esac
  shift
done
tools=$PWD/target/tools
if [[ $architecture ]]; then
  package=$architecture wanted=("$@") folder=$tools/$architecture
else
  package=$1 wanted=("$1") folder=$tools/debian/$1
  shift
fi

fail() { echo "tools: $package: $*" >&2; exit 1; }

# 126 and 127: the program, or a library of it, is not there. Not every program knows --version.
starts() { "$tools/$1" --version >/dev/null 2>&1 || (($? < 126)); }
missing=()
if [[ $architecture ]]; then
  # Its last file says which packages were unpacked.
  [[ $(cat "$folder/packages.list" 2>/dev/null) == "${wanted[*]}" ]] || missing=("${wanted[@]}")
else
  for pair in "$@"; do starts "${pair%%=*}" || missing+=("${pair%%=*}"); done
fi
((${#missing[@]})) || exit 0

command -v apt-get >/dev/null && command -v dpkg >/dev/null || \
  fail "not a Debian; the tests take ${missing[*]} from the PATH too"
if [[ $architecture ]]; then
  echo "tools: bringing Debian's packages ${missing[*]} for $architecture"
else
  echo "tools: bringing ${missing[*]} out of Debian's package $package${suite:+ of $suite}"
fi

state=$tools/debian/apt-${suite:-${architecture:-system}}
mkdir -p "$state/lists/partial" "$state/cache/archives/partial" "$state/sources"
options=(-o "Dir::State::Lists=$state/lists" -o "Dir::Cache=$state/cache" -o "APT::Sandbox::User=$(id -un)")
if [[ $suite ]]; then
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian $suite main" \
    >"$state/sources/suite.list"
  options+=(-o Dir::Etc::SourceList=/dev/null -o "Dir::Etc::SourceParts=$state/sources")
fi
# Alone: as if nothing were installed, or an installed package of a higher version would hide it.
if [[ $alone || $architecture ]]; then options+=(-o Dir::State::status=/dev/null); fi
if [[ $architecture ]]; then options+=(-o "APT::Architecture=$architecture" -o "APT::Architectures=$architecture"); fi
apt() { apt-get -qq -o Acquire::Languages=none -o Acquire::Retries=3 "${options[@]}" "$@"; }
apt update || fail "apt-get update failed"

if [[ ! $alone ]]; then
  plan=$(apt --simulate --no-install-recommends install "${wanted[@]}") || fail "apt-get cannot resolve it"
  mapfile -t wanted < <(sed -nE 's/^Inst ([^ ]+) (\[[^]]*\] )?\(([^ ]+) .*/\1=\3/p' <<<"$plan")
fi
rm -rf "$folder"
mkdir -p "$folder/packages"
# As the system has it: packages put the same folder under / and under /usr.
if [[ $architecture ]]; then
  mkdir -p "$folder/usr/lib"
  ln -s usr/lib "$folder/lib"
fi
(cd "$folder/packages" && apt download "${wanted[@]}") || fail "apt-get download failed"
for archive in "$folder"/packages/*.deb; do
  dpkg --extract "$archive" "$folder" || fail "dpkg cannot unpack $archive"
done
rm -rf "$folder/packages"
if [[ $architecture ]]; then
  # A link from the root would lead to the system's own root.
  find "$folder" -type l -lname '/*' -print0 | while IFS= read -r -d '' link; do
    ln -sfnr "$folder$(readlink "$link")" "$link"
  done
  echo "${missing[*]}" >"$folder/packages.list"
  exit 0
fi

# Libraries and fonts lie where the package would have installed them, but under the folder.
libraries=$(find "$folder" -path '*/lib/*' -name '*.so*' -printf '%h\n' | sort -u | paste -sd:)
cat >"$folder/fonts.conf" <<CONF
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "urn:fontconfig:fonts.dtd">
<fontconfig>
  <dir>$folder/usr/share/fonts</dir>
  <dir>/usr/share/fonts</dir>
  <include ignore_missing="yes">/etc/fonts/conf.d</include>
  <cachedir>$folder/font-cache</cachedir>
</fontconfig>
CONF
for pair in "$@"; do
  name=${pair%%=*}
  cat >"$tools/$name" <<RUN
#!/bin/sh
export LD_LIBRARY_PATH="$libraries\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}" FONTCONFIG_FILE="$folder/fonts.conf"
exec "$folder/${pair#*=}" $argument "\$@"
RUN
  chmod +x "$tools/$name"
  starts "$name" || \
    fail "the package came, but its ${pair#*=} does not start: $("$tools/$name" --version 2>&1 | tail -1)"
done
