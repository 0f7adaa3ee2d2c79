#!/usr/bin/env bash
# The admin API: its key, the tree, warming, pins, drops, importance, reorder and gc; nothing of it without the key.
. "$(dirname "$0")/lib.sh"
need_model
export tmp IMPRESS IMPRESS_MODEL
timeout 800 python3 - <<'PY' || failures=1
from serve import *

secret = "zebra%d" % random.randrange(1 << 30)
handbook = secret + " " + words(220, 5)
admin_key = "admin-key-%d" % random.randrange(1 << 30)
every = [("GET", "/admin/stats"), ("GET", "/admin/prefixes"), ("GET", "/admin/prefixes/1/importance"), ("POST", "/admin/warm"),
         ("POST", "/admin/warm/text"), ("POST", "/admin/pin"), ("POST", "/admin/unpin"), ("POST", "/admin/drop"),
         ("POST", "/admin/reorder"), ("POST", "/admin/gc"), ("GET", "/admin/"), ("DELETE", "/admin/prefixes"),
         ("GET", "/admin/nothing")]

# A default start: every endpoint, without a key. No text of a prompt anywhere, and nothing that changes the store.
s = Server("--slots", "2", "--ctx-size", "2048")
r = s.complete(handbook + count(1))
ok(r.status == 200, r)
n = r.usage["prompt_tokens"]
s.wait_for(lambda: s.metrics()["impress_store_tokens"] >= n, "the prompt in the store")
pages = []
before = s.metrics()["impress_store_tokens"]
for method, path in every:
    for key in (None, "Bearer " + admin_key, "Bearer ", "Basic x"):
        r = s.request(method, path, '{"all": true}' if method == "POST" else None, {"Authorization": key} if key else {})
        ok(r.status == 403 and r.error["code"] == "admin_off", (method, path, r))
        pages.append(r.body)
for path in ("/health", "/metrics", "/ui", "/v1/models"):
    pages.append(s.get(path).body)
ok(secret not in "".join(pages) and handbook[:40] not in "".join(pages), "no text of a prompt without a key")
ok(s.metrics()["impress_store_tokens"] >= before, "nothing was dropped")
ok(s.stop() == 0, "stop")

# With a key: it, and no other, opens the door; it is no client's key.
open(os.path.join(os.environ["tmp"], "admin.key"), "w").write(admin_key + "\n")
os.chmod(os.path.join(os.environ["tmp"], "admin.key"), 0o600)
s = Server("--slots", "2", "--ctx-size", "2048", "--admin-key-file", os.path.join(os.environ["tmp"], "admin.key"),
           "--host-cache", "8M")

def get(path):
    return s.request("GET", path, headers={"Authorization": "Bearer " + admin_key})

def post(path, body):
    return s.post(path, body, key=admin_key)

for method, path in every:
    for key in (None, "Basic " + admin_key, admin_key):
        r = s.request(method, path, headers={"Authorization": key} if key else {})
        ok(r.status == 401 and r.error["code"] == "invalid_api_key", (method, path, key, r))

# Wrong keys are told apart from none: after ten of them an address has to wait, others don't.
def guess(path, key, address="127.0.0.2", method="GET"):
    return s.request(method, path, headers={"Authorization": "Bearer " + key}, address=address)

wrong = ["nonsense-key", admin_key[:-1], admin_key + "x", admin_key.upper()]
for i, (method, path) in enumerate(every[:10]):
    r = guess(path, wrong[i % len(wrong)], method=method)
    ok(r.status == 401 and r.error["code"] == "invalid_api_key", (i, method, path, r))
for i in range(1000):
    r = guess("/admin/stats", wrong[i % len(wrong)])
    if r.status != 401:
        break
ok(r.status == 429 and 1 <= int(r.headers["retry-after"]) <= 4 and r.error["code"] == "too_many_wrong_keys", r)
ok(get("/admin/stats").status == 200 and s.get("/metrics").status == 200, "who is elsewhere doesn't wait")
s.wait_for(lambda: guess("/admin/stats", admin_key).status == 200, "the right key, a little later")

def refused(status, r, word, code=None):
    ok(r.status == status and word in r.error["message"], (status, word, r))
    ok(code is None or r.error["code"] == code, r)

refused(404, get("/admin/"), "nothing at this path")
refused(404, get("/admin/nothing"), "nothing at this path")
refused(404, get("/admin/prefixes/x/importance"), "no prefix")
refused(404, get("/admin/prefixes/99999/importance"), "no prefix", "no_such_prefix")
refused(404, get("/admin/prefixes/1/tokens"), "nothing at this path")
refused(405, get("/admin/warm"), "another method")
ok(get("/admin/warm").headers["allow"] == "POST", "405 says what is allowed")
refused(405, s.request("DELETE", "/admin/prefixes", headers={"Authorization": "Bearer " + admin_key}), "another method")
refused(400, post("/admin/pin", "{"), "not a JSON object", "invalid_json")
refused(400, post("/admin/pin", "[1]"), "not a JSON object")
for body in ({}, {"node": 0}, {"node": "1"}, {"node": -1}, {"nodes": []}, {"nodes": [1, "x"]}, {"all": True}, {"node": 1, "nodes": [1]},
             {"node": 1, "force": True}):
    refused(400, post("/admin/pin", body), "wanted")
refused(400, post("/admin/drop", {"all": False}), "wanted")
refused(400, post("/admin/drop", '{"node": 1, "node": 2}'), "JSON")
refused(404, post("/admin/pin", {"node": 99999}), "no node", "no_such_prefix")
refused(400, post("/admin/warm", {"prompt": 7}), "prompt")
refused(400, post("/admin/warm", {"prompt": "x", "colour": 1}), "colour")
refused(400, post("/admin/warm", {"prompt": "x", "pin": 1}), "pin")
refused(404, post("/admin/warm", {"prompt": "x", "tenant": "bert"}), "no API key has this name")
refused(400, post("/admin/warm", {"prompt": words(2000)}), "maximum context length")
refused(400, s.request("POST", "/admin/warm/text", b"\xff\xfe" * 40, {"Authorization": "Bearer " + admin_key}), "UTF-8")

# Warming: what is stored is there for the next request, as if it had been asked.
stats = get("/admin/stats").json
ok(stats["store"]["tokens"] > 100 and [t["tier"] for t in stats["tiers"]] == ["device", "host", "disk"], stats)
ok(stats["tiers"][1]["limit_bytes"] == 8 << 20 and 0 < stats["tiers"][2]["bytes"] <= stats["tiers"][2]["limit_bytes"], stats)
other = "giraffe " + words(230, 77)
w = s.request("POST", "/admin/warm/text", other, {"Authorization": "Bearer " + admin_key})
ok(w.status == 200 and w.json["stored_tokens"] == w.json["prompt_tokens"] == w.json["computed_tokens"], w)
ok(w.json["cached_tokens"] == 0 and w.json["node"] > 0 and not w.json["pinned"] and w.json["note"] == "", w)
n = w.json["prompt_tokens"]
again = post("/admin/warm", {"prompt": other, "pin": True}).json
ok(again["stored_tokens"] == n and again["computed_tokens"] < 65 and again["pinned"] and again["node"] == w.json["node"], again)
w = post("/admin/warm", {"prompt": other, "impress": {"system": "recomp"}})
ok(w.status == 200 and w.json["stored_tokens"] == n and w.json["computed_tokens"] < 65, ("whatever the system", w))
r = s.complete(other + count(3))
ok(r.cached >= n - 65, (r, n))
chat = {"messages": [{"role": "system", "content": "Answer from this. " + words(150, 6)}, {"role": "user", "content": "Now?"}]}
w = post("/admin/warm", chat)
ok(w.status == 200 and w.json["stored_tokens"] == w.json["prompt_tokens"], w)
chat["messages"][1]["content"] = "And then?"
r = s.post("/v1/chat/completions", dict(chat, max_tokens=2, temperature=0))
ok(r.cached >= w.json["prompt_tokens"] - 90, (r, w))
w = post("/admin/warm", {"prompt": "Too short."})
ok(w.status == 200 and w.json["stored_tokens"] == 0 and w.json["node"] == 0, w)

# The tree: numbers, and parents that exist.
def tree():
    return {n["id"]: n for n in get("/admin/prefixes").json["data"]}

nodes = tree()
ok(len(nodes) >= 3 and all(n["parent"] == 0 or n["parent"] in nodes for n in nodes.values()), nodes)
ok(set(next(iter(nodes.values()))) == {"id", "parent", "space", "model", "first_token", "tokens", "bytes", "hits", "derived",
                                       "pinned", "created", "used"}, "fields")
ok(all(n["bytes"] > 0 and n["tokens"] > 0 for n in nodes.values()), nodes)
ok([n["id"] for n in nodes.values() if n["pinned"]] == [again["node"]] or nodes[again["node"]]["pinned"], nodes)

# Importance: a value for each token; questions leave their mark where the system chooses by them.
for q in range(3):
    s.complete(handbook + count(20 + q))
    s.wait_for(s.idle, "an idle server")
root = max((n for n in tree().values() if n["parent"] == 0), key=lambda n: n["hits"])
i = get("/admin/prefixes/%d/importance" % root["id"]).json
ok(i["node"] == root["id"] and len(i["values"]) == root["tokens"] and i["first_token"] == root["first_token"], i)
ok(all(v >= 0 for v in i["values"]) and i["source"] in ("requests", "prefill", "none"), i)
ok(i["source"] != "requests" or i["requests"] > 0, i)
ok((i["source"] == "none") == (max(i["values"]) == 0), i)

# Pins and drops.
ok(post("/admin/unpin", {"node": again["node"]}).json == {"done": 1, "missing": []}, "unpin")
ok(not tree()[again["node"]]["pinned"], "no longer pinned")
ids = list(tree())[:2]
ok(post("/admin/pin", {"nodes": ids}).json == {"done": 2, "missing": []} and all(tree()[n]["pinned"] for n in ids), "pins")
ok(post("/admin/unpin", {"nodes": ids}).json == {"done": 2, "missing": []}, "unpins")
ok(post("/admin/reorder", "").status == 200 and "reordered" in post("/admin/reorder", "").json, "reorder")
g = post("/admin/gc", "")
ok(g.status == 200 and g.json["over_limit"] is False and g.json["evicted_prefixes"] == 0, g)
gone = again["node"]
ok(post("/admin/drop", {"node": gone}).json == {"done": 1, "missing": []} and gone not in tree(), "drop")
refused(404, post("/admin/drop", {"node": gone}), "no node")
ids = list(tree())
ok(post("/admin/pin", {"nodes": [ids[0], 999999]}).json == {"done": 1, "missing": [999999]}, "a pin and a node that isn't there")
d = post("/admin/drop", {"nodes": ids})
ok(d.status == 200 and d.json["done"] + len(d.json["missing"]) == len(ids) and tree() == {}, d)
ok(s.complete("something else " + words(100, 8), 1).status == 200, "the server goes on")
s.wait_for(lambda: tree() != {}, "something that is stored")
ok(post("/admin/drop", {"all": True}).json == {"done": 1, "missing": []} and tree() == {}, "drop all")
r = s.complete("something new " + words(100, 9), 2)
ok(r.status == 200, "the server goes on")

# Several at once, with clients between.
done = at_once([lambda k=k: post("/admin/warm", {"prompt": "warm %d " % k + words(90, k)}) for k in range(4)] +
               [lambda: s.complete("a client " + words(60, 50), 4), lambda: post("/admin/gc", ""), lambda: get("/admin/prefixes")])
ok(all(r.status == 200 for r in done), done)
ok(all(r.json["stored_tokens"] == r.json["prompt_tokens"] for r in done[:4]), done[:4])
ok(s.stop() == 0, "stop")
log = open(s.log).read()
ok(secret not in log and admin_key not in log and "giraffe" not in log, "neither text nor key in the log")

# Tenants: each key has prefixes of its own, so a warm says whose it is. The admin's key is no client's.
keys = os.path.join(os.environ["tmp"], "keys")
open(keys, "w").write("key-of-bert-1 bert\nkey-of-cara-1 cara\nkey-without-name\n")
os.chmod(keys, 0o600)
s = Server("--slots", "2", "--ctx-size", "1024", "--api-key-file", keys, env={"IMPRESS_ADMIN_KEY": admin_key}, store="tenants")
refused(400, post("/admin/warm", {"prompt": other}), "whose", "tenant_missing")
refused(400, s.request("POST", "/admin/warm/text", other, {"Authorization": "Bearer " + admin_key}), "whose")
refused(404, post("/admin/warm", {"prompt": other, "tenant": "dora"}), "name", "no_such_tenant")
refused(404, s.request("POST", "/admin/warm/text?tenant=dora", other, {"Authorization": "Bearer " + admin_key}), "name")
for pin in ("pin=yes", "pin=1", "pin="):
    refused(400, s.request("POST", "/admin/warm/text?tenant=cara&" + pin, other, {"Authorization": "Bearer " + admin_key}), "true or false", "invalid_type")
w = s.request("POST", "/admin/warm/text?tenant=cara&pin=true", words(80, 77), {"Authorization": "Bearer " + admin_key})
ok(w.status == 200 and w.json["stored_tokens"] == w.json["prompt_tokens"] and w.json["pinned"], w)
ok(s.complete(words(80, 77) + count(2), 1, key="key-of-bert-1").cached == 0, "cara's text isn't bert's")
ok(s.complete(words(80, 77) + count(2), 1, key="key-of-cara-1").cached > 64, "but cara's")
w = post("/admin/warm", {"prompt": other, "tenant": "bert"})
ok(w.status == 200 and w.json["stored_tokens"] == w.json["prompt_tokens"], w)
r = s.complete(other + count(2), 1, key="key-of-cara-1")
ok(r.cached == 0, ("cara's are others", r))
r = s.complete(other + count(2), 1, key="key-of-bert-1")
ok(r.cached >= w.json["prompt_tokens"] - 65, ("bert's are there", r))
ok(s.complete(other, 1, key=admin_key).status == 401, "the admin's key is no client's")
ok(s.request("GET", "/admin/stats", headers={"Authorization": "Bearer key-of-bert-1"}).status == 401, "nor the other way round")
ok(get("/metrics").status == 200 and s.get("/metrics").status == 401, "both keys read the metrics")
ok(s.stop() == 0, "stop")

s = Server("--slots", "1", "--ctx-size", "512", "--host-cache", "0", env={"IMPRESS_ADMIN_KEY": admin_key}, store="none")
ok(get("/admin/stats").json["store"] is None, "no store")
refused(409, get("/admin/prefixes"), "no store", "no_store")
refused(409, post("/admin/warm", {"prompt": "x"}), "no store")
ok(s.stop() == 0, "stop")
finish()
PY
finish
