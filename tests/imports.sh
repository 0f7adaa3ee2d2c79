#!/usr/bin/env bash
# Imports point one way. A module includes headers of itself and of the modules that the list in CMakeLists.txt gives it,
# directly or not; adapters, programs and examples include <impress/*.h>, their own headers and foreign ones only.
# usage: imports.sh [ROOT]
set -euo pipefail
cd "${1:-$(dirname "$0")/..}"

declare -A allowed
while read -r module depends; do
    set_=" $module "
    for d in $depends; do
        d=${d#imp_}
        [ -n "${allowed[$d]:-}" ] || { echo "CMakeLists.txt: module $module depends on $d, which is not above it"; exit 1; }
        for x in ${allowed[$d]}; do [[ $set_ == *" $x "* ]] || set_+="$x "; done
    done
    allowed[$module]=$set_
done < <(sed -nE 's/^impress_module\(([a-z_]+) *(DEPENDS)? *(.*)\).*/\1 \3/p' CMakeLists.txt | sed -E 's/ ([A-Zm][A-Za-z:]*|impress_[a-z]+)\b//g')
[ ${#allowed[@]} -gt 3 ] || { echo "imports.sh: no module list in CMakeLists.txt"; exit 1; }

bad=0
complain() { echo "$1:$2: $3"; bad=1; }

# includes FILES...: lines "file:line:path-as-written", quotes or brackets kept
includes() { [ $# -eq 0 ] || grep -nHoE '^[[:space:]]*#[[:space:]]*include[[:space:]]*["<][^">]+[">]' "$@" | sed -E 's/:[[:space:]]*#[[:space:]]*include[[:space:]]*/:/' || true; }

shopt -s nullglob
n=0
for dir in src/*/; do
    module=$(basename "$dir")
    files=("$dir"*.c "$dir"*.h)
    [ ${#files[@]} -gt 0 ] || continue
    if [ -z "${allowed[$module]:-}" ]; then
        echo "$dir: not in the module list of CMakeLists.txt"
        bad=1
        continue
    fi
    while IFS=: read -r file line what; do
        n=$((n + 1))
        path=${what:1:-1}
        case $path in
            *..*) complain "$file" "$line" "a path with '..': $path" ;;
            impress/impress.h) ;;
            impress/*) complain "$file" "$line" "modules use impress/impress.h only: $path" ;;
            */*)
                other=${path%%/*}
                if [ -d "src/$other" ] && [[ ${allowed[$module]} != *" $other "* ]]; then
                    complain "$file" "$line" "module $module may not include $path"
                fi ;;
        esac
    done < <(includes "${files[@]}")
done

modules=$(ls src)
for dir in engines/*/ apps/*/ examples/; do
    mapfile -t files < <([ ! -d "$dir" ] || find "$dir" -name '*.[ch]')
    while IFS=: read -r file line what; do
        n=$((n + 1))
        path=${what:1:-1}
        first=${path%%/*}
        if [[ $path == *src/* ]] || { [[ $path == */* ]] && grep -qxF -- "$first" <<<"$modules"; }; then
            complain "$file" "$line" "outside src/ only include/impress/*.h may be used: $path"
        elif [[ $path == *engines/* || $path == *apps/* ]]; then
            complain "$file" "$line" "another program's internals: $path"
        fi
    done < <(includes "${files[@]}")
done

[ $bad -eq 0 ] && echo "$n includes, all in the direction of the module list"
exit $bad
