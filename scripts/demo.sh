#!/usr/bin/env bash
# The main job on a real model, as a user would do it: a question on a handbook of a few thousand tokens, the same handbook
# again in a new process with nothing in memory, and three ways of answering side by side. Fails if loaded KV doesn't
# give the answer that recomputing gives.
# usage: demo.sh     (after `make`; `make demo` does everything)
set -euo pipefail
cd "$(dirname "$0")/.."

impress=build/impress
prefix=examples/demo/prefix.txt
store=build/demo-store
mapfile -t questions <examples/demo/questions.txt

[ -x $impress ] || { echo "demo.sh: no $impress: run \`make\` first" >&2; exit 1; }
model=$(scripts/get-model.sh)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
# What is compared is the handbook: questions and answers, below 512 tokens, are not stored.
common=(-m "$model" -f $prefix --store $store --min-store 512 -n 48)

say() { printf '\n== %s\n' "$*"; }
# The store's files leave the page cache (the library's own reads pass it by where the file system allows that).
cold() { find $store -type f -exec dd of={} oflag=nocache conv=notrunc,fdatasync count=0 status=none \; 2>/dev/null || true; }
# The answer over all of the handbook and the one in FILE, over a quarter of it.
answers() { # QUESTION FILE
    $impress run "${common[@]}" --json --system as -p "$1" >"$tmp/exact.json"
    python3 - "$tmp/exact.json" "$2" <<'PY'
import json, re, sys

exact, rows = (json.load(open(name)) for name in sys.argv[1:])
partial = rows[-1] if isinstance(rows, list) else rows
texts = [" ".join((r["answer"] or "?").split()) for r in (exact, partial)]
print(f"all of it loaded, the exact answer:     {texts[0]}")
print(f"{partial['retention']:.0%} of its tokens, the partial one:     {texts[1]}")
if re.findall(r"\w+", texts[0]) != re.findall(r"\w+", texts[1]):
    print("They differ: a part isn't always enough for so small a model; --retention 0.5 loads half, --system as all.")
PY
}

if [ -d $store ]; then
    say "1. A question on the handbook, whose KV an earlier demo stored: a quarter of its tokens is loaded"
else
    say "1. First call: the handbook is computed, the question answered exactly, the KV stored"
fi
echo "   ${questions[0]}"
$impress run "${common[@]}" -p "${questions[0]}"

say "2. New process, page cache dropped, another question: the handbook comes from disk (three times, the median counts)"
echo "   ${questions[1]}"
for i in 1 2 3; do
    cold
    $impress run "${common[@]}" --json -p "${questions[1]}" >"$tmp/stored-$i.json"
done
python3 - "$tmp" <<'PY'
import json, shutil, sys

def row(i):
    return json.load(open(f"{sys.argv[1]}/stored-{i}.json"))

median = sorted((1, 2, 3), key=lambda i: row(i)["ttft_ms"])[1]
shutil.copy(f"{sys.argv[1]}/stored-{median}.json", f"{sys.argv[1]}/stored.json")
r = row(median)
print(f"[{r['matched_tokens']} of {r['prompt_tokens']} tokens of the prompt from disk, {r['bytes_read'] / 1e6:.1f} MB read, "
      f"first token after {r['ttft_ms']:.0f} ms: I/O wait {r['io_wait_ms']:.0f}, gather {r['gather_ms']:.0f}, "
      f"compute {r['compute_ms']:.0f}]")
PY
answers "${questions[1]}" "$tmp/stored.json"

say "3. Side by side: recompute, everything loaded, the important quarter loaded"
cold
echo "   ${questions[2]}"
$impress run "${common[@]}" --compare --json -p "${questions[2]}" >"$tmp/compare.json"
answers "${questions[2]}" "$tmp/compare.json"
python3 - "$tmp/compare.json" "$tmp/stored.json" <<'PY'
import json, sys

rows = json.load(open(sys.argv[1]))
stored = json.load(open(sys.argv[2]))
print()
columns = [f"{r['system']} {r['retention']:.0%}" if r["retention"] < 1 else r["system"] for r in rows]
print(f"{'':16}" + "".join(f"{c:>16}" for c in columns))
for key in ("ttft_ms", "match_ms", "identify_ms", "io_wait_ms", "gather_ms", "compute_ms", "prefix_tokens",
            "matched_tokens", "loaded_tokens", "query_tokens", "bytes_read", "bytes_full", "kl", "top1_same"):
    cells = []
    for r in rows:
        v = r[key]
        cells.append("-" if v is None else f"{v:.1f}" if key.endswith("_ms") else f"{v:.5f}" if key == "kl" else
                     "yes" if v is True else "no" if v is False else f"{v:,}")
    print(f"{key:16}" + "".join(f"{c:>16}" for c in cells))

by_name = {r["system"]: r for r in rows}
recomp, full = by_name["recomp"], by_name["as"]
ratio = recomp["ttft_ms"] / stored["ttft_ms"]
print(f"\nfirst token of a stored prefix of {stored['matched_tokens']} tokens, new process, cold page cache (median of 3): "
      f"{stored['ttft_ms']:.0f} ms; recomputed: {recomp['ttft_ms']:.0f} ms; {ratio:.1f}x sooner")
bad = []
if stored["matched_tokens"] < stored["prompt_tokens"] - 64: # up to 64 tokens are computed, where that is quicker
    bad.append(f"only {stored['matched_tokens']} of {stored['prefix_tokens']} handbook tokens came from the store")
if full["kl"] is None or not full["kl"] < 1e-3:
    bad.append(f"KL of a full load to recompute is {full['kl']}, not under 0.001")
if full["top1_same"] is not True:
    bad.append("the first token after a full load is not the one of recompute")
for line in bad:
    print(f"demo.sh: {line}", file=sys.stderr)
sys.exit(1 if bad else 0)
PY
