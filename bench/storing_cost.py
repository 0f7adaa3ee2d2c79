#!/usr/bin/env python3
"""What storing a new prefix costs the request that brings it: time to the first token, and decode speed after it.

    bench/storing_cost.py -m MODEL.gguf [-f PREFIX.txt] [--impress build/impress] [--reps 5] [-n 64] [--busy] [--json FILE]

`impress run` computes the prefix from nothing and answers, in turns with a store and with one that takes nothing so short
(--min-store). Packing and writing go on while the answer is made. With --busy a second process keeps every core at work
meanwhile. Prints medians and the ratio of each pair's with its quartiles, as a Markdown table. On a machine that does nothing else.
"""
import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
WAYS = {"not stored": ["--min-store", "1000000000"], "stored": []}
SPIN = "while True: pass"


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-m", "--model", required=True)
    p.add_argument("-f", "--file", default=os.path.join(HERE, "..", "examples", "demo", "prefix.txt"))
    p.add_argument("-p", "--prompt", default="List what the handbook says, point by point.")
    p.add_argument("-n", "--n-predict", default="64")
    p.add_argument("--impress", default=os.path.join(HERE, "..", "build", "impress"))
    p.add_argument("--reps", type=int, default=5)
    p.add_argument("--busy", action="store_true", help="with other work on every core")
    p.add_argument("--rest", help="precision at rest (default: the system's)")
    p.add_argument("--json", metavar="FILE", help="write the rows to FILE")
    return p.parse_args()


def ask(a, folder, way):
    shutil.rmtree(folder, ignore_errors=True)
    command = [a.impress, "run", "-m", a.model, "-f", a.file, "-p", a.prompt, "-n", a.n_predict, "--store", folder, "--json"]
    command += WAYS[way] + (["--rest", a.rest] if a.rest else [])
    done = subprocess.run(command, capture_output=True, text=True, check=False,
                          env=dict(os.environ, OMP_WAIT_POLICY="passive"))
    if done.returncode != 0:
        sys.exit(f"storing_cost.py: {' '.join(command)}: {done.stderr.strip().splitlines()[-1]}")
    row = json.loads(done.stdout)
    size = sum(os.path.getsize(os.path.join(d, f)) for d, _, files in os.walk(folder) for f in files if f.endswith(".seg"))
    return {"way": way, "ttft_ms": row["ttft_ms"], "token_ms": row["answer_ms"] / max(1, row["answer_tokens"]),
            "prefix_tokens": row["prefix_tokens"], "answer_tokens": row["answer_tokens"], "bytes_stored": size}


def spread(ratios):
    quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return f"{quarters[1]:.3f} [{quarters[0]:.3f}-{quarters[2]:.3f}]"


def table(rows, reps):
    of = {w: [r for r in rows if r["way"] == w] for w in WAYS}
    lines = [f"{rows[0]['prefix_tokens']:,} tokens, answers of {rows[0]['answer_tokens']}, medians of {reps} pairs.", "",
             "| | TTFT, ms | ms a token of the answer | MB stored |", "|---|---:|---:|---:|"]
    for way, mine in of.items():
        lines.append(f"| {way} | {statistics.median(r['ttft_ms'] for r in mine):,.0f} | "
                     f"{statistics.median(r['token_ms'] for r in mine):.2f} | {mine[0]['bytes_stored'] / 1e6:.1f} |")
    ratio = {f: [s[f] / n[f] for s, n in zip(of["stored"], of["not stored"])] for f in ("ttft_ms", "token_ms")}
    return lines + [f"| ratio, median of pairs [quartiles] | {spread(ratio['ttft_ms'])} | {spread(ratio['token_ms'])} | |"]


def main():
    a = parse()
    if a.reps < 1:
        sys.exit("storing_cost.py: --reps wants at least 1")
    busy = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(os.cpu_count() or 1)] if a.busy else []
    rows = []
    try:
        with tempfile.TemporaryDirectory(prefix="impress-storing-") as work:
            for rep in range(a.reps):
                # The order changes, so that neither is always the one after a pause.
                for way in sorted(WAYS, reverse=rep % 2 == 1):
                    rows.append(ask(a, os.path.join(work, "store"), way))
                    print(f"{rep + 1} of {a.reps}: {way}: {rows[-1]['ttft_ms']:,.0f} ms", file=sys.stderr)
    finally:
        for p in busy:
            p.kill()
    print("\n".join(table(rows, a.reps)))
    if a.json:
        with open(a.json, "w", encoding="utf-8") as f:
            json.dump(rows, f, indent=1)


if __name__ == "__main__":
    main()
