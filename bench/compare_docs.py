#!/usr/bin/env python3
"""Ask questions on long documents by recompute, full load and one system, and sum up what the answers cost and lose.

    bench/compare_docs.py --impress build/impress -m MODEL.gguf --docs DIR [--system as-h2o-lru] [--retention 0.25]
                          [--tokens 2000] [--documents 5] [--per-document 4] [--store DIR] [--json FILE]

DIR holds documents and `questions.jsonl`, one object a line with `doc` (a file name in DIR) and `query`. Each document is
cut at a line end to about --tokens tokens (4.2 characters each). Every document is a prefix of its own: it is computed,
stored, and then loaded for each of its questions, with the page cache passed by (O_DIRECT) and no host tier. KL is the mean
over all questions of the first answer token's distribution to recompute's, in nats; times are medians.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--impress", default="build/impress")
    p.add_argument("-m", "--model", required=True)
    p.add_argument("--docs", required=True, metavar="DIR")
    p.add_argument("--system", default="as-h2o-lru")
    p.add_argument("--retention", default="0.25")
    p.add_argument("--tokens", type=int, default=2000)
    p.add_argument("--documents", type=int, default=5)
    p.add_argument("--per-document", type=int, default=4)
    p.add_argument("--store", metavar="DIR", help="keep the store here (default: a temporary folder)")
    p.add_argument("--json", metavar="FILE", help="write every row to FILE, one object a line")
    return p.parse_args()


def questions_by_document(folder):
    found = {}
    path = os.path.join(folder, "questions.jsonl")
    with open(path, encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            try:
                q = json.loads(line)
                found.setdefault(q["doc"], []).append(q["query"])
            except (ValueError, KeyError) as e:
                sys.exit(f"{path}:{number}: {e}")
    return found


def cut(text, tokens):
    if len(text) <= tokens * 4.2:
        return text
    text = text[:int(tokens * 4.2)]
    return text[:text.rfind("\n") + 1] or text


def main():
    a = parse()
    chosen = sorted((d, q) for d, q in questions_by_document(a.docs).items() if len(q) >= a.per_document)[:a.documents]
    rows = []
    with tempfile.TemporaryDirectory() as tmp:
        for number, (doc, queries) in enumerate(chosen, 1):
            prefix = os.path.join(tmp, doc)
            with open(os.path.join(a.docs, doc), encoding="utf-8") as f, open(prefix, "w", encoding="utf-8") as g:
                g.write(cut(f.read(), a.tokens))
            print(f"[{number} of {len(chosen)}] {doc}", file=sys.stderr)
            command = [a.impress, "run", "-m", a.model, "-f", prefix, "--store", a.store or os.path.join(tmp, "store"),
                       "--raw", "-n", "1", "--compare", "--json", "--system", a.system, "--retention", a.retention]
            for q in queries[:a.per_document]:
                command += ["-p", q]
            out = subprocess.run(command, stdout=subprocess.PIPE, check=False)
            if out.returncode:
                sys.exit(f"{doc}: exit code {out.returncode}")
            rows += [dict(r, document=doc) for r in json.loads(out.stdout)]
    if a.json:
        with open(a.json, "w", encoding="utf-8") as f:
            f.writelines(json.dumps(r) + "\n" for r in rows)

    print("| system | questions | prefix tokens | KL mean | KL max | top-1 same | TTFT ms | identify ms | I/O wait ms | "
          "gather ms | compute ms | mass | MB read |")
    print("|---|" + "---:|" * 12)
    for system in dict.fromkeys(r["system"] for r in rows):
        of = [r for r in rows if r["system"] == system]
        timed = [r for r in of if r["ttft_ms"] is not None]
        med = lambda key: statistics.median(r[key] for r in timed)
        print(f"| {system} | {len(of)} | {min(r['prefix_tokens'] for r in of)}-{max(r['prefix_tokens'] for r in of)} | "
              f"{statistics.mean(r['kl'] for r in of):.4f} | {max(r['kl'] for r in of):.4f} | "
              f"{sum(r['top1_same'] for r in of)} of {len(of)} | {med('ttft_ms'):.0f} | {med('identify_ms'):.1f} | "
              f"{med('io_wait_ms'):.1f} | {med('gather_ms'):.1f} | {med('compute_ms'):.0f} | {med('mass'):.3f} | "
              f"{med('bytes_read') / 1e6:.1f} |")


main()
