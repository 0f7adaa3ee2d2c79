#!/usr/bin/env bash
# Installs the build into a temporary folder, moves it, and builds a small project against it: with find_package, and with
# pkg-config (shared and static). The project's own targets are a C and a C++ program.
# usage: consumer.sh BUILD_FOLDER CONSUMER_SOURCE LIBDIR
set -euo pipefail
build=$1 source=$2 libdir=$3
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
unset DESTDIR
step() { echo "-- $*"; }

step "install"
cmake --install "$build" --prefix "$tmp/first" >"$tmp/log" 2>&1 || { cat "$tmp/log"; exit 1; }
mv "$tmp/first" "$tmp/moved" # the tree must work wherever it lies
prefix=$tmp/moved

step "find_package"
cmake -S "$source" -B "$tmp/cmake" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_BUILD_TYPE=Release >"$tmp/log" 2>&1 &&
    cmake --build "$tmp/cmake" >>"$tmp/log" 2>&1 || { cat "$tmp/log"; exit 1; }
for program in consumer_c consumer_cxx consumer_static; do
    "$tmp/cmake/$program" "$tmp/store.$program"
done

step "pkg-config"
export PKG_CONFIG_PATH=$prefix/$libdir/pkgconfig
flags=(-Wall -Wextra -Wpedantic -Werror)
pkg-config --validate impress
read -ra cflags < <(pkg-config --cflags impress)
read -ra libs < <(pkg-config --libs impress)
read -ra static_libs < <(pkg-config --static --libs impress)
cc -std=c11 "${flags[@]}" "${cflags[@]}" "$source/consumer.c" -o "$tmp/pc_c" "${libs[@]}"
c++ -std=c++11 "${flags[@]}" "${cflags[@]}" -x c++ "$source/consumer.c" -o "$tmp/pc_cxx" "${libs[@]}"
LD_LIBRARY_PATH=$prefix/$libdir "$tmp/pc_c" "$tmp/store.pc_c"
LD_LIBRARY_PATH=$prefix/$libdir "$tmp/pc_cxx" "$tmp/store.pc_cxx"
cc -std=c11 "${flags[@]}" "${cflags[@]}" "$source/consumer.c" -o "$tmp/pc_static" \
    -Wl,-Bstatic -L"$prefix/$libdir" -limpress -Wl,-Bdynamic $(printf '%s\n' "${static_libs[@]}" | grep -v '^-limpress$')
"$tmp/pc_static" "$tmp/store.pc_static"

if [ -x "$prefix/bin/impress" ]; then
    step "the installed program"
    "$prefix/bin/impress" --version
fi
step "done"
