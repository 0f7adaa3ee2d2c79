#!/usr/bin/env python3
"""Fuzzes a whole server through its socket: requests that are cut, changed, mixed, sent in pieces, or none at all. Each
must be answered in HTTP's form or have its connection closed; afterwards the server must be there and answer as before.

usage: serve_fuzz.py ROUNDS         expects $IMPRESS, $IMPRESS_MODEL, $tmp; prints its seed, takes it back from IMP_TEST_SEED
"""
import os
import random
import select
import socket
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from serve import Server, finish, ok  # noqa: E402

KEY = "fuzz-admin-key"

BODIES = [
    b'{"prompt":"The sea","max_tokens":2,"temperature":0}',
    b'{"prompt":[1,2,3],"max_tokens":1,"logprobs":2,"stop":["a","b"]}',
    b'{"prompt":"x","max_tokens":2,"stream":true,"stream_options":{"include_usage":true}}',
    b'{"messages":[{"role":"system","content":"S"},{"role":"user","content":[{"type":"text","text":"a\\u00e9"},'
    b'{"type":"text","text":"b"}]}],"max_tokens":1}',
    b'{"messages":[{"role":"user","content":"Hi"}],"max_tokens":1,"response_format":{"type":"json_object"}}',
    b'{"messages":[{"role":"user","content":"Hi"}],"max_tokens":1,"tools":[{"type":"function","function":{"name":"f",'
    b'"parameters":{"type":"object","properties":{"x":{"type":"integer"}}}}}]}',
    b'{"messages":[{"role":"user","content":"Hi"}],"max_tokens":1,"response_format":{"type":"json_schema",'
    b'"json_schema":{"name":"n","schema":{"type":"object"}}}}',
    b'{"prompt":"x","max_tokens":1,"grammar":"root ::= \\"a\\"","impress":{"retention":0.5,"cache":"off"}}',
    b'{"prompt":"x","max_tokens":8,"grammar":"root ::= [^z] root \\"x\\" | [^z] root \\"y\\" | [^z]"}',
    b'{"prompt":"x","max_tokens":8,"grammar":"r1 ::= r2 r2 | \\"\\"\\nr2 ::= \\"a\\"? \\"b\\"?\\nroot ::= r1{0,99} root?"}',
    b'{"id":1}', b'{"text":"some words"}', b"[" * 3000, b'{"prompt":"\xff\xfe"}', b"", b"\x00" * 64,
]
LINES = [
    b"POST /v1/completions HTTP/1.1", b"POST /v1/chat/completions HTTP/1.1", b"GET /v1/models HTTP/1.1",
    b"GET /health HTTP/1.1", b"GET /metrics HTTP/1.0", b"GET /ui HTTP/1.1", b"HEAD /health HTTP/1.1",
    b"OPTIONS * HTTP/1.1", b"GET /admin/stats HTTP/1.1", b"GET /admin/prefixes HTTP/1.1",
    b"GET /admin/prefixes/1/importance HTTP/1.1", b"POST /admin/pin HTTP/1.1", b"POST /admin/warm/text HTTP/1.1",
    b"POST /admin/drop HTTP/1.1", b"GET /" + b"a" * 9000 + b" HTTP/1.1", b"GET http://x/health HTTP/1.1", b"NONSENSE",
    b"GET /v1/%00%ff%2e%2e/ HTTP/1.1", b"PUT /v1/models HTTP/1.1",
]
HEADERS = [
    b"Authorization: Bearer " + KEY.encode(), b"Authorization: Basic x", b"Authorization:", b"Origin: http://evil",
    b"X-Request-Id: abc", b"X-Request-Id: \x01\x02", b"Content-Type: application/json", b"Expect: 100-continue",
    b"Connection: close", b"Content-Length: 18446744073709551616", b"Content-Length: -1", b"Content-Length: 5",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: nonsense", b"Cookie: " + b"c" * 5000, b"no colon", b": no name",
    b"Host: evil.example", b" folded: x",
]


def mutate(r, data):
    data = bytearray(data)
    for _ in range(r.choice((0, 0, 1, 1, 2, 8))):
        at = r.randrange(len(data) + 1)
        what = r.randrange(5)
        if what == 0 and at < len(data):
            data[at] ^= 1 << r.randrange(8)
        elif what == 1:
            data[at:at] = bytes(r.randrange(256) for _ in range(r.randrange(1, 20)))
        elif what == 2:
            del data[at:at + r.randrange(1, 30)]
        elif what == 3:
            data[at:at] = r.choice((b"\r\n", b"\x00", b"0", b"\"", b"{", b"\\u", b"1e999", b"\r\n\r\n"))
        else:
            data += data[:at]
    return bytes(data[:1 << 16])


def make(r):
    if r.random() < 0.02:
        return bytes(r.randrange(256) for _ in range(r.randrange(2000)))
    body = r.choice(BODIES)
    if r.random() < 0.6:
        body = mutate(r, body)
    headers = [b"Host: localhost"] if r.random() < 0.95 else []
    headers += r.sample(HEADERS, r.choice((0, 0, 1, 2, 4)))
    if r.random() < 0.3:
        headers.append(b"Authorization: Bearer " + KEY.encode())
    if r.random() < 0.2:
        headers.append(b"Transfer-Encoding: chunked")
        body = b"".join(b"%x\r\n%s\r\n" % (len(body[i:i + 7]), body[i:i + 7]) for i in range(0, len(body), 7)) + b"0\r\n\r\n"
    else:
        headers.append(b"Content-Length: %d" % max(0, len(body) + r.choice((0, 0, 0, 0, 0, 1, -1))))
    data = b"\r\n".join([r.choice(LINES)] + headers) + b"\r\n\r\n" + body
    return mutate(r, data) if r.random() < 0.4 else data


def talk(port, data, r):
    """Send, in one piece or several; what comes back until the end, or until nothing comes for a while."""
    s = socket.create_connection(("127.0.0.1", port), timeout=60)
    got = b""
    try:
        at = 0
        while at < len(data):
            n = len(data) if r.random() < 0.7 else r.randrange(1, 200)
            s.sendall(data[at:at + n])
            at += n
        if r.random() < 0.1:
            return got  # gone without listening
        if r.random() < 0.6:
            s.shutdown(socket.SHUT_WR)
        while select.select([s], [], [], 0.05 if not got else 0.02)[0]:
            more = s.recv(65536)
            if not more:
                break
            got += more
    except OSError:  # closed at the other end
        pass
    finally:
        s.close()
    return got


def main():
    rounds = int(sys.argv[1])
    seed = int(os.environ.get("IMP_TEST_SEED") or random.randrange(1 << 32))
    print("seed: IMP_TEST_SEED=%d" % seed, file=sys.stderr)
    r = random.Random(seed)
    keys = os.path.join(os.environ["tmp"], "admin.key")
    with open(keys, "w") as f:
        f.write(KEY + "\n")
    os.chmod(keys, 0o600)
    s = Server("--slots", "2", "--ctx-size", "512", "--timeout", "5", "--time-limit", "20", "--admin-key-file", keys)
    before = s.complete("One, two, three,", n=6).text
    n_answers = 0
    for i in range(rounds):
        data = make(r)
        got = talk(s.port, data, r)
        n_answers += got.startswith(b"HTTP/1.")
        if s.process.poll() is not None or (got and not got.startswith((b"HTTP/1.1 ", b"HTTP/1.0 "))):
            with open("crash-request", "wb") as f:
                f.write(data)
            ok(False, "round %d: server %s, reply %r; the request is in ./crash-request" % (
                i, "gone (%s)" % s.process.poll() if s.process.poll() is not None else "there", got[:80]))
            break
    if s.process.poll() is None:
        ok(s.wait_for(s.idle, "idle after the last request"), "idle")
        ok(s.get("/health").status == 200, "health")
        ok(s.complete("One, two, three,", n=6).text == before, "the same answer as before")
        ok(s.stop() == 0, "a clean end")
    ok(n_answers * 4 > rounds, "answers to %d of %d" % (n_answers, rounds))
    print("%d requests, %d with an answer" % (rounds, n_answers))
    finish()


main()
