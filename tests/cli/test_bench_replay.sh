#!/usr/bin/env bash
# impress bench replay: small replays of every system, in virtual time and slept; patterns; misuse.
. "$(dirname "$0")/lib.sh"
replay=("$IMPRESS" bench replay --shape llama-3-8b --prefixes 3 --prefix-tokens 256 --requests 6 --warm 3 --dir "$tmp/stores")
rows() { python3 -c 'import json, sys; print(json.dumps([json.loads(l) for l in open(sys.argv[1])]))' "$1" >"$2"; }
mkdir "$tmp/stores"

"${replay[@]}" --virtual --json >"$tmp/out" 2>"$tmp/err" || fail "all systems: $(tail -1 "$tmp/err")"
rows "$tmp/out" "$tmp/rows"
json_ok "$tmp/rows" 'len(d) == 8 and all(r["modelled"] is True and r["mode"] == "virtual" for r in d)'
json_ok "$tmp/rows" 'all(r["ttft_ms"] > 0 and r["p50_ms"] <= r["p99_ms"] and r["compute_ms"] > 0 for r in d)'
json_ok "$tmp/rows" 'all(r["loaded_tokens"] == (0 if r["system"] == "recomp" else 256 if r["system"] == "as" else 64)
    for r in d)'
json_ok "$tmp/rows" 'all(r["bytes_read"] + r["host_hit_bytes"] + r["device_hit_bytes"] > 0 for r in d if r["system"] != "recomp")'
"${replay[@]}" --virtual --json >"$tmp/two" 2>/dev/null
cmp -s "$tmp/out" "$tmp/two" || fail "virtual time isn't the same twice"
[ -z "$(ls "$tmp/stores")" ] || fail "stores stay"

"${replay[@]}" -s as-h2o-lru,impress+bytes=.5 --rest q8 --json --rows >"$tmp/out" 2>/dev/null || fail "slept"
rows "$tmp/out" "$tmp/rows"
json_ok "$tmp/rows" 'len(d) == 14 and all(r["mode"] == "slept" for r in d)'
json_ok "$tmp/rows" '[r["rest"] for r in d if r["bench"] == "replay"] == ["q8", "q8"]'
"${replay[@]}" --virtual -s recomp,as --disk 0.5 >"$tmp/out" 2>/dev/null || fail "a table"
grep -q '^modelled: llama-3-8b on a100-80g, 3 prefixes' "$tmp/out" || fail "the table doesn't say what is modelled"

# Whose turn it is, from a trace.
for i in 1 2 3 4; do printf '{"timestamp":%d,"input_length":128,"output_length":1,"hash_ids":[1,%d]}\n' $i $((1 + i % 3 + 1)); done \
    >"$tmp/trace.jsonl"
"${replay[@]}" --virtual -s as --trace "$tmp/trace.jsonl" --json >"$tmp/out" 2>/dev/null || fail "a trace"

expect 2 '--shape: `gpt`' "${replay[@]}" --shape gpt
expect 2 '--profile: `cpu`' "${replay[@]}" --profile cpu
expect 2 '--scale: `0`' "${replay[@]}" --scale 0
expect 2 'scale must leave' "${replay[@]}" --scale 1/32
expect 2 '--systems' "${replay[@]}" -s frob
expect 2 'prefixes have' "${replay[@]}" --prefix-tokens 100
expect 2 'unexpected argument' "${replay[@]}" more
expect 1 'not a file of patterns' "${replay[@]}" --patterns "$tmp/trace.jsonl"
expect 2 'no model' env -u IMPRESS_MODEL "$IMPRESS" bench replay --record "$tmp/a.pat"
expect 2 'no prefix' "$IMPRESS" bench replay --record "$tmp/a.pat" -m x
expect 2 'no questions' "$IMPRESS" bench replay --record "$tmp/a.pat" -m x -f y

if [ -r "${IMPRESS_MODEL:-}" ]; then
    words 200 >"$tmp/prefix.txt"
    printf 'what is ka?\n\nwho told mi?\n' >"$tmp/questions.txt"
    "$IMPRESS" bench replay --record "$tmp/a.pat" -m "$IMPRESS_MODEL" -f "$tmp/prefix.txt" --questions "$tmp/questions.txt" \
        >"$tmp/out" 2>"$tmp/err" || fail "record: $(tail -1 "$tmp/err")"
    grep -q '2 questions' "$tmp/out" || fail "record: $(head -1 "$tmp/out")"
    "${replay[@]}" --virtual -s as,impress --patterns "$tmp/a.pat" --json >"$tmp/out" 2>/dev/null || fail "recorded patterns"
    rows "$tmp/out" "$tmp/rows"
    json_ok "$tmp/rows" 'all(r["patterns"].endswith("a.pat") for r in d)'
fi
finish
