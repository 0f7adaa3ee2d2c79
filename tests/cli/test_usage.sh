#!/usr/bin/env bash
# Misuse: one line that says what and where, exit code 2; and help that is complete.
. "$(dirname "$0")/lib.sh"
unset IMPRESS_MODEL # it would fill in for -m
echo text >"$tmp/prefix.txt"
run=("$IMPRESS" run)
base=("${run[@]}" -m "$tmp/no.gguf" -f "$tmp/prefix.txt" -p question)

expect 2 'unknown command `frobnicate`.*run' "$IMPRESS" frobnicate
expect 2 'no model' "${run[@]}" -f x -p y
expect 2 'no prefix' "${run[@]}" -m x -p y
expect 2 'no question' "${run[@]}" -m x -f y
expect 2 'question is empty' "${run[@]}" -m x -f y -p ' '
expect 2 'unknown option --frob' "${base[@]}" --frob
expect 2 'unknown option -Z' "${base[@]}" -Z
expect 2 '-n wants a value' "${run[@]}" -m x -f y -p z -n
expect 2 'unexpected argument `stray`' "${base[@]}" stray
for r in 0 -1 -0.5 1.01 nan 1e9 abc ''; do
    expect 2 'retention' "${base[@]}" --system as-h2o-lru --retention="$r"
done

expect 2 'as-h2o-lru' "${base[@]}" --system frob
expect 2 'system' "${base[@]}" --system impress-paper
expect 2 '--chunk' "${base[@]}" --chunk 20
expect 2 '--rest.*f16, q8' "${base[@]}" --rest q3
expect 2 '--io.*auto, uring, threads' "${base[@]}" --io mmap
expect 2 '--cache-type.*f16, q8_0' "${base[@]}" --cache-type q4
expect 2 '--limit wants a size' "${base[@]}" --limit 10X
expect 2 '--n-predict' "${base[@]}" -n 0
expect 2 'whole number' "${base[@]}" -n -3
expect 2 'needs a store' "${base[@]}" --store none --compare
expect 2 'not the number of a node' "$IMPRESS" rm "$tmp" ../etc
expect 2 'NODE' "$IMPRESS" rm "$tmp"
expect 2 'no nodes' "$IMPRESS" rm "$tmp" 1 --all
expect 2 'NODE' "$IMPRESS" pin "$tmp"
expect 2 'configuration file .*missing' "$IMPRESS" run --config "$tmp/missing" -m x -f y -p z
printf 'retention 5\n' >"$tmp/bad.conf"
expect 2 'bad.conf:1' "$IMPRESS" run --config "$tmp/bad.conf" -m x -f y -p z
printf '# fine\n\nn-predict = many\n' >"$tmp/bad.conf"
expect 2 'bad.conf:3' "$IMPRESS" run --config "$tmp/bad.conf" -m x -f y -p z
printf 'stroe = /tmp\n' >"$tmp/bad.conf"
expect 2 'bad.conf:1: no such setting: `stroe`' "$IMPRESS" run --config "$tmp/bad.conf" -m x -f y -p z
printf 'file = x\n' >"$tmp/bad.conf"
expect 2 'bad.conf:1: only a flag' "$IMPRESS" run --config "$tmp/bad.conf" -m x -f y -p z
expect 2 'IMPRESS_LIMIT wants a size' env IMPRESS_LIMIT=lots "${base[@]}"

"$IMPRESS" >/dev/null 2>&1
[ $? -eq 2 ] || fail "no command should be a misuse"
version=$(sed -nE 's/^#define IMP_VERSION_(MAJOR|MINOR|PATCH) ([0-9]+)$/\2/p' ../../include/impress/impress.h | paste -sd.)
[ "$("$IMPRESS" --version)" = "impress $version" ] || fail "the program's version is not the header's"

# Help names every command; the manual page (of the command, or the common one) has every option that help has.
commands=$("$IMPRESS" --help | sed -n 's/^  \([a-z]\+\)  .*/\1/p')
[ "$(wc -w <<<"$commands")" -ge 7 ] || fail "help lists too few commands: $commands"
for c in $commands; do
    page=../../man/impress-$c.1
    [ -f "$page" ] || page=../../man/impress.1
    manual=$(sed 's/\\-/-/g' "$page")
    "$IMPRESS" "$c" --help >"$tmp/help" || fail "$c --help failed"
    grep -q '^usage: impress '"$c" "$tmp/help" || fail "$c --help has no usage line"
    for o in $(grep -oE '^ +(-[a-z], )?--[a-z-]+' "$tmp/help" | grep -oE -- '--[a-z-]+'); do
        [ "$o" = --help ] || grep -qF -- "$o" <<<"$manual" || fail "$page lacks $o of $c"
    done
    awk 'length > 100 { exit 1 }' "$tmp/help" || fail "$c --help has a line over 100 columns"
done
finish
