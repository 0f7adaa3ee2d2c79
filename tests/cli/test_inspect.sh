#!/usr/bin/env bash
# A look into a store, flipped bytes, lost catalogues, weights that differ in one byte.
. "$(dirname "$0")/lib.sh"
need_model
words 120 3 >"$tmp/a.txt"
words 120 4 >"$tmp/b.txt"
run() { "$IMPRESS" run -m "${model:-$IMPRESS_MODEL}" -f "$tmp/$1.txt" -n 2 --raw --store "$tmp/store" -p 'And so?' --json 2>"$tmp/err" >"$tmp/$1.json" || fail "run $1: $(cat "$tmp/err")"; }
nodes() { "$IMPRESS" ls "$tmp/store" --json >"$tmp/ls.json" && json "$tmp/ls.json" 'len(d)'; }

run a && run b
[ "$(nodes)" -ge 2 ] || fail "two prefixes, but $(nodes) nodes"
json_ok "$tmp/ls.json" 'all(n["kv_bytes"] > 0 and n["n_tokens"] >= 1 and len(n["space"]) == 32 for n in d)'
"$IMPRESS" ls "$tmp/store" | grep -q '^node ' || fail "ls has no head line"
"$IMPRESS" ls "$tmp/store" >"$tmp/out" && grep -n ' $' "$tmp/out" && fail "ls: blanks at the end of a line"
at=$(awk 'NR == 1 { print index($0, "layout") }' "$tmp/out")
[ "$(cut -c "$at-" "$tmp/out" | sed 1d | sort -u)" = 'core raw 16 sketch' ] || fail "ls: layouts aren't below their head: $(cat "$tmp/out")"
json_ok "$tmp/ls.json" 'd[0]["order"] == "core" and d[0]["rest"] == "raw" and d[0]["chunk_tokens"] == 16 and d[0]["paired"]'
json_ok "$tmp/ls.json" 'd[0]["sketch_bits"] > 0 and d[0]["probe_heads"] == 0'
"$IMPRESS" stat "$tmp/store" | grep -qE '^layout +core raw 16 sketch: [0-9]+ tokens$' || fail "stat names no layout"
"$IMPRESS" stat "$tmp/store" | grep -q '^I/O ' || fail "stat doesn't say how it reads"
"$IMPRESS" stat "$tmp/store" --json >"$tmp/stat.json" || fail "stat --json"
du=$(du -s --block-size=1 "$tmp/store" | cut -f1)
json_ok "$tmp/stat.json" "abs(d['disk_bytes'] - $du) <= 65536"
json_ok "$tmp/stat.json" 'd["reads"] is None'
"$IMPRESS" stat "$tmp/store" | grep -q '^reads  *not measured' || fail "stat tells of costs that nobody measured"
"$IMPRESS" bench io --store "$tmp/store" >/dev/null || fail "bench io --store"
"$IMPRESS" stat "$tmp/store" --json >"$tmp/stat.json" || fail "stat --json"
json_ok "$tmp/stat.json" 'd["reads"]["read_ns"] >= 0 and d["reads"]["byte_ns"] > 0 and d["reads"]["measured_s"] > 1.7e9'
[ "$("$IMPRESS" verify "$tmp/store")" = clean ] || fail "a fresh store isn't clean"
"$IMPRESS" verify "$tmp/store" --json >"$tmp/v.json" && json_ok "$tmp/v.json" 'd["clean"] and d["findings"] == []'

# rm takes what is below too; the rest still hits.
first=$(json "$tmp/ls.json" '[n["node"] for n in d if n["parent"] == 0][0]')
"$IMPRESS" pin "$tmp/store" "$first" || fail "pin"
pinned() { nodes >/dev/null && json_ok "$tmp/ls.json" "[n['pinned'] for n in d if n['node'] == $first] == [$1]"; }
pinned True
"$IMPRESS" pin --store "$tmp/store" "$first" --off || fail "pin --store"
pinned False
IMPRESS_STORE="$tmp/store" "$IMPRESS" pin "$first" || fail "pin with IMPRESS_STORE"
pinned True
# A number that is a store's name is the store, but not behind --store.
ln -s "$tmp/store" "$tmp/$first"
impress=$(realpath "$IMPRESS")
(cd "$tmp" && IMPRESS_STORE=$tmp/none "$impress" pin "$first" "$first" --off) || fail "pin in a store with a number for a name"
pinned False
(cd "$tmp" && "$impress" pin --store "$tmp/store" "$first") || fail "pin --store beside a file with a number for a name"
pinned True
rm "$tmp/$first"
"$IMPRESS" rm "$tmp/store" "$first" || fail "rm"
run a && run b
a=$(json "$tmp/a.json" 'd["matched_tokens"]')
b=$(json "$tmp/b.json" 'd["matched_tokens"]')
{ [ "$a" -eq 0 ] && [ "$b" -gt 0 ]; } || { [ "$b" -eq 0 ] && [ "$a" -gt 0 ]; } || fail "after rm of one prefix: matched $a and $b"

# One flipped byte anywhere in a segment, padding included, is found; the answer stays what it was.
answer=$(json "$tmp/a.json" 'd["answer"]')
cp -a "$tmp/store" "$tmp/good"
for i in 1 2 3 4 5 6; do
    rm -rf "$tmp/store" && cp -a "$tmp/good" "$tmp/store"
    python3 - "$tmp/store/segments" "$i" <<'PY'
import os, random, sys
r = random.Random(int(sys.argv[2]))
name = r.choice(sorted(os.listdir(sys.argv[1])))
with open(os.path.join(sys.argv[1], name), "r+b") as f:
    at = r.randrange(os.fstat(f.fileno()).st_size)
    f.seek(at)
    byte = f.read(1)[0]
    f.seek(at)
    f.write(bytes([byte ^ (1 << r.randrange(8))]))
PY
    "$IMPRESS" verify "$tmp/store" >"$tmp/out" 2>&1 && fail "flip $i wasn't found"
    run a
    [ "$(json "$tmp/a.json" 'd["answer"]')" = "$answer" ] || fail "flip $i changed the answer"
    "$IMPRESS" verify "$tmp/store" --repair >"$tmp/out" 2>&1 || fail "not repaired: flip $i: $(cat "$tmp/out")"
    [ "$(sort "$tmp/out" | uniq -d)" = "" ] || fail "flip $i: told twice: $(cat "$tmp/out")"
    [ "$("$IMPRESS" verify "$tmp/store")" = clean ] || fail "not clean after repair of flip $i"
done

# What a killed process left is named, and is no damage.
touch "$tmp/store/segments/0123456789abcdef.seg.tmp"
"$IMPRESS" verify "$tmp/store" >"$tmp/out" || fail "a leftover is no damage: $(cat "$tmp/out")"
grep -q '0123456789abcdef.seg.tmp: left by a killed' "$tmp/out" || fail "a leftover isn't named: $(cat "$tmp/out")"

# A lost or garbled catalogue is made again from the segments.
rm -rf "$tmp/store" && cp -a "$tmp/good" "$tmp/store"
had=$(nodes)
rm "$tmp"/store/catalogue.db*
[ "$(nodes)" = "$had" ] || fail "a lost catalogue: $(nodes) of $had nodes came back"
head -c 20000 /dev/urandom >"$tmp/store/catalogue.db"
# Who may not write can't mend it, and isn't told that nothing is there.
modest() { if [ "$(id -u)" -eq 0 ]; then setpriv --bounding-set=-dac_override,-dac_read_search "$@"; else "$@"; fi; }
chmod a-w "$tmp/store"
for command in ls stat; do
    modest "$IMPRESS" $command "$tmp/store" >"$tmp/out" 2>"$tmp/err"
    [ $? -eq 1 ] || fail "$command of a garbled catalogue that may not be mended: no exit code 1"
    grep -q 'catalogue.db: file is not a database' "$tmp/err" || fail "$command doesn't say why: $(cat "$tmp/err")"
    [ ! -s "$tmp/out" ] || fail "$command of a garbled catalogue: $(cat "$tmp/out")"
done
modest "$IMPRESS" verify "$tmp/store" >"$tmp/out" 2>/dev/null && fail "verify: a garbled catalogue is clean"
grep -q "^catalogue.db: it can't be read" "$tmp/out" || fail "verify: $(cat "$tmp/out")"
chmod u+w "$tmp/store"
run a
json_ok "$tmp/a.json" 'd["matched_tokens"] > 0'
[ "$("$IMPRESS" verify "$tmp/store" --rebuild)" = clean ] || fail "not clean after a rebuild"

# Weights that differ in one byte under the same name never share KV.
cp "$IMPRESS_MODEL" "$tmp/model.gguf"
model=$tmp/model.gguf
run a
json_ok "$tmp/a.json" 'd["matched_tokens"] > 0'
python3 - "$tmp/model.gguf" <<'PY'
import os, sys
with open(sys.argv[1], "r+b") as f:
    at = os.fstat(f.fileno()).st_size - 4097
    f.seek(at)
    byte = f.read(1)[0]
    f.seek(at)
    f.write(bytes([byte ^ 1]))
PY
run a
json_ok "$tmp/a.json" 'd["matched_tokens"] == 0'

# Another order leaves the rest of a layout as it was, whoever writes it anew.
layouts() { nodes >/dev/null && json "$tmp/ls.json" '"; ".join(sorted({"%s %s %d %s %d" % (n["order"], n["rest"], n["chunk_tokens"], n["paired"], n["sketch_bits"] > 0) for n in d}))'; }
"$IMPRESS" gc "$tmp/store" --reorder --order token --json >"$tmp/gc.json" || fail "gc --reorder"
json_ok "$tmp/gc.json" 'd["reorder"]["reordered"] > 0'
[ "$(layouts)" = 'token raw 16 True 1' ] || fail "reordered: $(layouts)"
"$IMPRESS" gc "$tmp/store" --reorder >/dev/null || fail "gc --reorder"
[ "$(layouts)" = 'core raw 16 True 1' ] || fail "reordered back: $(layouts)"

# What a smaller limit evicts is counted, wherever in the call that happens.
had=$(nodes)
cp -a "$tmp/store" "$tmp/plain"
"$IMPRESS" gc "$tmp/store" --limit 1M --json >"$tmp/gc.json" || fail "gc"
left=$(nodes)
json_ok "$tmp/gc.json" "d['evicted_nodes'] == $had - $left > 0 and d['freed_bytes'] > 0"
"$IMPRESS" gc "$tmp/plain" --limit 1M >"$tmp/out" || fail "gc"
grep -q "nodes evicted: $((had - left)), freed: [1-9]" "$tmp/out" || fail "gc evicted $((had - left)) nodes, and says: $(cat "$tmp/out")"
[ "$(du -s --block-size=1 "$tmp/store" | cut -f1)" -le 1048576 ] || fail "gc leaves more than its limit"
# That is the store's limit now; who names none goes by it.
limit() { "$IMPRESS" stat "$tmp/store" --json >"$tmp/stat.json" && json "$tmp/stat.json" 'd["limit_bytes"]'; }
[ "$(limit)" -eq 1048576 ] || fail "the limit is $(limit) after gc --limit 1M"
"$IMPRESS" gc "$tmp/store" >/dev/null || fail "gc without a limit"
[ "$(limit)" -eq 1048576 ] || fail "the limit is $(limit) after gc"
"$IMPRESS" gc "$tmp/store" --limit 30M >/dev/null || fail "gc with a larger limit"
run a
[ "$(limit)" -eq 31457280 ] || fail "the limit is $(limit) after a run without one"
[ "$(IMPRESS_STORE="$tmp/store" "$IMPRESS" stat --json)" = "$("$IMPRESS" stat "$tmp/store" --json)" ] || fail "IMPRESS_STORE"
[ "$("$IMPRESS" ls --store "$tmp/store")" = "$("$IMPRESS" ls "$tmp/store")" ] || fail "--store"
"$IMPRESS" rm "$tmp/store" --all || fail "rm --all"
[ "$("$IMPRESS" ls "$tmp/store")" = 'the store is empty' ] || fail "rm --all left something"
finish
