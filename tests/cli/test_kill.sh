#!/usr/bin/env bash
# kill -9 while a real model's KV is being stored: the next open works, verify is clean, old prefixes hit.
. "$(dirname "$0")/lib.sh"
need_model
rounds=${IMPRESS_KILL_ROUNDS_MODEL:-4}
words 200 50 >"$tmp/old.txt"
ask() { "$IMPRESS" run -m "$IMPRESS_MODEL" -f "$1" -n 1 --raw --store "$tmp/store" -p 'And so?' --json; }
ask "$tmp/old.txt" >/dev/null 2>&1 || fail "first run"
for i in $(seq "$rounds"); do
    words 400 "$i" >"$tmp/new.txt"
    ask "$tmp/new.txt" >/dev/null 2>&1 &
    pid=$!
    # Wait until the store is being written, then a random moment more.
    for _ in $(seq 2000); do
        ls "$tmp"/store/segments/*.tmp >/dev/null 2>&1 && break
        kill -0 $pid 2>/dev/null || break
        sleep 0.005
    done
    sleep "0.00$((RANDOM % 10))"
    kill -9 $pid 2>/dev/null
    wait $pid 2>/dev/null
    ask "$tmp/old.txt" >"$tmp/old.json" 2>"$tmp/err" || fail "round $i: $(cat "$tmp/err")"
    json_ok "$tmp/old.json" 'd["matched_tokens"] > 200'
    [ "$("$IMPRESS" verify "$tmp/store")" = clean ] || fail "round $i: not clean"
    [ "$(find "$tmp/store" -name '*.tmp' | wc -l)" -eq 0 ] || fail "round $i: a stray file"
done
finish
