#!/usr/bin/env python3
"""Tables of the results pages, from rows of `impress bench ttft` and `peer-llama-server`: needs nothing but Python.

usage: ttft_tables.py [--page PAGE.md NAME] ROWS.jsonl...

Prints a Markdown table for each model, length, limit and state, and below it how many times faster `impress` is than each
system, in all and at the same precision at rest. With --page the tables go into PAGE.md, between the lines
`<!-- NAME -->` and `<!-- end NAME -->`, in place of what is there.
"""
import math
import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from into_page import tables  # noqa: E402
from plot_bench import percentile, rate, read_rows, ttft_name, unique  # noqa: E402


def mean(rows, field):
    values = [r[field] for r in rows if r.get(field) is not None]
    return sum(values) / len(values) if values else math.nan


def median(rows, field):
    return percentile([r[field] for r in rows if r.get(field) is not None], 0.5)


def number(value, digits=1):
    return "–" if math.isnan(value) else f"{value:,.{digits}f}"


def label(row):
    return row["system"] + (f", {row['retention']:.0%}" if row["retention"] < 1 else "")


def at_rest(row):
    """How its store keeps rows: "f16", "q8", ..."""
    parts = row.get("kept", "").split("-")
    return parts[1] if len(parts) > 2 else "f16"


def groups_of(rows):
    groups = {}
    for r in rows:
        groups.setdefault(label(r), []).append(r)
    return groups


def table(rows):
    groups = groups_of(rows)
    whole = next((g for g in groups.values() if g[0]["system"] == "as"), None)
    lines = ["| system | n | TTFT p50, ms | p99 | as / it | match | identify | I/O wait | gather | compute | limit | of it | "
             "MB read | of f16, % | KL | same first, % |", "|---|" + "---:|" * 15]
    for name, g in groups.items():
        ttft, limit, full = median(g, "ttft_ms"), mean(g, "limit_ms"), mean(g, "bytes_f16")
        same = [r["same_first"] for r in g if r.get("same_first") is not None]
        cells = [name, str(len(g)), number(ttft), number(percentile([r["ttft_ms"] for r in g], 0.99)),
                 number(median(whole, "ttft_ms") / ttft, 2) if whole else "–"]
        cells += [number(median(g, f + "_ms"), 2 if f == "match" else 1)
                  for f in ("match", "identify", "io_wait", "gather", "compute")]
        cells += [number(limit), number(mean(g, "ttft_ms") / limit if limit else math.nan, 2),
                  number(mean(g, "bytes_read") / 1e6), number(100 * mean(g, "bytes_read") / full if full else math.nan),
                  number(mean(g, "kl"), 4), f"{100 * sum(same) / len(same):.0f}" if same else "–"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def ratios(rows):
    """How many times faster each variant of impress is than the others, with what both would take at their limits."""
    groups = {n: g for n, g in groups_of(rows).items()}
    ours = {n: g for n, g in groups.items() if re.match(r"impress($|[+, ])", n) and "(HTTP)" not in n}
    lines = []
    for name, mine in ours.items():
        parts = []
        for other, g in groups.items():
            if other in ours or "(HTTP)" in other:
                continue
            alike = "" if at_rest(g[0]) == at_rest(mine[0]) else f" ({at_rest(g[0])} at rest)"
            parts.append(f"{other}{alike} {median(g, 'ttft_ms') / median(mine, 'ttft_ms'):.2f} "
                         f"[{mean(g, 'limit_ms') / mean(mine, 'limit_ms'):.2f}]")
        if parts:
            lines += ["", f"`{name}` ({at_rest(mine[0])} at rest) is faster than: " + "; ".join(parts) +
                      ". In brackets: the limits' ratio."]
    return lines


def title(rows):
    r = rows[0]
    text = f"**{r['model'].removesuffix('.gguf')}, {median(rows, 'prefix_tokens'):,.0f} tokens, {r['state']}"
    if rate(r):
        text += f", disk limited to {rate(r)}B/s"
    elif r.get("bandwidth"):
        text += f", disk {r['bandwidth'] / 1e6:,.0f} MB/s"
    if r["state"] == "warm":
        text += f", host cache {r['host_cache_bytes'] / 1e6:,.0f} MB"
    return text + "**"


def place(row):
    return row["model"], row.get("length", 0), row.get("io_limit", 0), row["state"]


def page_lines(paths, page):
    rows = [r for r in read_rows(paths) if r.get("bench") == "ttft"]
    lines = []
    for at in unique(place(r) for r in rows):
        mine = [r for r in rows if place(r) == at]
        lines += ([""] if lines else []) + [title(mine), ""] + table(mine) + ratios(mine)
        if page and os.path.exists(os.path.join(os.path.dirname(page), "img", ttft_name(mine[0]))):
            lines += ["", f"![{title(mine).strip('*')}](img/{ttft_name(mine[0])})"]
    return lines


if __name__ == "__main__":
    tables(__doc__, page_lines)
