#!/usr/bin/env python3
"""Tables of accuracy in Markdown, from the output of `impress eval --json`: needs nothing but Python.

usage: table_eval.py FILE.json...

A table for each model, task and share of tokens, as docs/results/accuracy.md has them, and under each what the KL of
`impress` and `impress-paper` is beside exact H2O's.
"""
import json
import sys


def number(x, form, scale=1.0):
    return "–" if x is None else form % (x * scale)


def table(rows):
    print("| system | right, % | to full load | 95 % interval | same answer, % | KL | mass, % | fallback, % | "
          "MB to identify | MB read |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for r in rows:
        print("| %s | %s | %s | %s to %s | %s | %s | %s | %s | %s | %s |" % (
            r["system"], number(r["accuracy"], "%.1f", 100), number(r["diff_full"], "%+.1f", 100),
            number(r["ci_low"], "%+.1f", 100), number(r["ci_high"], "%+.1f", 100), number(r["agreement"], "%.1f", 100),
            number(r["kl"], "%.4f"), number(r["mass"], "%.1f", 100), number(r["fallback_layers"], "%.1f", 100),
            number(r["identify_bytes"], "%.2f", 1e-6), number(r["bytes_read"], "%.2f", 1e-6)))


def beside(rows):
    kl = {r["system"]: r["kl"] for r in rows}
    exact, said = kl.get("as-h2o-lru"), []
    for name in ("impress", "impress-paper"):
        if exact and name in kl:
            said.append("`%s` %.2f" % (name, kl[name] / exact))
    if said:
        print("\nKL beside exact H2O's: %s." % ", ".join(said))


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__.strip())
    groups = {}
    for path in sys.argv[1:]:
        try:
            with open(path, encoding="utf-8") as f:
                rows = json.load(f)
            for r in rows:
                share = max(x["retention"] for x in rows if x["task"] == r["task"] and x["retention"] < 1)
                key = (r["model"], r["task"], share if r["retention"] == 1 else r["retention"])
                groups.setdefault(key, []).append(r)
        except (OSError, ValueError, KeyError, TypeError) as e:
            sys.exit(f"table_eval.py: {path}: {e!r}")
    for (model, task, share), rows in groups.items():
        print(f"\n### {task}, {model}, {share * 100:.0f} %, {rows[0]['n']} questions\n")
        table(rows)
        beside(rows)


main()
