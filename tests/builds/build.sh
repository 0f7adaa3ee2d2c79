#!/usr/bin/env bash
# Configures and builds the project in BUILD, and runs its unit tests if asked to.
# usage: build.sh SOURCE BUILD unit|- CMAKE_ARGUMENT...
set -euo pipefail
source=$1 build=$2 what=$3
shift 3
for arg in "$@"; do
    case $arg in
        -DCMAKE_C_COMPILER=*)
            command -v "${arg#*=}" >/dev/null || { echo "skipped: ${arg#*=} is not installed"; exit 77; } ;;
    esac
done
mkdir -p "$build"
cmake -S "$source" -B "$build" -DIMPRESS_NESTED_TESTS=OFF "$@" >"$build/cmake.log" 2>&1 || { cat "$build/cmake.log"; exit 1; }
cmake --build "$build" -j "$(nproc)" >"$build/build.log" 2>&1 ||
    { grep -E 'error|warning|FAILED' "$build/build.log" | head -n 60; echo "whole log: $build/build.log"; exit 1; }
echo "built without warnings"
[ "$what" = unit ] || exit 0
UBSAN_OPTIONS=print_stacktrace=1 ctest --test-dir "$build" --output-on-failure -j $(($(nproc) + 2)) -L unit # some of them wait
