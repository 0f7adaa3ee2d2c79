#!/usr/bin/env bash
# impress bench trace: figures that can be told ahead, and lines that are wrong.
. "$(dirname "$0")/lib.sh"
trace=("$IMPRESS" bench trace)
rows() { python3 -c 'import json, sys; print(json.dumps([json.loads(l) for l in open(sys.argv[1])]))' "$1" >"$2"; }

# Three prompts that share a root, one after another: LRU with room for all has every block but the new ones.
cat >"$tmp/a.jsonl" <<'END'
{"timestamp":0,"input_length":1536,"output_length":5,"hash_ids":[7,8,9]}
{"timestamp":1,"input_length":1300,"output_length":5,"hash_ids":[7,8,10],"session":1}

{"timestamp":1,"input_length":1536,"output_length":5,"hash_ids":[7,8,9]}
{"timestamp":2.5,"input_length":512,"output_length":0,"hash_ids":[11]}
END
"${trace[@]}" "$tmp/a.jsonl" --cache 5,1,0.4 --json >"$tmp/out" || fail "a small trace"
rows "$tmp/out" "$tmp/rows"
json_ok "$tmp/rows" 'len(d) == 15 and all(r["requests"] == 4 and r["uses"] == 10 and r["blocks"] == 5 for r in d)'
json_ok "$tmp/rows" 'all(r["chunk_tokens"] == 64 for r in d)'
json_ok "$tmp/rows" 'all(abs(r["hit_ratio"] - .5) < 1e-9 and r["hit_ratio_of_min"] == 1 for r in d if r["cache_blocks"] == 5)'
json_ok "$tmp/rows" 'sorted({r["cache_blocks"] for r in d}) == [1, 2, 5]'
json_ok "$tmp/rows" 'all(r["hit_ratio"] <= r["min_ratio"] + 1e-9 and r["matter_ratio"] <= r["matter_bound"] + 1e-6 for r in d)'
json_ok "$tmp/rows" 'all(r["hit_ratio"] <= r["memory_ratio"] + 1e-9 for r in d)'
"${trace[@]}" --traces "$tmp/a.jsonl" --chunk 0 --cache 2 --policies lru --json >"$tmp/out" || fail "whole blocks"
rows "$tmp/out" "$tmp/rows"
json_ok "$tmp/rows" 'len(d) == 1 and d[0]["chunk_tokens"] == 512 and abs(d[0]["hit_ratio"] - .4) < 1e-9' # the root's two
"${trace[@]}" "$tmp/a.jsonl" "$tmp/a.jsonl" --cache 0.5 >"$tmp/out" || fail "a table"
[ "$(grep -c '^MIN' "$tmp/out")" -eq 2 ] || fail "no table for each trace"
"${trace[@]}" "$tmp/a.jsonl" --json --cache 2 >"$tmp/one" && "${trace[@]}" "$tmp/a.jsonl" --json --cache 2 >"$tmp/two"
cmp -s "$tmp/one" "$tmp/two" || fail "two runs differ"

good='{"timestamp":5,"input_length":1536,"output_length":5,"hash_ids":[7,8,9]}'
bad() { # PATTERN LINE
    printf '%s\n%s\n' "$good" "$2" >"$tmp/bad.jsonl"
    expect 1 "bad.jsonl:2: $1" "${trace[@]}" "$tmp/bad.jsonl"
}
bad 'not JSON' '{"timestamp":6,'
bad 'not JSON' "$good $good"
bad 'not a JSON object' '[1, 2]'
bad '`timestamp` goes back' '{"timestamp":4,"input_length":5,"output_length":5,"hash_ids":[7]}'
bad '`timestamp` is missing' '{"input_length":5,"output_length":5,"hash_ids":[7]}'
bad '`input_length` is not a number' '{"timestamp":6,"input_length":"5","output_length":5,"hash_ids":[7]}'
bad '`output_length` is below 0' '{"timestamp":6,"input_length":5,"output_length":-5,"hash_ids":[7]}'
bad '`hash_ids` is missing' '{"timestamp":6,"input_length":5,"output_length":5}'
bad '`hash_ids` is empty' '{"timestamp":6,"input_length":5,"output_length":5,"hash_ids":[]}'
bad 'entry 1 of `hash_ids` is no id' '{"timestamp":6,"input_length":5,"output_length":5,"hash_ids":[7,-1]}'
bad '3 blocks for 2 tokens' '{"timestamp":6,"input_length":2,"output_length":5,"hash_ids":[7,8,9]}'
bad "block 9 doesn't stand behind" '{"timestamp":6,"input_length":900,"output_length":5,"hash_ids":[7,9]}'
bad "block 7 doesn't stand behind" '{"timestamp":6,"input_length":900,"output_length":5,"hash_ids":[7,8,7]}'
: >"$tmp/bad.jsonl"
expect 1 'bad.jsonl: no requests' "${trace[@]}" "$tmp/bad.jsonl"
expect 1 'No such file' "${trace[@]}" "$tmp/none.jsonl"
expect 1 'blocks of 64 tokens' "${trace[@]}" "$tmp/a.jsonl" --block 64
expect 1 'not a file of patterns' "${trace[@]}" "$tmp/a.jsonl" --patterns "$tmp/a.jsonl"
expect 2 'no trace' "${trace[@]}"
expect 2 '--policies: `mru`' "${trace[@]}" "$tmp/a.jsonl" --policies lru,mru
expect 2 '--cache: `1.5`' "${trace[@]}" "$tmp/a.jsonl" --cache 1.5
expect 2 '--cache: `0`' "${trace[@]}" "$tmp/a.jsonl" --cache 0
expect 2 '--retention' "${trace[@]}" "$tmp/a.jsonl" --retention 0
finish
