#!/usr/bin/env bash
# impress bench ttft and peer-llama-server: a row for each request with all its fields, a run that goes on, misuse. Times are
# only looked at for being there. llama-server itself is too long in the building: a stand-in answers as it does.
. "$(dirname "$0")/lib.sh"
ttft=("$IMPRESS" bench ttft)
peer=("$IMPRESS" bench peer-llama-server)
rows() { python3 -c 'import json, sys; print(json.dumps([json.loads(l) for l in open(sys.argv[1])]))' "$1" >"$2"; }
echo text >"$tmp/prefix.txt"
mkdir "$tmp/empty"
base=(-m "$tmp/no.gguf" -f "$tmp/prefix.txt")

# Misuse.
for command in ttft peer-llama-server; do
    b=("$IMPRESS" bench $command)
    expect 2 'no model' env -u IMPRESS_MODEL "${b[@]}" -f x
    expect 2 'no prefix' "${b[@]}" -m x
    expect 2 'exclude each other' "${b[@]}" "${base[@]}" -p x --questions y
    expect 2 'unknown system' "${b[@]}" "${base[@]}" -s frob
    expect 2 '--systems wants at least one' "${b[@]}" "${base[@]}" -s ,
    for r in 0 1.5 x auto:1; do expect 2 '--retention wants shares' "${b[@]}" "${base[@]}" -s impress -r "$r"; done
    expect 2 '--reps wants' "${b[@]}" "${base[@]}" --reps 0
    for n in x 0 15; do expect 2 '--prefix-tokens wants' "${b[@]}" "${base[@]}" --prefix-tokens "$n"; done
    expect 2 'no disk' "${b[@]}" "${base[@]}" --store none
    expect 2 'unexpected argument' "${b[@]}" "${base[@]}" more
done
for l in x 0 25Q; do expect 2 '--io-limit wants sizes' "${ttft[@]}" "${base[@]}" --io-limit "$l"; done
for c in x 1/0 9/8 1/x; do expect 2 '--host-cache wants a size' "${ttft[@]}" "${base[@]}" --host-cache "$c"; done
expect 2 'unknown option --io-limit' "${peer[@]}" "${base[@]}" --io-limit 25M
expect 1 "can't read the model" "${ttft[@]}" "${base[@]}"
expect 1 'there is no llama-server; scripts/get-peer.sh' env -u IMPRESS_LLAMA_SERVER "${peer[@]}" "${base[@]}"
expect 1 'is no program; scripts/get-peer.sh' "${peer[@]}" "${base[@]}" --llama-server "$tmp/none"
need_model
m=(-m "$IMPRESS_MODEL" -f "$tmp/a.txt" --store "$tmp/stores" -t 1)
words 120 >"$tmp/a.txt"
words 120 2 >"$tmp/b.txt"
echo 'this is not ours' >"$tmp/foreign"
expect 1 'foreign:1: not a row of bench ttft' "${ttft[@]}" "${m[@]}" --out "$tmp/foreign"
grep -q 'not ours' "$tmp/foreign" || fail "a foreign file was changed"
expect 1 "can't read the folder" "${ttft[@]}" "${m[@]}" --prefixes "$tmp/none"
expect 1 'no \*.txt' "${ttft[@]}" "${m[@]}" --prefixes "$tmp/empty"
expect 1 'less than 4000 tokens' "${ttft[@]}" "${m[@]}" --prefix-tokens 4000
expect 1 'none is left' "${ttft[@]}" "${m[@]}" -p one --warm-up 1

# Both states of two systems; a row has what it is worth.
run=("${ttft[@]}" "${m[@]}" -p 'what is ka?' -p 'who told mi?' --warm-up 1 --reps 1 --prefix-tokens 100 -s as,impress -r 0.5 --adaptive
    --io-limit 20M --out "$tmp/rows")
"${run[@]}" --json >"$tmp/out" 2>"$tmp/err" || fail "a run: $(tail -1 "$tmp/err")"
cmp -s "$tmp/out" "$tmp/rows" || fail "rows printed and kept differ"
rows "$tmp/out" "$tmp/list"
json_ok "$tmp/list" '[(r["system"], r["state"], r["retention"]) for r in d] ==
    [("as", "cold", 1), ("as", "warm", 1), ("impress", "cold", 0.5), ("impress", "warm", 0.5),
     ("impress, adaptive", "cold", 0.5), ("impress, adaptive", "warm", 0.5)]'
json_ok "$tmp/list" 'all(r["ttft_ms"] > 0 and r["compute_ms"] > 0 and r["limit_ms"] >= r["compute_ms"] for r in d)'
json_ok "$tmp/list" 'all({"model", "prefix", "prefix_tokens", "rep", "match_ms", "identify_ms", "io_wait_ms", "gather_ms",
    "identify_bytes", "host_hit_bytes", "same_first", "bytes_f16", "way"} <= set(r) for r in d)'
json_ok "$tmp/list" 'all(r["io_limit"] == 20 << 20 and r["bandwidth"] <= 20 << 20 and r["prefix"] == "a.txt" for r in d)'
json_ok "$tmp/list" 'd[0]["kl"] == 0 and d[0]["same_first"] and all(r["kl"] >= 0 for r in d)'
json_ok "$tmp/list" 'd[0]["bytes_read"] > 0 and d[0]["host_hit_bytes"] == 0 and d[0]["way"] == "whole"'
json_ok "$tmp/list" 'all(90 <= r["prefix_tokens"] <= 140 for r in d)'

# It goes on: without its last row and a half, only that is measured again.
head -n 5 "$tmp/rows" >"$tmp/kept"
{ cat "$tmp/kept"; tail -n 1 "$tmp/rows" | head -c 100; } >"$tmp/torn" && cp "$tmp/torn" "$tmp/rows"
"${run[@]}" >"$tmp/table" 2>/dev/null || fail "going on"
head -n 5 "$tmp/rows" | cmp -s - "$tmp/kept" || fail "rows that were there changed"
[ "$(wc -l <"$tmp/rows")" -eq 6 ] || fail "not six rows after going on"
[ "$(grep -c '^impress  *50 ' "$tmp/table")" -eq 2 ] || fail "no line for impress in both tables: $(cat "$tmp/table")"
(
    flock -x 9
    expect 1 'another run writes to it' "${run[@]}"
) 9<"$tmp/rows"

# Beside a stand-in for llama-server, which knows what was saved; ours through HTTP too.
cat >"$tmp/llama-server" <<SH
#!/bin/sh
exec python3 "$PWD/fake_llama_server.py" "\$@"
SH
chmod +x "$tmp/llama-server"
beside=("${peer[@]}" "${m[@]}" -p 'what is ka?' -p 'who told mi?' --warm-up 1 --reps 1 --prefix-tokens 100 -s as
    --llama-server "$tmp/llama-server")
"${beside[@]}" --json >"$tmp/out" 2>"$tmp/err" || fail "beside: $(tail -1 "$tmp/err")"
rows "$tmp/out" "$tmp/list"
json_ok "$tmp/list" '[r["system"] for r in d] == ["as", "as (HTTP)", "llama-server, recompute", "llama-server"]'
json_ok "$tmp/list" 'all(r["ttft_ms"] > 0 and r["state"] == "cold" for r in d) and all(r["overhead_ms"] > 0 for r in d[1:])'
json_ok "$tmp/list" 'd[1]["way"] == "whole" and d[1]["bytes_read"] > 0'
json_ok "$tmp/list" 'd[2]["matched_tokens"] == 0 and d[2]["query_tokens"] == d[2]["prompt_tokens"]'
json_ok "$tmp/list" 'd[3]["matched_tokens"] == d[3]["prefix_tokens"] and d[3]["bytes_read"] > 0'
FAKE_FAILS=1 "${beside[@]}" >"$tmp/out" 2>"$tmp/err"
[ $? -eq 1 ] && grep -q 'llama-server answers /slots/0?action=restore with status 400' "$tmp/err" ||
    fail "a refused restore: $(tail -1 "$tmp/err")"
printf '#!/bin/sh\nexit 3\n' >"$tmp/llama-server"
"${beside[@]}" >"$tmp/out" 2>"$tmp/err"
[ $? -eq 1 ] && grep -q 'llama-server ended at once' "$tmp/err" || fail "a server that ends: $(tail -1 "$tmp/err")"
finish
