#!/usr/bin/env bash
# kill -9 while a real model's KV is being stored, 20 times: one open is enough, verify is clean, no file is left over,
# and old prefixes hit with the same answer. tests/fault/test_kill.c kills at chosen operations; here it is the whole
# program.
. "$(dirname "$0")/lib.sh"
need_model
rounds=${IMPRESS_KILL_ROUNDS_MODEL:-20}
words 40 50 >"$tmp/old.txt"
asking=(run -m "$IMPRESS_MODEL" -n 4 --raw --retention 1 --store "$tmp/store" -p 'And so?' --json)
ask() { "$IMPRESS" "${asking[@]}" -f "$1"; }
ask "$tmp/old.txt" >"$tmp/first.json" 2>/dev/null || fail "first run"
answer=$(json "$tmp/first.json" 'd["answer"]')
declare -A found=([before]=0 [meanwhile]=0 [afterwards]=0)
for i in $(seq "$rounds"); do
    words 40 "$i" >"$tmp/new.txt"
    had=$(ls "$tmp/store/segments" | wc -l)
    # Not through ask(): a function in the background is a shell of its own, which would be killed instead.
    "$IMPRESS" "${asking[@]}" -f "$tmp/new.txt" >/dev/null 2>&1 &
    pid=$!
    # Wait until the store is being written, then a random moment more.
    for _ in $(seq 20000); do
        [ "$(ls "$tmp/store/segments" | wc -l)" -gt "$had" ] && break
        kill -0 $pid 2>/dev/null || break
    done
    sleep "0.00$((RANDOM % 10))"
    kill -9 $pid 2>/dev/null
    wait $pid 2>/dev/null
    if compgen -G "$tmp/store/segments/*.tmp" >/dev/null; then
        found[meanwhile]=$((found[meanwhile] + 1))
    elif [ "$(ls "$tmp/store/segments" | wc -l)" -gt "$had" ]; then
        found[afterwards]=$((found[afterwards] + 1))
    else
        found[before]=$((found[before] + 1))
    fi
    "$IMPRESS" ls "$tmp/store" >/dev/null 2>"$tmp/err" || fail "round $i: $(cat "$tmp/err")"
    [ "$("$IMPRESS" verify "$tmp/store")" = clean ] || fail "round $i: not clean"
    [ "$(find "$tmp/store" -name '*.tmp' | wc -l)" -eq 0 ] || fail "round $i: a stray file"
    "$IMPRESS" stat "$tmp/store" --json >"$tmp/stat.json" || fail "round $i: no stat"
    json_ok "$tmp/stat.json" "d['segments'] == $(ls "$tmp/store/segments" | wc -l)"
    [ $((i % 5)) -eq 0 ] || continue
    ask "$tmp/old.txt" >"$tmp/old.json" 2>"$tmp/err" || fail "round $i: $(cat "$tmp/err")"
    json_ok "$tmp/old.json" 'd["matched_tokens"] > 60'
    [ "$(json "$tmp/old.json" 'd["answer"]')" = "$answer" ] || fail "round $i: another answer"
done
echo "killed before the file: ${found[before]}, meanwhile: ${found[meanwhile]}, afterwards: ${found[afterwards]}"
finish
