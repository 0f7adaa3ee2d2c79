#!/usr/bin/env python3
"""Long prompts to a server whose host cache has a limit: beyond its own it takes no more memory than that and a tenth.

N distinct prompts of some 1,100 to 1,700 tokens are computed and stored, together a multiple of the limit. Then they
are asked about with other questions, in part and whole, so that their chunks come from disk into the host tier and
displace each other; then the same again on a second server on that store, whose tier keeps what was used last and so
takes in all that comes. Rounds of one client, whose prefixes are loaded as they are asked for, and of several, of whom
one waits and has its prefix read ahead, take turns: so do the threads that fill the tier. Checked: memory; that the
tier was full at the end, and more than the limit had come into it; that every reply counts the stored tokens as cached,
and, where all of them were loaded, goes on with the numbers it was asked for.

What memory counts. The server's own is the most that the same server takes without a host cache while prompts of the
same lengths are computed, stored and loaded by as many clients: the model, the slots' cells, buffers of loads, rows
that wait to be written. It is known before the tier fills, and doesn't hide what grows with the number of prompts. What
goes beyond it is looked at twice. RssAnon is what the process has allocated and touched, looked at ten times a second.
VmHWM is the most that VmRSS has ever been: it misses nothing that lasted less long, but pages of the model's file count
in it too, which the system drops and reads again as it likes.

usage: memory.py LIMIT N          LIMIT as for --host-cache; expects $IMPRESS, $IMPRESS_MODEL, $tmp
"""
import concurrent.futures
import os
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from serve import Server, count, finish, ok, words  # noqa: E402

MIB = 1 << 20
SLOTS, CLIENTS = 2, 3                # where several ask
N_WORDS = [560, 620, 680, 740, 800]  # of prompts, in turn; chunks that hold all of a layer differ in size
N_OWN = 10                           # prompts by which the server's own memory is found
TENTH, ROOM = 0.1, 48 * MIB          # beyond the limit: of it, but this where it is small (what loads hold on to)
FULL = 0.95                          # what the tier must hold at the end, of the limit
SEEN = 0.9                           # so much of what it holds must be seen in the process, else nothing is measured
DISTINCT = 1.25                      # what must have come from disk once everything was asked for once, of the limit
REST = 64 + 16                       # of a stored prompt's tokens, those that may be computed again
OPTIONS = ["--slots", str(SLOTS), "--ctx-size", "2048", "--limit", "100G"]
FIELDS = ("RssAnon", "VmRSS", "VmHWM")

# A name; rounds: clients, and whether all is loaded; options.
SERVERS = [("impress", [(CLIENTS, False), (1, True), (CLIENTS, False)], []),
           ("as", [(1, True), (CLIENTS, True), (1, True)], ["--system", "as"])]


def size(text):
    unit = "KMGT".find(text[-1].upper()) + 1
    return int(text[:-1] if unit else text) << 10 * unit


class Prompt:
    def __init__(self, seed):
        self.seed, self.text, self.n_tokens = seed, words(N_WORDS[seed % len(N_WORDS)], seed), 0

    def compute(self, server):
        r = server.complete(self.text, 1)
        ok(r.status == 200 and r.cached < REST, "a prompt for the first time: %r" % r)
        self.n_tokens = r.usage["prompt_tokens"]

    def ask(self, server, turn, whole):
        """Each turn with another question. A slot may hold the prompt's cells still, from the turn before."""
        first = 10 + 7 * ((self.seed + 13 * turn) % 100)
        r = server.complete(self.text + count(first), 4, impress={"full_load": whole})
        ok(r.status == 200 and self.n_tokens - REST <= r.cached < r.usage["prompt_tokens"],
           "%d stored tokens: %r" % (self.n_tokens, r))
        ok(r.json["impress"]["way"] in ("live", "whole" if whole else "partial"), r)
        if whole:
            following = " %d, %d" % (first + 7, first + 8)
            ok(len(r.text) > 2 and following.startswith(r.text), "%s comes next: %r" % (following, r))


class Watched:
    """A server, and the most memory that it took."""

    def __init__(self, name, *options, store):
        self.name, self.server = name, Server(*OPTIONS, *options, store=store)
        self.most = dict.fromkeys(FIELDS, 0)
        self.end = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def memory(self):
        with open("/proc/%d/status" % self.server.process.pid) as f:
            lines = [line.split() for line in f]
        return {line[0][:-1]: int(line[1]) << 10 for line in lines if line[0][:-1] in FIELDS}

    def note(self, now):
        for field, n in now.items():
            self.most[field] = max(self.most[field], n)

    def watch(self):
        while not self.end.wait(0.1) and self.server.process.poll() is None:
            try:
                self.note(self.memory())
            except OSError:  # it ends just now
                break

    def tier(self):
        return self.server.metrics()['impress_tier_bytes{tier="host"}']

    def all(self, what, clients, prompts, call):
        """`call` for each prompt, by so many clients; a line for each tenth of them."""
        since = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            for n, _ in enumerate(pool.map(call, prompts), 1):
                if n % max(1, len(prompts) // 10) == 0 or n == len(prompts):
                    now = self.memory()
                    print("%-16s %-24s %3d of %d, %4.0f s; MiB: tier %7.1f, RssAnon %7.1f, VmRSS %7.1f"
                          % (self.name, what, n, len(prompts), time.monotonic() - since, self.tier() / MIB,
                             now["RssAnon"] / MIB, now["VmRSS"] / MIB))

    def run(self, prompts, rounds):
        """Compute what nobody has computed yet; then ask, forth and back, so that a round begins with what the one
        before has left in the tier. Returns the bytes that came from disk in the first round."""
        distinct = 0
        if not prompts[0].n_tokens:
            self.all("computed", CLIENTS, prompts, lambda p: p.compute(self.server))
            least = sum(p.n_tokens - 64 for p in prompts)
            self.server.wait_for(self.server.idle, "an idle server")
            self.server.wait_for(lambda: self.server.metrics()["impress_store_tokens"] >= least, "all prompts on disk")
        for turn, (clients, whole) in enumerate(rounds):
            what = "asked %s, %d client%s" % ("whole" if whole else "in part", clients, "s" * (clients > 1))
            self.all(what, clients, prompts[::-1] if turn % 2 else prompts, lambda p: p.ask(self.server, turn, whole))
            if turn == 0:
                distinct = self.server.metrics()['impress_store_read_bytes_total{tier="disk"}']
        return distinct

    def stop(self):
        """Returns what it takes at the end."""
        now = self.memory()
        self.end.set()
        self.thread.join()
        self.note(now)
        ok(self.server.stop() == 0, self.name + ": a clean end")
        return now


def main():
    sys.stdout.reconfigure(line_buffering=True)
    limit, n = size(sys.argv[1]), int(sys.argv[2])
    since = time.monotonic()
    few, prompts, table = [Prompt(1000000 + i) for i in range(N_OWN)], [Prompt(i) for i in range(n)], []
    for name, rounds, options in SERVERS:
        own = Watched(name + ", no cache", "--host-cache", "0", *options, store="own")
        own.run(few, rounds)
        ok(own.tier() == 0, "nothing is in a tier")
        own_end = own.stop()

        w = Watched(name, "--host-cache", str(limit), *options, store="store")
        distinct = w.run(prompts, rounds)
        m = w.server.metrics()
        tier, disk = m['impress_tier_bytes{tier="host"}'], m['impress_store_read_bytes_total{tier="disk"}']
        end = w.stop()
        ok(distinct >= DISTINCT * limit, "%s: %d bytes came from disk in the first round, the limit is %d: more prompts"
           % (name, distinct, limit))
        ok(FULL * limit <= tier <= limit, "%s: %d bytes in the tier at the end, the limit is %d" % (name, tier, limit))
        ok(m['impress_store_read_bytes_total{tier="host"}'] > 0, name + ": something came from the tier")
        ok(m["impress_look_ahead_prefixes_total"] > 0, name + ": something was read ahead")
        ok(m["impress_store_io_errors_total"] == m["impress_store_corrupt_chunks_total"] == 0, name + ": all was read")
        ok(end["RssAnon"] - own_end["RssAnon"] >= SEEN * tier, "%s: %d bytes allocated at the end, %d without a cache: "
           "%d in the tier aren't seen" % (name, end["RssAnon"], own_end["RssAnon"], tier))
        for field in ("RssAnon", "VmHWM"):
            beyond = w.most[field] - own.most[field]
            table.append((name, field, limit, disk, tier, own.most[field], w.most[field], beyond, beyond / limit))
            ok(beyond <= limit + max(TENTH * limit, ROOM), "%s: %s is %d beyond the server's own, the limit is %d"
               % (name, field, beyond, limit))

    print("%d prompts of %d to %d tokens, %d in all; %.0f min" % (
        n, min(p.n_tokens for p in prompts), max(p.n_tokens for p in prompts), sum(p.n_tokens for p in prompts),
        (time.monotonic() - since) / 60))
    heads = "limit", "from disk", "tier", "own", "most", "beyond", "of limit"
    print("%-16s" % "MiB" + " ".join("%9s" % x for x in heads))
    for name, field, *sizes, ratio in table:
        print("%-8s%-8s" % (name, field) + " ".join("%9.1f" % (x / MIB) for x in sizes) + "%10.3f" % ratio)
    finish()


main()
