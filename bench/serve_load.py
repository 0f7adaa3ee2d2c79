#!/usr/bin/env python3
"""serve_load.py: many clients, questions about shared prefixes, for one or more OpenAI-compatible servers.

usage: serve_load.py [OPTIONS] NAME=URL|NAME=COMMAND...

A URL (http://127.0.0.1:8080) is of a server that runs already. A command is started for its turn and ended by SIGTERM;
{port} in it stands for a free port, {dir} for a new empty folder.

Each server gets the same requests, drawn from the seed: /v1/completions, streamed, at temperature 0. Every prefix is
asked about once before the clock starts. Then each client asks one question after the other, about a prefix drawn by
chance. An answer that doesn't begin with the number that comes next is wrong. When the time is up, some of the pairs of
prefix and question are asked once more, alone and without a cache (in impress's words where the NAME begins with impress,
else in llama-server's): a whole computation. An answer to them that was another one is wrong, too; of servers named by
--partial, which load a part of a prefix by design, such are counted apart. Then the speed of answers is measured
with one stream and with several. Where a server has impress's metrics, what it says of the time to the first token goes
into the JSON and to standard error. With --p50-at-least and --p99-at-least the first server's times must be so many times
shorter than each other's, else the exit status is 1. Standard library only."""
import argparse
import http.client
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse

PARTS = "ka lo mi ren to sal ver ni do tra pel gus".split()


def invented(n, seed):
    """A text of n words that no model knows."""
    r = random.Random(seed)
    return " ".join("".join(r.choice(PARTS) for _ in range(r.randint(1, 3))) for _ in range(n))


N_COUNTED = 7


def count_from(start):
    """A question whose answer leaves no doubt, so that rounding can't change it."""
    return "\n\nNumbers in order: " + ", ".join(str(start + i) for i in range(N_COUNTED)) + ","


def counts_on(text, start):
    """Does it begin with the number that comes next?"""
    return re.match(r"\s*%d(\D|$)" % (start + N_COUNTED), text) is not None


def quantile(values, q):
    """Linear between the neighbours; None of nothing."""
    if not values:
        return None
    v = sorted(values)
    at = q * (len(v) - 1)
    low = int(at)
    return v[low] + (v[min(low + 1, len(v) - 1)] - v[low]) * (at - low)


def end_properly():
    """SIGTERM ends the servers that were started, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


class Failed(Exception):
    pass


class Answer:
    """Of one streamed request."""

    def __init__(self):
        self.text, self.n_tokens, self.prompt_tokens, self.cached = "", 0, 0, None
        self.start = self.end = 0.0
        self.times = []  # at which text came

    @property
    def first(self):
        return self.times[0]

    @property
    def last(self):
        return self.times[-1]

    @property
    def ttft(self):
        return self.first - self.start

    @property
    def decode(self):
        """Tokens a second after the first one; None: too few to tell."""
        return (self.n_tokens - 1) / (self.last - self.first) if self.n_tokens > 2 and self.last > self.first else None


class Server:
    """One that runs, or is started here."""

    def __init__(self, what, start_s=300):
        self.name, _, value = what.partition("=")
        self.process = self.folder = self.log = None
        if not value:
            raise SystemExit("serve_load.py: NAME=URL or NAME=COMMAND, not " + what)
        if value.startswith("http://"):
            self.address = urllib.parse.urlsplit(value).netloc
        else:
            self.start(value)
        until = time.monotonic() + start_s
        while not self.healthy():
            if time.monotonic() > until or (self.process and self.process.poll() is not None):
                last = open(self.log.name, errors="replace").read()[-500:] if self.log else ""
                self.stop()
                raise SystemExit("serve_load.py: %s doesn't answer /health\n%s" % (self.name, last))
            time.sleep(0.05)

    def start(self, command):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.address = "127.0.0.1:%d" % port
        self.folder = tempfile.mkdtemp(prefix="serve-load-")
        self.log = open(os.path.join(self.folder, "log"), "wb")
        folder = os.path.join(self.folder, "dir")
        os.mkdir(folder)
        argv = [a.replace("{port}", str(port)).replace("{dir}", folder) for a in shlex.split(command)]
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)

    def healthy(self):
        try:
            c = http.client.HTTPConnection(self.address, timeout=5)
            c.request("GET", "/health")
            ok = c.getresponse().status == 200
            c.close()
            return ok
        except OSError:
            return False

    def peak_mib(self):
        """Largest resident size so far; None where it isn't known."""
        try:
            with open("/proc/%d/status" % self.process.pid) as f:
                return next(int(line.split()[1]) / 1024 for line in f if line.startswith("VmHWM:"))
        except (OSError, AttributeError, StopIteration):
            return None

    def parts(self):
        """Sums and counts of impress's histograms of times, {name: (seconds, n)}; {} of other servers."""
        try:
            c = http.client.HTTPConnection(self.address, timeout=60)
            c.request("GET", "/metrics")
            page = c.getresponse().read().decode(errors="replace")
            c.close()
        except (OSError, http.client.HTTPException):
            return {}
        found = dict(re.findall(r"(?m)^impress_(\w+_seconds_(?:sum|count)) (\S+)$", page))
        return {k[:-4]: (float(v), float(found.get(k[:-4] + "_count", 0))) for k, v in found.items() if k.endswith("_sum")}

    def stop(self):
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(120)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.log:
            self.log.close()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None

    def ask(self, prompt, n, **fields):
        """One streamed answer; Failed where it isn't whole."""
        body = dict(prompt=prompt, max_tokens=n, temperature=0, stream=True, stream_options={"include_usage": True})
        body.update(fields)
        a = Answer()
        c = http.client.HTTPConnection(self.address, timeout=900)
        try:
            a.start = time.monotonic()
            c.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            reply = c.getresponse()
            if reply.status != 200:
                raise Failed("status %d: %s" % (reply.status, reply.read(300).decode(errors="replace")))
            done = False
            for line in reply:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    done = True
                    break
                self.take(a, json.loads(line[6:]))
            a.end = time.monotonic()
            if not done or not a.times:
                raise Failed("a stream that isn't whole")
        except (OSError, http.client.HTTPException, ValueError) as e:
            raise Failed("%s: %s" % (type(e).__name__, e))
        finally:
            c.close()
        return a

    @staticmethod
    def take(a, event):
        if "error" in event:
            raise Failed(json.dumps(event["error"])[:300])
        text = "".join(choice.get("text") or "" for choice in event.get("choices", []))
        if text:
            a.times.append(time.monotonic())
            a.text += text
        usage = event.get("usage")
        if usage:
            a.n_tokens, a.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
            a.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", a.cached)
        if "timings" in event:  # llama-server's
            a.cached = event["timings"].get("cache_n", a.cached)


class Load:
    """The requests of a run: the same for every server."""

    def __init__(self, o):
        self.o = o
        r = random.Random(o.seed)
        self.prefixes = [invented(r.randint(*o.words), o.seed * 1000 + i) for i in range(o.prefixes)]
        self.starts = [10 * (i + 1) for i in range(o.questions)]
        self.questions = [count_from(start) for start in self.starts]

    def prompt(self, pair):
        return self.prefixes[pair[0]] + self.questions[pair[1]]

    def pairs(self, client):
        r = random.Random("%d/%d" % (self.o.seed, client))
        while True:
            yield r.randrange(len(self.prefixes)), r.randrange(len(self.questions))


def run_clients(server, load, o):
    """[(pair, Answer or Failed)] of all clients, and the seconds it took."""
    results, lock = [], threading.Lock()
    begin = time.monotonic()

    def client(i):
        for pair in load.pairs(i):
            if time.monotonic() - begin >= o.duration:
                return
            try:
                got = server.ask(load.prompt(pair), o.tokens)
            except Failed as e:
                got = e
                time.sleep(0.1)
            with lock:
                results.append((pair, got))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(o.clients)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return results, time.monotonic() - begin


def check_answers(server, load, o, results):
    """How many answers were compared, those that are wrong, and how many others differ by design."""
    answers, partial, wrong = {}, server.name in o.partial, []
    for pair, got in results:
        if not isinstance(got, Answer):
            continue
        answers.setdefault(pair, []).append(got.text)
        if not counts_on(got.text, load.starts[pair[1]]):
            wrong.append(dict(prefix=pair[0], question=pair[1], got=got.text))
    pairs = sorted(answers)
    random.Random(o.seed).shuffle(pairs)
    checked, differ = 0, 0
    for pair in pairs[:o.check] if o.check >= 0 else pairs:
        fields = {"impress": {"cache": "off"}} if server.name.startswith("impress") else {"cache_prompt": False}
        try:
            alone = server.ask(load.prompt(pair), o.tokens, **fields).text
        except Failed as e:
            alone = "failed: %s" % e
        checked += len(answers[pair])
        for got in answers[pair]:
            if got == alone or not counts_on(got, load.starts[pair[1]]):
                continue
            if partial:
                differ += 1
            else:
                wrong.append(dict(prefix=pair[0], question=pair[1], alone=alone, got=got))
    return checked, wrong, differ


def decode_speed(server, o, n_streams, run):
    """Tokens a second of each stream, summed, while n_streams count."""
    speeds = [None] * n_streams

    def stream(i):
        try:
            speeds[i] = server.ask("run %d, stream %d%s" % (run, i, count_from(100 * (i + 1))), o.decode_tokens).decode
        except Failed as e:
            print("serve_load.py: %s: %s" % (server.name, e), file=sys.stderr)

    threads = [threading.Thread(target=stream, args=(i,)) for i in range(n_streams)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return None if None in speeds else sum(speeds)


def measure(what, load, o):
    server = Server(what)
    print("%s: each of %d prefixes once" % (server.name, o.prefixes), file=sys.stderr)
    try:
        first = []
        for i in range(o.prefixes):
            first.append(server.ask(load.prompt((i, 0)), o.tokens))
        time.sleep(o.settle)
        print("%s: %d clients, %d s" % (server.name, o.clients, o.duration), file=sys.stderr)
        before = server.parts()
        results, seconds = run_clients(server, load, o)
        after = server.parts()
        good = [a for _, a in results if isinstance(a, Answer)]
        bad = [str(a) for _, a in results if not isinstance(a, Answer)]
        peak = server.peak_mib()
        print("%s: answers and speed" % server.name, file=sys.stderr)
        checked, wrong, differ = check_answers(server, load, o, results)
        decode = {n: [decode_speed(server, o, n, run) for run in range(o.runs)] for n in (1, o.streams)}
    except Failed as e:
        raise SystemExit("serve_load.py: %s: %s" % (server.name, e))
    finally:
        server.stop()
    parts = {k: 1000 * (after[k][0] - s) / (after[k][1] - n) for k, (s, n) in before.items() if k in after and after[k][1] > n}
    if parts:
        print("%s: means [ms]: %s" % (server.name, ", ".join("%s %.1f" % (k[:-8], v) for k, v in parts.items())), file=sys.stderr)
    cached = [a.cached / a.prompt_tokens for a in good if a.cached is not None and a.prompt_tokens]
    ttft = [a.ttft for a in good]
    return {
        "server": server.name, "command": what.partition("=")[2], "seconds": seconds, "requests": len(results),
        "errors": len(bad), "first_errors": bad[:5], "answers_checked": checked, "answers_wrong": len(wrong),
        "answers_differ": differ if server.name in o.partial else None, "first_wrong": wrong[:5], "means_ms": parts,
        "prefix_tokens": [a.prompt_tokens for a in first], "cold_ttft_p50_s": quantile([a.ttft for a in first], 0.5),
        "ttft_p50_s": quantile(ttft, 0.5), "ttft_p90_s": quantile(ttft, 0.9), "ttft_p99_s": quantile(ttft, 0.99),
        "ttft_max_s": max(ttft, default=None), "tokens_per_s": sum(a.n_tokens for a in good) / seconds,
        "requests_per_s": len(good) / seconds, "cached_share": sum(cached) / len(cached) if cached else None,
        "decode_1_per_s": quantile([d for d in decode[1] if d], 0.5),
        "decode_%d_per_s" % o.streams: quantile([d for d in decode[o.streams] if d], 0.5), "peak_rss_mib": peak,
    }


def table(results, o):
    rows = [("requests", "requests", "%d"), ("errors", "errors", "%d"), ("answers wrong", "answers_wrong", "%d"),
            ("answers compared with a whole computation", "answers_checked", "%d"), ("others that differ, by design", "answers_differ", "%d"),
            ("prompt tokens cached, share", "cached_share", "%.3f"),
            ("TTFT of a new prefix, p50 [s]", "cold_ttft_p50_s", "%.3f"), ("TTFT p50 [s]", "ttft_p50_s", "%.3f"),
            ("TTFT p90 [s]", "ttft_p90_s", "%.3f"), ("TTFT p99 [s]", "ttft_p99_s", "%.3f"),
            ("TTFT max [s]", "ttft_max_s", "%.3f"), ("tokens/s, all clients", "tokens_per_s", "%.1f"),
            ("decode, 1 stream [tokens/s]", "decode_1_per_s", "%.1f"),
            ("decode, %d streams [tokens/s]" % o.streams, "decode_%d_per_s" % o.streams, "%.1f"),
            ("peak RSS [MiB]", "peak_rss_mib", "%.0f")]
    lines = ["| | " + " | ".join(r["server"] for r in results) + " |", "|---" + "|---:" * len(results) + "|"]
    for title, key, form in rows:
        lines.append("| %s | %s |" % (title, " | ".join("-" if r[key] is None else form % r[key] for r in results)))
    return "\n".join(lines)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                usage="serve_load.py [OPTIONS] NAME=URL|NAME=COMMAND...")
    p.add_argument("servers", nargs="+", metavar="NAME=...")
    p.add_argument("--clients", type=int, default=8)
    p.add_argument("--prefixes", type=int, default=20)
    p.add_argument("--questions", type=int, default=12, help="different ones; all prefixes get the same")
    p.add_argument("--words", type=int, nargs=2, default=(465, 930), metavar=("LEAST", "MOST"),
                   help="of a prefix; about 2.15 tokens each (default: 465 930)")
    p.add_argument("--tokens", type=int, default=24, help="of an answer")
    p.add_argument("--duration", type=float, default=300, help="seconds")
    p.add_argument("--settle", type=float, default=3, help="seconds between the prefixes and the clock")
    p.add_argument("--check", type=int, default=60, help="pairs of prefix and question to ask alone; -1: all that came")
    p.add_argument("--streams", type=int, default=4, help="for the speed of answers, besides 1")
    p.add_argument("--decode-tokens", type=int, default=200)
    p.add_argument("--runs", type=int, default=5, help="of that speed; the median counts")
    p.add_argument("--partial", action="append", default=[], metavar="NAME", help="a server that loads a part by design")
    p.add_argument("--p50-at-least", type=float, metavar="X", help="times that the others' TTFT p50 must be the first one's")
    p.add_argument("--p99-at-least", type=float, metavar="X", help="the same of p99")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--json", metavar="FILE")
    o = p.parse_args()
    unknown = set(o.partial) - {s.partition("=")[0] for s in o.servers}
    if unknown:
        p.error("--partial: no server is called " + ", ".join(sorted(unknown)))
    end_properly()
    load = Load(o)
    results = [measure(what, load, o) for what in o.servers]
    print(table(results, o))
    if o.json:
        with open(o.json, "w") as f:
            options = {k: v for k, v in vars(o).items() if k not in ("servers", "json")}
            json.dump({"options": options, "results": results}, f, indent=1)
            f.write("\n")
    for r in results:
        for what in r["first_errors"] + [json.dumps(w) for w in r["first_wrong"]]:
            print("%s: %s" % (r["server"], what), file=sys.stderr)
    bad = any(r["errors"] or r["answers_wrong"] for r in results)
    if o.p50_at_least or o.p99_at_least:
        print() # a paragraph of its own below the table
    for name, least in (("p50", o.p50_at_least), ("p99", o.p99_at_least)):
        key = "ttft_%s_s" % name
        for r in results[1:] if least else []:
            ratio = r[key] / results[0][key] if r[key] and results[0][key] else 0
            print("TTFT %s: %s takes %.2f times what %s does." % (name, r["server"], ratio, results[0]["server"]))
            bad = bad or ratio < least
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
