#!/usr/bin/env python3
"""serve_restart.py: what a restart costs the next question about a long prefix.

usage: serve_restart.py -m MODEL.gguf [OPTIONS]

In each run a server with an empty store is asked about a new prefix: the cold time to the first token. It is ended by
SIGTERM and started again on the same store, and asked another question about the prefix: the warm one, whose cached
tokens must be all but the last hundred. Before both, a short request of something else, so that neither is the process's
first. Prints a table, and exits with 1 where tokens weren't cached or the ratio of the medians is below --at-least."""
import argparse
import json
import os
import shutil
import sys
import tempfile

from serve_load import Failed, Server, count_from, end_properly, invented, quantile


def measure(o, run):
    """(cold, warm, prompt's tokens, cached tokens of the warm one)"""
    folder = tempfile.mkdtemp(prefix="serve-restart-", dir=o.dir)
    command = "impress='%s' serve -m '%s' --port {port} --store '%s' --slots 1 -c %d %s" % (
        o.impress, o.model, folder, o.context, o.options)
    prefix = invented(o.words, 1000 * o.seed + run)
    try:
        answers = []
        for question in (10, 50):
            server = Server(command)
            try:
                server.ask("Something else.", 2)
                answers.append(server.ask(prefix + count_from(question), 4))
            finally:
                server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    cold, warm = answers
    return dict(cold_s=cold.ttft, warm_s=warm.ttft, prompt_tokens=warm.prompt_tokens, cached_tokens=warm.cached)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                usage="serve_restart.py -m MODEL.gguf [OPTIONS]")
    p.add_argument("-m", "--model", required=True)
    p.add_argument("--impress", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "../build/impress"))
    p.add_argument("--words", type=int, default=1860, help="of the prefix; 1860 are about 4,000 tokens of SmolLM2")
    p.add_argument("--context", type=int, default=8192)
    p.add_argument("--runs", type=int, default=5)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--dir", help="where stores are made (default: $TMPDIR)")
    p.add_argument("--options", default="", help="more of the server's, a text")
    p.add_argument("--at-least", type=float, default=0, metavar="RATIO")
    p.add_argument("--json", metavar="FILE")
    o = p.parse_args()
    end_properly()
    try:
        runs = [measure(o, i) for i in range(o.runs)]
    except Failed as e:
        raise SystemExit("serve_restart.py: %s" % e)
    cold, warm = (quantile([r[k] for r in runs], 0.5) for k in ("cold_s", "warm_s"))
    print("| run | prompt tokens | cached tokens | TTFT cold [s] | TTFT after the restart [s] | ratio |")
    print("|---|---:|---:|---:|---:|---:|")
    for i, r in enumerate(runs):
        print("| %d | %d | %d | %.3f | %.4f | %.1f |" % (
            i + 1, r["prompt_tokens"], r["cached_tokens"] or 0, r["cold_s"], r["warm_s"], r["cold_s"] / r["warm_s"]))
    print("| median | | | %.3f | %.4f | %.1f |" % (cold, warm, cold / warm))
    if o.json:
        with open(o.json, "w") as f:
            json.dump(dict(options=vars(o), runs=runs, cold_s=cold, warm_s=warm, ratio=cold / warm), f, indent=1)
            f.write("\n")
    whole = all((r["cached_tokens"] or 0) >= r["prompt_tokens"] - 100 for r in runs)
    if not whole:
        print("serve_restart.py: tokens that weren't cached", file=sys.stderr)
    sys.exit(0 if whole and cold / warm >= o.at_least else 1)


if __name__ == "__main__":
    main()
