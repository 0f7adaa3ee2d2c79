#!/usr/bin/env bash
# The main job: compute and store, then load in a new process; compare; what is kept, and with which rights.
. "$(dirname "$0")/lib.sh"
need_model
words 150 7 >"$tmp/prefix.txt"
any=("$IMPRESS" run -m "$IMPRESS_MODEL" -f "$tmp/prefix.txt" -n 8)
run=("${any[@]}" --store "$tmp/store" -s as)
ask=(-p 'What is this about?')

umask 000
"${run[@]}" "${ask[@]}" --json >"$tmp/1.json" 2>"$tmp/err" || fail "first run: $(cat "$tmp/err")"
json_ok "$tmp/1.json" 'd["matched_tokens"] == 0 and d["bytes_read"] == 0 and d["system"] == "as"'
json_ok "$tmp/1.json" 'd["query_tokens"] == d["prompt_tokens"] and d["prefix_tokens"] > 250'
json_ok "$tmp/1.json" 'd["ttft_ms"] > 0 and d["kl"] is None and len(d["answer"]) > 0'
[ "$(find "$tmp/store" -type d ! -perm 0700 | wc -l)" -eq 0 ] || fail "a directory is not 0700"
[ "$(find "$tmp/store" -type f ! -perm 0600 | wc -l)" -eq 0 ] || fail "a file is not 0600: $(find "$tmp/store" -type f ! -perm 0600)"

# A new process, another question: the prefix is matched whole, and only the rest is computed.
"${run[@]}" -p 'Is there more to say?' --json >"$tmp/2.json" 2>"$tmp/err" || fail "second run: $(cat "$tmp/err")"
json_ok "$tmp/2.json" 'd["matched_tokens"] >= d["prompt_tokens"] - 64 and d["loaded_tokens"] == d["matched_tokens"]'
json_ok "$tmp/2.json" 'd["query_tokens"] == d["prompt_tokens"] - d["matched_tokens"]'
json_ok "$tmp/2.json" 'd["bytes_read"] >= d["bytes_full"] > 0 and d["way"] == "whole"'
parts='abs(d["match_ms"] + d["identify_ms"] + d["io_wait_ms"] + d["gather_ms"] + d["compute_ms"] - d["ttft_ms"]) < 1e-3'
json_ok "$tmp/2.json" "$parts"

# Side by side.
"${run[@]}" -s as-h2o-lru "${ask[@]}" -p 'And what is not?' --compare --json >"$tmp/3.json" 2>"$tmp/err" || fail "compare: $(cat "$tmp/err")"
json_ok "$tmp/3.json" '[r["system"] for r in d] == ["recomp"] * 2 + ["as"] * 2 + ["as-h2o-lru"] * 2'
json_ok "$tmp/3.json" 'all(r["kl"] == 0 and r["matched_tokens"] == 0 for r in d[:1])'
json_ok "$tmp/3.json" 'all(r["kl"] < 1e-3 and r["top1_same"] for r in d[2:4])'
# A whole load may compute up to 64 tokens of the prompt anew, a partial one at least 16.
json_ok "$tmp/3.json" 'all(r["prompt_tokens"] - 64 <= r["matched_tokens"] <= r["prefix_tokens"] for r in d[2:])'
json_ok "$tmp/3.json" 'all(r["retention"] == 0.25 and abs(r["loaded_tokens"] - r["matched_tokens"] / 4) < 2 for r in d[4:])'
json_ok "$tmp/3.json" 'all(0.3 < r["mass"] <= 1 and 0 < r["identify_bytes"] <= r["bytes_read"] for r in d[4:])'
"${run[@]}" -s as-h2o-lru "${ask[@]}" --compare >"$tmp/table" 2>"$tmp/err" || fail "compare table: $(cat "$tmp/err")"
for word in TTFT match identify 'I/O wait' gather compute matched loaded 'bytes read' KL 'same first token' recomp as-h2o-lru; do
    grep -qF "$word" "$tmp/table" || fail "the table lacks $word"
done
awk 'length > 80 { exit 1 }' <(tail -17 "$tmp/table") || fail "the table is wider than 80 columns"

# The answer that streams is the one in JSON; a prefix from standard input is the same prefix.
"${run[@]}" -p 'Is there more to say?' >"$tmp/answer" 2>/dev/null || fail "plain run"
[ "$(cat "$tmp/answer")" = "$(json "$tmp/2.json" 'd["answer"]')" ] || fail "streamed answer differs from the one in JSON"
"$IMPRESS" run -m "$IMPRESS_MODEL" -f - -n 8 --store "$tmp/store" -s as -p 'Is there more to say?' --json <"$tmp/prefix.txt" >"$tmp/4.json" 2>/dev/null
json_ok "$tmp/4.json" 'd["matched_tokens"] > 250'

# The default system: sketches, a part of the tokens, few bytes to find them.
"${any[@]}" --store "$tmp/default" "${ask[@]}" --json >"$tmp/d.json" 2>"$tmp/err" || fail "default: $(cat "$tmp/err")"
json_ok "$tmp/d.json" 'd["system"] == "impress" and d["way"] == "computed"'
"${any[@]}" --store "$tmp/default" -p 'Is there more to say?' --json >"$tmp/d.json" 2>"$tmp/err" || fail "default: $(cat "$tmp/err")"
json_ok "$tmp/d.json" 'd["way"] == "partial" and d["retention"] == 0.25 and abs(d["loaded_tokens"] - d["matched_tokens"] / 4) < 2'
json_ok "$tmp/d.json" 'd["fallback_layers"] == 0 and d["selected_layers"] > 0 and 0 < d["identify_bytes"] < d["bytes_full"] / 10'
json_ok "$tmp/d.json" "$parts"
[ ! -s "$tmp/err" ] || fail "the default system says: $(cat "$tmp/err")"
"${any[@]}" --store "$tmp/default" "${ask[@]}" --compare --json >"$tmp/d.json" 2>"$tmp/err" || fail "compare: $(cat "$tmp/err")"
json_ok "$tmp/d.json" '[r["system"] for r in d] == ["recomp", "as", "impress"] and d[1]["kl"] < 1e-3 and d[2]["mass"] > 0.5'

# A prefix as short as this one is loaded whole, unless a retention is asked for.
for way in whole partial; do
    env -u IMPRESS_WHOLE_BELOW "${any[@]}" --store "$tmp/default" $([ $way = whole ] || echo -r 0.25) -p 'Is there more to say?' --json \
        >"$tmp/d.json" 2>"$tmp/err" || fail "below: $(cat "$tmp/err")"
    json_ok "$tmp/d.json" "d['system'] == 'impress' and d['way'] == '$way' and d['matched_tokens'] > 250"
done

# A store that was written for another system stays readable: what it lacks is replaced, and counted.
for system in impress impress-paper contiguous spi spi+rank=reconstruction random as-h2o-lfu impress+bytes=.3+history-weight=0; do
    "${run[@]}" -s "$system" -p 'Is there more to say?' --json >"$tmp/s.json" 2>"$tmp/err" || fail "run -s $system: $(cat "$tmp/err")"
    json_ok "$tmp/s.json" "d['system'] == '$system' and d['way'] == 'partial' and d['retries'] == 0"
    case $system in
        impress | impress-paper) json_ok "$tmp/s.json" 'd["fallback_layers"] == d["selected_layers"] > 0' ;;
        spi* | random) json_ok "$tmp/s.json" 'd["identify_bytes"] == 0' ;;
    esac
done
"${run[@]}" -s impress -p 'Is there more?' >/dev/null 2>"$tmp/err" || fail "run -s impress"
grep -q 'layers went by all keys' "$tmp/err" || fail "nothing is said of layers that went by all keys"

# One switch at a time, over the preset; what has no meaning is said.
"${any[@]}" --store "$tmp/paper" "${ask[@]}" -s impress-paper --rest q8 --chunk 32 --json >/dev/null 2>"$tmp/err" || fail "paper"
"${any[@]}" --store "$tmp/paper" -p 'Is there more?' -s impress-paper --rest q8 --chunk 32 --probe-heads 1 --json >"$tmp/s.json" 2>"$tmp/err"
json_ok "$tmp/s.json" 'd["system"] == "impress-paper+rest=q8+chunk=32+probe-heads=1"'
json_ok "$tmp/s.json" '0 < d["identify_bytes"] < d["bytes_full"] and d["bytes_full"] < 0.6 * 23040 * d["matched_tokens"]'
"${run[@]}" --bytes .5 --json "${ask[@]}" >/dev/null 2>"$tmp/err" || fail "run --bytes"
grep -q 'note: --bytes has no meaning for as' "$tmp/err" || fail "a switch without meaning isn't told of"

# Reordered now; in memory only.
"$IMPRESS" gc "$tmp/default" --reorder --json >"$tmp/gc.json" || fail "gc --reorder"
json_ok "$tmp/gc.json" 'd["reorder"]["segments"] >= 1'
"${any[@]}" --store "$tmp/default" -p 'Is there more to say?' --json >"$tmp/d.json" 2>"$tmp/err" || fail "after a reorder"
json_ok "$tmp/d.json" 'd["way"] == "partial" and d["fallback_layers"] == 0'
"${any[@]}" --store none --host-cache 256M "${ask[@]}" -p 'Is there more to say?' --json >"$tmp/d.json" 2>"$tmp/err" || fail "in memory"
json_ok "$tmp/d.json" '[r["way"] for r in d] == ["computed", "partial"]'

# Settings from file and environment; the flag wins.
mkdir -p "$tmp/config/impress"
printf 'store = %s\nn-predict = 3\nsystem = as\n' "$tmp/store" >"$tmp/config/impress/config"
"$IMPRESS" run -m "$IMPRESS_MODEL" -f "$tmp/prefix.txt" "${ask[@]}" --json >"$tmp/5.json" 2>/dev/null
json_ok "$tmp/5.json" 'd["answer_tokens"] <= 3 and d["matched_tokens"] > 250'
IMPRESS_N_PREDICT=2 "$IMPRESS" run -m "$IMPRESS_MODEL" -f "$tmp/prefix.txt" "${ask[@]}" --json -n 1 >"$tmp/5.json" 2>/dev/null
json_ok "$tmp/5.json" 'd["answer_tokens"] == 1'
rm -r "$tmp/config"

# Other salts and cache types are other spaces; recomp uses nothing; `none` keeps nothing.
for other in '--salt tenant' '--cache-type q8_0' '--system recomp'; do
    # shellcheck disable=SC2086
    "${run[@]}" "${ask[@]}" $other --json >"$tmp/6.json" 2>/dev/null || fail "run $other"
    json_ok "$tmp/6.json" 'd["matched_tokens"] == 0'
done
"${run[@]}" -p 'Is there more to say?' --cache-type q8_0 --json >"$tmp/6.json" 2>/dev/null
json_ok "$tmp/6.json" 'd["matched_tokens"] >= d["prompt_tokens"] - 64'
"${any[@]}" "${ask[@]}" -n 2 --store none --json >"$tmp/7.json" 2>/dev/null
json_ok "$tmp/7.json" 'd["matched_tokens"] == 0'
[ ! -e "$tmp/cache" ] || fail "--store none left files"

# 8 bits at rest: half the bytes, nearly the same answer.
"${run[@]}" "${ask[@]}" --store "$tmp/q8" --rest q8 --compare --json >"$tmp/8.json" 2>"$tmp/err" || fail "q8: $(cat "$tmp/err")"
json_ok "$tmp/8.json" 'd[1]["kl"] < 0.05 and d[1]["bytes_full"] < 0.6 * 23040 * d[1]["matched_tokens"]'

# No prompt text in the log.
"${run[@]}" "${ask[@]}" -v >/dev/null 2>"$tmp/log"
grep -qF 'What is this about' "$tmp/log" && fail "the log holds prompt text"
"$IMPRESS" verify "$tmp/store" >"$tmp/out" || fail "verify after all this: $(cat "$tmp/out")"
finish
