#!/usr/bin/env bash
# impress bench io: a row for each size, depth and order; misuse. Rates are only looked at for being there.
. "$(dirname "$0")/lib.sh"
io=("$IMPRESS" bench io)
rows() { python3 -c 'import json, sys; print(json.dumps([json.loads(l) for l in open(sys.argv[1])]))' "$1" >"$2"; }

head -c 3000000 /dev/urandom >"$tmp/a: file"
"${io[@]}" "$tmp/a: file" --seconds 0.02 --rounds 1 --sizes 4K,64K --depths 1,4 --json >"$tmp/out" 2>"$tmp/err" || fail "a file"
rows "$tmp/out" "$tmp/rows"
json_ok "$tmp/rows" 'len(d) == 9 and d[8]["bench"] == "io-cost"'
json_ok "$tmp/rows" 'd[8]["read_us"] is None or d[8]["read_us"] >= 0 and d[8]["byte_ns"] > 0' # times of chance may tell nothing
json_ok "$tmp/rows" 'all(r["bytes_per_s"] > 0 and r["reads_per_s"] > 0 for r in d[:8])'
json_ok "$tmp/rows" '{(r["order"], r["block_bytes"], r["depth"]) for r in d[:8]} ==
    {(o, b, n) for o in ("sequential", "random") for b in (4096, 65536) for n in (1, 4)}'
if command -v fio >/dev/null; then
    json_ok "$tmp/rows" 'all(r["fio_bytes_per_s"] > 0 for r in d[:8])'
else
    grep -q 'fio is not installed' "$tmp/err" || fail "no word about fio"
fi
PATH=/nowhere "${io[@]}" "$tmp/a: file" --seconds 0.01 --rounds 1 --sizes 4K --depths 1 >"$tmp/out" 2>"$tmp/err" ||
    fail "without fio"
grep -q 'fio is not installed' "$tmp/err" || fail "no word about fio that isn't there"
"${io[@]}" "$tmp/a: file" --seconds 0.01 --rounds 1 --sizes 4K --depths 2 --io threads --no-direct --no-fio --json >"$tmp/out" \
    2>/dev/null || fail "threads"
rows "$tmp/out" "$tmp/rows"
json_ok "$tmp/rows" 'len(d) == 3 and d[0]["io_mode"] == "threads, page cache" and d[0]["fio_bytes_per_s"] is None and d[2]["read_us"] is None'

# A cap holds: 40 MB/s for 0.2 s, with what may run ahead.
"${io[@]}" "$tmp/a: file" --seconds 0.2 --rounds 1 --sizes 64K --depths 4 --io-limit 40M --no-fio --json >"$tmp/out" 2>/dev/null
rows "$tmp/out" "$tmp/rows"
json_ok "$tmp/rows" 'all(r["bytes_per_s"] < 1.2 * 40 * 2**20 for r in d[:2])'

# The file that it makes goes again.
"${io[@]}" --file-size 1M --seconds 0.01 --rounds 1 --sizes 4K --depths 1 --no-fio >/dev/null 2>&1 || fail "a file of its own"
[ -z "$(ls "$XDG_CACHE_HOME/impress" 2>/dev/null | grep bench-io)" ] || fail "the file stays"

expect 1 'No such file' "${io[@]}" "$tmp/none"
: >"$tmp/empty"
expect 1 'less than one block' "${io[@]}" "$tmp/empty" --no-fio
# A store's own disk: nothing to time in an empty one; what is measured otherwise is in tests/unit/session/test_costs.c.
expect 1 'No such file' "${io[@]}" --store "$tmp/nothing"
mkdir -p "$tmp/store"
expect 2 'either FILE or --store' "${io[@]}" "$tmp/empty" --store "$tmp/store"
expect 2 '--io-limit' "${io[@]}" --store "$tmp/store" --io-limit 1M
expect 2 '--sizes: `5K`' "${io[@]}" "$tmp/empty" --sizes 5K
expect 2 '--depths: `0`' "${io[@]}" "$tmp/empty" --depths 0
expect 2 '--io: `mmap`' "${io[@]}" "$tmp/empty" --io mmap
expect 2 '--seconds' "${io[@]}" "$tmp/empty" --seconds 0
expect 2 '--rounds' "${io[@]}" "$tmp/empty" --rounds 0
expect 2 'unexpected argument' "${io[@]}" "$tmp/empty" more
finish
