#!/usr/bin/env bash
# The shared library exports exactly the functions that its public header declares.
# usage: exports.sh LIBRARY HEADER
set -euo pipefail
declared=$(sed -nE '/^static /d; s/^[a-z].*[ *](imp_[a-z0-9_]+)\(.*/\1/p' "$2" | sort -u)
exported=$(nm -D --defined-only "$1" | awk '$2 ~ /[A-Z]/ && $3 !~ /^(__|_init|_fini)/ { print $3 }' | sed 's/@.*//' | sort -u)
missing=$(comm -23 <(echo "$declared") <(echo "$exported"))
extra=$(comm -13 <(echo "$declared") <(echo "$exported"))
[ -z "$missing" ] || echo "declared in $2, missing from $1: $(echo $missing)"
[ -z "$extra" ] || echo "exported by $1, not declared in $2: $(echo $extra)"
[ -z "$missing$extra" ] && echo "$(wc -l <<<"$declared") functions"
