#!/usr/bin/env bash
# Every relative link in the Markdown pages leads to a file.
# usage: links.sh [ROOT]
set -euo pipefail
cd "${1:-$(dirname "$0")/..}"
bad=0 n=0
while IFS=: read -r page line link; do
    target=${link#](}
    target=${target%)}
    target=${target%%#*}
    case $target in '' | *://* | mailto:*) continue ;; esac
    n=$((n + 1))
    [ -e "$(dirname "$page")/$target" ] || { echo "$page:$line: no $target"; bad=1; }
done < <(find . -name '*.md' -not -path './build*' -exec grep -noHE '\]\([^) ]+\)' {} +)
[ $bad -eq 0 ] && echo "$n links"
exit $bad
