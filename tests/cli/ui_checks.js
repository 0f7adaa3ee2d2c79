/* Rules of accessibility that a program can check, over the page as it is now. Returns a list of what breaks them. */
(() => {
  const bad = [], seen = (e) => e.getClientRects().length > 0 && getComputedStyle(e).visibility !== "hidden";
  const say = (e, what) => bad.push(`${what}: <${e.tagName.toLowerCase()}${e.id ? " id=" + e.id : ""}> ` +
    `${(e.textContent || "").trim().slice(0, 40)}`);
  const named = (e) => e.getAttribute("aria-label") ||
    (e.getAttribute("aria-labelledby") || "").split(" ").map((id) => (document.getElementById(id) || {}).textContent || "").join("") ||
    (e.labels && e.labels.length ? e.labels[0].textContent : "") || (e.matches("input") ? "" : e.textContent);

  if (!document.documentElement.lang) bad.push("no language");
  if (!document.title) bad.push("no title");
  for (const [tag, n] of [["main", 1], ["h1", 1], ["header", 1]])
    if (document.querySelectorAll(tag).length !== n) bad.push(`not ${n} <${tag}>`);
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) bad.push("twice: " + id);
  for (const name of ["aria-labelledby", "aria-describedby", "aria-controls", "for"])
    for (const e of document.querySelectorAll(`[${name}]`))
      for (const id of e.getAttribute(name).split(" ")) if (!document.getElementById(id)) say(e, `${name} names nothing`);
  let level = 0;
  for (const h of document.querySelectorAll("h1, h2, h3, h4")) {
    const l = Number(h.tagName[1]);
    if (l > level + 1) say(h, "a level of headings is left out");
    level = l;
  }

  const focusable = "a[href], button, input, select, textarea, [tabindex]";
  for (const e of document.querySelectorAll(`${focusable}, [role=img], [role=meter], [role=tree], [role=region], section`)) {
    if (!seen(e)) continue;
    if (e.id !== "main" && !(named(e) || "").trim()) say(e, "no name");
  }
  for (const e of document.querySelectorAll("button, input")) {
    const r = e.getBoundingClientRect();
    if (seen(e) && (r.width < 24 || r.height < 24)) say(e, "smaller than 24 pixels");
  }
  for (const e of document.querySelectorAll("[tabindex]")) if (e.tabIndex > 0) say(e, "a tabindex above 0");
  for (const t of document.querySelectorAll("table")) {
    if (![...t.querySelectorAll("thead th")].every((h) => h.scope === "col")) say(t, "a column's head has no scope");
    for (const tr of t.tBodies[0].rows) if (!tr.querySelector("th[scope=row]")) say(tr, "a row has no head");
  }
  for (const e of document.querySelectorAll("[role=treeitem]")) {
    if (!e.parentElement.matches("[role=tree], [role=group]")) say(e, "no tree around it");
    for (const a of ["aria-level", "aria-selected"]) if (!e.hasAttribute(a)) say(e, "no " + a);
  }
  const tree = document.querySelector("[role=tree]");
  if (tree.children.length && tree.querySelectorAll("[tabindex='0']").length !== 1) say(tree, "not one place for the focus");
  for (const e of document.querySelectorAll("[style]")) /* widths of bars are set so; nothing else is */
    if (!e.matches(".bar > div")) say(e, "a style of its own");

  /* contrast: text against what lies behind it, and the shapes of the pictures against theirs */
  const rgb = (s) => (s.match(/[\d.]+/g) || []).map(Number);
  const behind = (e) => {
    for (let at = e; at; at = at.parentElement) {
      const c = rgb(getComputedStyle(at).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
    return [255, 255, 255];
  };
  const light = (c) => {
    const [r, g, b] = c.slice(0, 3).map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let n = walker.nextNode(); n; n = walker.nextNode()) {
    const e = n.parentElement;
    if (!n.textContent.trim() || !seen(e) || e.matches("script, style, :disabled")) continue;
    const r = ratio(rgb(getComputedStyle(e).color), behind(e));
    if (r < 4.5) say(e, `contrast ${r.toFixed(2)}`);
  }
  for (const e of document.querySelectorAll("svg rect, svg path")) {
    const r = ratio(rgb(getComputedStyle(e).fill), behind(e.closest("svg")));
    if (r < 3) say(e, `a shape's contrast ${r.toFixed(2)}`);
  }
  for (const e of document.querySelectorAll(".swatch, .bar > div")) {
    const r = ratio(rgb(getComputedStyle(e).backgroundColor), behind(e.parentElement));
    if (r < 3) say(e, `a mark's contrast ${r.toFixed(2)}`);
  }
  for (const e of document.querySelectorAll("input, button")) {
    const s = getComputedStyle(e), r = Math.max(ratio(rgb(s.borderTopColor), behind(e.parentElement)), ratio(behind(e), behind(e.parentElement)));
    if (seen(e) && r < 3) say(e, `a border's contrast ${r.toFixed(2)}`);
  }
  return [...new Set(bad)];
})()
