#!/usr/bin/env python3
"""The table of docs/results/io.md, from `impress bench io --json`: needs nothing but Python.

usage: io_table.py [--page PAGE.md NAME] FILE.jsonl...
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from into_page import into_page  # noqa: E402
from plot_bench import read_rows  # noqa: E402


def main():
    args = sys.argv[1:]
    page = name = None
    if args[:1] == ["--page"]:
        page, name, args = args[1], args[2], args[3:]
    if not args:
        sys.exit(__doc__.split("\n\n")[1])
    all_rows = read_rows(args)
    rows = [r for r in all_rows if r.get("bench") == "io"]
    lines = [f"Through {rows[0]['io_mode']}.", "", "| order | KiB a read | in flight | MB/s | fio, MB/s | of fio, % | "
             "CPU, µs per MB |", "|---|---:|---:|---:|---:|---:|---:|"]
    for r in rows:
        fio = f"{r['fio_bytes_per_s'] / 1e6:,.0f} | {100 * r['of_fio']:.0f}" if r["fio_bytes_per_s"] else "– | –"
        lines.append(f"| {r['order']} | {r['block_bytes'] // 1024} | {r['depth']} | {r['bytes_per_s'] / 1e6:,.0f} | {fio} | "
                     f"{r['cpu_us_per_mb']:.0f} |")
    for r in all_rows:
        if r.get("bench") == "io-cost":
            lines += ["", f"One more read costs {r['read_us']:.1f} µs, a byte {r['byte_ns']:.3f} ns: a read is worth "
                      f"{r['read_is_bytes'] / 1024:.0f} KiB."]
    if page:
        into_page(page, name, "\n".join(lines))
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
