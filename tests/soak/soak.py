#!/usr/bin/env python3
"""A server under mixed load and faults for so many minutes, and what must hold of it.

Clients of two tenants ask greedily, streamed or not, some leave early, some send nonsense; an admin pins, drops, looks
and cleans up; the store's directory becomes read-only and comes back, is made small, and the process is stopped or
killed and started again. Checked: every answer is that of a server without a store (`full_load`); nothing but the
expected refusals; memory doesn't rise from start to end of one process's life; the store stays within its limit, in
bytes and in files; at the end `impress verify` finds nothing.

usage: soak.py MINUTES            expects $IMPRESS, $IMPRESS_MODEL, $tmp; seed as IMP_TEST_SEED
       soak.py --requests N       N short requests to one server: memory stays flat
"""
import collections
import http.client
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from serve import Server, count, finish, ok, words  # noqa: E402

LIMIT = 64 << 20
CLIENTS = 4
N_PREFIXES = 8
N_QUESTIONS = 3
KEYS = ["tenant-one-key", "tenant-two-key"]
ADMIN = "soak-admin-key"
LIFE_RSS_SHARE = 1.15  # the second half of a life against the first, at most; and so much more:
LIFE_RSS_ROOM = 48 << 20


def write_secret(name, text):
    path = os.path.join(os.environ["tmp"], name)
    with open(path, "w") as f:
        f.write(text)
    os.chmod(path, 0o600)
    return path


def rss(pid):
    with open("/proc/%d/statm" % pid) as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def start():
    options = ["--slots", "3", "--ctx-size", "2048", "--limit", str(LIMIT), "--host-cache", "16M", "--min-store", "32",
               "--reorder-period", "5", "--reorder-after", "2", "--drain", "5",
               "--api-key-file", write_secret("keys", KEYS[0] + " one\n" + KEYS[1] + " two\n"),
               "--admin-key-file", write_secret("admin", ADMIN + "\n")]
    return Server(*options)


class Soak:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.prompts = [words(120 + 40 * (i % 4), i) + count(20 * i + 7 * q)
                        for i in range(N_PREFIXES) for q in range(N_QUESTIONS)]
        self.reference = {}
        self.end = False
        self.pause = threading.Event()  # set: the server may be away, requests may fail
        self.tally = collections.Counter()
        self.lock = threading.Lock()
        self.server = None
        self.bytes_high = self.files_high = 0

    def count(self, what, n=1):
        with self.lock:
            self.tally[what] += n

    def learn(self):
        """What each prompt's answer is, computed whole."""
        s = Server("--slots", "1", "--ctx-size", "2048", store="none")
        for p in self.prompts:
            r = s.complete(p, n=6, impress={"full_load": True, "cache": "off"})
            ok(r.status == 200, r)
            self.reference[p] = r.text
        ok(s.stop() == 0, "the reference server stops")

    # ---- clients

    def ask(self, r, key):
        p = r.choice(self.prompts)
        body = {"impress": {"full_load": True}}
        if r.random() < 0.3:
            reply = self.server.post("/v1/completions", dict(prompt=p, max_tokens=6, temperature=0, stream=True, **body), key=key)
            events = [line[6:] for line in reply.body.split("\n") if line.startswith("data: ")]
            if reply.status != 200 or not events or events[-1] != "[DONE]":
                return self.refused(reply)
            text = "".join(json.loads(e)["choices"][0]["text"] for e in events[:-1] if json.loads(e)["choices"])
        else:
            reply = self.server.complete(p, n=6, key=key, **body)
            if reply.status != 200:
                return self.refused(reply)
            text = reply.text
        if text != self.reference[p]:
            ok(False, "a wrong answer: %r, not %r" % (text, self.reference[p]))
        self.count("answers")

    def refused(self, reply):
        if self.pause.is_set() or reply.status in (429, 503):
            return self.count("refused")
        ok(False, "not answered: %r" % reply)

    def leave(self, r, key):
        body = json.dumps({"prompt": r.choice(self.prompts), "max_tokens": 200, "stream": True})
        s = socket.create_connection(("127.0.0.1", self.server.port), timeout=60)
        s.sendall(("POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s"
                   % (key, len(body), body)).encode())
        time.sleep(r.random() * 0.5)
        s.close()
        self.count("left")

    def nonsense(self, r, key):
        reply = self.server.post("/v1/completions", r.choice(["{", "[]", '{"prompt":5}', '{"prompt":"x","max_tokens":-1}']),
                                 key=key)
        if not self.pause.is_set():
            ok(400 <= reply.status < 500 or reply.status == 503, "nonsense gets %r" % reply)
        reply = self.server.complete("x", n=1, key="no-such-key-%d" % r.randrange(1000)) if r.random() < 0.02 else None
        if reply is not None and not self.pause.is_set():
            ok(reply.status in (401, 429), "a wrong key gets %r" % reply)
        self.count("nonsense")

    def client(self, number):
        r = random.Random(self.random.random() + number)
        key = KEYS[number % len(KEYS)]
        while not self.end:
            away = self.pause.is_set()
            try:
                what = r.random()
                if what < 0.8:
                    self.ask(r, key)
                elif what < 0.9:
                    self.leave(r, key)
                else:
                    self.nonsense(r, key)
            except (OSError, ValueError, KeyError, http.client.HTTPException) as e:  # refused, cut, or half a reply
                if not away and not self.pause.is_set() and not self.end:
                    ok(False, "a client's request failed: %r" % e)
                self.count("cut")
                time.sleep(0.2)

    # ---- the operator, and the world

    def admin(self, r):
        def call(method, path, body=None):
            reply = self.server.request(method, path, body, {"Authorization": "Bearer " + ADMIN})
            ok(reply.status in (200, 404, 409, 503, 507), "%s %s: %r" % (method, path, reply))
            return reply
        reply = call("GET", "/admin/prefixes")
        nodes = [int(w) for w in re.findall(r'"id": ?"?(\d+)', reply.body)] if reply.status == 200 else []
        what = r.randrange(6)
        if what < 3 and nodes:
            call("POST", "/admin/" + ("pin", "unpin", "drop")[what], {"node": r.choice(nodes)})
        elif what == 3:
            call("GET", "/admin/stats")
        else:
            call("POST", "/admin/" + ("gc", "reorder")[what % 2], {})
        self.server.metrics(ADMIN)
        self.count("admin calls")

    def readonly(self, r):
        """Nothing can be written for a while: requests go on. (For root a mode says nothing; the files then are full.)"""
        folder = os.path.join(os.environ["tmp"], "store", "segments")
        if not os.path.isdir(folder):
            return
        os.chmod(folder, 0o500)
        time.sleep(2 + 3 * r.random())
        os.chmod(folder, 0o700)
        self.count("read-only")

    def full(self, r):
        """No file may grow: RLIMIT_FSIZE of the running server, as a disk that is full."""
        pid = self.server.process.pid
        soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, hard))
        time.sleep(2 + 3 * r.random())
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
        self.count("full")

    def restart(self, r):
        how = r.choice((signal.SIGTERM, signal.SIGKILL))
        self.pause.set()
        time.sleep(0.1)
        rc = self.server.stop(how)
        ok(rc == (0 if how == signal.SIGTERM else -9), "stopped by %d: %s" % (how, rc))
        self.look_at_store()
        self.server = start()
        time.sleep(1)
        self.pause.clear()
        self.count("restarts" if how == signal.SIGTERM else "kills")

    def look_at_store(self):
        n_bytes = n_files = 0
        for folder, _, names in os.walk(os.path.join(os.environ["tmp"], "store")):
            for name in names:
                try:
                    n_bytes += os.stat(os.path.join(folder, name)).st_blocks * 512
                    n_files += 1
                except OSError:
                    pass
        self.bytes_high = max(self.bytes_high, n_bytes)
        self.files_high = max(self.files_high, n_files)
        ok(n_bytes <= LIMIT + (8 << 20), "%d bytes in a store of %d" % (n_bytes, LIMIT))
        ok(n_files < 5000, "%d files in the store" % n_files)

    # ---- the whole

    def run(self, minutes):
        r = self.random
        self.learn()
        self.server = start()
        threads = [threading.Thread(target=self.client, args=(i,), daemon=True) for i in range(CLIENTS)]
        for t in threads:
            t.start()
        until = time.monotonic() + 60 * minutes
        life = []  # memory of this process, a look a second
        period = min(60.0, max(10.0, 60 * minutes / 6))  # of faults and restarts
        next_fault, next_restart = time.monotonic() + period / 3, time.monotonic() + period
        while time.monotonic() < until and not self.end:
            time.sleep(1)
            if self.server.process.poll() is not None:
                ok(False, "the server is gone: %s; see %s" % (self.server.process.poll(), self.server.log))
                break
            life.append(rss(self.server.process.pid))
            self.look_at_store()
            try:
                if r.random() < 0.3:
                    self.admin(r)
            except OSError as e:
                ok(False, "the admin's request failed: %r" % e)
            if time.monotonic() > next_fault:
                r.choice((self.readonly, self.full))(r)
                next_fault = time.monotonic() + period
            if time.monotonic() > next_restart:
                self.check_life(life)
                life = []
                self.restart(r)
                next_restart = time.monotonic() + period
        self.check_life(life)
        self.pause.set()
        self.end = True
        for t in threads:
            t.join(120)
        if self.server.process.poll() is None:
            ok(self.server.stop() == 0, "the last stop")
        done = subprocess.run([os.environ["IMPRESS"], "verify", os.path.join(os.environ["tmp"], "store")],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        ok(done.returncode == 0, "verify: " + done.stdout[-500:])
        ok(self.tally["answers"] > 0, "there were answers")
        print(", ".join("%s %d" % (k, v) for k, v in sorted(self.tally.items())))
        print("store: %.1f MiB and %d files at most, of %d MiB" % (self.bytes_high / 2**20, self.files_high, LIMIT >> 20))

    def check_life(self, life):
        """The first quarter is warming up."""
        if len(life) < 40:
            return
        rest = life[len(life) // 4:]
        half = len(rest) // 2
        first, second = max(rest[:half]), max(rest[half:])
        print("memory: %.0f MiB at most in the first half of this life, %.0f in the second" % (first / 2**20, second / 2**20))
        ok(second <= first * LIFE_RSS_SHARE + LIFE_RSS_ROOM, "memory rises: %d, then %d" % (first, second))


def many_requests(n):
    s = Server("--slots", "2", "--ctx-size", "512", "--limit", "64M", "--host-cache", "8M", "--min-store", "16")
    looks = []
    for i in range(n):
        # One in four comes for the first time and is stored, many times the limit in all; the others come again.
        prompt = words(5, i % 50) if i % 4 else words(12, 1000 + i)
        reply = s.complete(prompt, n=1)
        ok(reply.status == 200, reply)
        if reply.status != 200:
            break
        if i % max(1, n // 100) == 0:
            looks.append(rss(s.process.pid))
    warm = looks[len(looks) // 4:]
    third = max(1, len(warm) // 3)
    first, last = sorted(warm[:third])[third // 2], sorted(warm[-third:])[third // 2]
    print("%d requests; memory after a quarter of them %.1f MiB, at the end %.1f MiB" % (n, first / 2**20, last / 2**20))
    print("memory after each tenth of them, in MiB: " +
          " ".join("%.1f" % (x / 2**20) for x in looks[len(looks) // 10::max(1, len(looks) // 10)]))
    ok(last <= first * 1.03 + (4 << 20), "memory rises: %d, then %d" % (first, last))
    ok(s.stop() == 0, "a clean end")


def main():
    seed = int(os.environ.get("IMP_TEST_SEED") or random.randrange(1 << 32))
    print("seed: IMP_TEST_SEED=%d" % seed, file=sys.stderr)
    sys.stdout.reconfigure(line_buffering=True)
    if sys.argv[1] == "--requests":
        many_requests(int(sys.argv[2]))
    else:
        Soak(seed).run(float(sys.argv[1]))
    finish()


main()
