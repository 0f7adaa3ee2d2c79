#!/usr/bin/env bash
# The server: endpoints, streams, cached tokens after a restart, what is refused, metrics, log.
. "$(dirname "$0")/lib.sh"
need_model
export tmp IMPRESS IMPRESS_MODEL
expect 2 'no model' env -u IMPRESS_MODEL "$IMPRESS" serve
expect 2 'slots' "$IMPRESS" serve -m x --slots 0
expect 2 'go together' "$IMPRESS" serve -m x --tls-cert y
expect 1 'without API keys only this machine' "$IMPRESS" serve -m x --host 0.0.0.0
expect 1 "can't read the model" "$IMPRESS" serve -m "$tmp/none.gguf" --store none
timeout 800 python3 - <<'PY' || failures=1
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

# Sampling: a seed gives the same again, a bias of 100 wins, one of -100 loses.
a = s.post("/v1/completions", dict(prompt="Once upon", max_tokens=8, temperature=1.5, seed=7))
b = s.post("/v1/completions", dict(prompt="Once upon", max_tokens=8, temperature=1.5, seed=7))
ok(a.status == 200 and a.text == b.text, (a, b))
r = s.complete("Once upon", 4, logit_bias={"100": 100})
ok(len(set(r.json["choices"][0]["text"])) <= 4, r)

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
refused(403, s.post("/v1/completions", {"prompt": "x"}, headers={"Origin": "http://evil.example"}), "Origin" if 0 else "key")
r = s.complete("x", 1)
ok(s.request("GET", "/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1", "ids")
ok(s.request("GET", "/health", headers={"X-Request-Id": "a b"}).headers["x-request-id"].startswith("req-"), "bad ids")

# cache off: nothing is looked up, nothing stored.
before = s.metrics()["impress_store_tokens"]
r = s.complete(prefix + count(1), impress={"cache": "off"})
ok(r.cached == 0 and r.text == first.text, r)
r = s.complete("quite another " + words(200, 99), 1, impress={"cache": "off"})
ok(r.cached == 0, r)
s.wait_for(s.idle, "an idle server")
ok(s.metrics()["impress_store_tokens"] == before, "cache off stores nothing")

# Metrics after Prometheus's rules: one HELP and TYPE a name, its samples behind them, buckets that rise.
page = s.get("/metrics")
ok(page.headers["content-type"].startswith("text/plain; version=0.0.4"), page.headers)
seen, current, last = set(), None, 0
for line in page.body.strip().split("\n"):
    m = re.fullmatch(r"# (HELP|TYPE) (\S+) (.+)", line)
    if m:
        if m[1] == "HELP":
            ok(m[2] not in seen, "twice: " + m[2])
            seen.add(m[2])
            current, last = m[2], 0
        else:
            ok(m[2] == current and m[3] in ("counter", "gauge", "histogram"), line)
            kind = m[3]
        continue
    m = re.fullmatch(r"([a-z_]+)(\{[a-z]+=\"[^\"]*\"(,[a-z]+=\"[^\"]*\")*\})? (\S+)", line)
    ok(m is not None, line)
    if not m:
        continue
    base = re.sub(r"_(bucket|sum|count)$", "", m[1]) if kind == "histogram" else m[1]
    ok(base == current, line)
    ok(kind != "counter" or m[1].endswith("_total"), line)
    if m[1].endswith("_bucket"):
        ok(float(m[4]) >= last, line)
        last = float(m[4])
m = s.metrics()
ok(m['impress_http_requests_total{route="/v1/completions",status="400"}'] >= 6, "requests are counted")
ok(m["impress_ttft_seconds_count"] == m["impress_request_seconds_count"], "each answer has its first token")
ok(m["impress_prompt_tokens_total"] == m["impress_prompt_tokens_computed_total"] + sum(
    v for k, v in m.items() if k.startswith("impress_prompt_tokens_cached_total")), "cached and computed are all")

ok(s.stop() == 0, "SIGTERM: exit 0")
for line in open(s.log):
    json.loads(line)
everything = open(s.log).read() + page.body
ok(secret not in everything and first.text.strip() not in everything, "no text in log and metrics")
line = [e for e in s.events("request") if e["id"] == first.headers["x-request-id"]]
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
