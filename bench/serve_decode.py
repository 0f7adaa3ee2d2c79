#!/usr/bin/env python3
"""serve_decode.py: how fast servers generate, with one stream and with several at once.

usage: serve_decode.py [OPTIONS] NAME=URL|NAME=COMMAND...

All servers run at the same time, and take turns: each repetition asks each of them, in an order that changes, for the
same texts with the same number of tokens, streamed, at temperature 0, from prompts that neither has seen. So what else
happens on the machine happens to all. Speed is that while all streams answer: from the first token of the last of them to
the last token of the first. With prompts: all tokens by the time from the first request to the last token, which counts
how prompts and answers take turns as well. Medians. CPU: what the server's process used, the prompt included, by
generated token (only of servers started here, by COMMAND; {port} and {dir} in it as in serve_load.py). Texts that differ
from the first server's are counted: rounding may fork them, and they are still the same amount of work. Exits with 1
where a stream is not whole, or, with --within, where the first server is slower than the last by more than so many per
cent."""
import argparse
import json
import os
import sys
import threading

from serve_load import Failed, Server, count_from, end_properly, invented, quantile


def cpu_s(server):
    """Seconds of processor time so far; None where it isn't known."""
    try:
        with open("/proc/%d/stat" % server.process.pid) as f:
            fields = f.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return None


def speeds_together(answers):
    """Tokens a second of each stream while all of them answer. A piece of text may be of several tokens."""
    start, end = max(a.first for a in answers), min(a.last for a in answers)
    pieces = [sum(start < t <= end for t in a.times) for a in answers]
    return [n * a.n_tokens / len(a.times) / (end - start) for n, a in zip(pieces, answers)] if end > start else None


def turn(server, o, n_streams, run):
    """One repetition on one server."""
    answers, failed = [None] * n_streams, []

    def stream(i):
        prompt = invented(o.words, 1000 * run + 10 * n_streams + i) + count_from(100 * (i + 1))
        try:
            answers[i] = server.ask(prompt, o.tokens)
        except Failed as e:
            failed.append("%s: %s" % (server.name, e))

    before = cpu_s(server)
    threads = [threading.Thread(target=stream, args=(i,)) for i in range(n_streams)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if not failed and any(a.n_tokens != o.tokens or a.decode is None for a in answers):
        failed.append("%s: %s tokens, not %d" % (server.name, [a.n_tokens for a in answers], o.tokens))
    if failed:
        raise SystemExit("serve_decode.py: " + failed[0])
    took = max(a.last for a in answers) - min(a.start for a in answers)
    after = cpu_s(server)
    speeds = speeds_together(answers)
    if not speeds:
        raise SystemExit("serve_decode.py: %s: the streams never answer at the same time: more --tokens" % server.name)
    return dict(streams=n_streams, run=run, per_stream=speeds, total=sum(speeds),
                with_prompts=sum(a.n_tokens for a in answers) / took, texts=[a.text for a in answers],
                cpu_ms=None if after is None else 1000 * (after - before) / sum(a.n_tokens for a in answers))


def summary(name, n_streams, turns, first):
    cpu = [t["cpu_ms"] for t in turns if t["cpu_ms"] is not None]
    differ = sum(a != b for t, u in zip(turns, first) for a, b in zip(t["texts"], u["texts"]))
    return dict(server=name, streams=n_streams, per_stream=quantile([s for t in turns for s in t["per_stream"]], 0.5),
                total=quantile([t["total"] for t in turns], 0.5),
                with_prompts=quantile([t["with_prompts"] for t in turns], 0.5), cpu_ms=quantile(cpu, 0.5),
                texts_differ=differ)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                usage="serve_decode.py [OPTIONS] NAME=URL|NAME=COMMAND...")
    p.add_argument("servers", nargs="+", metavar="NAME=...")
    p.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    p.add_argument("--tokens", type=int, default=200, help="of each answer")
    p.add_argument("--words", type=int, default=40, help="of each prompt, before its question")
    p.add_argument("--runs", type=int, default=9, help="repetitions")
    p.add_argument("--within", type=float, metavar="PERCENT")
    p.add_argument("--json", metavar="FILE")
    o = p.parse_args()
    end_properly()
    servers, turns = [], {}
    try:
        for what in o.servers:
            servers.append(Server(what))
        for run in range(-1, o.runs):  # the first one warms up
            for n in o.streams:
                for server in servers if run % 2 else reversed(servers):
                    result = turn(server, o, n, run + 1)
                    if run >= 0:
                        turns.setdefault((server.name, n), []).append(result)
            print("%d of %d" % (run + 1, o.runs), file=sys.stderr)
    finally:
        for server in servers:
            server.stop()
    rows = [summary(s.name, n, turns[s.name, n], turns[servers[0].name, n]) for n in o.streams for s in servers]
    print("| streams | server | tokens/s, each | all | of the last server's | with prompts | CPU ms a token | other texts |")
    print("|---:|---|---:|---:|---:|---:|---:|---:|")
    slow = False
    for r in rows:
        last = next(x for x in rows if x["streams"] == r["streams"] and x["server"] == servers[-1].name)
        r["share"] = r["total"] / last["total"]
        slow = slow or (o.within is not None and r["server"] == servers[0].name and r["share"] < 1 - o.within / 100)
        print("| %d | %s | %.1f | %.1f | %.1f %% | %.1f | %s | %d |" % (
            r["streams"], r["server"], r["per_stream"], r["total"], 100 * r["share"], r["with_prompts"],
            "-" if r["cpu_ms"] is None else "%.2f" % r["cpu_ms"], r["texts_differ"]))
    if o.json:
        with open(o.json, "w") as f:
            kept = {"%s, %d" % key: [{k: v for k, v in t.items() if k != "texts"} for t in value] for key, value in turns.items()}
            json.dump(dict(options=vars(o), summary=rows, turns=kept), f, indent=1)
            f.write("\n")
    sys.exit(1 if slow else 0)


if __name__ == "__main__":
    main()
