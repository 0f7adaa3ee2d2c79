#!/usr/bin/env bash
# Many clients at once: prefixes computed once, tenants, a full queue, disconnects, clients that dawdle.
. "$(dirname "$0")/lib.sh"
need_model
export tmp IMPRESS IMPRESS_MODEL
printf 'key-of-anne-1 anne\nkey-of-anne-2 anne   # her other machine\n\nkey-of-bert-1\n' >"$tmp/keys"
chmod 600 "$tmp/keys"
timeout 800 python3 - <<'PY' || failures=1
import prometheus
from serve import *

# Eight clients, four slots, one prefix that is new: it is computed once.
prefix = words(125, 4)


def computed_once(s):
    rs = at_once([lambda i=i: s.complete(prefix + count(10 * i), 4) for i in range(8)])
    ok(all(r.status == 200 for r in rs), rs)
    n = rs[0].usage["prompt_tokens"]
    fresh = [r for r in rs if r.cached < n / 2]
    ok(len(fresh) == 1, "computed once: %s" % [r.cached for r in rs])
    m = s.metrics()
    # The others compute their questions, and up to 64 tokens that weren't there yet when a slot was free for them.
    ok(m["impress_prompt_tokens_computed_total"] < n + 7 * 100, m["impress_prompt_tokens_computed_total"])
    again = [s.complete(prefix + count(10 * i), 4) for i in range(8)]
    ok([r.text for r in again] == [r.text for r in rs], "answers don't depend on company")
    return n, [r.text for r in rs]


# Slots that share cells, fewer than four such requests need; and those with cells of their own, without a store.
n, texts = {}, {}
for store, options in (("pool", ["--cells", "1024"]), ("none", [])):
    s = Server("--slots", "4", "--ctx-size", "1024", "--system", "as", "--queue", "16", *options, store=store)
    n[store], texts[store] = computed_once(s)
    ok(s.stop() == 0, "stop")
ok(2 * n["pool"] < 1024 < 4 * n["pool"], n)

s = Server("--slots", "4", "--ctx-size", "2048", "--system", "as", "--timeout", "3", "--queue", "16")

# Meanwhile ones that never finish a request: silent ones, and such that send a byte now and then, or only half. All are cut off.
DAWDLERS = {"says nothing": b"", "stops in the head": b"POST /v1/compl", "stops in the body": b"POST /v1/completions HTTP/1.1\r\n"
            b"Host: localhost\r\nContent-Length: 1000\r\n\r\n{", "drips its head": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nA: ",
            "drips its body": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"}


def dawdle(name):
    c = socket.create_connection(("127.0.0.1", s.port))
    c.sendall(DAWDLERS[name])
    c.settimeout(0.5)
    for _ in range(1200):
        try:
            if c.recv(4096) == b"":
                return None
        except socket.timeout:
            pass
        except OSError:
            return None
        try:
            c.sendall(b" " if name.startswith("drips") else b"")
        except OSError:
            return None
    return name


dawdlers = []
slow = threading.Thread(target=lambda: dawdlers.extend(at_once([lambda n=n: dawdle(n) for n in DAWDLERS])))
slow.start()

_, texts["own"] = computed_once(s)
ok(texts["pool"] == texts["own"] == texts["none"], texts)

# Different prompts at once answer as they do alone.
alone = [s.complete(words(40, 50 + i) + count(20 * i), 6).text for i in range(6)]
together = at_once([lambda i=i: s.complete(words(40, 50 + i) + count(20 * i), 6, impress={"cache": "off"}).text for i in range(6)])
ok(sum(a == b for a, b in zip(alone, together)) >= 5, (alone, together))

# Four answers at once come from common steps; and go on while another's prompt is read, a slice after the other.
before = s.metrics()
rs = at_once([lambda i=i: s.post("/v1/completions", endless(prompt="Text %d:" % i, max_tokens=40, temperature=0)) for i in range(4)])
after = s.metrics()
steps, tokens = (after[k] - before[k] for k in ("impress_steps_total", "impress_generated_tokens_total"))
ok(all(r.status == 200 for r in rs) and tokens == 160 and steps < 0.7 * tokens, (steps, tokens))
running = s.open(endless(prompt="Meanwhile:", max_tokens=1900, stream=True))
s.wait_for(lambda: s.busy() == 1, "an answer on its way")
before = s.metrics()["impress_generated_tokens_total"]
r = s.complete(words(420, 51), 1, impress={"cache": "off"})
during = s.metrics()["impress_generated_tokens_total"] - before
ok(r.status == 200 and during >= 3 + r.usage["prompt_tokens"] // 512, ("tokens of the other answer", during, r))
running.close()
s.wait_for(s.idle, "an idle server")

# A conversation goes on in its cells.
chat = words(60, 8)
cached = 0
for turn in range(5):
    r = s.complete(chat, 12)
    ok(r.cached >= cached, (turn, r.cached, cached))
    cached = r.usage["prompt_tokens"] - 8  # an answer's text may be cut into other tokens
    chat += r.text + " " + words(6, 80 + turn)

# Clients that go away, some of them by closing only their sending half: before their requests are looked at, with four
# answers on their way and two requests in the queue, and while prompts are read. The server is idle soon after.
def leave(c, half):
    if half:
        c.shutdown(socket.SHUT_WR)
    else:
        c.close()


seen = ("impress_generated_tokens_total", 'impress_answers_total{end="cancelled"}')
before_all = s.metrics()
for n_words, until in ((40, None), (40, "answers"), (600, "prompts")):
    before = s.metrics()
    gone = [s.open(endless(prompt=words(n_words, 900 + i), max_tokens=1900, stream=i % 2 == 0)) for i in range(6)]
    if until:
        s.wait_for(lambda: s.busy() == 4 and s.metrics()["impress_queue_length"] == 2, "slots and queue in use")
    if until == "answers":
        s.wait_for(lambda: s.metrics()[seen[0]] >= before[seen[0]] + 20, "answers on their way")
    for i, c in enumerate(gone):
        leave(c, i >= 3)
    s.wait_for(lambda: s.metrics()[seen[1]] >= before[seen[1]] + 6, "six cancelled requests (%s)" % until)
    s.wait_for(s.idle, "cancelled requests end")
    for c in gone:
        c.close()
ok(s.metrics()[seen[1]] - before_all[seen[1]] == 18, (before_all[seen[1]], s.metrics()[seen[1]]))
ok(s.complete("still there?", 2).status == 200, "others are served")

# One that stays while others leave gets its answer.
stays = []
clients = threading.Thread(target=lambda: stays.append(s.complete(words(30, 77) + count(30), 24)))
clients.start()
gone = [s.open(endless(prompt=words(40, 950 + i), max_tokens=1900, stream=True)) for i in range(3)]
s.wait_for(lambda: s.busy() >= 2 or stays, "slots in use")
for c in gone:
    c.close()
clients.join()
ok(stays[0].status == 200 and stays[0].usage["completion_tokens"] == 24 and "37" in stays[0].text, stays)
slow.join()
ok(dawdlers == [None] * len(DAWDLERS), "cut off: not %s" % dawdlers)
ok(s.stop() == 0, "stop")

# Those that leave give back what they borrowed of the store: once everything is dropped, no file is left.
s = Server("--slots", "4", "--ctx-size", "2048", env={"IMPRESS_ADMIN_KEY": "key-of-the-admin"})
segments = os.path.join(os.environ["tmp"], "store", "segments")
ok(len(os.listdir(segments)) > 0, "stored prefixes")
gone = [s.open(endless(prompt=prefix + count(500 + 10 * i), max_tokens=1900, stream=True)) for i in range(6)]
s.wait_for(lambda: s.metrics()["impress_prompt_tokens_cached_total{source=\"store\"}"] > 0, "a prefix that was loaded")
for c in gone:
    c.close()
s.wait_for(s.idle, "cancelled requests end")
# What they computed is stored at a quiet moment, perhaps after the first of these.
s.wait_for(lambda: s.post("/admin/drop", {"all": True}, key="key-of-the-admin").status == 200 and not os.listdir(segments),
           "an empty store")
ok(s.complete(prefix + count(1), 2).status == 200, "the server goes on")
ok(s.stop() == 0, "stop")

# A queue that is full says so, and when to come again.
s = Server("--slots", "1", "--queue", "1", "--ctx-size", "2048", store="none")
held = [s.open(endless(prompt=words(20, 20 + i), max_tokens=1900, stream=True)) for i in range(2)]
s.wait_for(lambda: s.busy() == 1 and s.metrics()["impress_queue_length"] == 1, "a full queue")
r = s.complete("x", 1)
ok(r.status == 503 and int(r.headers["retry-after"]) >= 1 and r.error["code"] == "queue_full", r)
ok(s.get("/health").status == 200, "health doesn't queue")
for c in held:
    c.close()
s.wait_for(s.idle, "an idle server")
ok(s.complete("x", 1).status == 200, "room again")
ok(s.stop() == 0, "stop")

# Who has an answer makes room for the next request, although none may wait.
s = Server("--slots", "1", "--queue", "0", "--ctx-size", "256", store="none")
ok([s.complete("x", 1).status for i in range(100)] == [200] * 100, "one after another")
ok(s.stop() == 0, "stop")

# Keys are tenants: two of one name share, others don't see it.
s = Server("--slots", "2", "--ctx-size", "1024", "--api-key-file", os.environ["tmp"] + "/keys", store="tenants",
           env={"IMPRESS_ADMIN_KEY": "key-of-the-admin"})
p = words(150, 31)
ok(s.complete(p).status == 401, "no key")
r = s.complete(p, key="key-of-nobody")
ok(r.status == 401 and r.error["code"] == "invalid_api_key" and "www-authenticate" in r.headers, r)
ok(s.get("/metrics").status == 401 and s.get("/nothing").status == 401 and s.get("/health").status == 200, "routes")
first = s.complete(p, key="key-of-anne-1")
ok(first.status == 200 and first.cached == 0, first)
ok(s.complete(p, key="key-of-anne-2").cached > 0, "a tenant's other key")
ok(s.complete(p, key="key-of-bert-1").cached == 0, "another tenant, while the first one's is live")
ok(s.complete(p, key="key-of-anne-1", impress={"salt": "a"}).cached == 0, "a salt of the request")


# The numbers: each key sees its own tenant's, and none that others have a part in; the admin sees all, and each share.
def numbers(key):
    r = s.get("/metrics", headers={"Authorization": "Bearer " + key})
    ok(r.status == 200 and prometheus.faults(r.body) == [] and prometheus.promtool(r.body) == "", (key, r))
    return r.body, {n: float(v) for n, v in (line.rsplit(" ", 1) for line in r.body.split("\n") if line and line[0] != "#")}


tokens, chats = "impress_prompt_tokens_total", 'impress_http_requests_total{route="/v1/completions",status="200"}'
s.wait_for(lambda: numbers("key-of-the-admin")[1].get(chats) == 4, "four requests that were counted")
n = first.usage["prompt_tokens"]
anne, a = numbers("key-of-anne-1")
_, a2 = numbers("key-of-anne-2")
bert, b = numbers("key-of-bert-1")
whole, sums = numbers("key-of-the-admin")
ok(a[tokens] == 3 * n == a2[tokens] and b[tokens] == n and sums[tokens] == 4 * n, (a[tokens], b[tokens], sums[tokens], n))
ok(a[chats] == 3 and b[chats] == 1 and a["impress_ttft_seconds_count"] == 3, (a, b))
for page in (anne, bert):
    names = [line for line in page.split("\n") if not line.startswith("#")]
    ok(not re.search("slots|queue_length|connections|live_tokens|steps|store_|tier_|tenant|anne|bert", "\n".join(names)), names)
ok('status="401"' not in anne and 'status="401"' in whole, "what nobody's key opened is nobody's")
share = 'impress_tenant_prompt_tokens_total{tenant="%s"}'
ok(sums[share % "anne"] == 3 * n and sums[share % "#1"] == n, [k for k in sums if "tenant" in k])
ok("key-of" not in whole and "impress_store_bytes" in sums, "no key as a label")
ok(s.stop() == 0, "stop")
s = Server("--slots", "2", "--ctx-size", "1024", env={"IMPRESS_API_KEY": "key-of-bert-1,key-of-cara-1"}, store="tenants")
q = p + " and then?"
ok(s.complete(q, key="key-of-cara-1").cached == 0, "a third tenant, from the store")
ok(s.complete(q, key="key-of-bert-1").cached > 0, "the second tenant, from the store")
ok(s.stop() == 0, "stop")
for text in ("key-of-anne", "key-of-bert"):
    ok(text not in open(s.log).read(), "no keys in the log")

# Two tenants send the same new prompt at once: neither waits for the other or gets anything of it, and each computes all.
# No more so while the other's is in the host tier, from where its owner gets it.
s = Server("--slots", "2", "--ctx-size", "512", "--min-store", "16", "--chunk", "16", "--host-cache", "64M", store="twice",
           env={"IMPRESS_API_KEY": "key-of-anne-1,key-of-bert-1", "IMPRESS_ADMIN_KEY": "key-of-the-admin"})


def of_anne(prompt):
    return s.complete(prompt, 1, key="key-of-anne-1")


def of_bert(prompt):
    return s.complete(prompt, 1, key="key-of-bert-1")


def all_computed(r):
    return (r.status == 200 and r.cached == 0 and r.json["impress"]["bytes_read"] == 0 and
            r.json["impress"]["tokens"] == {"live": 0, "loaded": 0, "computed": r.usage["prompt_tokens"]})


p, q, n = words(40, 41), words(16, 42), 0
for r in at_once([lambda: of_anne(p), lambda: of_bert(p)]):
    ok(all_computed(r), r)
    n += r.usage["prompt_tokens"]
ok(s.metrics("key-of-the-admin")["impress_prefix_waits_total"] == 0, "nobody waits for another tenant's prompt")
r = of_anne(q)
n += r.usage["prompt_tokens"]
s.wait_for(lambda: s.metrics("key-of-the-admin")["impress_store_tokens"] == n, "three prefixes on disk")
for seed in (43, 44):  # both slots' cells
    of_anne(words(4, seed))
r = of_anne(q)
ok(r.json["impress"]["tokens"]["loaded"] > 0 and r.cached > 0, r)
m = s.metrics("key-of-the-admin")
ok(m['impress_tier_bytes{tier="host"}'] > 0, "it is in the host tier")
r = of_bert(q)
ok(all_computed(r), r)
ok(s.metrics("key-of-the-admin")["impress_store_hits_total"] == m["impress_store_hits_total"], "nothing found")
ok(s.stop() == 0, "stop")

# An age: what nobody uses goes, also while nobody asks anything. Looked at further below.
aged = Server("--slots", "1", "--ctx-size", "512", "--min-store", "16", "--ttl", "2", store="aged")
old = aged.complete(words(14, 60), 1)

# One tenant floods the store with five times its limit; the other keeps its prefix, and `du` keeps to the limit: above
# it is at most what was just removed, one segment, and the catalogue's log, which is three times its share too large.
LIMIT, SEGMENT = 5 << 19, 1 << 20
s = Server("--slots", "1", "--ctx-size", "512", "--min-store", "16", "--chunk", "16", "--host-cache", "0",
           "--limit", str(LIMIT), "--tenant-share", "50", store="shares",
           env={"IMPRESS_API_KEY": "key-of-anne-1,key-of-bert-1", "IMPRESS_ADMIN_KEY": "key-of-the-admin"})


def store_metric(s, name):
    return s.metrics("key-of-the-admin")["impress_store_" + name]


taken = 'commits_total{result="taken"}'
folder, p = os.environ["tmp"] + "/shares", words(14, 61)
mine = s.complete(p, 1, key="key-of-anne-1")
ok(mine.status == 200 and mine.cached == 0, mine)
s.wait_for(lambda: store_metric(s, taken) == 1, "a prefix on disk")
used, flood = [du(folder)], []
over = threading.Event()


def watch():
    while not over.wait(0.02):
        used.append(du(folder))


watcher = threading.Thread(target=watch)
watcher.start()
while store_metric(s, "written_bytes_total") < 5 * LIMIT and len(flood) < 100:
    flood.append(s.complete(words(16, 700 + len(flood)), 1, key="key-of-bert-1"))
    s.wait_for(lambda: store_metric(s, taken) == 1 + len(flood), "one more on disk")
    if failures:
        break
over.set()
watcher.join()
ok(all(r.status == 200 and r.cached == 0 for r in flood) and store_metric(s, "evictions_total") > 10, flood[-1])
ok(max(used) <= LIMIT + SEGMENT + 3 * LIMIT // 16, (max(used), len(used)))
r = s.complete(p, 1, key="key-of-anne-1")
ok(r.cached == r.usage["prompt_tokens"] - 1 and r.json["impress"]["tokens"]["loaded"] > 0, r)
r = s.complete(words(16, 700), 1, key="key-of-bert-1")
ok(r.cached == 0, "a tenant's own flood drove out its first ones: %s" % r)
ok(s.stop() == 0, "stop")
ok(du(folder) <= LIMIT, du(folder))

aged.wait_for(lambda: aged.metrics()["impress_store_" + taken] == 1, "a prefix that was stored")
aged.wait_for(lambda: aged.metrics()["impress_store_prefixes"] == 0, "a prefix that became old")
ok(aged.metrics()["impress_store_evictions_total"] == 1, "it was evicted")
aged.wait_for(lambda: not os.listdir(os.environ["tmp"] + "/aged/segments"), "no file left")
ok(aged.complete("x", 1).status == 200, "the cells are another's")
r = aged.complete(words(14, 60), 1)
ok(old.status == r.status == 200 and r.cached == 0, r)
ok(aged.stop() == 0, "stop")
finish()
PY
for share in 101 -1 some; do
    expect 2 "tenant-share" "$IMPRESS" serve -m "$IMPRESS_MODEL" --tenant-share "$share"
done
finish
