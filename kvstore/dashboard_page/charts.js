// Charts as SVG, drawn from data: stacked areas over time, lines, an icicle. Colours come from
// style.css by class, so that light and dark need nothing here. All text is set as text: names are
// anybody's, and none of them is markup.

const SVG = "http://www.w3.org/2000/svg";

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name === "width") made.style.width = value;
    else if (value !== false) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function shape(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function table(caption, heads, rows) {
  const head = element("tr", {}, ...heads.map(([text, kind]) =>
    element("th", { scope: "col", class: kind || "" }, text)));
  const body = rows.map(cells => element("tr", {}, ...cells.map((cell, at) =>
    element("td", { class: heads[at][1] || "" }, cell))));
  return element("table", {}, element("caption", { class: "hidden" }, caption),
    element("thead", {}, head), element("tbody", {}, ...body));
}

// Puts a table in its place; one that is wider can be scrolled with keys too.
export function putTable(place, made, ...more) {
  place.replaceChildren(made, ...more);
  const isWide = place.scrollWidth > place.clientWidth;
  for (const [name, value] of [["tabindex", "0"], ["role", "region"],
    ["aria-label", made.caption ? made.caption.textContent : ""]]) {
    if (isWide) place.setAttribute(name, value); else place.removeAttribute(name);
  }
}

// A bar of parts: [class, share of the whole].
export function bar(parts, label, kind = "") {
  const made = element("div", { class: `bar ${kind}`, role: "img", "aria-label": label });
  for (const [look, share] of parts) {
    if (share > 0) made.append(element("span", { class: look, width: `${100 * Math.min(1, share)}%` }));
  }
  return made;
}

const tip = document.getElementById("tip");

export function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const right = document.documentElement.clientWidth - box.width - 8;
  tip.style.left = `${Math.max(8, Math.min(x + 14, right))}px`;
  tip.style.top = `${y > box.height + 24 ? y - box.height - 14 : y + 18}px`;
}

export function hideTip() {
  tip.hidden = true;
}

export function clock(seconds, span) {
  const at = new Date(1000 * seconds);
  const two = number => String(number).padStart(2, "0");
  const short = `${two(at.getHours())}:${two(at.getMinutes())}`;
  return span > 1200 ? short : `${short}:${two(at.getSeconds())}`;
}

// Round steps of time, about `count` of them.
function times(from, to, count) {
  const steps = [5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600];
  const step = steps.find(each => (to - from) / each <= count) || 43200;
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
  return found;
}

function niceMax(value, isBytes) {
  if (!(value > 0)) return 1;
  const base = isBytes ? 1024 ** Math.floor(Math.log(value) / Math.log(1024)) : 1;
  const rest = value / base;
  const power = 10 ** Math.floor(Math.log10(rest));
  return base * power * ([1, 2, 2.5, 5, 10].find(each => each * power >= rest) || 10);
}

// points: [{from, to, values: [numbers] or null}], values in the order of `series`
// ([{name, look}]). options: height, max, format, isStacked, label, say(point).
export function timeChart(place, points, series, options) {
  const width = Math.max(240, place.clientWidth);
  const height = options.height, left = 46, bottom = 22, top = 8;
  const plot = { w: width - left - 6, h: height - bottom - top };
  const isOld = place.firstChild && place.contains(document.activeElement);
  const first = points.length ? points[0].from : 0;
  const last = points.length ? points[points.length - 1].to : 1;
  const sums = points.filter(each => each.values).map(each => options.isStacked
    ? each.values.reduce((a, b) => a + b, 0) : Math.max(...each.values));
  const max = options.max || niceMax(Math.max(0, ...sums), options.isBytes);
  const x = at => left + plot.w * (at - first) / Math.max(1e-9, last - first);
  const y = value => top + plot.h * (1 - Math.min(1, value / max));
  const made = shape("svg", {
    viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: "0",
    "aria-label": `${options.label} Arrow keys move along it; a table is below.`,
  });
  for (let step = 0; step <= 4; step += options.height < 150 ? 2 : 1) {
    const value = max * step / 4;
    made.append(shape("line", { class: "grid", x1: left, x2: width - 6, y1: y(value), y2: y(value) }));
    const label = shape("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" });
    label.textContent = options.format(value);
    made.append(label);
  }
  for (const at of times(first, last, Math.max(2, plot.w / 90))) {
    const label = shape("text", { x: x(at), y: height - 4, "text-anchor": "middle" });
    label.textContent = clock(at, last - first);
    if (x(at) > left + 16 && x(at) < width - 26) made.append(label);
  }
  for (const run of runs(points)) drawRun(made, run, series, { x, y, isStacked: options.isStacked });
  const cursor = shape("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
  made.append(cursor);
  follow(made, points, { x, left, plot, width, cursor, say: options.say });
  place.replaceChildren(made);
  if (isOld) made.focus({ preventScroll: true });
}

// Stretches of points that have values.
function runs(points) {
  const found = [];
  let run = [];
  for (const point of points) {
    if (point.values) run.push(point);
    else if (run.length) { found.push(run); run = []; }
  }
  if (run.length) found.push(run);
  return found;
}

function drawRun(made, run, series, { x, y, isStacked }) {
  const middle = point => x((point.from + point.to) / 2);
  const edges = point => [x(point.from), x(point.to)];
  let floor = run.map(() => 0);
  series.forEach(({ look }, number) => {
    const values = run.map(point => point.values[number]);
    if (!isStacked) {
      const path = run.map((point, at) => `${middle(point)},${y(values[at])}`).join(" L");
      made.append(shape("path", { class: `l-${look}`, d: `M${path}` }));
      return;
    }
    const roof = values.map((value, at) => floor[at] + value);
    if (values.some(value => value > 0)) {
      const above = [], below = [];
      run.forEach((point, at) => {
        const [start, end] = edges(point);
        above.push(`${start},${y(roof[at])} ${end},${y(roof[at])}`);
        below.push(`${end},${y(floor[at])} ${start},${y(floor[at])}`);
      });
      made.append(shape("polygon", {
        class: `f-${look}`, points: `${above.join(" ")} ${below.reverse().join(" ")}`,
      }));
    }
    floor = roof;
  });
}

// The crosshair, by pointer and by arrow keys.
function follow(made, points, { x, left, plot, width, cursor, say }) {
  let at = points.length - 1;
  const show = (number, clientX, clientY) => {
    at = Math.max(0, Math.min(points.length - 1, number));
    const point = points[at];
    const box = made.getBoundingClientRect();
    const middle = x((point.from + point.to) / 2);
    cursor.setAttribute("x1", middle);
    cursor.setAttribute("x2", middle);
    cursor.setAttribute("visibility", "visible");
    showTip(say(point), clientX ?? box.left + middle * box.width / width, clientY ?? box.top + 30);
    made.setAttribute("aria-label", say(point));
  };
  const hide = () => { cursor.setAttribute("visibility", "hidden"); hideTip(); };
  made.addEventListener("pointermove", event => {
    if (!points.length) return;
    const box = made.getBoundingClientRect();
    const place = ((event.clientX - box.left) * width / box.width - left) / plot.w;
    const time = points[0].from + place * (points[points.length - 1].to - points[0].from);
    const found = points.findIndex(point => point.to >= time);
    show(found < 0 ? points.length - 1 : found, event.clientX, event.clientY);
  });
  made.addEventListener("pointerleave", hide);
  made.addEventListener("blur", hide);
  made.addEventListener("keydown", event => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !points.length) return;
    event.preventDefault();
    show(cursor.getAttribute("visibility") === "hidden" ? at : at + step);
  });
}

export function spark(values) {
  const made = shape("svg", { viewBox: "0 0 100 24", height: 24, preserveAspectRatio: "none",
    "aria-hidden": "true" });
  const known = values.filter(value => value !== null);
  if (known.length < 2) return made;
  const max = Math.max(...known) || 1;
  let d = "", pen = "M";
  values.forEach((value, at) => {
    if (value === null) { pen = "M"; return; }
    d += `${pen}${100 * at / (values.length - 1)},${22 - 20 * value / max}`;
    pen = "L";
  });
  made.append(shape("path", { class: "spark", d, "vector-effect": "non-scaling-stroke" }));
  return made;
}

const ROW = 32, ROWS_MAX = 14;

// boxes: [{above, total_bytes, ...}], each after the one above. options: at (the box that fills
// the width, -1: all), look(box), name(box), say(box), onFocus(number), onOpen(number).
export function icicle(place, boxes, options) {
  const width = Math.max(240, place.clientWidth);
  const below = new Map();
  boxes.forEach((box, number) => {
    if (!below.has(box.above)) below.set(box.above, []);
    below.get(box.above).push(number);
  });
  const made = shape("svg", { role: "tree", "aria-label": "Cached runs of pages, by bytes" });
  const drawn = [];
  let depthMax = 0;
  const draw = (number, from, to, row) => {
    if (to - from < 1.2 || row >= ROWS_MAX) return;
    depthMax = Math.max(depthMax, row);
    made.append(boxShape(boxes[number], number, from, to, row, options));
    drawn.push(number);
    spread(number, boxes[number].total_bytes, from, to, row + 1);
  };
  const spread = (above, whole, from, to, row) => {
    let at = from;
    for (const number of below.get(above) || []) {
      const next = at + (to - from) * boxes[number].total_bytes / whole;
      draw(number, at, next, row);
      at = next;
    }
  };
  if (options.at < 0) {
    const whole = (below.get(-1) || []).reduce((sum, number) => sum + boxes[number].total_bytes, 0);
    spread(-1, Math.max(1, whole), 0, width, 0);
  } else {
    draw(options.at, 0, width, 0);
  }
  const height = (depthMax + 1) * ROW;
  made.setAttribute("viewBox", `0 0 ${width} ${height}`);
  made.setAttribute("height", height);
  walk(made, boxes, below, drawn, options);
  place.replaceChildren(made);
}

function boxShape(box, number, from, to, row, options) {
  const group = shape("g", { class: `box ${options.look(box)}`, role: "treeitem", tabindex: "-1",
    "aria-level": row + 1, "aria-label": options.say(box), "data-box": number });
  group.append(shape("rect", { x: from, y: row * ROW, width: to - from, height: ROW - 1, rx: 2 }));
  const room = Math.floor((to - from - 10) / 6.6);
  const words = `${options.name(box)} `;
  const shown = words.slice(0, Math.max(0, words.lastIndexOf(" ", room))); // whole words only
  if (room > 0 && shown) {
    const text = shape("text", { x: from + 6, y: row * ROW + 20, "aria-hidden": "true" });
    text.textContent = shown;
    group.append(text);
  }
  return group;
}

// One stop for the Tab key; arrows move inside.
function walk(made, boxes, below, drawn, options) {
  const find = number => made.querySelector(`[data-box="${number}"]`);
  const of = event => {
    const group = event.target.closest("[data-box]");
    return group ? Number(group.dataset.box) : -1;
  };
  const start = find(drawn.includes(options.focus) ? options.focus : drawn[0]);
  if (start) start.setAttribute("tabindex", "0");
  const go = number => {
    const next = number === undefined ? null : find(number);
    if (!next) return;
    for (const old of made.querySelectorAll('[tabindex="0"]')) old.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  };
  made.addEventListener("focusin", event => options.onFocus(of(event)));
  made.addEventListener("pointerover", event => { if (of(event) >= 0) options.onFocus(of(event)); });
  made.addEventListener("click", event => { if (of(event) >= 0) options.onOpen(of(event)); });
  made.addEventListener("keydown", event => {
    const number = of(event);
    if (number < 0) return;
    const beside = (below.get(boxes[number].above) || []).filter(each => drawn.includes(each));
    const at = beside.indexOf(number);
    const moves = {
      ArrowLeft: () => go(beside[at - 1]),
      ArrowRight: () => go(beside[at + 1]),
      ArrowUp: () => go(boxes[number].above),
      ArrowDown: () => go((below.get(number) || [])[0]),
      Enter: () => options.onOpen(number),
      " ": () => options.onOpen(number),
      Escape: () => options.onOpen(-1),
    };
    if (moves[event.key]) { event.preventDefault(); moves[event.key](); }
  });
}
