#!/usr/bin/env bash
# Fuzzes each target of a build with libFuzzer (preset `fuzz`), from its corpus, and stops at the first finding.
# usage: run.sh BUILD SECONDS [TARGET...]     what is found is kept in BUILD/findings, inputs that reach more in BUILD/work
# exit code: 1 a finding, 2 misused
set -uo pipefail
build=$(realpath "${1:?}") seconds=${2:?}
shift 2
here=$(dirname "$(realpath "$0")")
there=()
for f in "$build"/tests/fuzz/fuzz_*; do
    if [ -x "$f" ] && [ -f "$f" ]; then there+=("${f##*/fuzz_}"); fi
done
[ ${#there[@]} -gt 0 ] || { echo "run.sh: no fuzzers in $build" >&2; exit 2; }
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=("${there[@]}")
for t in "${targets[@]}"; do
    [[ " ${there[*]} " == *" $t "* ]] || { echo "no such fuzzer: $t (there are: ${there[*]})" >&2; exit 2; }
done
mkdir -p "$build/findings"
for t in "${targets[@]}"; do
    mkdir -p "$build/work/$t"
    log=$build/findings/$t.log
    if ! UBSAN_OPTIONS=print_stacktrace=1 "$build/tests/fuzz/fuzz_$t" -max_total_time="$seconds" -timeout=60 \
        -rss_limit_mb=4096 -artifact_prefix="$build/findings/$t-" -print_final_stats=1 "$build/work/$t" "$here/corpus/$t" \
        >"$log" 2>&1; then
        grep -E 'broken:|IMP_E_|ERROR|SUMMARY|runtime error' "$log" | head -n 5 >&2
        input=$(sed -nE 's/.*Test unit written to (.*)/\1/p' "$log" | tail -n 1)
        echo "fuzz_$t: a finding; once more: $build/tests/fuzz/fuzz_$t ${input:-(see $log)}" >&2
        exit 1
    fi
    printf '%-10s %s\n' "$t" "$(sed -nE 's/^stat::number_of_executed_units: *(.*)/\1 inputs, nothing found/p' "$log")"
done
