#!/usr/bin/env bash
# Prints the path of llama-server, which `impress bench peer-llama-server` compares with: $IMPRESS_LLAMA_SERVER if set, else
# one built from the same pinned llama.cpp as the library, for this CPU, once, into ${XDG_CACHE_HOME:-~/.cache}/impress.
# Without its page and without HTTPS, which a comparison doesn't need.
#
# J in the environment: so many compilers at once (default: one a core).
# usage: get-peer.sh [--find]     --find: print nothing and fail rather than build
set -euo pipefail

version=0.3.36 # as scripts/get-llama.sh
get_llama=$(dirname "${BASH_SOURCE[0]}")/get-llama.sh

say() { echo "$*" >&2; }
die() { say "get-peer.sh: $*"; exit 1; }

find_only=0
case ${1:-} in
    '') ;;
    --find) find_only=1 ;;
    *) sed -n 2,7p "$0"; exit 2 ;;
esac
if [ -n "${IMPRESS_LLAMA_SERVER:-}" ]; then
    [ -x "$IMPRESS_LLAMA_SERVER" ] || die "IMPRESS_LLAMA_SERVER=$IMPRESS_LLAMA_SERVER is no program"
    echo "$IMPRESS_LLAMA_SERVER"
    exit 0
fi
grep -q "^version=$version\$" "$get_llama" || die "scripts/get-llama.sh pins another version than $version"

# The same compiler flags as the library's llama.cpp, so that both compute alike.
flags=-w
[ "$(uname -m)" != x86_64 ] || flags+=' -mno-amx-tile -mno-amx-int8 -mno-amx-bf16'
options=(-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
    -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_COMMON=ON -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF
    -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_CURL=OFF "-DCMAKE_C_FLAGS=$flags" "-DCMAKE_CXX_FLAGS=$flags")
isa() { "${CC:-cc}" -march=native -dM -E -x c /dev/null 2>/dev/null || "${CC:-cc}" -mcpu=native -dM -E -x c /dev/null; }
key=$( (echo "${options[@]}"; uname -m
    isa | grep -E '^#define __[A-Za-z0-9_]+ 1$' | sort) | sha256sum | cut -c1-8)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/impress
program=$cache/peer-$version-$key/llama-server

if [ -x "$program" ]; then # it got this name when it was whole
    echo "$program"
    exit 0
fi
[ $find_only -eq 0 ] || exit 1

mkdir -p "$cache"
exec 8>"$cache/peer.lock"
flock 8
if [ -x "$program" ]; then
    echo "$program"
    exit 0
fi
tmp=$cache/.peer-build # the lock is ours; the same name each time, so that ccache knows what it sees
rm -rf "$tmp"
mkdir "$tmp"
trap 'rm -rf "$tmp"' EXIT
trap 'exit 1' INT TERM

if [ -n "${IMPRESS_LLAMA_SOURCE:-}" ]; then # for machines without a network: the same source, unpacked
    source=$IMPRESS_LLAMA_SOURCE
else
    source=$("$get_llama" --source "$tmp") || die "no source of llama.cpp"
fi
say "== llama-server: building it, once (minutes)"
generator=()
! command -v ninja >/dev/null || generator=(-G Ninja)
! command -v ccache >/dev/null || options+=(-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
env -u CMAKE_GENERATOR cmake -S "$source" -B "$tmp/build" "${generator[@]}" "${options[@]}" >"$tmp/cmake.log" 2>&1 ||
    { tail -n 20 "$tmp/cmake.log" >&2; die "cmake failed"; }
export NINJA_STATUS='   [%f/%t] '
cmake --build "$tmp/build" -j "${J:-$(nproc)}" --target llama-server 2>&1 | tee "$tmp/build.log" |
    awk '/^ *\[/ { if (++n % 25 == 1) { print; fflush() } }' >&2 ||
    { tail -n 30 "$tmp/build.log" >&2; die "building llama-server failed"; }
built=$(find "$tmp/build" -name llama-server -type f -perm -u+x | head -n 1)
[ -n "$built" ] || die "no llama-server came out of the build"
mkdir -p "$(dirname "$program")"
mv "$built" "$program.new"
mv "$program.new" "$program"
say "== llama-server: ready"
echo "$program"
