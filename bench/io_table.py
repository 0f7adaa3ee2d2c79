#!/usr/bin/env python3
"""The table of docs/results/io.md, from `impress bench io --json`: needs nothing but Python.

usage: io_table.py [--page PAGE.md NAME] FILE.jsonl...
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from into_page import tables  # noqa: E402
from plot_bench import read_rows  # noqa: E402


def page_lines(paths, page):
    del page  # it has the picture itself
    all_rows = read_rows(paths)
    rows = [r for r in all_rows if r.get("bench") == "io"]
    lines = [f"Through {rows[0]['io_mode']}.", "", "| order | KiB a read | in flight | MB/s | fio, MB/s | of fio, % | "
             "CPU, µs per MB |", "|---|---:|---:|---:|---:|---:|---:|"]
    for r in rows:
        fio = f"{r['fio_bytes_per_s'] / 1e6:,.0f} | {100 * r['of_fio']:.0f}" if r["fio_bytes_per_s"] else "– | –"
        lines.append(f"| {r['order']} | {r['block_bytes'] // 1024} | {r['depth']} | {r['bytes_per_s'] / 1e6:,.0f} | {fio} | "
                     f"{r['cpu_us_per_mb']:.0f} |")
    for r in all_rows:
        if r.get("bench") == "io-cost" and r["read_us"] is not None:
            lines += ["", f"One more read costs {r['read_us']:.1f} µs, a byte {r['byte_ns']:.3f} ns: a read is worth "
                      f"{r['read_is_bytes'] / 1024:.0f} KiB."]
    return lines


if __name__ == "__main__":
    tables(__doc__, page_lines)
