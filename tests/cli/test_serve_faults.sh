#!/usr/bin/env bash
# A server whose store can't be written, or one of its segments not be read, or that has no catalogue, no directory, no
# room: it answers as without one, names the fault in its log, /health and statistics, and goes on by itself when it is
# over.
. "$(dirname "$0")/lib.sh"
need_model
export tmp IMPRESS IMPRESS_MODEL
timeout 600 python3 - <<'PY' || failures=1
from serve import *

key = "key-of-the-admin"
s = Server("--slots", "1", "--ctx-size", "1024", store="faulty", env={"IMPRESS_ADMIN_KEY": key})
segments = os.environ["tmp"] + "/faulty/segments"
one, two, three = (words(80, seed) for seed in (31, 32, 33))

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
s = Server("--slots", "1", "--ctx-size", "1024", "--min-store", "16", store="faulty", env={"IMPRESS_ADMIN_KEY": key})
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

store = os.environ["tmp"] + "/faulty"


def ask(prompt):
    s.complete("x", 1)  # the cells are another's
    r = s.complete(prompt, 2)
    ok(r.status == 200 and r.usage["completion_tokens"] == 2, r)
    return r


def faulty(what):
    h, st = s.get("/health"), stats()
    ok(h.status == 200 and h.json["status"] == "ok", h)
    ok([f["what"] for f in h.json.get("store_faults", [])] == what == [f["what"] for f in st["faults"]], (h, st))
    ok("faulty" not in h.body and "catalogue.db" not in h.body, h)


def keep(prompt):
    s.wait_for(lambda: ask(prompt).cached > 0, "a prefix that is stored and found")


def comes_back(prompt):
    keep(prompt)
    faulty([])


first, second, third, fourth = (words(14, seed) for seed in (34, 35, 36, 37))
keep(first)

# A file is where the directory was; then the catalogue is none.
os.rename(store, store + ".away")
open(store, "w").close()
ok(ask(first).cached == 0 and ask(second).cached == 0, "no store")
faulty(["catalogue"])
os.remove(store)
os.rename(store + ".away", store)
comes_back(first)
keep(second)

os.rename(store + "/catalogue.db", store + "/away")
os.mkdir(store + "/catalogue.db")
ok(ask(first).cached == 0 and ask(second).cached == 0, "no catalogue")
faulty(["catalogue"])
os.rmdir(store + "/catalogue.db")
os.rename(store + "/away", store + "/catalogue.db")
comes_back(second)

# The directory is gone: it is made again. Then the former one is back.
os.rename(store, store + ".away")
ok(ask(first).cached == 0, "an empty store")
keep(third)
faulty([])
ok(os.path.exists(store + "/catalogue.db"), "a store in its place")
os.rename(store, store + ".other")
os.rename(store + ".away", store)
comes_back(first)
ok(ask(third).cached == 0, "stored in the other one")
keep(fourth)
ok(sum("catalogue works again" in w for w in warnings()) == 2, warnings())
ok(sum("the directory is another one now" in w for w in warnings()) >= 1, warnings())
ok(s.stop() == 0, "exit 0")
finish()
PY
for store in faulty faulty.other; do
    "$IMPRESS" verify "$tmp/$store" >/dev/null || fail "verify $store"
done

# A full disk: a small file system of this script's own.
mkdir "$tmp/disk"
small() { unshare -m sh -c 'mount -t tmpfs -o size=8m,mode=700 none "$0" && exec "$@"' "$tmp/disk" "$@"; }
if ! small true 2>/dev/null; then
    echo "SKIPPED: the full disk: nothing can be mounted here"
    finish
fi
small timeout 300 python3 - <<'PY' || failures=1
from serve import *

disk = os.environ["tmp"] + "/disk"
key = "key-of-the-admin"
s = Server("--slots", "1", "--ctx-size", "512", "--min-store", "16", "--limit", "6M", store="disk/store",
           env={"IMPRESS_ADMIN_KEY": key})
one, two, three = (words(14, seed) for seed in (38, 39, 40))


def ask(prompt):
    s.complete("x", 1)
    r = s.complete(prompt, 2)
    ok(r.status == 200 and r.usage["completion_tokens"] == 2, r)
    return r


def counted(name):
    return s.metrics(key)["impress_store_" + name]


def faults():
    return s.get("/health").json.get("store_faults", [])


taken = 'commits_total{result="taken"}'
ask(one)
s.wait_for(lambda: counted(taken) == 1, "a prefix that is stored")
with open(disk + "/filler", "wb", buffering=0) as f:
    try:
        while f.write(bytes(4096)) == 4096:
            pass
    except OSError:
        pass
ok(os.statvfs(disk).f_bavail == 0, "a full disk")
ok(ask(one).cached > 0, "what is stored is served")
ok(faults() == [] and counted("io_errors_total") == 0, faults())
ok(ask(two).cached == 0, "a new one")
s.wait_for(lambda: "write" in [f["what"] for f in faults()], "a fault of writing in /health")
h = s.get("/health")
ok(h.status == 200 and h.json["status"] == "ok" and "disk/" not in h.body, h)
ok({f["error"] for f in h.json["store_faults"]} == {"no room"}, h)
ok(counted("io_errors_total") > 0 and counted('commits_total{result="failed"}') == 1, "counted")
ok(ask(one).cached > 0, "what is stored is served")
os.remove(disk + "/filler")
s.wait_for(lambda: ask(three).cached > 0 and counted(taken) > 1, "a prefix that is stored again")
ok(s.get("/health").json == {"status": "ok"}, s.get("/health"))
ok(ask(three).cached > 0 and ask(one).cached > 0, "both")
ok(any("write works again" in e["message"] for e in s.events("library")), s.events("library"))
ok(s.stop() == 0, "exit 0")
v = subprocess.run([os.environ["IMPRESS"], "verify", disk + "/store"], stdout=subprocess.PIPE)
ok((v.returncode, v.stdout) == (0, b"clean\n"), v)
finish()
PY
finish
