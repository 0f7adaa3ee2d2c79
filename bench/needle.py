#!/usr/bin/env python3
"""Facts that no earlier question touched: are they still found when only a part of the document is loaded?

    bench/needle.py -m MODEL.gguf [--impress build/impress] [--systems as,as-h2o-lru,impress] [--retention 0.25]
                    [--documents 8] [--store DIR] [--work DIR] [--out FILE] [--json FILE]

Each document is examples/demo/prefix.txt with five facts of its own, the needles, at five places: "The service code of
the amber pump is 4821." Before they are asked for, questions on other things in the handbook (examples/tasks) are asked,
so that a system's history and its order on disk know those and not the needles; segments are then written anew. A
needle is found if its code is the likeliest of four, two of which belong to other needles of the same document.

Prints, for each system, how many needles it found, and how many of those that full load found. The task files are
written to --work (default: a temporary folder); all answers go through `impress eval`, whose rows --out keeps.
"""
import argparse
import json
import os
import random
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
EXAMPLES = os.path.join(HERE, "..", "examples")
COLOURS = ["amber", "silver", "violet", "copper", "ivory", "crimson", "olive", "indigo"]
THINGS = ["pump", "crane", "siren", "boiler", "winch"]
NEEDLES = len(THINGS)


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--impress", default="build/impress")
    p.add_argument("-m", "--model", required=True)
    p.add_argument("--systems", default="as,as-h2o-lru,impress-paper,impress")
    p.add_argument("--retention", default="0.25")
    p.add_argument("--documents", type=int, default=8, help="1 to %d" % len(COLOURS))
    p.add_argument("--store", metavar="DIR")
    p.add_argument("--work", metavar="DIR")
    p.add_argument("--out", metavar="FILE", help="as for `impress eval`")
    p.add_argument("--json", metavar="FILE", help="write the result to FILE")
    return p.parse_args()


def read_lines(path):
    with open(path, encoding="utf-8") as f:
        return [json.loads(line) for line in f if line.strip()]


def with_needles(paragraphs, needles, rng):
    """Each needle at the end of a paragraph of its own stretch of the document."""
    out = list(paragraphs)
    stretch = len(out) / len(needles)
    for i, (what, code) in enumerate(needles):
        long = [j for j in range(int(i * stretch), int((i + 1) * stretch)) if len(out[j]) > 200]
        out[rng.choice(long)] += f" The service code of the {what} is {code}."
    return "\n\n".join(out)


def example(name, query, choices, answer):
    return {"id": name, "query": query, "choices": choices, "answer": answer}


def write_task(folder, colour, number):
    rng = random.Random(1000 + number)
    with open(os.path.join(EXAMPLES, "demo", "prefix.txt"), encoding="utf-8") as f:
        paragraphs = f.read().strip().split("\n\n")
    codes = rng.sample(range(1000, 10000), NEEDLES + 2 * NEEDLES)
    needles = [(f"{colour} {thing}", codes[i]) for i, thing in enumerate(THINGS)]
    document = with_needles(paragraphs, needles, rng)

    train = [example(f"document-{number}", document, ["End of the handbook.", "To be continued."], 0)]
    train += [example(q["id"], q["query"], q["choices"], q["answer"])
              for q in read_lines(os.path.join(EXAMPLES, "tasks", "questions.jsonl"))]
    val = []
    for i, (what, code) in enumerate(needles):
        others = rng.sample([c for _, c in needles if c != code], 2) + [codes[NEEDLES + i]]
        choices = [str(c) for c in others + [code]]
        rng.shuffle(choices)
        val.append(example(f"needle-{number}-{i}", f"Question: What is the service code of the {what}?\nAnswer:",
                           choices, choices.index(str(code))))
    name = f"needle-{number}"
    for part, rows in (("train", train), ("val", val)):
        with open(os.path.join(folder, f"{name}.{part}.jsonl"), "w", encoding="utf-8") as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)
    return name


def main():
    a = parse()
    if not 1 <= a.documents <= len(COLOURS):
        sys.exit(f"needle.py: --documents wants 1 to {len(COLOURS)}, not {a.documents}")
    with tempfile.TemporaryDirectory() as tmp:
        folder = a.work or tmp
        os.makedirs(folder, exist_ok=True)
        names = [write_task(folder, COLOURS[i], i + 1) for i in range(a.documents)]
        out = a.out or os.path.join(tmp, "rows.jsonl")
        command = [a.impress, "eval", "-m", a.model, "--tasks", folder, "--task", ",".join(names), "--shots", "1",
                   "--warm", "8", "--scoring", "sum", "--systems", a.systems, "--retention", a.retention, "--out", out,
                   "--json", "--store", a.store or os.path.join(tmp, "stores")]
        if not a.store:
            os.makedirs(os.path.join(tmp, "stores"))
        done = subprocess.run(command, stdout=subprocess.PIPE)
        if done.returncode:
            sys.exit(done.returncode)
        rows = json.loads(done.stdout)
    totals = {}
    for row in rows:
        t = totals.setdefault(row["system"], {"system": row["system"], "retention": row["retention"], "needles": 0,
                                              "found": 0, "kl": 0.0})
        t["needles"] += row["n"]
        t["found"] += round(row["accuracy"] * row["n"])
        t["kl"] += row["kl"] * row["n"]
    print(f"{'':28} {'found':>9} {'KL':>8}")
    for t in totals.values():
        t["kl"] /= t["needles"]
        share = "" if t["retention"] == 1 else f" {100 * t['retention']:g} %"
        print(f"{t['system'] + share:28} {t['found']:>3} of {t['needles']:<3} {t['kl']:>8.4f}")
    if a.json:
        with open(a.json, "w", encoding="utf-8") as f:
            f.writelines(json.dumps(t) + "\n" for t in totals.values())


if __name__ == "__main__":
    main()
