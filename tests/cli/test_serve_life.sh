#!/usr/bin/env bash
# How a server ends: SIGTERM lets answers finish, or cuts them properly; kill -9 loses nothing that was stored.
. "$(dirname "$0")/lib.sh"
need_model
export tmp IMPRESS IMPRESS_MODEL
timeout 800 python3 - <<'PY' || failures=1
from serve import *

def read_all(c):
    data = b""
    while True:
        part = c.recv(65536)
        if not part:
            return data.decode(errors="replace")
        data += part

# SIGTERM: what runs comes to its end, what waits is told, new ones find nobody; the store is complete: another question
# about the same 2,000 tokens finds them after the restart.
s = Server("--slots", "1", "--ctx-size", "4096", "--drain", "600")
prefix = words(930, 12)
running = s.open(endless(prompt=prefix, max_tokens=150, temperature=0, stream=True, stream_options={"include_usage": True}))
s.wait_for(lambda: s.busy() == 1, "a running request")
waiting = s.open(dict(prompt="me too", max_tokens=5))
s.wait_for(lambda: s.metrics()["impress_queue_length"] == 1, "a waiting request")
halves = [socket.create_connection(("127.0.0.1", s.port), timeout=600) for _ in range(2)]
for c in halves:
    c.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 14\r\n\r\n{"prompt"')
s.wait_for(lambda: s.metrics()["impress_http_connections"] >= 5, "two requests that aren't whole")
s.process.send_signal(signal.SIGTERM)
told = read_all(waiting)
ok(" 503 " in told.split("\r\n")[0] and "shutting_down" in told and "Retry-After:" in told, told)
halves[0].sendall(b':"x"}')  # the other one stays as it is, and holds nothing up
told = read_all(halves[0])
ok(" 503 " in told.split("\r\n")[0] and "shutting_down" in told, told)
stream = read_all(running)
ok('"completion_tokens":150' in stream and "[DONE]" in stream and '"finish_reason":"length"' in stream, stream[-300:])
ok(s.stop() == 0, "exit 0")
ok(s.event("draining") and s.event("stopped"), "the log says so")

# The drain's time is up: the stream ends with an error event and its mark; exit 0 all the same.
s = Server("--slots", "1", "--ctx-size", "4096", "--drain", "0")
shared = int(re.search(r'"prompt_tokens":(\d+)', stream)[1])  # of the first answer
r = s.complete(prefix + " and more", 1)
ok(shared >= 1900 and r.cached >= 0.95 * shared, (shared, r))
ok(r.json["impress"]["way"] in ("whole", "partial") and r.json["impress"]["bytes_read"] > 0, r)
running = s.open(endless(prompt="go on and on", max_tokens=1900, stream=True))
s.wait_for(lambda: s.metrics()["impress_generated_tokens_total"] > 4, "a running answer")
s.process.send_signal(signal.SIGTERM)
stream = read_all(running)
ok('"error"' in stream and "shutting down" in stream and "[DONE]" in stream, stream[-400:])
ok(s.stop() == 0, "exit 0")

# Killed in the middle of an answer: the next one starts, verifies, and has what was stored.
s = Server("--slots", "2", "--ctx-size", "2048")
other = words(250, 13)
before = s.metrics()["impress_store_tokens"]
r = s.complete(other + count(3), 4)
s.wait_for(lambda: s.metrics()["impress_store_tokens"] >= before + r.usage["prompt_tokens"] - 16, "the second prefix on disk")
running = s.open(endless(prompt=words(250, 14), max_tokens=800, stream=True))
s.wait_for(lambda: s.busy() == 1, "a running request")
s.stop(signal.SIGKILL)
s = Server("--slots", "2", "--ctx-size", "2048")
r2 = s.complete(other + count(3), 4)
ok(r2.cached >= r2.usage["prompt_tokens"] - 64 and r2.text == r.text, (r, r2))
ok(s.stop() == 0, "exit 0")

# What takes longer than a request may: an answer ends there, as one of that length; a prompt is given up.
s = Server("--slots", "1", "--ctx-size", "4096", "--time-limit", "3", store="none")
running = s.open(endless(prompt="go on", max_tokens=4000, stream=True))
stream = read_all(running)
ok('"finish_reason":"length"' in stream and "[DONE]" in stream and '"error"' not in stream, stream[-300:])
r = s.complete(words(1700, 15), 4)
ok(r.status == 504 and r.error["code"] == "timeout", r)
ok(s.stop() == 0, "exit 0")

# The port is taken: one line, exit 1.
s = Server("--slots", "1", "--ctx-size", "256", store="none")
t = Server("--port", str(s.port), store="none", wait=False)
ok(t.process.wait(120) == 1 and "can't listen" in open(t.log).read(), open(t.log).read()[-300:])
s.stop()
finish()
PY
"$IMPRESS" verify "$tmp/store" >"$tmp/out" || fail "verify after all this: $(cat "$tmp/out")"
finish
