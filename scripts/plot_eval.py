#!/usr/bin/env python3
"""Plots of accuracy, from the output of `impress eval --json`: needs nothing but Python.

usage: plot_eval.py OUT_DIR FILE.json...

OUT_DIR/eval-MODEL-diff.svg  accuracy less full load's, with its 95 % interval, for each task and system
OUT_DIR/eval-MODEL-kl.svg    KL against the share of tokens loaded, a panel a task, a curve a system
OUT_DIR/eval-MODEL-acc.svg   accuracy against that share, with full load's as a line
"""
import json
import math
import os
import re
import sys
from html import escape

COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999"]
FIELDS = {"system", "task", "model", "retention", "n", "accuracy", "diff_full", "ci_low", "ci_high", "kl"}


class Svg:
    def __init__(self, width, height):
        self.size = (width, height)
        self.parts = []

    def line(self, x1, y1, x2, y2, colour="#444", width=1.0, dash=None):
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
                          f'stroke-width="{width}"{dashes}/>')

    def polyline(self, points, colour):
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{text}" fill="none" stroke="{colour}" stroke-width="1.6"/>')

    def dot(self, x, y, colour):
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{colour}"/>')

    def text(self, x, y, text, anchor="start", size=12, colour="#222"):
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
                          f'fill="{colour}">{escape(text)}</text>')

    def save(self, path):
        width, height = self.size
        with open(path, "w", encoding="utf-8") as f:
            f.write(f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
                    f'viewBox="0 0 {width} {height}" font-family="sans-serif">\n'
                    f'<rect width="{width}" height="{height}" fill="#fff"/>\n')
            f.write("\n".join(self.parts) + "\n</svg>\n")
        print(path)


def ticks(low, high, n=5):
    """Round steps that cover [low, high]."""
    step = 10 ** math.floor(math.log10((high - low) / n))
    while (high - low) / step > n * 1.5:
        step *= 2 if str(step / 10 ** math.floor(math.log10(step)))[0] != "2" else 2.5
    first = math.ceil(low / step - 1e-9) * step
    return [first + i * step for i in range(int((high - first) / step + 1e-9) + 1)]


def read_rows(paths):
    rows = []
    for path in paths:
        try:
            with open(path, encoding="utf-8") as f:
                found = json.load(f)
        except (OSError, ValueError) as why:
            sys.exit(f"plot_eval.py: {path}: {why}")
        for row in found if isinstance(found, list) else [found]:
            missing = FIELDS - set(row)
            if missing:
                sys.exit(f"plot_eval.py: {path}: a row lacks {', '.join(sorted(missing))}")
            rows.append(row)
    if not rows:
        sys.exit("plot_eval.py: no rows")
    return rows


def label(row):
    return f"{row['system']} {row['retention']:.0%}" if row["retention"] < 1 else row["system"]


def unique(values):
    return list(dict.fromkeys(values))


def plot_diff(rows, path, title):
    """One line a task and system: the difference as a dot, its interval as a bar."""
    rows = [r for r in rows if r["system"] != "as"]
    if not rows:
        return
    tasks, systems = unique(r["task"] for r in rows), unique(r["system"] for r in rows)
    left, right, top, step = 230, 30, 56, 20
    height = top + step * (len(rows) + len(tasks)) + 44
    svg = Svg(760, height)
    low = min(0, min(r["ci_low"] for r in rows)) * 100
    high = max(0, max(r["ci_high"] for r in rows)) * 100
    margin = max(1.0, 0.05 * (high - low))
    low, high = low - margin, high + margin
    bottom = height - 40

    def at(v):
        return left + (v - low) / (high - low) * (760 - left - right)

    svg.text(16, 24, title, size=14)
    for t in ticks(low, high):
        svg.line(at(t), top - 8, at(t), bottom, "#ddd")
        svg.text(at(t), bottom + 16, f"{t:+g}" if abs(t) > 1e-9 else "0", "middle", 11)
    svg.line(at(0), top - 8, at(0), bottom, "#444")
    svg.text((left + 760 - right) / 2, height - 6, "accuracy less full load's, points (95 % interval)", "middle")
    y = top
    for task in tasks:
        mine = [r for r in rows if r["task"] == task]
        svg.text(16, y + 4, f"{task} (n = {mine[0]['n']})", size=12)
        y += step
        for r in mine:
            colour = COLOURS[systems.index(r["system"]) % len(COLOURS)]
            svg.text(left - 10, y + 4, label(r), "end", 12, colour)
            svg.line(at(100 * r["ci_low"]), y, at(100 * r["ci_high"]), y, colour, 2)
            svg.dot(at(100 * r["diff_full"]), y, colour)
            y += step
    svg.save(path)


def plot_curves(rows, path, title, field, unit, full):
    """A panel a task, a curve over retention for every system that chooses tokens; `full` draws full load as a line."""
    partial = [r for r in rows if r["retention"] < 1]
    if not partial:
        return
    tasks, systems = unique(r["task"] for r in partial), unique(r["system"] for r in partial)
    wide, tall, columns = 330, 240, min(2, len(tasks))
    lines = (len(tasks) + columns - 1) // columns
    svg = Svg(columns * wide + 20, 60 + lines * tall + 10)
    svg.text(16, 24, title, size=14)
    x = 16
    for i, system in enumerate(systems):
        svg.dot(x + 4, 42, COLOURS[i % len(COLOURS)])
        svg.text(x + 14, 46, system)
        x += 30 + 8 * len(system)
    scale = 100 if unit == "%" else 1
    for k, task in enumerate(tasks):
        left, top = 56 + (k % columns) * wide, 84 + (k // columns) * tall
        w, h = wide - 80, tall - 76
        mine = [r for r in partial if r["task"] == task]
        whole = [r[field] * scale for r in rows if full and r["task"] == task and r["system"] == "as"]
        values = [r[field] * scale for r in mine] + whole
        low, high = (0, max(values)) if unit != "%" else (min(values), max(values))
        margin = 0.08 * (high - low) or 1
        low, high = (low if unit != "%" else low - margin), high + margin
        least = min(r["retention"] for r in mine)

        def px(share):
            return left + (math.log(share / least) / math.log(1 / least)) * w

        def py(value):
            return top + h - (value - low) / (high - low) * h

        svg.text(left, top - 8, task)
        for t in ticks(low, high, 4):
            svg.line(left, py(t), left + w, py(t), "#ddd")
            svg.text(left - 6, py(t) + 4, f"{t:g}", "end", 11)
        for share in unique(sorted({r["retention"] for r in mine} | {1.0})):
            svg.line(px(share), top + h, px(share), top + h + 4)
            svg.text(px(share), top + h + 16, f"{share * 100:g}", "middle", 11)
        svg.text(left + w / 2, top + h + 32, "tokens loaded, % (log)", "middle", 11)
        for v in whole:
            svg.line(left, py(v), left + w, py(v), "#444", 1, "4 3")
            svg.text(left + w, py(v) - 4, "full load", "end", 10)
        for i, system in enumerate(systems):
            points = sorted((r["retention"], r[field] * scale) for r in mine if r["system"] == system)
            colour = COLOURS[i % len(COLOURS)]
            if len(points) > 1:
                svg.polyline([(px(s), py(v)) for s, v in points], colour)
            for s, v in points:
                svg.dot(px(s), py(v), colour)
        svg.line(left, top, left, top + h)
        svg.line(left, top + h, left + w, top + h)
    svg.save(path)


def main():
    if len(sys.argv) < 3 or sys.argv[1] in ("-h", "--help"):
        print(__doc__.strip())
        sys.exit(0 if len(sys.argv) > 1 and sys.argv[1] in ("-h", "--help") else 2)
    rows = read_rows(sys.argv[2:])
    os.makedirs(sys.argv[1], exist_ok=True)
    for model in unique(r["model"] for r in rows):
        mine = [r for r in rows if r["model"] == model]
        stem = os.path.join(sys.argv[1], "eval-" + re.sub(r"[^A-Za-z0-9.-]+", "_", re.sub(r"\.gguf$", "", model)))
        plot_diff(mine, stem + "-diff.svg", f"{model}: accuracy against full load")
        plot_curves(mine, stem + "-kl.svg", f"{model}: KL to full load, nats", "kl", "nats", False)
        plot_curves(mine, stem + "-acc.svg", f"{model}: accuracy, %", "accuracy", "%", True)


if __name__ == "__main__":
    main()
