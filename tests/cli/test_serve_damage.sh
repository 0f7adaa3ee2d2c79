#!/usr/bin/env bash
# Segments are lost, cut or changed under a running server: it answers as without a store, serves what lies before the
# damage, says so, and stores the rest again.
. "$(dirname "$0")/lib.sh"
need_model
export tmp IMPRESS IMPRESS_MODEL
timeout 600 python3 - <<'PY' || failures=1
from serve import *

options = ("--slots", "1", "--ctx-size", "512", "--min-store", "8", "--chunk", "16", "--host-cache", "0",
           "--reorder-period", "never")
store = os.environ["tmp"] + "/store"

# A prompt that grew in two turns, so that it lies in three segments; a copy of it for each kind of damage, by its salt.
turns = [words(11, 1)]
turns.append(turns[0] + " " + words(6, 2))
turns.append(turns[1] + count(10, 4))


def block_short(path):
    os.truncate(path, os.path.getsize(path) - 4096)


def flip(path):
    with open(path, "r+b") as f:
        f.seek(os.path.getsize(path) // 2)
        byte = f.read(1)[0]
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte ^ 16]))


CLOSED = {"lost": os.remove, "a byte short": lambda p: os.truncate(p, os.path.getsize(p) - 1),
          "a block short": block_short, "empty": lambda p: os.truncate(p, 0), "a bit flipped": flip}
OPEN = {"lost while open": os.remove, "a block short while open": block_short}


# There is one slot, so that each salt displaces the one before from the cells.
def ask(s, salt, turn=2):
    return s.complete(turns[turn], 6 if turn == 2 else 1, impress={"full_load": True, "salt": salt})


def tokens():
    return s.metrics()["impress_store_tokens"]


def counters():
    m = s.metrics()
    return m["impress_store_io_errors_total"], m["impress_store_corrupt_chunks_total"]


def warned(segment):
    return [e["message"] for e in s.events("library") if e["level"] == "warn" and segment in e["message"]]


s = Server(*options, store="store")
cold = s.complete(turns[2], 6, impress={"cache": "off"})
ok(cold.status == 200 and cold.cached == 0, cold)
n = cold.usage["prompt_tokens"]
middle = {}
for salt in [*CLOSED, *OPEN]:
    rs = [ask(s, salt, turn) for turn in range(3)]
    ok(rs[0].cached == 0 and rs[2].text == cold.text, rs)
ok(s.stop() == 0, "exit 0")
listing = subprocess.run([os.environ["IMPRESS"], "ls", "--json", store], stdout=subprocess.PIPE, check=True).stdout
nodes = sorted(json.loads(listing), key=lambda node: node["node"])
spaces = list(dict.fromkeys(node["space"] for node in nodes))
for salt, space in zip([*CLOSED, *OPEN], spaces):
    mine = [node for node in nodes if node["space"] == space]
    ok(len(mine) == 3 and len({node["segment"] for node in mine}) == 3, mine)
    middle[salt] = mine[1]
everything = n * len(spaces)
head = nodes[1]["first_token"]
ok(sum(node["n_tokens"] for node in nodes) == everything and 0 < head < n, (everything, nodes))


def segment(salt):
    return os.path.join(store, "segments", middle[salt]["segment"] + ".seg")


# Files that nobody has open: what is damaged is dropped at once, and counted.
s = Server(*options, store="store")
for i, (salt, damage) in enumerate(CLOSED.items()):
    damage(segment(salt))
    r = ask(s, salt)
    ok(r.status == 200 and r.text == cold.text and r.cached == head, (salt, r))
    ok(counters() == (0, i + 1) and warned(middle[salt]["segment"]), (salt, counters()))
    ok(s.get("/health").json == {"status": "ok"}, s.get("/health"))
s.wait_for(lambda: tokens() == everything, "what was dropped is stored again")

# Files that are open: one without a name is served as before. One that was cut can't be told from a disk that reads
# short: it stays, isn't used for a while, and /health says so.
for salt, damage in OPEN.items():
    r = ask(s, salt)
    ok(r.cached == n - 1 and r.json["impress"]["way"] == "whole" and r.text == cold.text, (salt, r))
    damage(segment(salt))
    ask(s, "lost")  # now the cells are another's
    for again in range(2):
        r = ask(s, salt)
        ok(r.status == 200 and r.text == cold.text and r.cached == (n - 1 if damage is os.remove else head), (salt, r))
        ask(s, "empty")
ok(counters() == (1, len(CLOSED)) and warned(middle[salt]["segment"]), counters())
h = s.get("/health")
ok(h.status == 200 and [f["what"] for f in h.json.get("store_faults", [])] == ["read"] and "segments" not in h.body, h)
for salt in CLOSED:
    r = ask(s, salt)
    ok(r.cached == n - 1 and r.json["impress"]["way"] == "whole" and r.text == cold.text, (salt, r))

# A repair by another process names these two and nothing else; all is stored again, and all is well.
v = subprocess.run([os.environ["IMPRESS"], "verify", "--repair", store], stdout=subprocess.PIPE)
named = sorted(re.findall(r"^segments/([0-9a-f]{16})\.seg: ", v.stdout.decode(), re.M))
ok(v.returncode == 0 and named == sorted(middle[salt]["segment"] for salt in OPEN), v)
for salt in OPEN:
    r = ask(s, salt)
    ok(r.text == cold.text and r.cached == head, (salt, r))
s.wait_for(lambda: tokens() == everything, "what was repaired is stored again")
for salt in OPEN:
    r = ask(s, salt)
    ok(r.text == cold.text and r.cached == n - 1, (salt, r))
ok(s.get("/health").json == {"status": "ok"} and counters() == (1, len(CLOSED)), (s.get("/health"), counters()))
ok(s.stop() == 0, "exit 0")
finish()
PY
"$IMPRESS" verify "$tmp/store" >"$tmp/out" || fail "verify after all this: $(cat "$tmp/out")"
finish
