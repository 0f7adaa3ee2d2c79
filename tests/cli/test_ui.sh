#!/usr/bin/env bash
# The page at /ui, in a real browser: no error, nothing from outside, by keyboard alone, light and dark, and what rules of
# accessibility a program can check. With UI_SHOTS=FOLDER two screenshots are left there.
. "$(dirname "$0")/lib.sh"
need_model
python3 browser.py || { echo "skipped: no Chromium (scripts/deps.sh --ui installs it)"; exit 77; }
export tmp IMPRESS IMPRESS_MODEL
timeout 800 python3 - <<'PY' || failures=1
from browser import *
from serve import *

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

# Meanwhile requests: from live cells, another prompt, and one more from the store.
for i in range(8):
    s.complete((handbook + words(45, 20 + i % 3) if i % 4 else other) + count(i * 7), 2)
    s.wait_for(s.idle, "an idle server")
    time.sleep(1)
ok(b.wait("document.querySelectorAll('#ttft-chart rect').length > 0", "columns"), "the split is drawn")
ok(b.wait("/answers/.test(document.querySelector('#ttft-chart').getAttribute('aria-label'))", "text"), "and told")
ok(b.eval("document.querySelector('#ttft').tBodies[0].rows.length") == 7, "parts, and all of it")
ok("were computed" in b.eval("document.querySelector('#tokens').textContent"), "tokens")

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
nodes = {n["id"]: n for n in s.request("GET", "/admin/prefixes", headers={"Authorization": "Bearer " + admin_key}).json["data"]}
chosen = nodes[int(item[1:])]
facts = b.eval("document.querySelector('#facts').textContent")
ok("%d, from %d" % (chosen["tokens"], chosen["first_token"]) in facts.replace(",", "", 1) or str(chosen["tokens"]) in facts, facts)
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
    if shots:
        b.size(1200, b.eval("document.documentElement.scrollHeight"))
        b.eval("document.activeElement.blur()")
        b.shot(os.path.join(shots, "ui-%s.png" % scheme))
        b.size(1200, 900)
b.size(320, 700)
ok(b.eval("document.documentElement.scrollWidth") <= 320, "a narrow window needs no scrolling sideways: %d" %
   b.eval("document.documentElement.scrollWidth"))
ok(b.eval(checks) == [], b.eval(checks))
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
left = s.request("GET", "/admin/prefixes", headers={"Authorization": "Bearer " + admin_key}).json["data"]
ok(chosen["id"] not in [n["id"] for n in left], "and gone from the store")

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
b.close()
finish()
PY
finish
