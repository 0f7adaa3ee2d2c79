# Shared by the tests of the program. Sourced; expects $IMPRESS (the program) and, for some, $IMPRESS_MODEL.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1
tmp=$(mktemp -d)
trap 'chmod -R u+rwX "$tmp" 2>/dev/null; rm -rf "$tmp"' EXIT
export IMPRESS_WHOLE_BELOW=0 # texts of tests are short
export IMPRESS_THREADS=1 # tests run side by side
export HOME=$tmp XDG_CACHE_HOME=$tmp/cache XDG_CONFIG_HOME=$tmp/config
failures=0

fail() { echo "FAIL: $*" >&2; failures=$((failures + 1)); }
finish() { [ $failures -eq 0 ] && echo "ok" && exit 0; echo "$failures failed" >&2; exit 1; }
need_model() {
    [ -n "${IMPRESS_MODEL:-}" ] && [ -r "$IMPRESS_MODEL" ] && return
    echo "skipped: no model (scripts/get-model.sh gets it)"
    exit 77
}

# expect CODE PATTERN COMMAND...: exit code, one line on standard error that matches, nothing on standard output.
expect() {
    local code=$1 pattern=$2 got
    shift 2
    "$@" >"$tmp/out" 2>"$tmp/err" </dev/null
    got=$?
    [ $got -eq "$code" ] || fail "exit code $got, not $code: $* ($(tail -1 "$tmp/err"))"
    [ "$(wc -l <"$tmp/err")" -eq 1 ] || fail "not one line on standard error: $* : $(head -c 600 "$tmp/err")"
    grep -qE -- "$pattern" "$tmp/err" || fail "no /$pattern/ in: $(head -1 "$tmp/err") : $*"
    [ ! -s "$tmp/out" ] || fail "output where none should be: $*"
}

# json FILE EXPRESSION: a Python expression over `d`, printed.
json() { python3 -c 'import json, sys; d = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$1" "$2"; }
# json_ok FILE EXPRESSION: it must be true.
json_ok() { [ "$(json "$1" "bool($2)")" = True ] || fail "not so: $2 in $(tr -d '\n ' <"$1" | head -c 900)"; }

# words N [SEED]: a text of N invented words.
words() {
    python3 -c '
import random, sys
r = random.Random(int(sys.argv[2]))
parts = "ka lo mi ren to sal ver ni do tra pel gus".split()
print(" ".join("".join(r.choice(parts) for _ in range(r.randint(1, 3))) for _ in range(int(sys.argv[1]))))' "$1" "${2:-1}"
}
