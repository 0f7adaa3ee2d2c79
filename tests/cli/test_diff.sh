#!/usr/bin/env bash
# impress diff: where two prompts part, at 10 % and at 90 % of them, and that a store shares just that. impress warm.
. "$(dirname "$0")/lib.sh"
need_model
m=(-m "$IMPRESS_MODEL")
printf '%s\n' "$(words 500 3)" | fold -s -w 72 >"$tmp/a.txt"
lines=$(wc -l <"$tmp/a.txt")
early=$((lines / 10)) late=$((lines * 9 / 10))
sed "${early}s/.*/This line is another one./" "$tmp/a.txt" >"$tmp/early.txt"
sed "${late}s/.*/This line is another one./" "$tmp/a.txt" >"$tmp/late.txt"
expect_code() { local want=$1 got; shift; "$@" >"$tmp/out" 2>"$tmp/err"; got=$?; [ $got -eq "$want" ] || fail "exit code $got, not $want: $* ($(tail -2 "$tmp/err"))"; }

# Misuse and trouble are 2, as diff(1) has it.
diff=("$IMPRESS" diff)
expect 2 'two files' "${diff[@]}" "$tmp/a.txt" "${m[@]}"
expect 2 'no model' env -u IMPRESS_MODEL "${diff[@]}" "$tmp/a.txt" "$tmp/a.txt"
expect 2 "can't be both" "${diff[@]}" - - "${m[@]}"
expect 2 'goes with --raw' "${diff[@]}" a b "${m[@]}" --special
expect 2 'no store' "${diff[@]}" a b "${m[@]}" --store none
expect 2 'cache-type' "${diff[@]}" a b "${m[@]}" --cache-type q3
expect 2 "can't read" "${diff[@]}" "$tmp/a.txt" "$tmp/none.txt" "${m[@]}"
expect 2 "can't read the model" "${diff[@]}" "$tmp/a.txt" "$tmp/a.txt" -m "$tmp/none.gguf"
expect_code 2 "${diff[@]}" "$tmp/a.txt" "$tmp/late.txt" "${m[@]}" --store "$tmp/none"

# The same: 0, and nothing of the text.
expect_code 0 "${diff[@]}" "$tmp/a.txt" "$tmp/a.txt" "${m[@]}"
grep -q '^the same [0-9]* tokens$' "$tmp/out" || fail "the same: $(cat "$tmp/out")"
expect_code 0 "${diff[@]}" "$tmp/a.txt" "$tmp/a.txt" "${m[@]}" --json
json_ok "$tmp/out" 'd["same"] and d["first_difference"] is None and d["files"][0]["computed_tokens"] == 0'

# Where they part: that line, whatever the template; the figures add up.
for mode in '' --raw '--raw --special'; do
    for which in early late; do
        line=${!which}
        # shellcheck disable=SC2086
        expect_code 1 "${diff[@]}" "$tmp/a.txt" "$tmp/$which.txt" "${m[@]}" $mode --json
        cp "$tmp/out" "$tmp/$which${mode:+-raw}.json"
        json_ok "$tmp/out" "not d['same'] and all(f['line'] == $line and f['exact_place'] for f in d['files'])"
        json_ok "$tmp/out" "d['shared_tokens'] == d['first_difference'] and all(f['computed_tokens'] == f['tokens'] - d['shared_tokens'] for f in d['files'])"
        json_ok "$tmp/out" "d['shared_kv_bytes'] == d['token_kv_bytes'] * d['shared_tokens'] and d['token_kv_bytes'] == 30 * 2 * 3 * 64 * 2"
        at=$(head -n $((line - 1)) "$tmp/a.txt" | wc -c)
        json_ok "$tmp/out" "all(0 <= f['byte'] - $at <= 4 and f['column'] == f['byte'] - $at + 1 for f in d['files'])"
    done
done
json_ok "$tmp/early.json" 'd["shared_tokens"] < 0.2 * d["files"][0]["tokens"]'
json_ok "$tmp/late.json" '0.8 * d["files"][0]["tokens"] < d["shared_tokens"] < 0.95 * d["files"][0]["tokens"]'
grep -q 'another' "$tmp/late.json" && fail "text in the JSON"
expect_code 1 "${diff[@]}" "$tmp/a.txt" "$tmp/late.txt" "${m[@]}"
grep -q "late.txt: line $late, column 1" "$tmp/out" && grep -qF '[This]' "$tmp/out" || fail "no context: $(cat "$tmp/out")"
grep -q '^computed where only .*late.txt is stored: ' "$tmp/out" || fail "no cost: $(cat "$tmp/out")"
expect_code 1 "${diff[@]}" "$tmp/a.txt" "$tmp/late.txt" "${m[@]}" --cache-type q8_0 --json
json_ok "$tmp/out" 'd["token_kv_bytes"] == 30 * 2 * 3 * 64 // 32 * 34'

# Ends, characters of several bytes, and what a terminal would obey.
printf 'One two three four.' >"$tmp/short.txt"
printf 'One two three four. Five six.' >"$tmp/longer.txt"
expect_code 1 "${diff[@]}" "$tmp/short.txt" "$tmp/longer.txt" "${m[@]}" --raw
grep -qF '[end]' "$tmp/out" || fail "no end: $(cat "$tmp/out")"
: >"$tmp/empty.txt"
expect_code 1 "${diff[@]}" "$tmp/empty.txt" "$tmp/longer.txt" "${m[@]}" --raw --json
json_ok "$tmp/out" 'd["files"][0]["tokens"] <= 1 and d["files"][1]["line"] == 1 and d["files"][1]["column"] == 1'
expect_code 0 "${diff[@]}" "$tmp/empty.txt" "$tmp/empty.txt" "${m[@]}" --raw
printf 'für Öl\nund Äpfel heute' >"$tmp/u1.txt"
printf 'für Öl\nund Äpfel \033[31mmorgen' >"$tmp/u2.txt"
expect_code 1 "${diff[@]}" "$tmp/u1.txt" "$tmp/u2.txt" "${m[@]}" --raw
grep -qE 'u2.txt: line 2, column 1[01]$' "$tmp/out" || fail "columns are characters: $(cat "$tmp/out")"
grep -q $'\033' "$tmp/out" && fail "an escape sequence reached the terminal"
grep -qF '\x1b' "$tmp/out" || fail "it isn't spelt out: $(cat "$tmp/out")"
"${diff[@]}" - "$tmp/longer.txt" "${m[@]}" --raw <"$tmp/longer.txt" >"$tmp/out" || fail "standard input"

# Warming: the first question finds the prefix, and one of another text shares what diff says.
expect 2 'no prefix' "$IMPRESS" warm "${m[@]}"
expect 2 'keeps nothing' "$IMPRESS" warm "${m[@]}" -f x --store none
expect 2 'unknown system' "$IMPRESS" warm "${m[@]}" -f x -s frob
expect 1 "can't read" "$IMPRESS" warm "${m[@]}" -f "$tmp/none.txt" --store "$tmp/store"
store=(--store "$tmp/store")
expect_code 0 "$IMPRESS" warm "${m[@]}" -f "$tmp/a.txt" -f "$tmp/u1.txt" "${store[@]}" --min-store 8 --pin --json
cp "$tmp/out" "$tmp/warm.json"
json_ok "$tmp/warm.json" 'len(d) == 2 and all(w["stored_tokens"] == w["tokens"] and w["pinned"] and w["node"] > 0 for w in d)'
json_ok "$tmp/warm.json" 'd[0]["computed_tokens"] == d[0]["tokens"] and d[0]["kv_bytes"] == d[0]["tokens"] * 23040'
"$IMPRESS" ls "$tmp/store" --json >"$tmp/ls.json" && json_ok "$tmp/ls.json" 'all(n["pinned"] for n in d if n["node"] not in [c["parent"] for c in d])'
expect_code 0 "$IMPRESS" warm "${m[@]}" -f "$tmp/a.txt" "${store[@]}" --json
json_ok "$tmp/out" 'd[0]["computed_tokens"] < 70 and d[0]["stored_tokens"] == d[0]["tokens"] and not d[0]["pinned"]'
expect_code 1 "${diff[@]}" "$tmp/a.txt" "$tmp/late.txt" "${m[@]}" "${store[@]}" --json
json_ok "$tmp/out" 'd["files"][0]["stored_tokens"] == d["files"][0]["tokens"] and d["files"][1]["stored_tokens"] == d["shared_tokens"]'
json_ok "$tmp/out" 'd["token_kv_bytes"] == 23040'
shared=$(json "$tmp/out" 'd["shared_tokens"]')
expect_code 1 "${diff[@]}" "$tmp/a.txt" "$tmp/late.txt" "${m[@]}" "${store[@]}" --salt other
grep -q '^stored: 0 of ' "$tmp/out" || fail "another salt: $(cat "$tmp/out")"
"$IMPRESS" run "${m[@]}" -f "$tmp/a.txt" -p 'And so?' -n 1 "${store[@]}" -s as --json >"$tmp/run.json" 2>"$tmp/err" || fail "run"
json_ok "$tmp/run.json" 'd["matched_tokens"] >= d["prefix_tokens"] - 64 and d["way"] == "whole"'
"$IMPRESS" run "${m[@]}" -f "$tmp/late.txt" -p 'And so?' -n 1 "${store[@]}" -s as --json >"$tmp/run.json" 2>"$tmp/err" || fail "run"
json_ok "$tmp/run.json" "d['matched_tokens'] == $shared"
"$IMPRESS" run "${m[@]}" -f "$tmp/early.txt" -p 'And so?' -n 1 "${store[@]}" -s as --json >"$tmp/run.json" 2>"$tmp/err" || fail "run"
json_ok "$tmp/run.json" "d['matched_tokens'] == $(json "$tmp/early.json" 'd["shared_tokens"]')"
finish
