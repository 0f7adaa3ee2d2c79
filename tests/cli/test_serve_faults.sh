#!/usr/bin/env bash
# A server whose store can't be written, or one of its segments not be read: it answers as without one, names the fault in
# its log, /health and statistics, and goes on by itself when it is over.
. "$(dirname "$0")/lib.sh"
need_model
export tmp IMPRESS IMPRESS_MODEL
timeout 600 python3 - <<'PY' || failures=1
from serve import *

key = "key-of-the-admin"
s = Server("--slots", "1", "--ctx-size", "1024", store="faulty", env={"IMPRESS_ADMIN_KEY": key})
segments = os.environ["tmp"] + "/faulty/segments"
one, two, three = (words(150, seed) for seed in (31, 32, 33))

def stats():
    return s.get("/admin/stats", headers={"Authorization": "Bearer " + key}).json["store"]

def warnings():
    return [e["message"] for e in s.events("library") if e["level"] == "warn"]

s.complete(one, 1)
s.wait_for(lambda: stats()["commits"] == 1, "a prefix that is stored")
ok(s.get("/health").json == {"status": "ok"} and stats()["faults"] == [], s.get("/health"))

# No directory, so that nothing can be made in it.
os.rename(segments, segments + ".away")
open(segments, "w").close()
r = s.complete(two, 4)
ok(r.status == 200 and r.cached == 0 and r.usage["completion_tokens"] > 0, r)
s.wait_for(lambda: "store_faults" in s.get("/health").json, "a fault in /health")
h = s.get("/health")
faults = h.json["store_faults"]
ok(h.status == 200 and h.json["status"] == "ok" and [f["what"] for f in faults] == ["write"], h)
ok(faults[0]["failures"] == 1 and faults[0]["since"] > 1 << 30 and faults[0]["error"] and "segments" not in h.body, h)
st = stats()
ok(st["io_errors"] == 1 and st["commits"] == 1 and "segments/" in st["faults"][0]["message"], st)
ok(any("segments/" in w and "not stored" in w for w in warnings()), warnings())

os.remove(segments)
os.rename(segments + ".away", segments)
r = s.complete(three, 4)
ok(r.status == 200, r)
s.wait_for(lambda: stats()["commits"] == 2, "a prefix that is stored again")
ok(s.get("/health").json == {"status": "ok"} and stats()["faults"] == [], s.get("/health"))
ok(any("write works again" in w for w in warnings()), warnings())
r = s.complete(one, 1)
ok(r.status == 200 and r.cached > 100, r)
ok(s.stop() == 0, "exit 0")

# A segment that can't be opened: its prefix is computed, the other one is loaded, and then reading works again.
s = Server("--slots", "1", "--ctx-size", "1024", store="faulty", env={"IMPRESS_ADMIN_KEY": key})
segment = os.path.join(segments, sorted(os.listdir(segments))[0])
os.rename(segment, segment + ".away")
os.mkdir(segment)
cold = []
for prompt in (one, three):
    r = s.complete(prompt, 4)
    ok(r.status == 200 and r.usage["completion_tokens"] > 0, r)
    h = s.get("/health")
    faults = h.json.get("store_faults", [])
    if r.cached < 100:
        cold.append(prompt)
        ok(h.status == 200 and h.json["status"] == "ok" and [f["what"] for f in faults] == ["read"], h)
        ok(faults[0]["error"] and "segments" not in h.body, h)
    else:
        ok(faults == [], h)
ok(len(cold) == 1, cold)
os.rmdir(segment)
os.rename(segment + ".away", segment)
r = s.complete(three if cold[0] == one else one, 4)
ok(r.status == 200 and r.cached > 100 and s.get("/health").json == {"status": "ok"}, (r, s.get("/health")))
ok(s.stop() == 0, "exit 0")
finish()
PY
"$IMPRESS" verify "$tmp/faulty" >/dev/null || failures=1
finish
