#!/usr/bin/env bash
# Accuracy on the data set of our own; rows that are taken up again; broken task files.
. "$(dirname "$0")/lib.sh"
tasks=../../examples/tasks
ev=("$IMPRESS" eval)
no=("${ev[@]}" -m "$tmp/no.gguf")
mine=("${no[@]}" --tasks "$tmp/t" --store "$tmp/store")

# Misuse: before any file is looked at.
expect 2 'no model' env -u IMPRESS_MODEL "${ev[@]}" --tasks "$tasks"
expect 2 'no questions' "${no[@]}"
expect 2 'frob.*as-h2o-lru.*recomp' "${no[@]}" --tasks "$tasks" --systems as,frob
expect 2 'at least one' "${no[@]}" --tasks "$tasks" --systems ,
expect 2 'at least one' "${no[@]}" --tasks "$tasks" --task ,
for r in 0 1.5 nan 0.5,x auto:1 auto:0.9:0.5; do expect 2 'retention wants' "${no[@]}" --tasks "$tasks" --retention "$r"; done
expect 2 'retention has no meaning' "${no[@]}" --tasks "$tasks" --systems recomp,as --retention 0.5
expect 2 'scoring.*auto, sum, norm' "${no[@]}" --tasks "$tasks" --scoring best
expect 2 'reference.*as, recomp' "${no[@]}" --tasks "$tasks" --reference spi
expect 2 'exclude' "${no[@]}" --doc "$tasks/README.md" --shots 2
expect 2 'in which folder' "${no[@]}" --task copa
expect 2 'needs a store' "${no[@]}" --tasks "$tasks" --store none
expect 2 'batch of 0' "${no[@]}" --tasks "$tasks" -b 0

# Task files: what is missing or broken, with file, line and reason, before the model is read.
mkdir "$tmp/t"
expect 1 "can't read the folder.*$tmp/nowhere" "${no[@]}" --tasks "$tmp/nowhere"
expect 1 'no task in' "${mine[@]}"
expect 1 'no task `frob` in .*; there are: everyday$' "${no[@]}" --tasks "$tasks" --task frob
expect 1 'none.jsonl: No such file' "${no[@]}" --task "$tmp/none.jsonl"
cp "$tasks/everyday.val.jsonl" "$tmp/t/"
expect 1 'no train file .*everyday.train.jsonl' "${mine[@]}"
head -4 "$tasks/everyday.train.jsonl" >"$tmp/t/everyday.train.jsonl"
echo '{"id": "x", "query": "Why?", "choices": ["a"], "answer": 0}' >>"$tmp/t/everyday.train.jsonl"
expect 1 'everyday.train.jsonl:5: `choices` has 1 entries' "${mine[@]}"
head -c 250 "$tasks/everyday.train.jsonl" >"$tmp/t/everyday.train.jsonl"
expect 1 'everyday.train.jsonl:2: not JSON' "${mine[@]}"
head -4 "$tasks/everyday.train.jsonl" >"$tmp/t/everyday.train.jsonl"
expect 1 'has 4 examples, fewer than --shots 5' "${mine[@]}" --shots 5
{ head -3 "$tasks/everyday.train.jsonl"; sed -n 2p "$tasks/everyday.val.jsonl"; } >"$tmp/t/everyday.train.jsonl"
expect 1 'everyday.train.jsonl:4: example everyday-val-02 is scored too' "${mine[@]}" --shots 4
expect 1 "can't read the model" "${mine[@]}" --shots 4 --limit 1
expect 1 "can't read the model" "${mine[@]}" --shots 3
cp "$tasks/everyday.val.jsonl" "$tmp/q.jsonl"
expect 1 'train file' "${no[@]}" --task "$tmp/q.jsonl"
expect 1 "can't read the model" "${no[@]}" --task "$tmp/q.jsonl" --shots 0
echo 'A text.' >"$tmp/other.txt"
: >"$tmp/empty.txt"
expect 1 'no question on `other.txt`' "${no[@]}" --doc "$tmp/other.txt" --tasks "$tasks"
expect 1 'empty.txt is empty' "${no[@]}" --doc "$tmp/empty.txt" --tasks "$tasks"
expect 1 'questions.jsonl: No such file' "${no[@]}" --doc "$tmp/other.txt"
expect 1 "can't read $tmp/none.txt" "${no[@]}" --doc "$tmp/none.txt" --tasks "$tasks"
echo 'my notes' >"$tmp/notes"
need_model
expect 1 'notes:1: not a row' "${ev[@]}" -m "$IMPRESS_MODEL" --tasks "$tasks" --out "$tmp/notes" --store "$tmp/store"
[ "$(cat "$tmp/notes")" = 'my notes' ] || fail "a file that isn't ours was changed"

ev+=(-m "$IMPRESS_MODEL" --tasks "$tasks" --store "$tmp/store")
expect 1 'everyday.val.jsonl:1: prompt of [0-9]+ tokens and choice of [0-9]+ are more than --ctx-size of 64' "${ev[@]}" -c 64

# Rows for each system, in the order asked for.
fields='["accuracy", "agreement", "bytes_read", "ci_high", "ci_low", "diff_full", "fallback_layers", "identify_bytes", "kl", "mass", "model", "n", "retention", "system", "task"]'
run=("${ev[@]}" --shots 12 --warm 1 --systems recomp,as,as-h2o-lru --retention 1,0.5 --out "$tmp/rows.jsonl" --json)
"${run[@]}" --limit 6 >"$tmp/1.json" 2>"$tmp/err" || fail "eval: $(cat "$tmp/err")"
# On a slow machine a line of progress now and then.
! grep -vE ': [0-9]+ %  ' "$tmp/err" || fail "eval says: $(cat "$tmp/err")"
json_ok "$tmp/1.json" '[(r["system"], r["retention"]) for r in d] == [("recomp", 1), ("as", 1), ("as-h2o-lru", 1), ("as-h2o-lru", 0.5)]'
json_ok "$tmp/1.json" "all(sorted(r) == $fields for r in d)"
json_ok "$tmp/1.json" 'all(r["n"] == 6 and r["task"] == "everyday" and r["fallback_layers"] is None for r in d)'
json_ok "$tmp/1.json" 'd[1]["kl"] == 0 and d[1]["diff_full"] == d[1]["ci_low"] == d[1]["ci_high"] == 0 and d[1]["agreement"] == 1'
json_ok "$tmp/1.json" 'all(r["kl"] < 1e-3 and r["agreement"] == 1 and abs(r["mass"] - 1) < 1e-6 for r in d[:3])'
json_ok "$tmp/1.json" 'd[0]["bytes_read"] == 0 and 0 < d[3]["identify_bytes"] < d[3]["bytes_read"]'
json_ok "$tmp/1.json" '0 < d[3]["kl"] < 2 and 0.5 < d[3]["mass"] < 1 and d[3]["ci_low"] <= d[3]["diff_full"] <= d[3]["ci_high"]'
[ "$(wc -l <"$tmp/rows.jsonl")" -eq 24 ] || fail "$(wc -l <"$tmp/rows.jsonl") rows, not 24"

# Again: nothing is computed. Then with a torn end, and further: only what is missing.
cp "$tmp/rows.jsonl" "$tmp/before"
"${run[@]}" --limit 6 >"$tmp/2.json" 2>"$tmp/err" || fail "eval again: $(cat "$tmp/err")"
cmp -s "$tmp/rows.jsonl" "$tmp/before" || fail "a second run wrote rows"
cmp -s "$tmp/1.json" "$tmp/2.json" || fail "a second run has other figures"
truncate -s -30 "$tmp/rows.jsonl"
"${run[@]}" --limit 6 >"$tmp/2.json" 2>"$tmp/err" || fail "eval after a torn row: $(cat "$tmp/err")"
cmp -s "$tmp/1.json" "$tmp/2.json" || fail "after a torn row there are other figures"
[ "$(head -23 "$tmp/rows.jsonl")" = "$(head -23 "$tmp/before")" ] || fail "whole rows were touched"
"${run[@]}" --limit 8 >"$tmp/3.json" 2>"$tmp/err" || fail "eval of more: $(cat "$tmp/err")"
[ "$(wc -l <"$tmp/rows.jsonl")" -eq 32 ] || fail "$(wc -l <"$tmp/rows.jsonl") rows, not 32"
json_ok "$tmp/3.json" 'all(r["n"] == 8 for r in d)'
[ "$(sort -u "$tmp/rows.jsonl" | wc -l)" -eq 32 ] || fail "rows stand twice"

# As few tokens as hold a share of the attention: a row of its own beside that of a plain share.
"${ev[@]}" --shots 12 --warm 2 --systems impress --retention 0.5,auto:0.9 --limit 2 --json >"$tmp/a.json" 2>"$tmp/err" ||
    fail "eval of auto: $(cat "$tmp/err")"
json_ok "$tmp/a.json" '[(r["system"], r["retention"]) for r in d] == [("impress", 0.5), ("impress, auto:0.9", 0.5)]'
json_ok "$tmp/a.json" 'd[1]["bytes_read"] <= d[0]["bytes_read"] and 0.5 < d[1]["mass"] <= 1'

# Systems whose stores differ, filled from one prefill and warmed alike.
"${ev[@]}" --systems as-h2o-lru,impress,impress-paper,contiguous,spi+rank=reconstruction,random --warm 2 --limit 2 --out "$tmp/s.jsonl" \
    --json >"$tmp/5.json" 2>"$tmp/err" || fail "eval of systems: $(cat "$tmp/err")"
! grep -vE ': [0-9]+ %  ' "$tmp/err" || fail "eval of systems says: $(cat "$tmp/err")"
json_ok "$tmp/5.json" '[r["fallback_layers"] is None for r in d] == [True, False, False, True, True, True]'
json_ok "$tmp/5.json" 'd[1]["fallback_layers"] == 0 and d[1]["identify_bytes"] < d[2]["identify_bytes"] < d[0]["identify_bytes"]'
json_ok "$tmp/5.json" 'd[4]["identify_bytes"] == d[5]["identify_bytes"] == 0 and all(0 < r["mass"] < 1 for r in d)'
json_ok "$tmp/5.json" 'd[0]["mass"] > d[5]["mass"] and d[4]["system"] == "spi+rank=reconstruction"'
for s in source token-f16-64 core-f16-16-sketch importance-f16-64-probe3 token-f16-16; do
    [ "$("$IMPRESS" verify "$tmp/store/$s" 2>&1)" = clean ] || fail "the store $s isn't there and clean"
done
# Taken up again in another process, the figures are the same; more systems add rows.
head -7 "$tmp/s.jsonl" >"$tmp/s2.jsonl"
"${ev[@]}" --systems as-h2o-lru,impress,impress-paper,contiguous,spi+rank=reconstruction,random --warm 2 --limit 2 --out "$tmp/s2.jsonl" \
    --json >"$tmp/6.json" 2>"$tmp/err" || fail "eval taken up: $(cat "$tmp/err")"
json_ok "$tmp/6.json" '[(r["accuracy"], r["agreement"]) for r in d] == [(r["accuracy"], r["agreement"]) for r in json.load(open("'"$tmp/5.json"'"))]'
json_ok "$tmp/6.json" 'all(abs(a["kl"] - b["kl"]) < 0.02 and abs(a["mass"] - b["mass"]) < 0.02 for a, b in zip(d, json.load(open("'"$tmp/5.json"'"))))'
# A prefix too short to be stored has no ranking either: a note, and the others are scored.
"$IMPRESS" eval -m "$IMPRESS_MODEL" --tasks "$tasks" --store "$tmp/short" --shots 2 --warm 0 --limit 1 \
    --systems spi+rank=reconstruction,as --out "$tmp/short.jsonl" --json >"$tmp/7.json" 2>"$tmp/err" ||
    fail "eval on a short prefix: $(cat "$tmp/err")"
grep -q 'spi+rank=reconstruction: no ranking' "$tmp/err" || fail "eval on a short prefix says: $(cat "$tmp/err")"
json_ok "$tmp/7.json" '[r["system"] for r in d] == ["spi+rank=reconstruction", "as"] and all(r["bytes_read"] == 0 for r in d)'
# One run at a time.
exec 9>"$tmp/store/lock"
flock -n 9 || fail "a run left the lock taken"
expect 1 'another run compares systems there' "${ev[@]}" --limit 1 --systems as
exec 9>&-

# Without a prefix and without a store.
"${ev[@]}" --shots 0 --reference recomp --systems recomp --store none --limit 3 --out "$tmp/plain.jsonl" --json >"$tmp/4.json" 2>"$tmp/err" ||
    fail "eval without a store: $(cat "$tmp/err")"
json_ok "$tmp/4.json" 'len(d) == 1 and d[0]["system"] == "recomp" and d[0]["agreement"] == 1'

# A document, and a table for people.
head -c 3000 ../../examples/demo/prefix.txt >"$tmp/prefix.txt"
"${ev[@]}" --doc "$tmp/prefix.txt" --limit 2 --systems as,as-h2o-lru --retention 0.25 >"$tmp/table" 2>"$tmp/err" ||
    fail "eval of a document: $(cat "$tmp/err")"
for word in 'prefix: 2 questions on the document' 'accuracy is norm' '95 % interval' 'same %' KL mass identify read 'as-h2o-lru 25 %'; do
    grep -qF "$word" "$tmp/table" || fail "the table lacks $word"
done
awk 'length > 110 { exit 1 }' "$tmp/table" || fail "the table is wider than 110 columns"

# The plots are well-formed.
python3 ../../scripts/plot_eval.py "$tmp/plots" "$tmp/3.json" >"$tmp/out" 2>"$tmp/err" || fail "plots: $(cat "$tmp/err")"
[ "$(wc -l <"$tmp/out")" -eq 3 ] || fail "not three plots: $(cat "$tmp/out")"
for f in "$tmp"/plots/*.svg; do python3 -c 'import sys, xml.dom.minidom as x; x.parse(sys.argv[1])' "$f" || fail "$f is no XML"; done
finish
