#!/usr/bin/env python3
"""Cost curves: time to the first token, memory and match time against the length of the prefix, the share that is loaded
and the number of prefixes. Drives `impress bench ttft` and bench-match; needs nothing but Python.

usage: cost_curves.py --model MODEL.gguf --prefixes DIR --out DIR [options]

  --impress PROGRAM     default: build/impress      --match PROGRAM   default: build/bench/bench-match
  --lengths LIST        default: 1000,2000,4000,8000
  --retention LIST      default: 0.05,0.125,0.25,0.5
  --systems LIST        default: as,impress          --reps N          default: 3
  --nodes LIST          default: 100,1000,10000,100000; `none`: no matches
  --n-prefixes N        prefixes of each length; default: 2
  --threads N, --store DIR   as of bench ttft

OUT/cost.jsonl holds the rows, and a run goes on from there; OUT/match.jsonl those of the matches. Then OUT/cost-*.svg, and the
tables as Markdown on standard output.
"""
import json
import os
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from plot_bench import Panel, Svg, legend, percentile, read_rows, system_colour  # noqa: E402

DEFAULTS = {"impress": "build/impress", "match": "build/bench/bench-match", "lengths": "1000,2000,4000,8000",
            "retention": "0.05,0.125,0.25,0.5", "systems": "as,impress", "nodes": "100,1000,10000,100000", "reps": "3",
            "n-prefixes": "2", "model": None, "prefixes": None, "out": None, "threads": None, "store": None}


def options(argv):
    found = dict(DEFAULTS)
    for name, value in zip(argv[::2], argv[1::2]):
        if not name.startswith("--") or name[2:] not in found:
            sys.exit(f"cost_curves.py: unknown option {name}")
        found[name[2:]] = value
    if len(argv) % 2 or not all(found[o] for o in ("model", "prefixes", "out")):
        sys.exit(__doc__.split("\n\n")[1])
    return found


def measure(o, rows):
    command = [o["impress"], "bench", "ttft", "--model", o["model"], "--prefixes", o["prefixes"], "--prefix-tokens",
               o["lengths"], "--systems", o["systems"], "--retention", o["retention"], "--reps", o["reps"], "--n-prefixes",
               o["n-prefixes"], "--cold", "--out", rows]
    for name in ("threads", "store"):
        if o[name]:
            command += ["--" + name, o[name]]
    code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    if code:
        sys.exit(f"cost_curves.py: bench ttft ended with status {code}")


def match_all(o, path):
    figures = []
    for n in o["nodes"].split(","):
        text = subprocess.run([o["match"], "--nodes", n, "--json"], check=True, capture_output=True, text=True).stdout
        figures.append({"bench": "match", **json.loads(text)})
    with open(path, "w", encoding="utf-8") as f:
        f.writelines(json.dumps(r) + "\n" for r in figures)
    return figures


def curves(rows, key):
    """{label: {x: rows}}; `key` gives label and x of a row, or None."""
    found = {}
    for r in rows:
        at = key(r)
        if at:
            found.setdefault(at[0], {}).setdefault(at[1], []).append(r)
    return {name: points for name, points in found.items() if len(points) > 1}


def plot(path, title, found, field, unit, x_label, y_label):
    if not found:
        return
    points = {n: [(x, percentile([r[field] for r in g], 0.5) / unit) for x, g in p.items()] for n, p in found.items()}
    svg = Svg(620, 380)
    svg.text(16, 24, title, size=14)
    colour = {n: system_colour(n) for n in points}
    shades = ["#d55e00", "#e69f00", "#cc79a7", "#009e73", "#0072b2", "#56b4e9"]
    for i, n in enumerate([n for n in points if list(colour.values()).count(colour[n]) > 1]):
        colour[n] = shades[i % len(shades)] # one system with several shares
    legend(svg, list(colour.items())[:4])
    legend(svg, list(colour.items())[4:], 60)
    ys = [y for p in points.values() for _, y in p]
    panel = Panel(svg, 74, 98, 500, 220, [x for p in points.values() for x, _ in p], max(ys), x_label, y_label, min(ys) > 0,
                  min(ys) * 0.85)
    for n, p in points.items():
        panel.curve(p, colour[n])
    svg.save(path)


def print_table(head, lines):
    print("| " + " | ".join(head) + " |\n|" + "---:|" * len(head))
    for line in lines:
        print("| " + " | ".join(line) + " |")
    print()


def ttft_table(rows):
    found = {}
    for r in rows:
        found.setdefault((r["length"], r["system"], r["retention"]), []).append(r)
    lines = []
    for (length, system, share), g in sorted(found.items(), key=lambda i: (i[0][0], i[0][1], i[0][2])):
        mid = {f: percentile([r[f] for r in g], 0.5)
               for f in ("ttft_ms", "match_ms", "compute_ms", "bytes_read", "store_memory_bytes", "resident_bytes")}
        lines.append([f"{length:,}", system, f"{share:.1%}" if share < 1 else "all", f"{mid['ttft_ms']:,.1f}",
                      f"{mid['match_ms']:.2f}", f"{mid['compute_ms']:,.1f}", f"{mid['bytes_read'] / 1e6:,.1f}",
                      f"{mid['store_memory_bytes'] / 1e6:.2f}", f"{mid['resident_bytes'] / 1e6:,.0f}"])
    print_table(["tokens", "system", "loaded", "TTFT, ms", "match, ms", "compute, ms", "MB read", "tree and tiers, MB",
                 "process, MB"], lines)


def main():
    o = options(sys.argv[1:])
    os.makedirs(o["out"], exist_ok=True)
    path = os.path.join(o["out"], "cost.jsonl")
    measure(o, path)
    name = os.path.basename(o["model"])
    rows = [r for r in read_rows([path]) if r["model"] == name and "recomp" not in r["system"]]
    stem = os.path.join(o["out"], "cost-" + name.removesuffix(".gguf"))

    def label(r):
        return r["system"] + (f" {r['retention']:.1%}" if r["retention"] < 1 else "")

    by_length = curves(rows, lambda r: (label(r), r["prefix_tokens"] if not r["length"] else r["length"]))
    plot(stem + "-length.svg", f"{name}: cold, by the prefix's length", by_length, "ttft_ms", 1, "tokens (log)",
         "TTFT, ms (log)")
    plot(stem + "-memory.svg", f"{name}: the whole process", by_length, "resident_bytes", 1e6, "tokens (log)", "MB (log)")
    by_share = curves(rows, lambda r: (f"{r['system']} of {r['length']:,}", r["retention"]) if r["retention"] < 1 else None)
    plot(stem + "-retention.svg", f"{name}: cold, by the share that is loaded", by_share, "ttft_ms", 1, "share (log)",
         "TTFT, ms (log)")
    ttft_table(rows)
    if o["nodes"] != "none":
        found = match_all(o, os.path.join(o["out"], "match.jsonl"))
        print_table(["nodes", "match of a prompt, µs", "p99", "tree, bytes a node"],
                    [[f"{r['nodes']:,}", f"{r['median_us']:.1f}", f"{r['p99_us']:.1f}",
                      f"{r['memory_bytes'] / r['nodes']:,.0f}"] for r in found])


if __name__ == "__main__":
    main()
