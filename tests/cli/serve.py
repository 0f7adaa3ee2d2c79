"""A server under test, and a client for it. Used by test_serve*.sh; standard library only."""
import atexit
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time

failures = []


def ok(condition, what):
    if not condition:
        failures.append(what)
        frame = sys._getframe(1)
        print("FAIL, line %d: %s" % (frame.f_lineno, what), file=sys.stderr)


def finish():
    sys.exit(1 if failures else 0)


def words(n, seed=1):
    r = random.Random(seed)
    parts = "ka lo mi ren to sal ver ni do tra pel gus".split()
    return " ".join("".join(r.choice(parts) for _ in range(r.randint(1, 3))) for _ in range(n))


def count(start, n=7):
    """A question whose answer leaves no doubt, so that rounding can't change it."""
    return "\n\nNumbers in order: " + ", ".join(str(i) for i in range(start, start + n)) + ","


def endless(**fields):
    """A request whose answer doesn't end before max_tokens: this model's two tokens for an end never come."""
    return dict(fields, logit_bias={"0": -100, "2": -100})


def du(folder):
    """Bytes of a directory on the disk, which others change meanwhile."""
    n = 0
    for where, _, files in os.walk(folder):
        for name in [".", *files]:
            try:
                n += os.lstat(os.path.join(where, name)).st_blocks * 512
            except FileNotFoundError:
                pass
    return n


class Reply:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        return self.json["error"]

    @property
    def text(self):
        return self.json["choices"][0]["text"]

    @property
    def usage(self):
        return self.json["usage"]

    @property
    def cached(self):
        return self.usage["prompt_tokens_details"]["cached_tokens"]

    def __repr__(self):
        return "%d %s" % (self.status, self.body[:1500])


class Server:
    """`impress serve` with a store below $tmp, on any free port, its log in `log`."""

    def __init__(self, *options, store="store", env=None, wait=True):
        tmp = os.environ["tmp"]
        self.log = os.path.join(tmp, "log-%d" % random.randrange(1 << 30))
        store = store if store in ("none",) else os.path.join(tmp, store)
        argv = [os.environ["IMPRESS"], "serve", "-m", os.environ["IMPRESS_MODEL"], "--port", "0", "--store", store]
        self.process = subprocess.Popen(argv + list(options), env=dict(os.environ, **(env or {})),
                                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=open(self.log, "wb"))
        atexit.register(lambda: self.process.poll() is None and self.process.kill())
        self.port = None
        for _ in range(1200):
            if not wait or self.process.poll() is not None:
                break
            line = self.event("listening")
            if line:
                self.port = line["port"]
                break
            time.sleep(0.05)
        if wait and not self.port:
            print("the server didn't start: " + open(self.log).read()[-2000:], file=sys.stderr)
            sys.exit(1)

    def events(self, name=None):
        found = []
        for line in open(self.log, errors="replace"):
            try:
                line = json.loads(line)
            except ValueError:
                continue
            if name is None or line["event"] == name:
                found.append(line)
        return found

    def event(self, name):
        return next(iter(self.events(name)), None)

    def request(self, method, path, body=None, headers=None, timeout=600, address="127.0.0.1"):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout, source_address=(address, 0))
        if isinstance(body, (dict, list)):
            body = json.dumps(body)
        connection.request(method, path, body, headers or {})
        reply = connection.getresponse()
        out = Reply(reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read().decode())
        connection.close()
        return out

    def get(self, path, **kw):
        return self.request("GET", path, **kw)

    def post(self, path, body, key=None, **kw):
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = "Bearer " + key
        headers.update(kw.pop("headers", {}))
        return self.request("POST", path, body, headers, **kw)

    def complete(self, prompt, n=8, key=None, **fields):
        return self.post("/v1/completions", dict(prompt=prompt, max_tokens=n, temperature=0, **fields), key=key)

    def stream(self, path, body):
        """All events of a streamed reply, [DONE] left out; (status, events)."""
        reply = self.post(path, dict(body, stream=True))
        events = [line[6:] for line in reply.body.split("\n") if line.startswith("data: ")]
        if reply.status == 200:
            ok(events[-1] == "[DONE]", "a stream ends with [DONE]")
            events = events[:-1]
        return reply, [json.loads(e) for e in events]

    def open(self, body, path="/v1/completions"):
        """Send a request and return the socket, without waiting for anything."""
        body = json.dumps(body)
        s = socket.create_connection(("127.0.0.1", self.port), timeout=600)
        s.sendall(("POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (path, len(body), body)).encode())
        return s

    def metrics(self, key=None):
        values = {}
        headers = {"Authorization": "Bearer " + key} if key else {}
        for line in self.get("/metrics", headers=headers).body.split("\n"):
            if line and line[0] != "#":
                name, value = line.rsplit(" ", 1)
                values[name] = float(value)
        return values

    def wait_for(self, condition, what, seconds=120):
        for _ in range(seconds * 20):
            if condition():
                return True
            time.sleep(0.05)
        ok(False, "waited in vain: " + what)
        return False

    def busy(self):
        return self.metrics()["impress_slots_busy"]

    def idle(self):
        m = self.metrics()
        return m["impress_slots_busy"] == 0 and m["impress_queue_length"] == 0

    def stop(self, how=signal.SIGTERM, seconds=120):
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            ok(False, "the server didn't stop")
            return None


def at_once(calls):
    """Run functions in threads; their results in order."""
    results = [None] * len(calls)

    def run(i):
        results[i] = calls[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return results
