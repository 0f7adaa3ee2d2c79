#!/usr/bin/env bash
# The server: endpoints, streams, cached tokens after a restart, what is refused, metrics, log.
. "$(dirname "$0")/lib.sh"
need_model
export tmp IMPRESS IMPRESS_MODEL
expect 2 'no model' env -u IMPRESS_MODEL "$IMPRESS" serve
expect 2 'slots' "$IMPRESS" serve -m x --slots 0
expect 2 'go together' "$IMPRESS" serve -m x --tls-cert y
expect 1 'without API keys only this machine' "$IMPRESS" serve -m x --host 0.0.0.0
expect 1 'without API keys only this machine' "$IMPRESS" serve -m x --host 127.evil.example
expect 1 "can't read the model" "$IMPRESS" serve -m "$tmp/none.gguf" --store none
# A signal while it starts, here where it waits for its keys, ends it as any program.
mkfifo "$tmp/fifo"
for signal in TERM INT; do
    env --default-signal=INT "$IMPRESS" serve -m "$IMPRESS_MODEL" --store none --api-key-file "$tmp/fifo" &
    child=$!
    sleep 0.3
    kill -$signal $child
    wait $child
    got=$?
    [ $got -eq $((128 + $(kill -l $signal))) ] || fail "exit code $got after $signal while it starts"
done
expect 2 "alias isn't UTF-8" "$IMPRESS" serve -m "$IMPRESS_MODEL" --store none --alias $'m\xff'
for alias in "" "$(printf '%0128d' 0)"; do
    expect 2 'alias wants 1 to 127 bytes' "$IMPRESS" serve -m "$IMPRESS_MODEL" --store none --alias "$alias"
done
: >"$tmp/empty"
expect 1 'empty is empty' "$IMPRESS" serve -m "$IMPRESS_MODEL" --store none --chat-template "$tmp/empty"
timeout 800 python3 - <<'PY' || failures=1
import prometheus
from serve import *

secret = "zebra%d" % random.randrange(1 << 30)
prefix = secret + " " + words(250, 3)
s = Server("--slots", "2", "--ctx-size", "2048", "--system", "as")

r = s.get("/health")
ok(r.status == 200 and r.json["status"] == "ok", r)
r = s.get("/v1/models")
ok(r.status == 200 and r.json["data"][0]["object"] == "model", r)
model = r.json["data"][0]["id"]
ok(s.get("/v1/models/" + model).json["id"] == model, "one model")
ok(s.get("/v1/models/other").status == 404, "no other model")

# An answer, again, and as a stream: the same text; what is cached is what wasn't computed.
r = s.complete(prefix + count(1))
ok(r.status == 200 and r.cached == 0 and len(r.text) > 0, r)
ok(r.usage["completion_tokens"] == 8 and r.json["choices"][0]["finish_reason"] == "length", r)
ok(r.usage["total_tokens"] == r.usage["prompt_tokens"] + 8, r)
ok(re.fullmatch(r"req-[0-9a-f]{24}", r.headers["x-request-id"]), r.headers)
first = r
r = s.complete(prefix + count(1), model=model, user="u")
ok(r.text == first.text and r.cached == r.usage["prompt_tokens"] - 1, r)
ok(r.json["impress"]["tokens"]["computed"] == 1 and r.json["impress"]["way"] == "live", r)
body = dict(prompt=prefix + count(1), max_tokens=8, temperature=0, stream_options={"include_usage": True})
r, events = s.stream("/v1/completions", body)
ok(r.headers["content-type"].startswith("text/event-stream"), r.headers)
ok("".join(e["choices"][0]["text"] for e in events if e["choices"]) == first.text, events)
ok(events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == first.usage["prompt_tokens"] - 1, events[-1])
ok(events[-1]["usage"]["prompt_tokens"] == first.usage["prompt_tokens"], events[-1])
r, events = s.stream("/v1/completions", dict(body, stream_options=None))
ok(all("usage" not in e or e["usage"] is None for e in events), "no usage that nobody asked for")

# Stop strings never show, whole or in part, and streams hold back what may become one.
text = first.text
for cut in (1, 3, len(text) // 2, len(text) - 2):
    stop = text[cut:cut + 3]
    want = text[:text.index(stop)]
    r = s.complete(prefix + count(1), stop=[stop, "never this"])
    ok(r.text == want and r.json["choices"][0]["finish_reason"] == "stop", (r, stop))
    _, events = s.stream("/v1/completions", dict(body, stop=stop))
    got = [e["choices"][0]["text"] for e in events if e["choices"]]
    ok("".join(got) == want, (got, stop))

# Log-probabilities.
r = s.complete("One two three four", 3, logprobs=2)
l = r.json["choices"][0]["logprobs"]
ok(len(l["tokens"]) == 3 and "".join(l["tokens"]) == r.text, l)
ok(all(p <= 0 for p in l["token_logprobs"]) and all(max(t.values()) == p for t, p in
   zip(l["top_logprobs"], l["token_logprobs"])), l)
ok(l["text_offset"][0] == len("One two three four"), l)
r = s.complete("One two", 3, logprobs=1, logit_bias={"1": 100}) # a control token, that adds no text
l = r.json["choices"][0]["logprobs"]
ok(r.text == "" and l["tokens"] == ["<|im_start|>"] * 3 and l["text_offset"] == [len("One two")] * 3, r)

# Sampling: a seed gives the same again, a bias of 100 wins, one of -100 loses.
a = s.post("/v1/completions", dict(prompt="Once upon", max_tokens=8, temperature=1.5, seed=7))
b = s.post("/v1/completions", dict(prompt="Once upon", max_tokens=8, temperature=1.5, seed=7))
ok(a.status == 200 and a.text == b.text, (a, b))
r = s.complete("Once upon", 4, logit_bias={"100": 100})
ok(len(set(r.json["choices"][0]["text"])) <= 4, r)
cold = s.complete("Once upon", 6)
for how in (dict(top_k=1), dict(top_p=1e-6), dict(min_p=1)):
    r = s.post("/v1/completions", dict(prompt="Once upon", max_tokens=6, temperature=1.5, **how))
    ok(r.status == 200 and r.text == cold.text, (how, r, cold))

# A prompt of tokens; a grammar, streamed and not, and with a chat; one that is none.
r = s.complete([1000, 2000, 3000], 2)
ok(r.status == 200 and r.usage["prompt_tokens"] == 3, r)
grammar = 'root ::= ("red" | "green") " " [0-9] [0-9]'
r = s.complete("A colour and a number:", 20, grammar=grammar)
ok(re.fullmatch(r"(red|green) [0-9]{2}", r.text) and r.json["choices"][0]["finish_reason"] == "stop", r)
_, events = s.stream("/v1/completions", dict(prompt="A colour and a number:", max_tokens=20, temperature=0, grammar=grammar))
ok("".join(e["choices"][0]["text"] for e in events if e["choices"]) == r.text, events)
r = s.post("/v1/chat/completions", dict(messages=[{"role": "user", "content": "A colour?"}], max_tokens=20, grammar=grammar))
ok(re.fullmatch(r"(red|green) [0-9]{2}", r.json["choices"][0]["message"]["content"]), r)
ok(s.complete("x", 2, grammar="root ::= [").status == 400, "a grammar that is none")
# Such as would never be done, and such as can be read in more ways with each character: neither keeps others waiting.
empty = "".join('r%d ::= r%d r%d | ""\n' % (i, i + 1, i + 1) for i in range(1, 45)) + 'r45 ::= "a" | ""\nroot ::= "["? r1'
r = s.complete("x", 2, grammar=empty)
ok(r.status == 400 and "ways" in r.error["message"] and r.error["param"] == "grammar", r)
for letter in ("[^e]", '"a"'):
    r = s.complete("aaaa", 40, grammar='root ::= %s root "x" | %s root "y" | %s' % ((letter,) * 3))
    ok(r.status == 200 and len(r.text) >= 40 / 2, r)
# A token that may never come, where the grammar has no other.
r = s.complete("a", 2, grammar='root ::= "["', logit_bias={"75": -100})
ok(r.status == 400 and r.error["code"] == "grammar_failed", r)
# What llama.cpp says of a pattern that it can't keep isn't in the log.
s.complete("x", 1, response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": {
    "type": "string", "pattern": secret + "\\d"}}})
tree = {"anyOf": [{"type": "object", "properties": {"l": {"$ref": "#/$defs/t"}, k: {"$ref": "#/$defs/t"}}, "required": ["l", k],
                   "additionalProperties": False} for k in ("r", "s")] + [{"type": "integer"}]}
wanted = {"type": "json_schema", "json_schema": {"name": "t", "schema": {"$defs": {"t": tree}, "$ref": "#/$defs/t"}}}
if s.complete("x", 1, response_format=wanted).status == 200: # else this build has no schemas
    r = s.complete("{\"l\": ", 60, response_format=wanted, logit_bias={str(i): -100 for i in [29, *range(32, 42)]})
    ok(r.status == 200 and r.text.count("l") >= 8, r) # without digits and `-` it only gets deeper

# Chat.
r = s.post("/v1/chat/completions", dict(messages=[{"role": "user", "content": "Say hello."}], max_tokens=12, temperature=0))
ok(r.status == 200 and r.json["choices"][0]["message"]["role"] == "assistant", r)
r2, events = s.stream("/v1/chat/completions", dict(messages=[{"role": "user", "content": "Say hello."}], max_tokens=12,
                      temperature=0))
ok("".join(e["choices"][0]["delta"].get("content") or "" for e in events) == r.json["choices"][0]["message"]["content"],
   events)
ok(events[-1]["choices"][0]["finish_reason"] in ("stop", "length"), events[-1])

# What is refused, each with its status and a message.
def refused(status, r, word, param=None):
    ok(r.status == status, (status, r))
    ok(word in r.error["message"] and r.error["type"], (word, r))
    ok(param is None or r.error["param"] == param, r)

refused(400, s.post("/v1/completions", "{"), "JSON")
refused(400, s.post("/v1/completions", ""), "")
refused(400, s.post("/v1/completions", {"prompt": 7}), "prompt")
refused(400, s.complete("x", frequency_penalty=9), "frequency_penalty", "frequency_penalty")
refused(400, s.complete("x", colour="red"), "colour", "colour")
refused(400, s.complete("x", impress={"system": "magic"}), "magic", "impress.system")
refused(404, s.complete("x", model="gpt-17"), "gpt-17", "model")
r = s.complete(words(2000))
refused(400, r, "maximum context length is 2048")
ok(r.error["code"] == "context_length_exceeded" and re.search(r"resulted in \d{4} tokens", r.error["message"]), r)
refused(404, s.get("/nothing"), "nothing at this path")
refused(405, s.get("/v1/completions"), "method")
ok(s.get("/v1/completions").headers["allow"] == "POST", "405 says what is allowed")
refused(413, s.post("/v1/completions", "x" * (17 << 20)), "longer than")
refused(403, s.post("/v1/completions", {"prompt": "x"}, headers={"Origin": "http://evil.example"}), "key")
# A page whose name was made to lead here: the browser takes the server for the page's own.
def named(host, path="/health", server=s, method="GET", **headers):
    body = {"prompt": "x", "max_tokens": 1} if method == "POST" else None
    return server.request(method, path, body, dict(headers, Host=host))

for host in ("localhost", "LocalHost:%d" % s.port, "127.0.0.1", "127.0.0.1:%d" % s.port, "127.8.9.10:1", "[::1]", "[::1]:%d" % s.port):
    ok(named(host).status == 200, host)
    ok(named(host, "/v1/completions", method="POST", Origin="http://" + host).status == 200, host)
for host in ("evil.example", "evil.example:%d" % s.port, "127.evil.example", "localhost.evil.example:80", "127.0.0.1.evil.example",
             "128.0.0.1", "0.0.0.0", "[::2]", "[::1", "[::1].evil.example", "x" * 5000):
    refused(403, named(host), "key")
    refused(403, named(host, "/v1/completions", method="POST", Origin="http://" + host), "key")
ok(named("evil.example", "/metrics").status == 403 and named("evil.example", "/ui").status == 403, "all that can be read")
r = s.complete("x", 1)
ok(s.request("GET", "/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1", "ids")
ok(s.request("GET", "/health", headers={"X-Request-Id": "a b"}).headers["x-request-id"].startswith("req-"), "bad ids")

# cache off: nothing is looked up, and nothing kept: neither live nor in the store.
r = s.complete(prefix + count(1), impress={"cache": "off"})
ok(r.cached == 0 and r.text == first.text, r)
other = "quite another " + words(120, 99)
ok(s.complete(other, 1, impress={"cache": "off"}).cached == 0, "cache off")
r = s.complete(other, 1)
ok(r.cached == 0 and r.json["impress"]["way"] == "computed", r)
s.wait_for(s.idle, "an idle server")

# What is no request, or only half of one, is refused or cut off, and the server goes on.
def raw(data, half=False):
    """What comes back until the server closes the connection, or has answered whole."""
    c = socket.create_connection(("127.0.0.1", s.port), timeout=600)
    out = b""
    try:
        c.sendall(data)
        if half:
            c.shutdown(socket.SHUT_WR)
        while True:
            head, end, body = out.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
            part = c.recv(65536) if not end or not length or len(body) < int(length[1]) else b""
            if not part:
                break
            out += part
    except OSError:
        pass
    c.close()
    return out.decode(errors="replace")


def post_raw(body, headers=b""):
    return raw(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n%s\r\n%s" % (len(body), headers, body))


for name, data in (("not HTTP", b"\x16\x03\x01\x02\x00garbage\r\n\r\n"), ("no version", b"GET /health\r\n\r\n"),
                   ("no such version", b"GET /health HTTP/9.9\r\n\r\n"), ("headers without end", b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 50000),
                   ("a huge header", b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"b" * 200000 + b"\r\n\r\n"),
                   ("a negative length", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n"),
                   ("an absurd length", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n"),
                   ("a length beyond all bounds", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999999\r\n\r\n"),
                   ("broken chunks", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nx\r\n"),
                   ("a NUL", b"GET /he\x00alth HTTP/1.1\r\nHost: localhost\r\n\r\n")):
    reply = raw(data, half=True)
    ok(not reply or re.match(r"HTTP/1\.[01] [45]\d\d ", reply), (name, reply[:200]))
ok(" 413 " in raw(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999999\r\n\r\n").split("\r\n")[0], "413")
chunks = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
ok(" 200 " in raw(b"GET /health HTTP/1.0\r\n\r\n").split("\r\n")[0], "no name at all")
ok(" 200 " in raw(chunks + b'1d\r\n{"prompt":"x","max_tokens":1}\r\n0\r\n\r\n').split("\r\n")[0], "a body in chunks")
many = (b"100000\r\n" + b"x" * (1 << 20) + b"\r\n") * 17 + b"0\r\n\r\n"
ok(" 413 " in raw(chunks + many).split("\r\n")[0], "more chunks than are taken")
for body, word in ((b'{"prompt":"a\xff"}', "UTF-8"), (b'{"prompt":"\xed\xa0\x80"}', "UTF-8"), (b'{"prompt":"\\ud800"}', "JSON"),
                   (b'{"prompt":' + b"[" * 100000, "nested"), (b'{"prompt":"a\\u0000b"}', ""), (b"\xef\xbb\xbf{}", "JSON"),
                   (b'{"prompt":""}', ""), (b'{"prompt":[]}', "prompt"), (b'{"prompt":"x","stop":[1]}', "stop"),
                   (b'{"prompt":"x","max_tokens":1e99}', "max_tokens"), (b'{"prompt":"x","prompt":"y"}', "JSON"), (b"[]", "object")):
    reply = post_raw(body)
    ok(" 400 " in reply.split("\r\n")[0] and word in reply, (body[:60], reply[:300]))
ok(" 415 " not in post_raw(b'{"prompt":"x","max_tokens":1}', b"Content-Type: text/plain\r\n"), "any type")
# Requests with a byte changed, dropped or doubled, from a printed seed.
seed = int(os.environ.get("IMP_TEST_SEED", random.randrange(1 << 30)))
dice = random.Random(seed)
whole = b'{"prompt":"x","max_tokens":1,"seed":100}'
whole = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(whole), whole)
for i in range(150):
    data = bytearray(whole)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(data))
        kind = dice.randrange(3)
        if kind == 0:
            data[at] = dice.randrange(256)
        elif kind == 1:
            del data[at]
        else:
            data.insert(at, data[at])
    reply = raw(bytes(data), half=True)
    ok(not reply or re.match(r"HTTP/1\.[01] [2345]\d\d ", reply), ("seed %d" % seed, i, bytes(data), reply[:100]))
ok(s.process.poll() is None and s.get("/health").status == 200, "the server goes on, seed %d" % seed)
s.wait_for(s.idle, "an idle server")

# Metrics after Prometheus's rules.
page = s.get("/metrics")
ok(page.headers["content-type"].startswith("text/plain; version=0.0.4"), page.headers)
ok(prometheus.faults(page.body) == [], prometheus.faults(page.body))
ok(prometheus.promtool(page.body) == "", prometheus.promtool(page.body))
named = set(re.findall(r"impress_[a-z_]+[a-z]", open("../../docs/server.md").read())) - {"impress_store", "impress_tenant"}
families = {line.split()[2] for line in page.body.split("\n") if line.startswith("# TYPE ")}
ok(len(named) > 15 and named <= families, ("metrics that docs/server.md tells of", named - families))
m = s.metrics()
ok(m["impress_layers_fallback_total"] >= 0 and m["impress_store_evictions_total"] == m["impress_store_corrupt_chunks_total"] == 0, m)
ok(m['impress_http_requests_total{route="/v1/completions",status="400"}'] >= 6, "requests are counted")
ok(m["impress_ttft_seconds_count"] <= m["impress_request_seconds_count"], "no more first tokens than answers")
ok(m["impress_prompt_tokens_total"] == m["impress_prompt_tokens_computed_total"] + sum(
    v for k, v in m.items() if k.startswith("impress_prompt_tokens_cached_total")), "cached and computed are all")

ok(s.stop() == 0, "SIGTERM: exit 0")
for line in open(s.log):
    json.loads(line)
everything = open(s.log).read() + page.body
ok(secret not in everything and first.text.strip() not in everything, "no text in log and metrics")
line = [e for e in s.events("request") if e.get("id") == first.headers["x-request-id"]]
ok(len(line) == 1 and line[0]["prompt_tokens"] == first.usage["prompt_tokens"] and line[0]["status"] == 200, line)

# After a restart the prefix comes from the store, whatever the question.
s = Server("--slots", "1", "--ctx-size", "2048", "--system", "as")
r = s.complete(prefix + count(40))
ok(r.cached >= first.usage["prompt_tokens"] - 64 - 16, r)
ok(r.json["impress"]["way"] == "whole" and r.json["impress"]["bytes_read"] > 0, r)
r = s.complete(prefix + count(1))
ok(r.text == first.text, (r.text, first.text))
ok(s.stop() == 0, "stop")
finish()
PY

# HTTPS.
if command -v openssl >/dev/null && command -v curl >/dev/null; then
    openssl req -x509 -newkey rsa:2048 -nodes -keyout "$tmp/key.pem" -out "$tmp/cert.pem" -days 2 -subj /CN=localhost \
        -addext subjectAltName=IP:127.0.0.1 2>/dev/null
    "$IMPRESS" serve -m "$IMPRESS_MODEL" --store none --port 0 --slots 1 --ctx-size 256 --tls-cert "$tmp/cert.pem" \
        --tls-key "$tmp/key.pem" 2>"$tmp/tls.log" &
    server=$!
    for _ in $(seq 600); do
        port=$(sed -n 's/.*"event":"listening".*"port":\([0-9]*\).*/\1/p' "$tmp/tls.log")
        [ -z "$port" ] || break
        sleep 0.1
    done
    curl -s -m 60 --cacert "$tmp/cert.pem" "https://127.0.0.1:$port/v1/completions" \
        -d '{"prompt": "Hello", "max_tokens": 2, "stream": true}' >"$tmp/tls.out" || fail "HTTPS: $(cat "$tmp/tls.log")"
    grep -qF '[DONE]' "$tmp/tls.out" || fail "HTTPS: $(cat "$tmp/tls.out")"
    curl -s -m 10 "http://127.0.0.1:$port/health" >/dev/null && fail "plain HTTP on a port for HTTPS"
    kill -TERM $server
    wait $server || fail "HTTPS: exit code $?"
    "$IMPRESS" serve -m "$IMPRESS_MODEL" --store none --port 0 --tls-cert "$tmp/key.pem" --tls-key "$tmp/cert.pem" 2>"$tmp/err"
    [ $? -eq 1 ] && grep -q 'a certificate and its key' "$tmp/err" || fail "a certificate that is none: $(cat "$tmp/err")"
fi
finish
