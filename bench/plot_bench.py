#!/usr/bin/env python3
"""Plots of benchmarks, from the output of `impress bench ... --json`: needs nothing but Python.

usage: plot_bench.py OUT_DIR FILE.jsonl...

OUT_DIR/trace-TRACE.svg            hit ratio, and what matters in memory, against the cache's size
OUT_DIR/io.svg                     bytes a second against the size of a read, beside fio's
OUT_DIR/replay-SHAPE.svg           time to the first token by system: mean and 99th percentile, with the limit
OUT_DIR/replay-SHAPE-VARIED.svg    the mean against what the rows differ in: disk, chunk, data, caches, ...
OUT_DIR/ttft-MODEL-....svg         the same on a real model, from rows of `bench ttft`: one for each length, limit and state
"""
import json
import math
import os
import re
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "scripts"))
from plot_eval import COLOURS, Svg, ticks, unique  # noqa: E402

VARIED = {"disk_bytes_per_s": ("disk", "disk, GB/s", 1e9), "chunk": ("chunk", "tokens a chunk", 1),
          "data_bytes": ("data", "KV of all prefixes, GiB", 2**30), "host_cache_bytes": ("host", "host cache, GiB", 2**30),
          "device_cache_bytes": ("device", "device cache, GiB", 2**30), "prefix_tokens": ("prefix", "tokens of a prefix", 1),
          "retention": ("retention", "share of tokens loaded", 1)}
# What a system's rows differ in by its nature, and what never is an axis.
OWN = {"chunk", "rest", "retention"}


def read_rows(paths):
    rows = []
    for path in paths:
        try:
            with open(path, encoding="utf-8") as f:
                for number, line in enumerate(f, 1):
                    if not line.strip():
                        continue
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError(f"line {number} is not an object")
                    rows.append(row)
        except (OSError, ValueError) as why:
            sys.exit(f"plot_bench.py: {path}: {why}")
    if not rows:
        sys.exit("plot_bench.py: no rows")
    return rows


def name_of(*parts):
    return "-".join(re.sub(r"[^A-Za-z0-9.]+", "_", str(p)) for p in parts) + ".svg"


def short(x):
    """Three digits, without an exponent."""
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


class Panel:
    """Axes with curves: x on a logarithmic scale, y from 0."""

    def __init__(self, svg, left, top, width, height, xs, highest, x_label, y_label, log_y=False, lowest=0):
        self.svg, self.box = svg, (left, top, width, height)
        self.low, self.high = min(xs), max(xs)
        self.log_y = log_y
        self.bottom, self.top_value = (lowest, highest * 1.15) if log_y else (0, highest * 1.08 or 1)
        for t in self.y_ticks():
            svg.line(left, self.y(t), left + width, self.y(t), "#ddd")
            svg.text(left - 6, self.y(t) + 4, f"{t:g}", "end", 11)
        for x in unique(sorted(xs)):
            svg.line(self.x(x), top + height, self.x(x), top + height + 4)
            svg.text(self.x(x), top + height + 16, short(x), "middle", 10)
        svg.line(left, top, left, top + height)
        svg.line(left, top + height, left + width, top + height)
        svg.text(left + width / 2, top + height + 32, x_label, "middle", 11)
        svg.text(left, top - 8, y_label)

    def y_ticks(self):
        if not self.log_y:
            return ticks(0, self.top_value, 4)
        first = math.floor(math.log10(self.bottom))
        all_ticks = [m * 10.0**e for e in range(first, first + 8) for m in (1, 2, 5)]
        return [t for t in all_ticks if self.bottom <= t <= self.top_value]

    def x(self, value):
        left, _, width, _ = self.box
        if self.high == self.low:
            return left + width / 2
        return left + math.log(value / self.low) / math.log(self.high / self.low) * width

    def y(self, value):
        _, top, _, height = self.box
        if self.log_y:
            return top + height - math.log(value / self.bottom) / math.log(self.top_value / self.bottom) * height
        return top + height - value / self.top_value * height

    def curve(self, points, colour, dash=None):
        points = sorted(points)
        drawn = [(self.x(x), self.y(y)) for x, y in points]
        for (x1, y1), (x2, y2) in zip(drawn, drawn[1:]):
            self.svg.line(x1, y1, x2, y2, colour, 1.6, dash)
        for x, y in drawn if not dash else []:
            self.svg.dot(x, y, colour)


def legend(svg, names, y=42):
    x = 16
    for name, colour in names:
        svg.dot(x + 4, y, colour)
        svg.text(x + 14, y + 4, name)
        x += 30 + 8 * len(name)


def colours(names):
    return {n: COLOURS[i % len(COLOURS)] for i, n in enumerate(names)}


def plot_trace(rows, out):
    for trace in unique(r["trace"] for r in rows):
        mine = [r for r in rows if r["trace"] == trace]
        colour = colours(unique(r["policy"] for r in mine))
        svg = Svg(760, 330)
        svg.text(16, 24, f"{trace}, importance: {mine[0]['patterns']}", size=14)
        legend(svg, list(colour.items()) + [("optimum (MIN; bound)", "#777")])
        xs = [100 * r["cache_share"] for r in mine]
        for i, (field, best, label) in enumerate((("hit_ratio", "min_ratio", "hit with all before it, %"),
                                                  ("matter_ratio", "matter_bound", "important bytes in memory, %"))):
            highest = max(100 * r[best] for r in mine)
            panel = Panel(svg, 56 + 370 * i, 84, 300, 190, xs, highest, "cache, % of all blocks (log)", label)
            panel.curve({(100 * r["cache_share"], 100 * r[best]) for r in mine}, "#777", "4 3")
            for policy, c in colour.items():
                panel.curve([(100 * r["cache_share"], 100 * r[field]) for r in mine if r["policy"] == policy], c)
        svg.save(os.path.join(out, name_of("trace", trace.rsplit(".", 1)[0])))


def plot_io(rows, out):
    depths = unique(r["depth"] for r in rows)
    colour = colours(depths)
    svg = Svg(760, 330)
    svg.text(16, 24, f"reads through {rows[0]['io_mode']}; broken lines: fio with the same settings", size=14)
    legend(svg, [(f"depth {d}", c) for d, c in colour.items()])
    for i, order in enumerate(("sequential", "random")):
        mine = [r for r in rows if r["order"] == order]
        if not mine:
            continue
        highest = max(max(r["bytes_per_s"], r["fio_bytes_per_s"] or 0) for r in mine) / 1e6
        panel = Panel(svg, 66 + 370 * i, 84, 290, 190, [r["block_bytes"] / 1024 for r in mine], highest,
                      "KiB a read (log)", f"{order}, MB/s")
        for depth, c in colour.items():
            at = [r for r in mine if r["depth"] == depth]
            panel.curve([(r["block_bytes"] / 1024, r["bytes_per_s"] / 1e6) for r in at], c)
            panel.curve([(r["block_bytes"] / 1024, r["fio_bytes_per_s"] / 1e6) for r in at if r["fio_bytes_per_s"]], c,
                        "4 3")
    svg.save(os.path.join(out, name_of("io")))


def bars(path, title, note, rows, colour_of=None):
    """rows: (label, middle, high, limit or None); a bar to the middle, a line to the high, a mark at the limit."""
    left, step, top = 230, 24, 58
    svg = Svg(760, top + step * len(rows) + 48)
    svg.text(16, 24, title, size=14)
    svg.text(16, 42, note, size=11, colour="#555")
    highest = max(r[2] for r in rows) * 1.06 or 1
    bottom = top + step * len(rows)

    def at(value):
        return left + value / highest * (760 - left - 90)

    for t in ticks(0, highest):
        svg.line(at(t), top - 8, at(t), bottom, "#ddd")
        svg.text(at(t), bottom + 16, f"{t:g}", "middle", 11)
    svg.text((left + 760 - 90) / 2, bottom + 34, "time to the first token, ms", "middle")
    for i, (label, middle, high, limit) in enumerate(rows):
        y, c = top + step * i + step / 2 - 4, colour_of(label) if colour_of else COLOURS[i % len(COLOURS)]
        svg.text(left - 10, y + 4, label, "end")
        svg.line(left, y, at(middle), y, c, 11)
        svg.line(at(middle), y, at(high), y, c, 1.5)
        svg.line(at(high), y - 4, at(high), y + 4, c, 1.5)
        if limit is not None:
            svg.line(at(limit), y - 8, at(limit), y + 8, "#000", 1.5)
        svg.text(at(high) + 6, y + 4, f"{middle:.0f} / {high:.0f}", size=11)
    svg.save(path)


def usual(rows, field):
    """The value that most rows have: where the other plots stand."""
    values = [r[field] for r in rows if field in r]
    return max(unique(values), key=values.count)


def plot_replay(rows, out):
    for shape in unique(r["shape"] for r in rows):
        mine = [r for r in rows if r["shape"] == shape]
        at = {f: usual(mine, f) for f in VARIED if f not in OWN}
        main = [r for r in mine if all(r[f] == v for f, v in at.items())]
        latest = {}
        for r in main:
            latest[(r["system"], r["rest"], r["mode"])] = r
        order = [(f"{r['system']}" + (f" ({r['rest']})" if r["rest"] not in ("-", "f16", "raw") else "") +
                  ("" if r["mode"] == "virtual" else " slept"), r["ttft_ms"], r["p99_ms"], r["limit_ms"])
                 for r in latest.values()]
        first = main[0]
        note = (f"modelled: {first['profile']}, {first['prefixes']} prefixes of {first['prefix_tokens']} tokens, disk "
                f"{first['disk_bytes_per_s'] / 1e9:g} GB/s; bar: mean, line: 99th percentile, mark: limit")
        bars(os.path.join(out, name_of("replay", shape)), f"{shape}: replay of {first['requests']} requests", note, order)
        for field, (stem, label, unit) in VARIED.items():
            others = {f: v for f, v in at.items() if f != field}
            there = [r for r in mine if r["system"] != "recomp" and all(r[f] == v for f, v in others.items())]
            values = {}
            for r in there:
                values.setdefault(r["system"], {})[float(r[field])] = r["ttft_ms"]
            values = {s: v for s, v in values.items() if len(v) > 1}
            if not values:
                continue
            colour = colours(values)
            svg = Svg(560, 380)
            svg.text(16, 24, f"{shape}, modelled: mean time to the first token", size=14)
            legend(svg, list(colour.items())[:4])
            legend(svg, list(colour.items())[4:], 60)
            xs = [x / unit for v in values.values() for x in v]
            ys = [y for v in values.values() for y in v.values()]
            panel = Panel(svg, 70, 98, 440, 220, xs, max(ys), label + " (log)", "ms (log)", True, min(ys) * 0.85)
            for system, v in values.items():
                panel.curve([(x / unit, y) for x, y in v.items()], colour[system])
            svg.save(os.path.join(out, name_of("replay", shape, stem)))


def percentile(values, share):
    values = sorted(values)
    return values[max(0, math.ceil(share * len(values)) - 1)]


# A system has the same colour in all plots of time to the first token; what it is varied by doesn't count.
SYSTEM_COLOURS = {"recomp": "#999999", "as": "#000000", "as-h2o-lru": "#56b4e9", "as-h2o-lfu": "#0072b2", "spi": "#cc79a7",
                  "impress-paper": "#e69f00", "contiguous": "#009e73", "impress": "#d55e00", "llama-server": "#7a5195",
                  "random": "#bbbbbb"}


def system_colour(label):
    return SYSTEM_COLOURS.get(re.split(r"[+ (,]", label)[0], "#777777")


def rate(row):
    """What the disk was limited to, as text; "" where it was not."""
    return f"{row['io_limit'] / 2**20:g}M" if row.get("io_limit") else ""


def ttft_name(row):
    """The file of a row's plot."""
    parts = ("ttft", row["model"].removesuffix(".gguf"), row.get("length"), rate(row), row.get("state"))
    return name_of(*[p for p in parts if p])


def plot_ttft(rows, out):
    """A picture for each model, length, limit and state: bar to the median, line to the 99th percentile, mark at the limit."""
    for place in unique((r["model"], r.get("length", 0), r.get("io_limit", 0), r.get("state", "")) for r in rows):
        mine = [r for r in rows if (r["model"], r.get("length", 0), r.get("io_limit", 0), r.get("state", "")) == place]
        groups = {}
        for r in mine:
            # Computing everything is another order of magnitude: its bar would leave the others none.
            if not re.search("recomp", r["system"]):
                groups.setdefault(r["system"] + (f" {r['retention']:.0%}" if r["retention"] < 1 else ""), []).append(r)
        if not groups:
            continue
        limits = [[r["limit_ms"] for r in g if "limit_ms" in r] for g in groups.values()]
        bars(os.path.join(out, ttft_name(mine[0])),
             f"{place[0]}, {percentile([r['prefix_tokens'] for r in mine], 0.5)} tokens"
             + (f", disk {rate(mine[0])}B/s" if rate(mine[0]) else "") + (f", {place[3]}" if place[3] else ""),
             "bar: median, line: 99th percentile, mark: limit (computing or reading alone)",
             [(s, percentile([r["ttft_ms"] for r in g], 0.5), percentile([r["ttft_ms"] for r in g], 0.99),
               sum(m) / len(m) if m else None) for (s, g), m in zip(groups.items(), limits)], system_colour)


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__.split("\n\n")[1])
    rows, out = read_rows(sys.argv[2:]), sys.argv[1]
    os.makedirs(out, exist_ok=True)
    kinds = {"trace": plot_trace, "io": plot_io, "replay": plot_replay}
    for kind, plot in kinds.items():
        mine = [r for r in rows if r.get("bench") == kind]
        if mine:
            plot(mine, out)
    ttft = [r for r in rows if r.get("bench", "ttft") == "ttft" and r.get("ttft_ms") is not None and "model" in r]
    if ttft:
        plot_ttft(ttft, out)


if __name__ == "__main__":
    main()
