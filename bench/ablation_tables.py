#!/usr/bin/env python3
"""Tables of docs/results/ablation.md, from rows of `impress bench ablation --json`: needs nothing but Python.

usage: ablation_tables.py [--page PAGE.md NAME] ROWS.jsonl...

A table for each file: a row for each step, retention and chunk size, cold and warm side by side. With --page the tables go
into PAGE.md, between the lines `<!-- NAME -->` and `<!-- end NAME -->`, in place of what is there.
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from into_page import tables  # noqa: E402
from plot_bench import percentile, rate, read_rows, unique  # noqa: E402

STATES = ("cold", "warm")


def cell_of(row):
    return row["step"] or row["system"], row["retention"], row["chunk"]


def state_cells(rows):
    """Median and 99th percentile, bytes in all and to identify, what came from memory."""
    if not rows:
        return ["–"] * 5
    mean = {f: sum(r[f] for r in rows) / len(rows) / 1e6 for f in ("bytes_read", "identify_bytes", "host_hit_bytes")}
    times = [r["ttft_ms"] for r in rows]
    return [f"{percentile(times, 0.5):,.0f}", f"{percentile(times, 0.99):,.0f}"] + [f"{m:,.1f}" for m in mean.values()]


def table(rows):
    first = rows[0]
    disk = f"disk limited to {rate(first)}B/s" if rate(first) else "disk as it is"
    lines = [f"**{first['model'].removesuffix('.gguf')}, {percentile([r['prefix_tokens'] for r in rows], 0.5):,} tokens, {disk}, "
             f"host cache {first['host_cache_bytes'] / 1e6:,.0f} MB, {len([r for r in rows if cell_of(r) == cell_of(first)])} "
             "requests a row**", "",
             "| step | tokens loaded, % | chunk | " + " | ".join(
                 f"{s}: TTFT p50, ms | p99 | MB read | to identify | from host" for s in STATES) + " |",
             "|---|" + "---:|" * 12]
    for name, retention, chunk in unique(cell_of(r) for r in rows):
        mine = [r for r in rows if cell_of(r) == (name, retention, chunk)]
        cells = [name, f"{100 * retention:g}", str(chunk)]
        for state in STATES:
            cells += state_cells([r for r in mine if r["state"] == state])
        lines.append("| " + " | ".join(cells) + " |")
    return lines + [""]


def page_lines(paths, page):
    del page  # nothing but tables
    lines = []
    for path in paths:
        rows = [r for r in read_rows([path]) if r.get("bench") == "ablation"]
        lines += table(rows)
    return lines


if __name__ == "__main__":
    tables(__doc__, page_lines)
