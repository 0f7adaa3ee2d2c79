"use strict";
/* Looks at /metrics and /admin/ every two seconds and draws what it finds. Everything shown as a picture stands beside it
 * as text. Nothing is kept but in this page's memory. */
(() => {
  const LOOK_MS = 2000, COLUMNS = 40, TREE_LOOKS = 5, MAX_SIBLINGS = 500, TOP = 5;
  const PARTS = [ /* in the order of the request's way; classes part-0, ... */
    ["Waiting for a slot", "queue"], ["Matching", "match"], ["Identifying", "identify"], ["Waiting for reads", "io_wait"],
    ["Gathering", "gather"], ["Computing", "compute"]];
  const $ = (id) => document.getElementById(id);
  const state = {key: "", refused: false, paused: false, before: null, columns: [], looks: 0, nodes: new Map(), roots: [],
    open: new Set(), seen: new Set(), selected: null, active: null, admin: false, busy: false,
    off: null /* no admin key is set; null: not known yet */, closed: false /* figures want a key, too */, client: false};

  /* ---- text and elements */

  const bytes = (n) => {
    let i = 0;
    while (n >= 1024 && i < 4) { n /= 1024; i++; }
    return (i ? n.toFixed(n < 10 ? 1 : 0) : String(n)) + "\u00a0" + ["B", "KiB", "MiB", "GiB", "TiB"][i];
  };
  const percent = (part, all) => all > 0 ? (100 * part / all).toFixed(1) + "\u00a0%" : "\u2013"; /* on one line */
  const count = (n) => Math.round(n).toLocaleString("en");
  const many = (n, one, more = one + "s") => count(n) + " " + (Math.round(n) === 1 ? one : more);
  const ago = (then) => {
    const s = Math.max(0, Date.now() / 1000 - then);
    return s < 90 ? Math.round(s) + " s ago" : s < 5400 ? Math.round(s / 60) + " min ago"
      : s < 129600 ? Math.round(s / 3600) + " h ago" : Math.round(s / 86400) + " d ago";
  };
  const make = (tag, text, attributes = {}) => {
    const e = document.createElement(tag);
    if (text !== undefined) e.textContent = text;
    for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
    return e;
  };
  const figures = (list, pairs) => list.replaceChildren(...pairs.map(([k, v]) => {
    const box = make("div");
    box.append(make("dt", k), make("dd", v));
    return box;
  }));
  const row = (head, cells, part) => {
    const tr = make("tr"), th = make("th", undefined, {scope: "row", class: part === undefined ? "" : "marked"});
    if (part !== undefined) th.append(make("span", undefined, {class: "swatch part-" + part, "aria-hidden": "true"}));
    th.append(head);
    tr.append(th, ...cells.map((c) => make("td", c)));
    return tr;
  };
  const svg = (tag, attributes) => {
    const e = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
    return e;
  };
  const say = (text, bad) => {
    const s = $("status");
    if (s.textContent !== text) s.textContent = text; /* the same again isn't read aloud */
    s.className = bad ? "bad" : "";
  };

  /* ---- asking */

  const ask = async (path, body, key = state.refused ? "" : state.key) => {
    const headers = key ? {Authorization: "Bearer " + key} : {};
    const reply = await fetch(path, {method: body ? "POST" : "GET", headers, body: body ? JSON.stringify(body) : undefined,
      cache: "no-store", credentials: "omit"});
    const text = await reply.text();
    if (reply.ok) return text;
    let error = {message: "status " + reply.status};
    try { error = JSON.parse(text).error || error; } catch { /* not ours */ }
    throw Object.assign(new Error(error.message), {status: reply.status, code: error.code});
  };

  const parseMetrics = (text) => {
    const m = {};
    for (const line of text.split("\n")) {
      const at = line.lastIndexOf(" ");
      if (at > 0 && line[0] !== "#") m[line.slice(0, at)] = Number(line.slice(at + 1));
    }
    return m;
  };

  /* ---- figures */

  const parts = (m, before) => {
    const of = (name) => (m[name] || 0) - (before ? before[name] || 0 : 0);
    const n = of("impress_ttft_seconds_count");
    return {n, all: n > 0 ? 1000 * of("impress_ttft_seconds_sum") / n : 0,
      parts: PARTS.map(([, name]) => n > 0 ? Math.max(0, 1000 * of("impress_" + name + "_seconds_sum") / n) : 0)};
  };

  const drawTtft = (m) => {
    const start = parts(m, null), fresh = state.before ? parts(m, state.before) : {n: 0};
    if (fresh.n > 0) state.columns = [...state.columns, fresh].slice(-COLUMNS);
    const n = state.columns.reduce((a, c) => a + c.n, 0);
    const mean = (f) => n > 0 ? state.columns.reduce((a, c) => a + c.n * f(c), 0) / n : 0;
    const all = mean((c) => c.all);
    $("ttft").tBodies[0].replaceChildren(
      ...PARTS.map(([label], i) => {
        const ms = mean((c) => c.parts[i]);
        return row(label, [n ? ms.toFixed(1) : "\u2013", n ? percent(ms, all) : "\u2013", start.n ? start.parts[i].toFixed(1) : "\u2013"], i);
      }), row("All of it", [n ? all.toFixed(1) : "\u2013", "", start.n ? start.all.toFixed(1) : "\u2013"]));
    const chart = $("ttft-chart"), top = Math.max(1e-9, ...state.columns.map((c) => Math.max(c.all, c.parts.reduce((a, b) => a + b, 0))));
    const width = 600 / COLUMNS, shapes = [];
    state.columns.forEach((c, i) => {
      let y = 140;
      c.parts.forEach((ms, p) => {
        const h = 136 * ms / top;
        y -= h;
        shapes.push(svg("rect", {class: "part-" + p, x: (COLUMNS - state.columns.length + i) * width + 1, y, width: width - 2,
          height: Math.max(0, h - 0.5)}));
      });
    });
    chart.replaceChildren(...shapes);
    const largest = PARTS.map(([label], i) => [mean((c) => c.parts[i]), label]).sort((a, b) => b[0] - a[0])[0];
    chart.setAttribute("aria-label", n ? `Lately ${many(n, "answer")}, on average ${all.toFixed(0)} ms to the first token, ` +
      `most of it: ${largest[1].toLowerCase()}, ${largest[0].toFixed(0)} ms.` : "No answer since this page was opened.");
    $("ttft-scale").textContent = n ? `The highest column is ${top.toFixed(0)} ms; ${many(n, "answer is", "answers are")} shown.`
      : "No answer since this page was opened.";
  };

  const drawHits = (m) => {
    const way = (w) => m[`impress_prompts_total{way="${w}"}`] || 0;
    const all = ["computed", "live", "whole", "partial"].reduce((a, w) => a + way(w), 0);
    const tier = (t) => [m[`impress_prefix_hits_total{tier="${t}"}`] || 0, m[`impress_prefix_bytes_total{tier="${t}"}`] || 0];
    $("hits").tBodies[0].replaceChildren(
      row("Live cells", [percent(way("live"), all), count(way("live")), ""]),
      ...["device", "host", "disk"].map((t) => {
        const [hits, n] = tier(t);
        return row(t[0].toUpperCase() + t.slice(1), [percent(hits, all), count(hits), bytes(n)]);
      }), row("Nowhere: computed", [percent(way("computed"), all), count(way("computed")), ""]));
    const prompt = m.impress_prompt_tokens_total || 0, from = (s) => m[`impress_prompt_tokens_cached_total{source="${s}"}`] || 0;
    $("tokens").textContent = prompt ? `Of ${many(prompt, "token")} of prompts, ${percent(from("live"), prompt)} were in live ` +
      `cells, ${percent(from("store"), prompt)} in the store, and ` +
      `${percent(m.impress_prompt_tokens_computed_total || 0, prompt)} were computed.` : "No prompt yet.";
    /* With a client's key the page of numbers has those of this client only: what isn't there isn't drawn. */
    const whole = "impress_slots" in m;
    figures($("now"), [
      ...whole ? [["Slots at work", `${count(m.impress_slots_busy || 0)} of ${count(m.impress_slots)}`],
        ["Waiting", count(m.impress_queue_length || 0)]] : [],
      ["Prompts", count(all)],
      ["Tokens generated", count(m.impress_generated_tokens_total || 0)],
      ["Refused", count(m.impress_queue_refused_total || 0)],
      ...whole ? [["Stored prefixes", count(m.impress_store_prefixes || 0)],
        ["Evicted", count(m.impress_store_evictions_total || 0)],
        ["Corrupt chunks", count(m.impress_store_corrupt_chunks_total || 0)]] : []]);
  };

  const drawTiers = (stats) => {
    $("server").textContent = `${stats.model}, ${many(stats.context_tokens, "token")} of context, version ${stats.version}`;
    if (!stats.store) {
      $("tiers").replaceChildren(make("p", "This server has no store.", {class: "note"}));
      return;
    }
    $("tiers").replaceChildren(...stats.tiers.map((t) => {
      const share = t.limit_bytes > 0 ? Math.min(1, t.bytes / t.limit_bytes) : 0, name = t.tier[0].toUpperCase() + t.tier.slice(1);
      const text = t.limit_bytes > 0 ? `${bytes(t.bytes)} of ${bytes(t.limit_bytes)}, ${percent(t.bytes, t.limit_bytes)}` : "not in use";
      const box = make("div", undefined, {class: "tier"}), bar = make("div", undefined, {class: "bar", role: "meter",
        "aria-label": name, "aria-valuemin": "0", "aria-valuemax": "100", "aria-valuenow": (100 * share).toFixed(1),
        "aria-valuetext": text}), fill = make("div");
      fill.style.width = 100 * share + "%";
      bar.append(fill);
      box.append(make("div", `${name}: ${text}`), bar);
      return box;
    }), make("p", `${stats.store.io_mode}. ${stats.store.note || ""}`, {class: "note"}));
  };

  /* ---- the tree: spaces, and the nodes below them. Keys are "s" and a space, or "n" and a number. */

  const takeNodes = (list) => {
    state.nodes.clear();
    const spaces = new Map();
    for (const n of list) state.nodes.set("n" + n.id, {key: "n" + n.id, node: n, children: []});
    for (const n of list) {
      const item = state.nodes.get("n" + n.id), parent = state.nodes.get("n" + n.parent);
      if (!spaces.has(n.space)) spaces.set(n.space, {key: "s" + n.space, space: n.space, model: n.model, children: [], tokens: 0, bytes: 0});
      const space = spaces.get(n.space);
      space.tokens += n.tokens;
      space.bytes += n.bytes;
      item.parent = parent || space;
      item.parent.children.push(item);
    }
    state.roots = [...spaces.values()];
    for (const s of state.roots) {
      state.nodes.set(s.key, s);
      if (!state.seen.has(s.key)) state.open.add(s.key);
      state.seen.add(s.key);
    }
    for (const item of state.nodes.values()) item.children.sort((a, b) => b.node.used - a.node.used || a.node.id - b.node.id);
    if (!state.nodes.has(state.selected)) state.selected = null;
    if (!state.nodes.has(state.active)) state.active = state.roots.length ? state.roots[0].key : null;
  };

  const itemRow = (item) => {
    const r = make("div", undefined, {class: "row"}), n = item.node;
    const add = (text, cls) => r.append(make("span", text, cls ? {class: cls} : {}), " ");
    if (!n) {
      add(item.model || "model", "name");
      add(`space ${item.space.slice(0, 8)}`);
      add(many(item.tokens, "token"));
      add(bytes(item.bytes));
      return r;
    }
    add(`Prefix ${n.id}`, "name");
    add(`${many(n.tokens, "token")} from ${count(n.first_token)}`);
    add(bytes(n.bytes));
    add(many(n.hits, "hit"));
    add(`used ${ago(n.used)}`);
    if (n.pinned) add("pinned", "mark");
    if (n.derived) add("derived", "mark");
    return r;
  };

  const itemElement = (item, level, at, of) => {
    const li = make("li", undefined, {role: "treeitem", "aria-level": level, "aria-posinset": at + 1, "aria-setsize": of,
      "aria-selected": String(state.selected === item.key), tabindex: state.active === item.key ? "0" : "-1"});
    li.dataset.key = item.key;
    li.append(itemRow(item));
    li.setAttribute("aria-label", li.textContent.trim());
    if (item.children.length === 0) return li;
    const open = state.open.has(item.key);
    li.setAttribute("aria-expanded", String(open));
    if (!open) return li;
    const group = make("ul", undefined, {role: "group"}), shown = item.children.slice(0, MAX_SIBLINGS);
    group.append(...shown.map((c, i) => itemElement(c, level + 1, i, item.children.length)));
    if (shown.length < item.children.length)
      group.append(make("li", `and ${count(item.children.length - shown.length)} that were used longer ago`, {class: "note", role: "none"}));
    li.append(group);
    return li;
  };

  const drawTree = () => {
    const tree = $("tree"), had = tree.contains(document.activeElement), scrolled = tree.scrollTop;
    tree.replaceChildren(...state.roots.map((r, i) => itemElement(r, 1, i, state.roots.length)));
    tree.scrollTop = scrolled;
    if (had) focusItem(state.active, true);
    const n = [...state.nodes.values()].filter((i) => i.node).length;
    $("tree-note").textContent = n ? `${many(n, "prefix", "prefixes")}. Arrow keys move and unfold, Enter shows a prefix.` : "The store is empty.";
  };

  const elementOf = (key) => [...$("tree").querySelectorAll("[role=treeitem]")].find((e) => e.dataset.key === key);
  const focusItem = (key, still) => {
    const e = elementOf(key);
    if (!e) return;
    for (const other of $("tree").querySelectorAll("[tabindex='0']")) other.tabIndex = -1;
    e.tabIndex = 0;
    state.active = key;
    e.focus({preventScroll: Boolean(still)});
  };

  const toggle = (key, open) => {
    if (open) state.open.add(key); else state.open.delete(key);
    drawTree();
  };

  const onTreeKey = (event) => {
    const li = event.target.closest("[role=treeitem]");
    if (!li || event.altKey || event.ctrlKey || event.metaKey) return;
    const item = state.nodes.get(li.dataset.key), open = state.open.has(item.key) && item.children.length > 0;
    const shown = [...$("tree").querySelectorAll("[role=treeitem]")], at = shown.indexOf(li);
    const go = (e) => { if (e) focusItem(e.dataset.key); };
    switch (event.key) {
    case "ArrowDown": go(shown[at + 1]); break;
    case "ArrowUp": go(shown[at - 1]); break;
    case "Home": go(shown[0]); break;
    case "End": go(shown[shown.length - 1]); break;
    case "ArrowRight":
      if (item.children.length > 0 && !open) toggle(item.key, true);
      else if (open) go(shown[at + 1]);
      break;
    case "ArrowLeft":
      if (open) toggle(item.key, false);
      else if (item.parent) focusItem(item.parent.key);
      break;
    case "Enter": case " ": select(item.key); break;
    default: return;
    }
    event.preventDefault();
  };

  const onTreeClick = (event) => {
    const r = event.target.closest(".row"), li = r && r.parentElement;
    if (!li) return;
    const item = state.nodes.get(li.dataset.key);
    state.active = item.key;
    if (item.children.length > 0 && (!item.node || event.clientX - r.getBoundingClientRect().left < 24)) toggle(item.key, !state.open.has(item.key));
    else select(item.key);
    focusItem(item.key, true);
  };

  /* ---- one prefix */

  const drawStrip = (data) => {
    const values = data.values, n = values.length, top = values.reduce((a, b) => Math.max(a, b), 1), bins = Math.min(n, 600);
    const height = (v) => 86 * Math.log1p(v) / Math.log1p(top); /* the first token often has a hundred times the mean */
    let path = "";
    for (let b = 0; b < bins; b++) {
      let v = 0;
      for (let i = Math.floor(b * n / bins); i < Math.floor((b + 1) * n / bins); i++) v = Math.max(v, values[i]);
      const h = height(v), x = 600 * b / bins, w = 600 / bins;
      path += `M${x.toFixed(2)} 90V${(90 - h).toFixed(2)}H${(x + Math.max(w - (bins < 300 ? 0.5 : 0), 0.5)).toFixed(2)}V90Z`;
    }
    $("strip").replaceChildren(svg("path", {d: path}), svg("line", {x1: 0, x2: 600, y1: 90 - height(1), y2: 90 - height(1)}));
    const order = values.map((v, i) => [v, i]).sort((a, b) => b[0] - a[0]).slice(0, TOP);
    const best = order.map(([v, i]) => `${data.first_token + i} (${v.toFixed(1)})`).join(", ");
    let sum = 0, half = 0;
    const all = values.reduce((a, b) => a + b, 0);
    for (const v of [...values].sort((a, b) => b - a)) { if (sum >= all / 2) break; sum += v; half++; }
    const source = data.source === "requests" ? `the mean over ${many(data.requests, "request")}`
      : data.source === "prefill" ? "by the prompt that it was stored with; no request chose from it yet" : "";
    const text = data.source === "none" ? "Nothing is known yet of how important its tokens are."
      : `Importance of each token on a logarithmic scale, ${source}; 1, the dashed line, is the mean of a whole prefix. The ` +
        `most important, by position in the prompt: ${best}. Half of it all is in ${percent(half, n)} of the tokens.`;
    $("strip-note").textContent = text;
    $("strip").setAttribute("aria-label", text);
  };

  const showDetail = async () => {
    const item = state.nodes.get(state.selected), n = item && item.node;
    $("detail").hidden = !n;
    if (!n) return;
    $("h-detail").textContent = `Prefix ${n.id}`;
    figures($("facts"), [["Tokens", `${count(n.tokens)}, from ${count(n.first_token)}`], ["Size", bytes(n.bytes)],
      ["Hits", count(n.hits)], ["Stored", ago(n.created)], ["Used", ago(n.used)],
      ["Kind", (n.derived ? "derived" : "exact") + (n.pinned ? ", pinned" : "")]]);
    $("pin").textContent = n.pinned ? "Unpin" : "Pin";
    try {
      const data = JSON.parse(await ask(`/admin/prefixes/${n.id}/importance`));
      if (state.selected === item.key) drawStrip(data);
    } catch (e) {
      $("strip").replaceChildren();
      $("strip-note").textContent = "Its importance can't be had: " + e.message;
    }
  };

  const select = (key) => {
    const item = state.nodes.get(key);
    if (!item) return;
    if (!item.node) { toggle(key, !state.open.has(key)); return; }
    state.selected = state.active = key;
    drawTree();
    showDetail();
  };

  const change = async (what, body, told) => {
    try {
      await ask("/admin/" + what, body);
      say(told);
      await lookAtTree();
    } catch (e) {
      say(e.message, true);
    }
  };

  const onPin = () => {
    const n = state.nodes.get(state.selected).node;
    change(n.pinned ? "unpin" : "pin", {node: n.id}, `Prefix ${n.id} is ${n.pinned ? "no longer pinned" : "pinned"}.`);
  };

  const onDrop = () => {
    const n = state.nodes.get(state.selected).node;
    $("ask-text").textContent = `Drop prefix ${n.id}, ${bytes(n.bytes)}, and everything below it?`;
    $("really").onclick = () => {
      $("ask").close();
      change("drop", {node: n.id}, `Prefix ${n.id} was dropped.`);
    };
    $("ask").showModal();
  };

  /* ---- looking */

  const lookAtTree = async () => {
    const key = state.key, list = JSON.parse(await ask("/admin/prefixes")).data;
    if (key !== state.key) return;
    takeNodes(list);
    drawTree();
    await showDetail();
  };

  /* Asked without a key: 401 where there is an admin key, 403 where there is none, and so none that works. */
  const findAdmin = async () => {
    try {
      await ask("/admin/stats", undefined, "");
    } catch (e) {
      if (!e.status) throw e;
      state.off = e.code === "admin_off";
    }
  };

  /* Of figures that aren't there: why not. */
  const drawMissing = (why) => {
    for (const e of document.querySelectorAll("[data-figures]")) e.hidden = Boolean(why);
    for (const e of document.querySelectorAll(".missing")) {
      e.hidden = !why;
      e.textContent = why;
    }
  };

  /* What the page says of keys. */
  const drawKeys = () => {
    const why = state.off === null ? "Not asked yet." : state.off ? "No admin key is set, so nothing can be shown here. To set one, " +
      "start the server with --admin-key-file FILE, or with $IMPRESS_ADMIN_KEY." : "The admin key is needed for this.";
    const useless = state.off === true && !state.closed;
    $("key-field").hidden = $("key-note").hidden = useless;
    $("key-label").textContent = state.off ? "API key" : state.closed ? "Admin or API key" : "Admin key";
    if (state.admin) return;
    $("tree-note").textContent = why;
    $("tiers").replaceChildren(make("p", why, {class: "note"}));
  };

  const lookAsAdmin = async (key) => {
    if (!key || state.refused || state.off) return;
    if (state.client) {
      say("This is a client's key: the figures are of its requests alone.");
      return;
    }
    const stats = JSON.parse(await ask("/admin/stats"));
    if (key !== state.key) return;
    drawTiers(stats);
    $("refresh").disabled = !stats.store;
    if (stats.store && (!state.admin || state.looks % TREE_LOOKS === 0)) await lookAtTree();
    if (key !== state.key) return;
    if (!state.admin) say("The admin key is right.");
    state.admin = true;
  };

  const lookOnce = async (key) => {
    if (state.off === null) {
      await findAdmin();
      drawKeys();
    }
    const m = parseMetrics(await ask("/metrics"));
    if (key !== state.key) return;
    state.client = !("impress_slots" in m); /* its own figures are all that a client's key opens */
    drawTtft(m);
    drawHits(m);
    drawMissing("");
    state.before = m;
    if (!state.admin) $("server").textContent = "connected";
    if (!key) say("");
    await lookAsAdmin(key);
    if (state.admin && $("status").className === "bad") say("");
    state.looks++;
  };

  const tellFailure = (e) => {
    const bare = e.status === 401 && !state.key;
    state.admin = false;
    if (e.status === 401 && state.key) state.refused = true; /* once: the server counts wrong keys */
    if (!e.status) state.off = null; /* another server may come back */
    if (bare && !state.closed) {
      state.closed = true;
      drawKeys();
    }
    say(bare ? "This server wants a key." : e.status === 401 ? "This key isn't right."
      : e.status ? e.message : "The server can't be reached.", true);
    $("server").textContent = e.status ? "connected" : "not connected";
    if (!state.before) drawMissing(e.status === 401 ? "A key is needed for this." : "Nothing came from the server yet.");
  };

  const look = async () => {
    if (state.busy) return;
    state.busy = true;
    const key = state.key;
    try {
      await lookOnce(key);
    } catch (e) {
      if (key === state.key) tellFailure(e);
    }
    state.busy = false;
    if (key !== state.key) look(); /* what came was an answer to the key before */
  };

  const forget = () => {
    state.nodes.clear();
    state.roots = [];
    state.selected = state.active = null;
    state.admin = false;
    if (state.closed) { /* figures of another client aren't where these begin */
      state.before = null;
      state.columns = [];
    }
    $("tree").replaceChildren();
    $("detail").hidden = true;
    $("refresh").disabled = true;
    drawKeys();
  };

  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    state.key = $("key").value.trim();
    state.refused = false;
    $("key").value = "";
    forget();
    look();
  });
  $("pause").addEventListener("click", () => {
    state.paused = !state.paused;
    $("pause").setAttribute("aria-pressed", String(state.paused));
  });
  $("refresh").addEventListener("click", () => lookAtTree().catch((e) => say(e.message, true)));
  $("tree").addEventListener("keydown", onTreeKey);
  $("tree").addEventListener("click", onTreeClick);
  $("pin").addEventListener("click", onPin);
  $("drop").addEventListener("click", onDrop);
  $("keep").addEventListener("click", () => $("ask").close());
  setInterval(() => { if (!state.paused && !document.hidden) look(); }, LOOK_MS);
  look();
})();
