#!/usr/bin/env bash
# The page at /ui, in a real browser: no error, nothing from outside, by keyboard alone, light and dark, and what rules of
# accessibility a program can check. With UI_SHOTS=FOLDER four screenshots are left there.
. "$(dirname "$0")/lib.sh"
need_model
python3 browser.py || { echo "skipped: no Chromium (scripts/deps.sh --ui installs it)"; exit 77; }
export tmp IMPRESS IMPRESS_MODEL
timeout 800 python3 - <<'PY' || failures=1
from browser import *
from decimal import ROUND_HALF_UP, Decimal
from serve import *

def fixed(x, digits):  # as toFixed does it
    return str(Decimal(x).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))

def share(part, whole):
    return fixed(100 * part / whole, 1) + "\u00a0%" if whole else "\u2013"

def size(n):
    i = 0
    while n >= 1024:
        n, i = n / 1024, i + 1
    return (fixed(n, 1 if n < 10 else 0) if i else "%d" % n) + "\u00a0" + ("B", "KiB", "MiB", "GiB")[i]

admin_key = "admin-key-%d" % random.randrange(1 << 30)
handbook, other = words(220, 5), words(120, 6)
for options in (("--slots", "2"), ("--slots", "1", "--host-cache", "16M")):  # what the first one stored, the second loads
    s = Server("--ctx-size", "2048", "--limit", "256M", *options, env={"IMPRESS_ADMIN_KEY": admin_key})
    if options[1] == "1":
        break
    for text in (handbook + words(45, 20), handbook + words(45, 21), handbook + words(45, 22), other):
        r = s.post("/admin/warm", {"prompt": text}, key=admin_key)
        ok(r.status == 200 and r.json["stored_tokens"] > 0, r)
    ok(s.stop() == 0, "stop")
url = "http://127.0.0.1:%d/ui" % s.port
checks = open("ui_checks.js").read()

# The reply: a policy that lets nothing in, and a number that is new each time.
page = s.get("/ui")
policy = page.headers["content-security-policy"]
nonce = re.search(r"script-src 'nonce-([0-9a-f]{32})'", policy)
ok(page.status == 200 and page.headers["content-type"] == "text/html; charset=utf-8", page.headers)
ok("default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy and nonce, policy)
ok(nonce and page.body.count('nonce="%s"' % nonce[1]) == 2 and "@" + "NONCE@" not in page.body, "the number is in the page")
ok(s.get("/ui").headers["content-security-policy"] != policy, "a new number each time")
ok(not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page.body), "no address of another place")
ok(s.request("HEAD", "/ui").status == 200 and s.post("/ui", "").status == 405, "GET and HEAD")
root = s.get("/")
ok(root.status == 302 and root.headers["location"] == "/ui", root.headers)
ok(s.event("listening")["url"] == "http://127.0.0.1:%d/" % s.port, s.event("listening"))

b = Browser()
b.media("light")
b.size(1200, 900)
b.go(url[:-2])  # from / to /ui
ok(b.eval("location.href") == url, "the page is where / leads")
ok(b.wait("document.querySelector('#server').textContent === 'connected'", "figures"), "the page finds the server")
ok(b.eval("document.querySelector('#tree').children.length") == 0, "no tree without a key")
ok("0 of 1" in b.eval("document.querySelector('#now').innerText"), "figures need no key here")
for place in ("tiers", "tree-note"):
    said = b.eval("document.querySelector('#%s').textContent" % place)
    ok(said == "The admin key is needed for this.", (place, said))
ok(b.eval(checks) == [], b.eval(checks))

# By keyboard: past the skip link to the key; a wrong one, then the right one.
def focused():
    return b.eval("document.activeElement.id || document.activeElement.className || document.activeElement.dataset.key")

b.key("Tab")
ok(focused() == "skip" and b.eval("document.activeElement.getBoundingClientRect().left >= 0"), "a link past the head: " + focused())
b.key("Tab")
ok(focused() == "key", focused())
ring = b.eval("getComputedStyle(document.activeElement).outlineStyle + getComputedStyle(document.activeElement).outlineWidth")
ok(ring == "solid3px", "the focus shows: " + ring)
b.type("not-the-key")
b.key("Enter")
ok(b.wait("document.querySelector('#status').textContent === \"This key isn't right.\"", "refusal"), "a wrong key is told")
ok(b.eval("getComputedStyle(document.querySelector('#status')).fontWeight") == "600", "not by colour alone")
wrong = len(b.errors())
ok(all("401" in e for e in b.errors()), b.errors())
b.type(admin_key)
b.key("Enter")
ok(b.wait("document.querySelectorAll('#tree [role=treeitem]').length >= 2", "the tree"), "the tree shows a stored prefix")
ok("The admin key is right." in b.eval("document.querySelector('#status').textContent"), "told")
ok(b.eval("document.querySelector('#key').value") == "", "the key doesn't stay in the field")
ok(b.eval("document.querySelectorAll('[role=meter]').length") == 3, "three tiers")

# Meanwhile requests: one computed, the same from live cells, then from the store, with another prompt among them.
for i in range(10):
    s.complete((handbook + words(45, 20 + i % 3) if i % 4 else other) + count(i * 7) if i > 1 else count(3), 2)
    s.wait_for(s.idle, "an idle server")
    time.sleep(1)
ok(b.wait("document.querySelectorAll('#ttft-chart rect').length > 0", "columns"), "the split is drawn")
ok(b.wait("/answers/.test(document.querySelector('#ttft-chart').getAttribute('aria-label'))", "text"), "and told")
ok(b.eval("document.querySelector('#ttft').tBodies[0].rows.length") == 7, "parts, and all of it")
ok("were computed" in b.eval("document.querySelector('#tokens').textContent"), "tokens")

# Where prefixes came from, and how full the tiers are: what /metrics says, number by number. It looks every two seconds.
def same(got, want, what):
    for _ in range(60):
        g, w = got(), want()
        if g == w:
            return
        time.sleep(0.5)
    ok(False, "%s: %s, not %s" % (what, g, w))

def page_hits():
    return b.eval("[...document.querySelector('#hits').tBodies[0].rows].map((r) => [...r.cells].map((c) => c.textContent))")

def true_hits():
    m = s.metrics()
    way = lambda w: m['impress_prompts_total{way="%s"}' % w]
    hits = lambda t: m['impress_prefix_hits_total{tier="%s"}' % t]
    n = sum(map(way, ("computed", "live", "whole", "partial")))
    return [["Live cells", share(way("live"), n), "%d" % way("live"), ""],
            *([t.title(), share(hits(t), n), "%d" % hits(t), size(m['impress_prefix_bytes_total{tier="%s"}' % t])]
              for t in ("device", "host", "disk")),
            ["Nowhere: computed", share(way("computed"), n), "%d" % way("computed"), ""]]

same(page_hits, true_hits, "the tiers' hits")
hits = [r[2] for r in true_hits()]
ok("0" not in hits[:1] + hits[2:], "live cells, host, disk and nowhere have something to show: %s" % hits)
ok(len(set(hits)) > 2, "and not all the same: %s" % hits)

def page_meters():
    return b.eval("[...document.querySelectorAll('[role=meter]')].map((e) => [e.getAttribute('aria-label'), "
                  "e.getAttribute('aria-valuenow'), e.getAttribute('aria-valuetext')])")

def true_meters():
    m = s.metrics()
    rows = [("Device", m['impress_tier_bytes{tier="device"}'], 0), ("Host", m['impress_tier_bytes{tier="host"}'], 16 << 20),
            ("Disk", m["impress_store_bytes"], 256 << 20)]
    return [[name, fixed(100 * n / limit, 1), "%s of %s, %s" % (size(n), size(limit), share(n, limit))] if limit
            else [name, "0.0", "not in use"] for name, n, limit in rows]

same(page_meters, true_meters, "the tiers' meters")
full = {name: float(now) for name, now, _ in page_meters()}
ok(0 < full["Disk"] < 100 and full["Host"] > 0, full)
wide = b.eval("[...document.querySelectorAll('.bar')].map((e) => 100 * e.firstChild.getBoundingClientRect().width / e.clientWidth)")
ok(all(abs(w - n) < 1 for w, n in zip(wide, full.values())), "bars as long as what they tell: %s" % wide)

# The tree by keyboard: to it, down, select, unfold; what is selected is told and shown.
b.eval("document.querySelector('#refresh').focus()")
b.key("Enter")
newest = "document.querySelector('[role=group] > [role=treeitem]')"
ok(b.wait(newest + ".hasAttribute('aria-expanded')", "the newest first"), "the prefix that was used last comes first")
b.key("Tab")
ok(b.eval("document.activeElement.getAttribute('role')") == "treeitem", "one Tab into the tree: " + focused())
first = focused()
ok(first.startswith("s"), first)
b.key("ArrowLeft")
ok(b.eval("document.activeElement.getAttribute('aria-expanded')") == "false", "folded")
b.key("ArrowRight")
ok(b.eval("document.activeElement.getAttribute('aria-expanded')") == "true", "unfolded")
b.key("ArrowDown")
item = focused()
ok(item.startswith("n"), item)
b.key("Enter")
ok(b.wait("!document.querySelector('#detail').hidden && document.querySelector('#strip-note').textContent !== ''", "strip"), "shown")
ok(focused() == item and b.eval("document.activeElement.getAttribute('aria-selected')") == "true", "selected, and still there")
note = b.eval("document.querySelector('#strip-note').textContent")
ok("importan" in note.lower() and note == b.eval("document.querySelector('#strip').getAttribute('aria-label')"), note)
def node_list():
    reply = s.get("/admin/prefixes", headers={"Authorization": "Bearer " + admin_key})
    return {n["id"]: n for n in reply.json["data"]}

def true_facts():
    n = node_list()[int(item[1:])]
    return {"Tokens": "%d, from %d" % (n["tokens"], n["first_token"]), "Size": size(n["bytes"]), "Hits": "%d" % n["hits"],
            "Kind": "derived" if n["derived"] else "exact"}

def page_facts():
    facts = b.eval("Object.fromEntries([...document.querySelectorAll('#facts > div')].map((d) => "
                   "[d.querySelector('dt').textContent, d.querySelector('dd').textContent]))")
    ok({"Stored", "Used"} <= set(facts) and all(facts.values()), facts)
    return {k: facts.get(k) for k in ("Tokens", "Size", "Hits", "Kind")}

same(page_facts, true_facts, "the prefix that was chosen")
chosen = node_list()[int(item[1:])]
ok(chosen["hits"] > 0 and chosen["bytes"] > 0, chosen)

# How important its tokens are: there are requests that told, a column for each token, none of them of no height.
told = s.get("/admin/prefixes/%d/importance" % chosen["id"], headers={"Authorization": "Bearer " + admin_key}).json
ok(told["source"] == "requests" and len(told["values"]) == chosen["tokens"] < 600, (told["source"], chosen))
ok("the mean over %d requests" % told["requests"] in note, note)
columns = re.findall(r"M[\d.]+ 90V([\d.]+)H[\d.]+V90Z", b.eval("(document.querySelector('#strip path') || document.body).getAttribute('d') || ''"))
ok(len(columns) == chosen["tokens"], "%d columns of %d tokens" % (len(columns), chosen["tokens"]))
highest = max(range(chosen["tokens"]), key=lambda i: told["values"][i])
ok(columns and float(columns[highest]) == min(map(float, columns)) < 10, "the most important one is the highest: %s" % columns[:9])
b.key("End")
ok(focused() != item, "End goes to the last")
b.key("Home")
ok(focused() == first, "Home to the first")
b.key("ArrowDown")
b.key("ArrowRight")
ok(b.eval("document.activeElement.getAttribute('aria-expanded')") == "true", "its questions below it")

# Light, dark, narrow, still: the rules hold in each.
shots = os.environ.get("UI_SHOTS")
for scheme in ("light", "dark"):
    b.media(scheme)
    found = b.eval(checks)
    ok(found == [], (scheme, found))
    back = b.eval("getComputedStyle(document.body).backgroundColor")
    ok((back == "rgb(255, 255, 255)") == (scheme == "light"), (scheme, back))
    for width, name in ((1200, "ui"), (390, "ui-narrow")):
        if shots:
            b.size(width, 900)
            b.size(width, b.eval("document.documentElement.scrollHeight"))
            b.eval("document.activeElement.blur()")
            b.shot(os.path.join(shots, "%s-%s.png" % (name, scheme)))
            b.size(1200, 900)
b.size(320, 700)
ok(b.eval("document.documentElement.scrollWidth") <= 320, "a narrow window needs no scrolling sideways: %d" %
   b.eval("document.documentElement.scrollWidth"))
ok(b.eval(checks) == [], b.eval(checks))
b.size(390, 844)
ok(b.eval("document.documentElement.scrollWidth") <= 390, "nor one as wide as a telephone's")
broken = b.eval("""[...document.querySelectorAll('td')].map((e) => {
    const r = document.createRange();
    r.selectNodeContents(e);
    return [e.textContent, new Set([...r.getClientRects()].map((c) => c.top)).size];
}).filter(([, lines]) => lines > 1)""")
ok(broken == [], "a number and its unit stay on one line: %s" % broken)
signs = b.eval("""[...document.querySelectorAll('#tree .row')].map((e) => {
    const row = e.getBoundingClientRect(), name = e.querySelector('.name').getClientRects()[0];
    return [e.textContent, name.top - row.top, name.left - row.left];
})""")
ok(len(signs) > 2 and all(top < 10 and left > 20 for _, top, left in signs), "the sign stands beside its name: %s" % signs)
b.size(1200, 900)
b.media("light", "reduce")
moving = b.eval("[...document.querySelectorAll('*')].filter((e) => getComputedStyle(e).transitionDuration !== '0s').length")
ok(moving == 0, "nothing moves")
b.media("light")

# What a screen reader is given.
tree = b.call("Accessibility.getFullAXTree")["nodes"]
roles = [n["role"]["value"] for n in tree if not n["ignored"] and "role" in n]
for role in ("main", "heading", "tree", "treeitem", "meter", "status", "table", "region", "button"):
    ok(role in roles, "no " + role)
unnamed = [n["role"]["value"] for n in tree if not n["ignored"] and n.get("role", {}).get("value") in
           ("button", "textbox", "treeitem", "meter", "image", "img", "region", "tree", "link") and not n.get("name", {}).get("value")]
ok(unnamed == [], unnamed)

# One is one: "1 hit", not "1 hits".
b.eval("""window.realFetch = window.fetch, window.fetch = async (path, how) => {
    const reply = await window.realFetch(path, how), text = await reply.text();
    const one = path === '/admin/prefixes' ? text.replace(/"(tokens|hits)":\\d+/g, '"$1":1') : text;
    return new Response(one, {status: reply.status});
}, document.querySelector('#refresh').click()""")
ok(b.wait("/1 hit/.test(document.querySelector('#tree').textContent)", "ones"), "one hit")
said = b.eval("document.querySelector('#tree').textContent")
ok("1 token from" in said and not re.search(r"\b1 (tokens|hits)", said), said)
b.eval("window.fetch = window.realFetch, document.querySelector('#refresh').click()")
ok(b.wait("!/1 token from/.test(document.querySelector('#tree').textContent)", "as it is"), "as it is")

# Pin and drop, asked back.
b.eval("document.querySelector('#pin').focus()")
b.key("Enter")
ok(b.wait("document.querySelector('#pin').textContent === 'Unpin'", "pinned"), "pinned")
ok(b.eval("document.querySelector('[aria-selected=true]').textContent").find("pinned") > 0, "told in the tree")
b.eval("document.querySelector('#drop').focus()")
b.key("Enter")
ok(b.eval("document.querySelector('#ask').open") and focused() == "keep", "asked back, No first")
b.key("Escape")
ok(not b.eval("document.querySelector('#ask').open") and focused() == "drop", "Escape keeps it")
b.key("Enter")
b.key("Tab")
b.key("Enter")
gone = "![...document.querySelectorAll('[role=treeitem]')].some((e) => e.dataset.key === '%s')" % item
ok(b.wait(gone, "dropped"), "dropped")
ok(chosen["id"] not in node_list(), "and gone from the store")

# The policy holds: no script that isn't the page's, nothing from elsewhere.
ok(len(b.errors()) == wrong, b.errors()[wrong:])
ok(all(u.startswith(url[:-2]) or u.startswith("data:") for u in b.urls()), set(b.urls()))
b.eval("(() => { const x = document.createElement('script'); x.textContent = 'window.injected = 1'; document.body.append(x); })()")
ok(b.eval("window.injected") is None, "a script without the number doesn't run")
ok(b.eval("fetch('http://127.0.0.1:9/').then(() => 'went', (e) => 'held')") == "held", "no request to elsewhere")
ok(any("Content Security Policy" in e or "violates" in e for e in b.errors()[wrong:]), b.errors()[wrong:])

# The key is nowhere but in memory.
ok(b.eval("localStorage.length + sessionStorage.length + document.cookie.length") == 0, "nothing is kept")
ok(admin_key not in b.eval("document.documentElement.outerHTML + location.href"), "nor shown")
b.call("Page.reload")
ok(b.wait("document.querySelector('#server').textContent === 'connected'", "the page again"), "again")
ok(b.eval("document.querySelector('#tree').children.length") == 0, "a new page has no key")

# A server that went away.
ok(s.stop() == 0, "stop")
ok(b.wait("/can't be reached/.test(document.querySelector('#status').textContent)", "told"), "told that the server is gone")
ok(b.eval("document.querySelector('#server').textContent") == "not connected", "and not called connected")

# What a newcomer sees of servers with other keys: what is missing, why, and how to come by it.
def text(place):
    return b.eval("document.querySelector('%s').innerText" % place)

def shown(place):
    return b.eval("document.querySelector('%s').getClientRects().length" % place) > 0

def newcomer(keys, ready):
    s = Server("--slots", "1", "--ctx-size", "256", store="none", env=keys)
    b.go("http://127.0.0.1:%d/ui" % s.port)
    ok(b.wait("location.port === '%d' && (%s)" % (s.port, ready), "the page"), (list(keys), text("header")))
    ok(text("#server") == "connected", text("#server"))
    ok(shown("#now") != ("A key is needed" in text("section")), "figures, or why there are none: " + text("section"))
    for scheme in ("light", "dark"):
        b.media(scheme)
        ok(b.eval(checks) == [], (list(keys), scheme, b.eval(checks)))
    return s

wants = "document.querySelector('#status').textContent === 'This server wants a key.'"
advice = re.compile(r"start the server with --admin-key-file FILE, or with \$IMPRESS_ADMIN_KEY")
s = newcomer({}, "/--admin-key-file/.test(document.querySelector('#tiers').textContent)")
ok(b.wait("document.querySelector('#now').children.length > 0", "figures") and shown("#now"), "figures without a key")
ok(advice.search(text("#tiers")) and advice.search(text("#tree-note")), text("#tiers"))
ok(not shown("#key") and not shown("#key-note") and shown("#pause"), "no field for a key where none can be right")
ok(s.stop() == 0, "stop")

s = newcomer({"IMPRESS_API_KEY": "key-of-anne-1"}, wants)
ok(not shown("#now") and shown("#key") and text("#key-label") == "API key", text("header"))
ok(advice.search(text("#tiers")) and advice.search(text("#tree-note")), text("#tiers"))
ok(s.stop() == 0, "stop")

s = newcomer({"IMPRESS_API_KEY": "key-of-anne-1", "IMPRESS_ADMIN_KEY": admin_key}, wants)
ok(not shown("#now") and text("#key-label") == "Admin or API key", text("header"))
ok(text("#tiers") == "The admin key is needed for this.", text("#tiers"))
ok(s.complete("Hello", 2, key="key-of-anne-1").status == 200, "a request")
red = len(b.errors())
b.eval("document.querySelector('#key').focus()")
b.type("key-of-anne-1")
b.key("Enter")
ok(b.wait("/client's key/.test(document.querySelector('#status').textContent)", "a client"), text("#status"))
ok(shown("#now") and "Prompts\n1" in text("#now") and "Slots" not in text("#now"), "the client's own figures: " + text("#now"))
looks = len([u for u in b.urls() if u.endswith("/metrics")])
s.wait_for(lambda: len([u for u in b.urls() if u.endswith("/metrics")]) > looks + 1, "it looks again, twice")
ok(len(b.errors()) == red, "and isn't tried as the admin's: %s" % b.errors()[red:])
b.type(admin_key)
b.key("Enter")
ok(b.wait("/admin key is right/.test(document.querySelector('#status').textContent)", "the admin"), text("#status"))
ok("Slots at work" in text("#now") and "version" in text("#server") and text("#tree-note") == "The store is empty.", text("body"))
ok(s.stop() == 0, "stop")
b.close()
finish()
PY
finish
