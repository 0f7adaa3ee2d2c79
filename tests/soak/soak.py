#!/usr/bin/env python3
"""A server under mixed load and faults for so many minutes, and what must hold of it.

Clients of two tenants ask greedily, streamed or not, some leave early, some send nonsense; an admin pins, drops, looks
and cleans up; the store's directory becomes read-only and comes back, its files may not grow for a while, and the
process is stopped or killed and started again. Checked: every answer is that of a server without a store (`full_load`);
nothing but the expected refusals; a fault is told in /health while there is one, and within two minutes afterwards no
more; memory and open files don't rise from start to end of one process's life; the store stays within its limit, in
bytes and in files; at the end no connection is left open, and `impress verify` finds nothing. From five minutes on each
of all this must have happened: it goes on, up to three times as long, until it has.

usage: soak.py MINUTES            expects $IMPRESS, $IMPRESS_MODEL, $tmp; seed as IMP_TEST_SEED
       soak.py --requests N       N short requests to one server: memory stays flat
"""
import collections
import fcntl
import http.client
import json
import os
import random
import re
import resource
import signal
import socket
import struct
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
LIFE_FILES_ROOM = 4    # open files that a life may gain, of a kind
LOOKS = 40             # of a life, for what is said of it to mean something
FAULT_SECONDS = 120    # until a fault is told, and until it is over
MUST_HAPPEN = ["answers", "left", "nonsense", "admin calls", "full", "read-only", "kills", "restarts",
               "lives looked at", "answers cancelled"]
FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_IMMUTABLE_FL = 0x80086601, 0x40086602, 0x10


def write_secret(name, text):
    path = os.path.join(os.environ["tmp"], name)
    with open(path, "w") as f:
        f.write(text)
    os.chmod(path, 0o600)
    return path


def rss(pid):
    with open("/proc/%d/statm" % pid) as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files(pid):
    """How many there are of each kind."""
    kinds = collections.Counter()
    folder = "/proc/%d/fd" % pid
    for fd in os.listdir(folder):
        try:
            to = os.readlink(os.path.join(folder, fd))
        except OSError:  # closed meanwhile
            continue
        kinds["sockets" if to.startswith("socket:") else "removed" if to.endswith(" (deleted)") else
              "segments" if "/segments/" in to else "others"] += 1
    return kinds


def shut(folder):
    """Nothing can be made in it or removed from it until the function that comes back is called. A mode doesn't hold root
    up, but a flag of the file system does; where it may not be set, a file is in the folder's place."""
    if os.geteuid() != 0:
        os.chmod(folder, 0o500)
        return lambda: os.chmod(folder, 0o700)

    def flag(on):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            flags = struct.unpack("i", fcntl.ioctl(fd, FS_IOC_GETFLAGS, bytes(8))[:4])[0]
            flags = flags | FS_IMMUTABLE_FL if on else flags & ~FS_IMMUTABLE_FL
            fcntl.ioctl(fd, FS_IOC_SETFLAGS, struct.pack("q", flags))
        finally:
            os.close(fd)

    def back():
        os.remove(folder)
        os.rename(folder + ".away", folder)

    try:
        flag(True)
        return lambda: flag(False)
    except OSError:
        os.rename(folder, folder + ".away")
        open(folder, "w").close()
        return back


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
        self.n_fresh = 0
        self.slowest = collections.Counter()  # seconds

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
        call = self.as_admin
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

    def as_admin(self, method, path, body=None):
        reply = self.server.request(method, path, body, {"Authorization": "Bearer " + ADMIN})
        ok(reply.status in (200, 404, 409, 503, 507), "%s %s: %r" % (method, path, reply))
        return reply

    def readonly(self, r):
        """Nothing can be made in the store's directory for a while: requests go on."""
        self.fault(r, "read-only", lambda: shut(os.path.join(os.environ["tmp"], "store", "segments")))
        # What was evicted meanwhile is still there, until somebody opens the store or cleans up.
        self.wait("a clean-up", lambda: self.as_admin("POST", "/admin/gc", {}).status == 200)

    def full(self, r):
        """No file may grow: RLIMIT_FSIZE of the running server, as a disk that is full."""
        pid = self.server.process.pid

        def no_room():
            soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, hard))
            return lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
        self.fault(r, "full", no_room)

    def fault(self, r, what, begin):
        """Between begin() and the call of what it returns there is a fault. It is told, requests are answered all the
        time, and it is told no more when it is over."""
        end = begin()
        try:
            told = self.wait(what + ": a fault in /health", lambda: self.faults(True))
            time.sleep(2 + 3 * r.random())
        finally:
            end()
        over = self.wait(what + ": no fault in /health any more", lambda: not self.faults(True))
        self.count(what, told and over)

    def wait(self, what, condition):
        """Whether it came."""
        since = time.monotonic()
        while time.monotonic() < since + FAULT_SECONDS:
            if condition():
                self.slowest[what] = max(self.slowest[what], time.monotonic() - since)
                return True
            time.sleep(0.2)
        ok(False, "waited %d s in vain: %s; see %s" % (FAULT_SECONDS, what, self.server.log))
        return False

    def faults(self, ask):
        """What /health says is wrong with the store. With `ask`, after a prompt came that is new, and came again: only
        what is written and read can fail or go well."""
        if ask:
            self.n_fresh += 1
            prompt = words(60, 1000 + self.n_fresh)
            for _ in range(2):
                reply = self.server.complete(prompt, n=1, key=KEYS[0])
                ok(reply.status == 200, "a new prompt: %r" % reply)
        reply = self.server.get("/health")
        ok(reply.status == 200 and reply.json["status"] == "ok", "health: %r" % reply)
        faults = reply.json.get("store_faults", [])
        ok(all(f["what"] in ("catalogue", "write", "read") and f["failures"] > 0 for f in faults), reply)
        return faults

    def restart(self, r):
        how = signal.SIGKILL if self.tally["kills"] <= self.tally["restarts"] else signal.SIGTERM
        self.end_of_life()
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
        quiet = open_files(self.server.process.pid)
        threads = [threading.Thread(target=self.client, args=(i,), daemon=True) for i in range(CLIENTS)]
        for t in threads:
            t.start()
        long = minutes >= 5
        since = time.monotonic()
        until, latest = since + 60 * minutes, since + 180 * minutes
        life = []  # memory and open files of this process, a look a second
        period = min(60.0, max(10.0, 60 * minutes / 6))  # of faults and restarts
        next_fault, next_restart = since + period / 3, since + period
        while not self.end and (time.monotonic() < until or (long and self.missing() and time.monotonic() < latest)):
            time.sleep(1)
            if self.server.process.poll() is not None:
                ok(False, "the server is gone: %s; see %s" % (self.server.process.poll(), self.server.log))
                break
            life.append((rss(self.server.process.pid), open_files(self.server.process.pid)))
            self.look_at_store()
            try:
                if r.random() < 0.3:
                    self.admin(r)
                if time.monotonic() > next_fault:
                    (self.full if self.tally["full"] <= self.tally["read-only"] else self.readonly)(r)
                    next_fault = time.monotonic() + period
            except OSError as e:
                ok(False, "the operator's request failed: %r" % e)
            if time.monotonic() > next_restart and len(life) >= LOOKS:
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
            self.end_of_clients(quiet)
            ok(self.server.stop() == 0, "the last stop")
        done = subprocess.run([os.environ["IMPRESS"], "verify", os.path.join(os.environ["tmp"], "store")],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        ok(done.returncode == 0, "verify: " + done.stdout[-500:])
        ok(self.tally["answers"] > 0, "there were answers")
        ok(not (long and self.missing()), "never happened: " + ", ".join(self.missing()))
        print(", ".join("%s %d" % (k, v) for k, v in sorted(self.tally.items())))
        print("at most, in seconds: " + ", ".join("%s %.1f" % (k, v) for k, v in sorted(self.slowest.items())))
        print("store: %.1f MiB and %d files at most, of %d MiB" % (self.bytes_high / 2**20, self.files_high, LIMIT >> 20))

    def missing(self):
        with self.lock:
            return [what for what in MUST_HAPPEN if self.tally[what] == 0]

    def end_of_life(self):
        """The server's own count of clients that left, which ends with the process."""
        self.count("answers cancelled", int(self.server.metrics(ADMIN)['impress_answers_total{end="cancelled"}']))

    def end_of_clients(self, quiet):
        """Nobody asks any more: no connection is left, and no file that is none any more."""
        self.end_of_life()

        def left():
            now = open_files(self.server.process.pid)
            return now["sockets"] - quiet["sockets"], now["removed"] - quiet["removed"]
        self.wait("the last connection's end", lambda: left()[0] <= 0)
        ok(left()[1] <= LIFE_FILES_ROOM, "%d removed files are open still" % left()[1])

    def check_life(self, life):
        """The first quarter is warming up. Files come and go with requests: the fewest that were open at once tell of
        those that are never closed."""
        if len(life) < LOOKS:
            return
        rest = life[len(life) // 4:]
        half = len(rest) // 2
        first, second = max(m for m, _ in rest[:half]), max(m for m, _ in rest[half:])
        print("memory: %.0f MiB at most in the first half of this life, %.0f in the second" % (first / 2**20, second / 2**20))
        ok(second <= first * LIFE_RSS_SHARE + LIFE_RSS_ROOM, "memory rises: %d, then %d" % (first, second))
        kinds = ("sockets", "removed", "others")
        before, after = ([min(f[k] for _, f in part) for k in kinds] for part in (rest[:half], rest[half:]))
        print("open files, the fewest at once: " + ", ".join("%s %d, then %d" % x for x in zip(kinds, before, after)) +
              "; segments %d at most" % max(f["segments"] for _, f in rest))
        ok(all(b <= a + LIFE_FILES_ROOM for a, b in zip(before, after)), "open files rise")
        self.count("lives looked at")


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
