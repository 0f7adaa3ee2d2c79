#!/usr/bin/env python3
"""Tables of docs/results/replay.md, from rows of `impress bench replay --json`: needs nothing but Python.

usage: replay_tables.py [--page PAGE.md NAME] ROWS.jsonl...

Prints a table for each shape and pattern at the usual settings, virtual beside slept where both are there, what is faster
than what, and one table for each setting that rows differ in. With --page the tables go into PAGE.md, between the lines
`<!-- NAME -->` and `<!-- end NAME -->`, in place of what is there.
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from into_page import tables  # noqa: E402
from plot_bench import OWN, VARIED, read_rows, unique, usual  # noqa: E402

BASELINES = ("as", "as-h2o-lru", "as-h2o-lfu", "spi", "contiguous")


def main_table(rows):
    lines = ["| system | TTFT mean, ms | p50 | p99 | compute | limit | of it | slept / virtual | GB read | to identify | "
             "from host | from device | fallback, % |", "|---|" + "---:|" * 12]
    slept = {r["system"]: r for r in rows if r["mode"] != "virtual"}
    for r in [r for r in rows if r["mode"] == "virtual"]:
        beside = slept.get(r["system"])
        cells = [r["system"], f"{r['ttft_ms']:,.0f}", f"{r['p50_ms']:,.0f}", f"{r['p99_ms']:,.0f}", f"{r['compute_ms']:.1f}",
                 f"{r['limit_ms']:,.0f}", f"{r['of_limit']:.2f}",
                 f"{beside['ttft_ms'] / r['ttft_ms']:.2f}" if beside else "–"]
        cells += [f"{r[f] / 1e9:.3f}" for f in ("bytes_read", "identify_bytes", "host_hit_bytes", "device_hit_bytes")]
        lines.append("| " + " | ".join(cells + [f"{100 * r['fallback_share']:.0f}"]) + " |")
    return lines


def ratios(rows):
    """The paper's comparison (its system beside the best other one), and ours beside the paper's."""
    at = {r["system"]: r for r in rows if r["mode"] == "virtual"}
    lines = []
    paper = at.get("impress-paper")
    others = [at[s] for s in BASELINES[:4] if s in at]
    if paper and others:
        best = min(others, key=lambda r: r["ttft_ms"])
        lines += ["", f"`impress-paper` is {best['ttft_ms'] / paper['ttft_ms']:.2f} times as fast as the best system it was "
                  f"compared with (`{best['system']}`)."]
    for name, r in at.items():
        if paper and name.split("+")[0] == "impress":
            lines += ["", f"`{name}` is {paper['ttft_ms'] / r['ttft_ms']:.2f} times as fast as `impress-paper` "
                      f"(their limits: {paper['limit_ms'] / r['limit_ms']:.2f})."]
    return lines


def varied_table(rows, field, label, unit):
    several = [s for s in unique(r["system"] for r in rows) if len({r[field] for r in rows if r["system"] == s}) > 1]
    rows = [r for r in rows if r["system"] in several]
    if not rows:
        return []
    values = sorted({r[field] for r in rows}, key=float)
    lines = [f"Mean, ms, by {label}:", "", "| system | " + " | ".join(f"{float(v) / unit:.4g}" for v in values) + " |",
             "|---|" + "---:|" * len(values)]
    for system in several:
        mine = {r[field]: r["ttft_ms"] for r in rows if r["system"] == system}
        lines.append(f"| {system} | " + " | ".join(f"{mine[v]:,.0f}" if v in mine else "–" for v in values) + " |")
    return lines + [""]


def shape_tables(shape, rows):
    at = {f: usual(rows, f) for f in VARIED if f not in OWN}
    lines = []
    for patterns in unique(r["patterns"] for r in rows):
        main = [r for r in rows if r["patterns"] == patterns and all(r[f] == v for f, v in at.items())]
        # Rows that flip the chunk only stand in the table of chunks.
        main = [r for r in main if "+chunk=" not in r["system"]]
        if not main:
            continue
        first = main[0]
        lines += [f"**{shape}, modelled: {first['profile']}, {first['prefixes']} prefixes of {first['prefix_tokens']} tokens, "
                  f"{first['requests']} requests after {first['warm']}, disk {first['disk_bytes_per_s'] / 1e9:g} GB/s, "
                  f"device tier {first['device_cache_bytes'] / 2**30:g} GiB, host tier {first['host_cache_bytes'] / 2**30:g} GiB; "
                  f"importance: {patterns}**", ""]
        lines += main_table(main) + ratios(main) + [""]
    rule = [r for r in rows if r["mode"] == "virtual" and r["system"] != "recomp" and r["patterns"] == rows[0]["patterns"]]
    for field, (_, label, unit) in VARIED.items():
        others = {f: v for f, v in at.items() if f != field}
        there = [r for r in rule if all(r[f] == v for f, v in others.items())]
        if field == "chunk":
            there = [dict(r, system=r["system"].split("+chunk=")[0]) for r in there if r["chunk"] != "-"]
        elif field in OWN:
            continue
        lines += varied_table(there, field, label, unit)
    return lines


def page_lines(paths, page):
    del page  # pictures stand elsewhere on it
    rows = [r for r in read_rows(paths) if r.get("bench") == "replay"]
    lines = []
    for shape in unique(r["shape"] for r in rows):
        lines += shape_tables(shape, [r for r in rows if r["shape"] == shape])
    return lines


if __name__ == "__main__":
    tables(__doc__, page_lines)
