// The page: asks this server what there is, every few seconds while it is visible, and shows it.
// The key stays in this tab's sessionStorage and goes along as an Authorization header.

import { bar, clock, element, hideTip, icicle, putTable, spark, table, timeChart } from "/charts.js";
import { age, bytes, count, many, percent, unitOf } from "/words.js";

const POLL_MS = 5000, WALK_POLLS = 4, BINS = 90;
const TIERS = ["host", "disk", "redis"];
const TIER_WORDS = { host: "memory", disk: "disk", redis: "Redis" };
const at = id => document.getElementById(id);

const seen = { state: null, rows: [], columns: [], tree: null, box: -1, focus: -1, polls: 0 };

// ---- asking

class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

async function ask(path, body) {
  const headers = {};
  const key = sessionStorage.getItem("kvstore-key");
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  const answer = await fetch(`/api/${path}`, { method: body ? "POST" : "GET", headers,
    body: body ? JSON.stringify(body) : undefined, credentials: "omit", redirect: "error" });
  let document = {};
  try { document = await answer.json(); } catch { /* an answer without a document */ }
  if (!answer.ok) throw new Refused(answer.status, document.error || `status ${answer.status}`);
  return document;
}

function takeKeyFromAddress() {
  const found = /^#key=([\w.~-]+)$/.exec(location.hash);
  if (!found) return;
  sessionStorage.setItem("kvstore-key", found[1]);
  history.replaceState(null, "", location.pathname);
}

function say(text) {
  at("notice").textContent = text;
  at("notice").hidden = !text;
}

function pill(text, look) {
  if (at("status").textContent !== text) at("status").textContent = text;
  at("status").className = `pill ${look}`;
}

function wantKey(why) {
  at("login-why").textContent = why;
  at("board").hidden = true;
  if (at("login").hidden) { at("login").hidden = false; at("key").focus(); }
  pill("locked", "");
}

async function poll() {
  try {
    const state = await ask("state");
    const isAdmin = state.role === "admin";
    if (seen.state && state.started_s !== seen.state.started_s) {
      Object.assign(seen, { rows: [], tree: null, box: -1, polls: 0 });
    }
    const isFirst = !seen.state || !seen.rows.length;
    seen.state = state;
    seen.columns = state.columns;
    at("login").hidden = true;
    at("board").hidden = false;
    for (const each of document.querySelectorAll(".admin")) each.hidden = !isAdmin;
    if (isAdmin) await history_(isFirst); else addReading(state.reading);
    say("");
    showState();
    if (isAdmin && seen.polls % WALK_POLLS === 0) await walks();
    seen.polls += 1;
  } catch (error) {
    if (error instanceof Refused && error.status === 401) wantKey(error.message);
    else if (error instanceof Refused && error.status === 403) wantKey(error.message);
    else {
      pill("no answer", "bad");
      say(error instanceof Refused ? error.message : "The server does not answer; trying again.");
    }
  }
}

async function history_(isFirst) {
  const newest = seen.rows.length ? seen.rows[seen.rows.length - 1].sampled_s : 0;
  const found = await ask(isFirst ? "history" : `history?after=${newest}`);
  // What was added from the state gives way to readings of the server's own rhythm.
  seen.rows = seen.rows.filter(row => row.isSampled);
  for (const row of found.rows) seen.rows.push(reading(row, true));
  if (seen.rows.length > 4000) seen.rows = seen.rows.slice(-3600);
  addReading(seen.state.reading);
}

function reading(row, isSampled) {
  const made = { isSampled };
  seen.columns.forEach((name, number) => { made[name] = row[number]; });
  made.sampled_s = isSampled ? made.time_s : (seen.rows.findLast(r => r.isSampled) || {}).time_s || 0;
  return made;
}

function addReading(row) {
  const made = reading(row, false);
  const last = seen.rows[seen.rows.length - 1];
  if (!last || made.time_s > last.time_s + 0.5) seen.rows.push(made);
}

async function walks() {
  seen.tree = await ask("tree");
  const chains = await ask("chains");
  showTree();
  showPlaces();
  showChains(seen.tree.hot, chains.cold);
}

// ---- what happened over time

const chosen = name => document.querySelector(`input[name=${name}]:checked`).value;

// Readings put into bins: what happened in each, and what there was at its end.
function binned() {
  const now = seen.state.now_s, first = seen.rows.length ? seen.rows[0].time_s : now;
  const from = Math.max(now - Number(chosen("range")), first);
  const rows = seen.rows.filter(row => row.time_s >= from - 1);
  const every = Math.max(5, (now - from) / BINS);
  const bins = [];
  let before = rows[0];
  for (const row of rows.slice(1)) {
    if (row.time_s - before.time_s < every * 0.9 && row !== rows[rows.length - 1]) continue;
    const did = { from: before.time_s, to: row.time_s, row };
    for (const name of seen.columns) did[name] = row[name] - before[name];
    bins.push(did);
    before = row;
  }
  return bins;
}

const hitsOf = bin => TIERS.map(tier => bin[`${tier}_hit_tokens`]);
const sum = values => values.reduce((a, b) => a + b, 0);

function shownTiers() {
  const there = seen.state.tiers;
  return TIERS.filter(tier => there ? there.some(each => each.name === tier) : tier !== "redis");
}

function showState() {
  const state = seen.state, bins = binned();
  const trouble = Object.entries(state.troubles || {});
  const bad = (state.tiers || []).filter(each => each.state !== "ok").map(each =>
    `${TIER_WORDS[each.name]}: ${each.state}`);
  if (!state.warm) pill("reading its catalog", "");
  else if (bad.length) pill("not all well", "bad");
  else pill("serving", "good");
  at("about").textContent = `${state.version}, up ${age(state.now_s - state.started_s)}`;
  const open = Object.entries(state.breakers || {}).filter(([, isOpen]) => isOpen).map(([tier]) =>
    `${TIER_WORDS[tier]} is left alone for a while after errors`);
  const warning = state.service && state.service.warning ? [state.service.warning] : [];
  const counted = trouble.length
    ? [`since the start: ${trouble.map(([name, n]) => `${n} ${name.replaceAll("_", " ")}`).join(", ")}`]
    : [];
  say([...bad, ...open, ...warning, ...counted].join("; "));
  showTiles(bins);
  showHits(bins);
  if (state.tiers) { showRoom(bins); showLeft(bins); }
  showTenants();
  showPlaces();
}

function tile(name, value, note, values) {
  const content = element("dd", {}, unitOf(value), element("div", { class: "note" }, note));
  if (values) content.append(spark(values));
  return element("div", { class: "tile" }, element("dt", {}, name), content);
}

function showTiles(bins) {
  const state = seen.state, total = name => sum(bins.map(bin => bin[name]));
  const span = bins.length ? bins[bins.length - 1].to - bins[0].from : 0;
  const tokens = total("tokens"), hits = sum(bins.map(bin => sum(hitsOf(bin))));
  const rate = name => bins.map(bin => bin[name] / Math.max(1e-9, bin.to - bin.from));
  const tiles = [
    tile("Hit ratio", tokens ? percent(hits / tokens) : "- %",
      `${count(hits)} of ${count(tokens)} tokens`,
      bins.map(bin => bin.tokens ? sum(hitsOf(bin)) / bin.tokens : null)),
    tile("Look-ups", `${count(total("requests") / Math.max(1, span))} /s`,
      `${count(total("requests"))} in ${age(span)}`, rate("requests")),
    tile("Stored", `${count(total("stored_pages"))} pages`,
      `${count(total("stored_pages") / Math.max(1, span))} /s`, rate("stored_pages")),
  ];
  if (total("saved_s") || !state.there) {
    tiles.push(tile("Prefill saved", age(total("saved_s")), "as the engines say", rate("saved_s")));
  } else {
    tiles.push(tile("Left", `${count(total("left_pages"))} pages`,
      `${count(total("missed_pages"))} wanted again`, rate("left_pages")));
  }
  if (state.there) {
    tiles.push(tile("Pages", count(state.there.pages),
      `in ${many(state.there.trees, "tree")}, ${count(state.there.runs)} runs`,
      bins.map(bin => bin.row.pages)));
    tiles.push(tile("Sessions", count(state.service.sessions),
      `${many(state.there.leases, "lease")}, ${many(state.there.pinned, "pin")}`));
  }
  at("tiles").replaceChildren(...tiles);
}

function swatch(look, text, value) {
  return element("li", {}, element("span", { class: `swatch b-${look}` }), `${text} `,
    element("b", {}, value));
}

function showHits(bins) {
  const isRatio = chosen("unit") === "ratio", tiers = shownTiers();
  const tokens = sum(bins.map(bin => bin.tokens));
  const points = bins.map(bin => {
    const by = isRatio ? bin.tokens : bin.to - bin.from;
    const hits = tiers.map(tier => bin[`${tier}_hit_tokens`]);
    const values = [...hits, bin.tokens - sum(hits)];
    return { from: bin.from, to: bin.to, bin, values: by ? values.map(each => each / by) : null };
  });
  const series = [...tiers.map(look => ({ look })), { look: "miss" }];
  const share = tier => percent(sum(bins.map(bin => bin[`${tier}_hit_tokens`])) / (tokens || 1));
  const found = sum(bins.map(bin => sum(hitsOf(bin))));
  at("hits-legend").replaceChildren(
    ...tiers.map(tier => swatch(tier, `from ${TIER_WORDS[tier]}`, share(tier))),
    swatch("miss", "computed", percent(tokens ? 1 - found / tokens : 0)));
  timeChart(at("hits-chart"), points, series, {
    height: 220, max: isRatio ? 1 : 0, isStacked: true,
    format: isRatio ? value => `${Math.round(100 * value)} %` : count,
    label: `Prompt tokens found by tier: ${percent(tokens ? found / tokens : 0)} in all.`,
    say: ({ bin }) => [`${clock(bin.from, 0)} to ${clock(bin.to, 0)}`,
      ...tiers.map(tier => `${TIER_WORDS[tier]}: ${percent(bin[`${tier}_hit_tokens`] / (bin.tokens || 1))}`),
      `${count(bin.tokens)} tokens in ${many(bin.requests, "look-up")}`].join("\n"),
  });
  refill("hits-table", () => table("Prompt tokens found by tier over time",
    [["From"], ["Look-ups", "n"], ["Tokens", "n"], ...tiers.map(tier => [TIER_WORDS[tier], "n"])],
    bins.slice(-30).reverse().map(bin => [clock(bin.from, 0), count(bin.requests), count(bin.tokens),
      ...tiers.map(tier => percent(bin[`${tier}_hit_tokens`] / (bin.tokens || 1)))])));
}

// A table that nobody has opened costs nothing.
function refill(id, make) {
  const details = at(id).closest("details");
  const fill = () => putTable(at(id), make());
  details.ontoggle = () => { if (details.open) fill(); };
  if (details.open) fill();
}

function showRoom(bins) {
  const meters = seen.state.tiers.map(tier => {
    const share = tier.used_bytes / (tier.capacity_bytes || 1);
    const label = `${bytes(tier.used_bytes)} of ${bytes(tier.capacity_bytes)}, ${percent(share)}`;
    return element("div", { class: "meter" },
      element("div", { class: "top" }, element("b", {}, TIER_WORDS[tier.name]), element("span", {}, label)),
      bar([[`b-${tier.name}`, share]], `${TIER_WORDS[tier.name]}: ${label}`));
  });
  at("room").replaceChildren(...meters);
  const tiers = shownTiers();
  const size = Object.fromEntries(seen.state.tiers.map(tier => [tier.name, tier.capacity_bytes || 1]));
  const points = bins.map(({ from, to, row }) => ({ from, to, row,
    values: tiers.map(tier => row[`${tier}_bytes`] / size[tier]) }));
  timeChart(at("room-chart"), points, tiers.map(look => ({ look })), {
    height: 130, max: 1, format: value => `${Math.round(100 * value)} %`,
    label: "Bytes in each tier over time.",
    say: ({ to, row }) => [clock(to, 0),
      ...tiers.map(tier => `${TIER_WORDS[tier]}: ${bytes(row[`${tier}_bytes`])}`)].join("\n"),
  });
  refill("room-table", () => table("Bytes in each tier over time",
    [["At"], ...tiers.map(tier => [TIER_WORDS[tier], "n"]), ["Pages", "n"]],
    bins.slice(-30).reverse().map(({ to, row }) => [clock(to, 0),
      ...tiers.map(tier => bytes(row[`${tier}_bytes`])), count(row.pages)])));
}

function showLeft(bins) {
  const reasons = seen.state.reasons.filter(each => each.left);
  const most = Math.max(1, ...reasons.map(each => each.left));
  const points = bins.map(bin => ({ from: bin.from, to: bin.to, bin,
    values: [bin.left_pages, bin.missed_pages].map(pages => pages / Math.max(1e-9, bin.to - bin.from)) }));
  timeChart(at("left-chart"), points, [{ look: "left" }, { look: "gone" }], {
    height: 130, format: count, label: "Pages a second that left, and that were wanted again.",
    say: ({ bin }) => [`${clock(bin.from, 0)} to ${clock(bin.to, 0)}`, `left: ${many(bin.left_pages, "page")}`,
      `wanted again: ${many(bin.missed_pages, "page")}`].join("\n"),
  });
  refill("left-table", () => table("Pages that left, and that were wanted again, over time",
    [["From"], ["Left", "n"], ["Wanted again", "n"]],
    bins.slice(-30).reverse().map(bin => [clock(bin.from, 0), count(bin.left_pages),
      count(bin.missed_pages)])));
  if (!reasons.length) {
    at("left").replaceChildren(element("p", {}, "Nothing has left so far."));
    return;
  }
  at("left").replaceChildren(...reasons.map(each => {
    const back = each.missed ? `, ${count(each.missed)} wanted again` : "";
    const label = `${count(each.left)} pages${back}`;
    return element("div", { class: "meter" },
      element("div", { class: "top" }, element("span", {}, each.words), element("span", {}, label)),
      bar([["hatched", each.missed / most], ["b-left", (each.left - each.missed) / most]],
        `${each.words}: ${label}`));
  }));
}

// ---- the tree

const HEATS = [0, 0.5, 1.5, 4, 10, 40]; // hits a page, up to which a colour goes
const heat = hits => HEATS.filter(most => hits > most).length;
const perPage = box => box.own_pages ? box.own_hits / box.own_pages : 0;

function nameOf(box) {
  if (!box.runs) return `${box.tenant} \u00b7 ${box.model}`;
  if (box.runs > 1) return `${count(box.runs)} small runs`;
  if (box.text) return box.text.replaceAll("\n", " ");
  return box.tokens_head.length ? box.tokens_head.join(" ") : many(box.total_pages, "page");
}

function factsOf(box) {
  const below = box.total_pages - box.own_pages;
  const parts = [nameOf(box), bytes(box.total_bytes)];
  if (box.runs === 1) parts.push(`${many(box.own_pages, "page")} from page ${box.first_page}`);
  if (box.runs === 1 && below) parts.push(`${many(below, "page")} continue it`);
  if (box.runs !== 1) parts.push(many(box.total_pages, "page"));
  if (box.own_pages) parts.push(`${perPage(box).toFixed(1)} hits a page`);
  parts.push(`${percent(box.host_pages / (box.total_pages || 1))} in memory`);
  return parts;
}

function showTree() {
  const tree = seen.tree;
  if (!tree) return;
  if (seen.box >= tree.boxes.length) seen.box = -1;
  const isInside = at("tree-chart").contains(document.activeElement);
  at("tree-out").hidden = seen.box < 0;
  at("heat").replaceChildren(
    element("li", {}, "0", element("span", { class: "heat-row" },
      ...[0, 1, 2, 3, 4, 5, 6].map(level => element("i", { class: `b-${level}` }))),
      `more than ${HEATS[5]} hits a page`),
    element("li", {}, `${bytes(tree.total_bytes)} in ${many(tree.total_pages, "page")}`));
  if (!tree.boxes.length) {
    at("tree-chart").replaceChildren(element("p", {}, "Nothing is cached so far."));
    at("tree-facts").textContent = "";
    return;
  }
  if (!at("tree-facts").firstChild) {
    at("tree-facts").textContent = "Point at a run of pages, or choose one, to read about it.";
  }
  icicle(at("tree-chart"), tree.boxes, {
    at: seen.box, focus: seen.focus,
    look: box => box.runs ? `f-${heat(perPage(box))}` : "f-tree",
    name: nameOf,
    say: box => factsOf(box).join(", "),
    onFocus: number => showBox(number),
    onOpen: openBox,
  });
  if (isInside) {
    const group = at("tree-chart").querySelector('[tabindex="0"]');
    if (group) group.focus({ preventScroll: true });
  }
  refill("tree-table", () => table("The largest runs of pages",
    [["Run"], ["Bytes", "n"], ["Pages", "n"], ["Hits a page", "n"], ["In memory", "n"]],
    [...tree.boxes].sort((a, b) => b.total_bytes - a.total_bytes).slice(0, 30).map(box => [nameOf(box),
      bytes(box.total_bytes), count(box.total_pages), perPage(box).toFixed(1),
      percent(box.host_pages / (box.total_pages || 1))])));
}

function openBox(number) {
  const above = number < 0 && seen.box >= 0 ? seen.tree.boxes[seen.box].above : number;
  seen.box = number === seen.box ? seen.tree.boxes[number].above : above;
  seen.focus = number < 0 ? seen.box : number;
  showTree();
}

function showBox(number) {
  const box = seen.tree.boxes[number];
  if (!box) return;
  seen.focus = number;
  const [name, ...rest] = factsOf(box);
  const parts = [element("b", {}, name), ` \u2014 ${rest.join(", ")}`];
  if (box.chain_id) {
    parts.push(element("br"), element("code", {}, `kvstore inspect DIR ${box.chain_id.slice(0, 12)}`));
  }
  at("tree-facts").replaceChildren(...parts);
}

// ---- tables

function showChains(hot, cold) {
  const heads = [["Chain"], ["Tenant", "wide"], ["Pages", "n"], ["Bytes", "n wide"], ["Hits", "n"],
    ["Idle", "n"], ["In memory", "n"]];
  const rows = chains => chains.map(chain => [element("code", {}, chain.chain_id.slice(0, 12)),
    chain.tenant, count(chain.pages), bytes(chain.payload_bytes), count(chain.hits),
    age(chain.idle_s), percent(chain.host_pages / (chain.pages || 1))]);
  const show = (id, caption, chains, none) => putTable(at(id), chains.length
    ? table(caption, heads, rows(chains)) : element("p", { class: "quiet" }, none));
  show("hot", "Chains that hit most", hot, "No chain was hit since the server started.");
  show("cold", "Chains that nobody asked for longest", cold, "Nothing is cached so far.");
}

function showTenants() {
  const rows = seen.state.tenants, all = seen.state.tenants_in_all;
  const most = Math.max(1, ...rows.map(each => each.host_bytes + each.disk_bytes));
  const share = (used, bound) => element("span", {}, bytes(used),
    ...(bound ? [element("small", { class: "wide" }, `share ${bytes(bound)}`)] : []));
  const made = table("Tenants, those with most bytes first",
    [["Tenant", "name"], ["Bytes", "wide"], ["Memory", "n"], ["Disk", "n"], ["Pages", "n wide"],
      ["Look-ups", "n wide"], ["Found", "n"]],
    rows.map(each => [each.tenant,
      bar([["b-host", each.host_bytes / most], ["b-disk", each.disk_bytes / most]],
        `${bytes(each.host_bytes)} in memory, ${bytes(each.disk_bytes)} on disk`),
      share(each.host_bytes, each.host_share_bytes), share(each.disk_bytes, each.disk_share_bytes),
      count(each.pages), count(each.requests),
      each.tokens ? percent(each.hit_tokens / each.tokens) : "-"]));
  const more = all > rows.length
    ? [element("p", { class: "quiet" }, `and ${count(all - rows.length)} with less`)] : [];
  putTable(at("tenants"), made, ...more);
}

// ---- explain

function showPlaces() {
  at("why-kind-box").hidden = !seen.state.has_tokenizer;
  if (!seen.tree) return;
  const trees = seen.tree.boxes.filter(box => !box.runs && box.namespace);
  const known = [...new Map(trees.map(box => [`${box.namespace} ${box.tenant}`, box])).entries()];
  const key = known.map(([name]) => name).join();
  if (at("why-where").dataset.key === key) return;
  at("why-where").dataset.key = key;
  const old = at("why-where").value;
  at("why-where").replaceChildren(...known.map(([name, box]) => element("option", { value: name },
    `${box.tenant} \u00b7 ${box.model} \u00b7 ${box.namespace.slice(0, 8)}`)));
  if (known.some(([name]) => name === old)) at("why-where").value = old;
}

async function explain(event) {
  event.preventDefault();
  const button = event.target.querySelector("button");
  const [namespace, ...tenant] = at("why-where").value.split(" ");
  const kind = seen.state.has_tokenizer ? at("why-kind").value : "tokens";
  button.disabled = true;
  try {
    showAnswer(await ask("explain", { [kind]: at("why-prompt").value, namespace,
      tenant: tenant.join(" ") }));
  } catch (error) {
    const text = error instanceof Refused ? error.message : "The server does not answer.";
    at("why-answer").replaceChildren(element("p", { class: "notice" }, text));
  } finally {
    button.disabled = false;
  }
}

function showAnswer(found) {
  const whole = Math.max(1, found.prompt_pages);
  const gone = found.departed.reduce((pages, run) => pages + run.pages, 0);
  const other = found.matched_pages - found.host_pages - found.disk_pages;
  const parts = [["host", found.host_pages], ["disk", found.disk_pages], ["redis", other], ["gone", gone]];
  const words = { ...TIER_WORDS, gone: "left lately" };
  const rest = whole - found.matched_pages - gone;
  const legend = element("ul", { class: "legend" }, ...parts.filter(([, pages]) => pages > 0).map(
    ([look, pages]) => swatch(look, words[look], many(pages, "page"))));
  if (rest > 0) legend.append(swatch("miss", "not stored", many(rest, "page")));
  const notes = [];
  if (found.differs_at !== null) {
    const [given, stored] = found.words || [];
    notes.push(`Token ${found.differs_at} is ${found.prompt_token}${given ? ` (${given})` : ""}; the `
      + `closest stored chain has ${found.stored_token ?? "none"}${stored ? ` (${stored})` : ""} there.`);
  }
  for (const run of found.departed) {
    notes.push(`Pages ${run.first_page} to ${run.first_page + run.pages - 1} left ${age(run.ago_s)} `
      + `ago: ${run.why.replaceAll("_", " ")}; they were in ${run.tiers.map(t => TIER_WORDS[t] || t).join(", ")}.`);
  }
  for (const each of found.elsewhere) {
    const fields = each.differs.map(d => `${d.field} is ${d.here} here and ${d.there} there`).join("; ");
    notes.push(`${count(each.matched_tokens)} tokens are stored for tenant ${each.tenant}, `
      + `${each.model}: ${fields}.`);
  }
  at("why-answer").replaceChildren(
    element("p", { class: "verdict" }, found.verdict),
    bar(parts.map(([look, pages]) => [`b-${look}`, pages / whole]),
      `${found.matched_pages} of ${found.prompt_pages} pages are stored`, "strip"),
    legend,
    element("ul", { class: "plain" }, ...notes.map(text => element("li", {}, text))));
}

// ---- start

at("login").addEventListener("submit", event => {
  event.preventDefault();
  sessionStorage.setItem("kvstore-key", at("key").value.trim());
  at("key").value = "";
  poll();
});
at("why").addEventListener("submit", explain);
at("tree-out").addEventListener("click", () => { seen.box = -1; seen.focus = -1; showTree(); });
for (const each of document.querySelectorAll("input[name=range], input[name=unit]")) {
  each.addEventListener("change", () => { if (seen.state) showState(); });
}
let resized = 0, width = 0;
new ResizeObserver(([main]) => {
  if (main.contentRect.width === width) return;
  width = main.contentRect.width;
  clearTimeout(resized);
  resized = setTimeout(() => { if (seen.state) { hideTip(); showState(); showTree(); } }, 80);
}).observe(at("main"));
addEventListener("scroll", hideTip, { passive: true });
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
setInterval(() => { if (!document.hidden && at("login").hidden) poll(); }, POLL_MS);
takeKeyFromAddress();
poll();
