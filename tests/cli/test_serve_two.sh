#!/usr/bin/env bash
# Two servers on one store under one limit, with own prefixes and a shared one, while others verify, collect and
# reorder it, and a third process stores in another space; then one of them is killed. All are answered as alone.
. "$(dirname "$0")/lib.sh"
need_model
export tmp IMPRESS IMPRESS_MODEL
timeout 600 python3 - <<'PY' || failures=1
from serve import *

MIB = 1 << 20
LIMIT = 3 * MIB
store = os.environ["tmp"] + "/store"
options = ("--slots", "1", "--ctx-size", "512", "--min-store", "16", "--chunk", "16", "--threads", "1",
           "--host-cache", "0", "--reorder-period", "never", "--limit", str(LIMIT))
# What docs/reliability.md allows above the limit: of each process what it has just removed, as much as a segment took;
# and the catalogue's log up to four times its share, a sixteenth, of which one counts always. A segment has 80 tokens.
SEGMENT, SHARE = 2 * MIB, LIMIT // 16
MOST = LIMIT + 3 * SHARE + 3 * SEGMENT
shared = words(16, 1)


def prompt(who, i):
    return shared + " " + words(6, 100 * who + i + 10) + count(10 * (i + 1) + who, 4)


def program(*argv):
    p = subprocess.run([os.environ["IMPRESS"], *argv], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                       stderr=subprocess.STDOUT)
    return p.returncode, p.stdout.decode()


servers = [Server(*options), Server(*options)]


def ask(who, which, i, **fields):
    return servers[who].complete(prompt(which, i), 4, impress=dict(fields, full_load=True))


# Alone: nothing is looked up, nothing kept.
N = 2
alone = [None, None]
at_once([lambda w=w: alone.__setitem__(w, [ask(w, w, i, cache="off") for i in range(N)]) for w in range(2)])
ok(all(r.status == 200 and r.cached == 0 for rs in alone for r in rs), alone)
ok(alone[0][0].text.startswith(" 14"), alone[0][0])

# What one has stored the other one finds.
a, b = servers
first = ask(0, 0, 0)
a.wait_for(lambda: a.metrics()['impress_store_commits_total{result="taken"}'] == 1, "a prefix on disk")
r = ask(1, 0, 0)
ok(first.cached == 0 and r.cached == r.usage["prompt_tokens"] - 1 and r.json["impress"]["way"] == "whole", (first, r))
ok(r.text == first.text == alone[0][0].text, (first, r))


def other_space():
    text = os.environ["tmp"] + "/text"
    open(text, "w").write(words(12, 3))
    return program("run", "-m", os.environ["IMPRESS_MODEL"], "--cache-type", "q8_0", "--store", store, "--limit",
                   str(LIMIT), "--min-store", "16", "--threads", "1", "-n", "2", "-f", text, "-p", "And?", "--raw")


# Another type of cells is another space, of a process that comes and goes.
rc, out = other_space()
ok(rc == 0 and b.complete("x", 1).status == 200 and b.metrics()["impress_store_spaces"] == 2, (rc, out))

# All at once. Each server is asked its own prompts and the other one's, and some that come but once.
over = threading.Event()
seen, ran, bad = [], [], []


def sample():
    while not over.is_set():
        seen.append(du(store))
        time.sleep(0.05)


def look_after():
    while not over.is_set() or len(ran) < 3:
        for argv in (["verify"], ["gc", "--limit", str(LIMIT)], ["gc", "--reorder", "--limit", str(LIMIT)]):
            rc, out = program(argv[0], store, *argv[1:])
            ran.append(argv)
            if rc != 0:
                bad.append((argv, rc, out))
            time.sleep(0.2)


def client(who):
    wrong = []
    for i in range(N):
        for which in (who, 1 - who):
            r = ask(who, which, i)
            if r.status != 200 or r.text != alone[which][i].text:
                wrong.append((who, which, i, r, alone[which][i].text))
        r = servers[who].complete(words(16, 1000 * who + i + 500), 1)
        if r.status != 200:
            wrong.append((who, i, r))
    return wrong


around = [threading.Thread(target=f) for f in (sample, look_after)]
for t in around:
    t.start()
wrong = at_once([lambda: client(0), lambda: client(1), other_space])
ok(wrong[0] == [] and wrong[1] == [], wrong[:2])
ok(wrong[2][0] == 0, wrong[2])

# One is killed in its work. The other one doesn't notice.
going = a.open(endless(prompt=prompt(0, 0) + " " + words(20, 9), max_tokens=300, stream=True))
a.wait_for(lambda: a.busy() == 1, "a running request")
a.stop(signal.SIGKILL)
for which in range(2):
    for i in range(N):
        r = ask(1, which, i)
        ok(r.status == 200 and r.text == alone[which][i].text, (which, i, r))
going.close()
over.set()
for t in around:
    t.join()
ok(bad == [] and len(ran) >= 3, bad)
ok(len(seen) > 10 and max(seen) <= MOST, (len(seen), max(seen), MOST))
m = b.metrics()
ok(m["impress_store_evictions_total"] > 0, "a limit that was reached")
ok(m["impress_store_corrupt_chunks_total"] == 0 and m["impress_store_io_errors_total"] == 0, "nothing found damaged")
ok(b.get("/health").json == {"status": "ok"}, b.get("/health"))
ok(b.stop() == 0, "exit 0")
rc, out = program("gc", store, "--limit", str(LIMIT))
ok(rc == 0 and du(store) <= LIMIT, (rc, out, du(store)))
rc, out = program("verify", store)
ok((rc, out) == (0, "clean\n"), (rc, out))
print("du: %d samples, most %d of %d; %d commands" % (len(seen), max(seen), MOST, len(ran)))
finish()
PY
finish
