// Draws what /events sends: a picture of the run as it is now, and what its curves, strip and log have got since.

import { comparePanel } from "/static/compare.js";
import { nameOf, routePanel } from "/static/routes.js";
import { searchPanels } from "/static/trials.js";

const uPlot = window.uPlot;
const $ = (id) => document.getElementById(id);
const state = { picture: null, search: null, names: [], points: [], columns: [], log: [], heard: 0, isConnected: false, dirty: new Set() };
const STRIP = 60, MAX_LOG_ROWS = 500, MOST_POINTS = 6000, HEIGHT = 220;
const LINES = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999999"];
const BAD = new Set(["slow", "lost", "expelled"]);
const MARKED = new Set(["rebalanced", "node lost", "joined", "back", "away", "excluded", "expelled", "left", "replaced", "skipped"]);
const BAD_EVENTS = new Set(["node lost", "expelled", "refused", "damaged line", "no checkpoint"]);

// --- words and numbers -------------------------------------------------------------------------------------------

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const percent = (value, digits = 0) => (isNumber(value) ? `${(100 * value).toFixed(digits)} %` : "–");
const digits3 = (value) => (value === 0 ? "0" : Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : value.toPrecision(3));
const number = (value) => (isNumber(value) ? digits3(value) : "–");

function bytes(value) {
  if (!isNumber(value)) return "–";
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return unit ? `${value.toPrecision(3)} ${units[unit]}` : `${Math.round(value)} B`;
}

function seconds(value) {
  if (!isNumber(value)) return "–";
  if (value >= 3600) return `${Math.floor(value / 3600)} h ${String(Math.round((value % 3600) / 60)).padStart(2, "0")} min`;
  if (value >= 60) return `${Math.floor(value / 60)} min ${String(Math.round(value % 60)).padStart(2, "0")} s`;
  if (value >= 1) return `${value.toPrecision(3)} s`;
  return value >= 1e-3 ? `${(1e3 * value).toPrecision(3)} ms` : `${(1e6 * value).toPrecision(3)} µs`;
}

// --- elements: text only ever becomes text -----------------------------------------------------------------------

function element(tag, words = "", kind = "") {
  const made = document.createElement(tag);
  made.textContent = words;
  if (kind) made.className = kind;
  return made;
}

function table(columns, rows) {
  // columns: [heading, cell(row), class]; a cell is text or an element
  const made = element("table"), head = made.createTHead().insertRow(), body = made.createTBody();
  for (const [heading, , kind] of columns) {
    const cell = element("th", heading, kind === "number" ? "number" : "");
    cell.scope = "col";
    head.append(cell);
  }
  for (const row of rows) {
    const line = body.insertRow();
    if (row.mood) line.className = row.mood;
    for (const [heading, of, kind] of columns) {
      const value = of(row), cell = line.insertCell();
      cell.dataset.name = heading;
      if (kind) cell.className = kind;
      if (kind === "reason") cell.title = value;
      if (value instanceof Node) cell.append(value); else cell.textContent = value;
    }
  }
  return made;
}

function bar(fraction, kind = "") {
  const made = element("span"), filled = element("span", "", `bar ${kind}`);
  filled.style.width = `${Math.max(0, Math.min(1, fraction)) * 5}rem`;
  made.append(filled, ` ${percent(fraction)}`);
  return made;
}

// --- panels ------------------------------------------------------------------------------------------------------

function drawFacts() {
  const p = state.picture, facts = $("facts");
  if (!p) { facts.textContent = state.isConnected ? "waiting for the run" : "no connection to the page's server"; return; }
  const silent = Date.now() / 1000 - p.written;
  const words = [p.phase + (p.detail ? `: ${p.detail}` : "")];
  if (p.strategy) words.push(p.strategy);
  if (!p.is_over && !state.isConnected) words.push("no connection to the page's server: evener dashboard serves it again");
  else if (!p.is_over && p.written && silent > 10) words.push(`nothing was heard of it for ${seconds(silent)}`);
  facts.textContent = words.join(" · ");
  facts.className = `facts ${p.phase === "failed" ? "bad" : !p.is_over && (silent > 10 || !state.isConnected) ? "warn" : ""}`;
}

const titleOf = (p) => (p.task ? `${p.task}${p.file ? ` (${p.file})` : ""}` : p.run);

function clock(at) {
  // the time of day, with its date unless that is today
  const when = new Date(1000 * at), day = when.toDateString() === new Date().toDateString() ? "" : `${when.toLocaleDateString("en-CA")} `;
  return `${day}${when.toLocaleTimeString("en-GB")}`;
}

function drawNow() {
  const p = state.picture;
  $("run").textContent = titleOf(p);
  $("origin").textContent = [
    p.task ? `run folder ${p.run}` : "", p.began ? `began ${clock(p.began)}` : "", p.written ? `last news ${clock(p.written)}` : "",
  ].filter(Boolean).join(" · ");
  document.title = `${isNumber(p.progress) ? `${percent(p.progress)} ` : ""}${p.task ? `${p.task} ` : ""}${p.run} – Evener`;
  const progress = $("progress");
  if (isNumber(p.progress)) progress.value = p.progress; else progress.removeAttribute("value");
  const gap = isNumber(p.predicted_seconds) && p.step_seconds ? `predicted ${seconds(p.predicted_seconds)}` : "";
  const tiles = [
    ["step", p.step.toLocaleString("en"), ""],
    ["epoch", p.epoch || "–", p.epochs ? `of ${p.epochs}` : ""],
    ["time left", p.is_over ? p.phase : seconds(p.left_seconds), ""],
    ["samples/s", number(p.samples_per_second), ""],
    ["of the ideal", percent(p.ideal), ""],
    ["time of a step", seconds(p.step_seconds), gap],
    ["loss", number(p.loss), ""],
  ].map(([name, value, more]) => {
    const tile = element("div"), shown = element("dd", String(value));
    if (more) shown.append(" ", element("small", more));
    tile.append(element("dt", name), shown);
    return tile;
  });
  $("tiles").replaceChildren(...tiles);
}

const moodOf = (node) => (BAD.has(node.state) ? "bad" : node.state ? "warn" : "");

function drawNodes() {
  const p = state.picture, rows = p.nodes.map((node) => ({ ...node, mood: moodOf(node) }));
  const trouble = (node) => ({ bad: 0, warn: 1 })[node.mood] ?? 2;
  if (rows.length > 12) rows.sort((a, b) => trouble(a) - trouble(b));
  const columns = [
    ["node", (n) => n.name], ["device", (n) => n.device],
    ["state", (n) => n.state || (p.is_over ? "" : "well")],
    ["share", (n) => bar(n.share)], ["samples/s", (n) => (n.samples_per_second ? number(n.samples_per_second) : "–"), "number"],
    ["waits", (n) => bar(n.waits, "wait")], ["CPU", (n) => (n.cpu_cores ? `${n.cpu_cores.toFixed(1)} cores` : "–"), "number"],
    ["memory", (n) => (n.memory_bytes ? bytes(n.memory_bytes) : "–"), "number"],
    ["why", (n) => n.reason, "reason"],
  ];
  if (p.is_pipeline) columns.splice(2, 0, ["stage", (n) => n.stage, "number"]);
  $("node-table").replaceChildren(table(columns, rows));
}

function drawWaits() {
  const p = state.picture;
  $("advice").textContent = p.advice;
  const rows = p.losses.filter((loss) => loss.fraction >= 0.001);
  const why = { computing: "computes longest", loading: "loads longest", exchange: "all exchange, nobody computes" };
  $("loss-table").replaceChildren(rows.length ? table([
    ["waited for", (l) => l.node || "all"], ["why", (l) => why[l.cause]],
    ["lost since the start", (l) => seconds(l.seconds), "number"], ["of the time", (l) => bar(l.fraction, "wait")],
  ], rows) : element("p", "Nothing yet.", "note"));
}

const targetsOf = (name) => state.picture.routes.filter((route) => route.source === name).map((route) => `${nameOf(route.target)}: ${route.content}`).join("; ");

function drawLinks() {
  drawRoutes();
  const p = state.picture, rows = p.nodes.filter((node) => node.sent_per_second > 0);
  const of = (n) => (n.exchange_rate && p.predicted_rate ? percent(n.exchange_rate / p.predicted_rate) : "–");
  $("link-table").replaceChildren(rows.length ? table([
    ["node", (n) => n.name], ["sends to", (n) => targetsOf(n.name)], ["sent", (n) => `${bytes(n.sent_per_second)}/s`, "number"],
    ["a step", (n) => bytes(n.sent_per_step), "number"],
    ["while it waits", (n) => (n.exchange_rate ? `${bytes(n.exchange_rate)}/s` : "–"), "number"],
    ["of what was measured before", of, "number"],
  ], rows) : element("p", "Nothing has been sent yet.", "note"));
}

function drawEvents() {
  const rows = state.log.slice(-MAX_LOG_ROWS).reverse().map((entry) => ({ ...entry, mood: BAD_EVENTS.has(entry.kind) ? "bad" : "" }));
  const at = (entry) => (entry.time ? clock(entry.time) : "");
  $("event-table").replaceChildren(rows.length ? table([
    ["time of day", at], ["step", (t) => (t.step ? t.step.toLocaleString("en") : ""), "number"], ["event", (t) => t.kind],
    ["node", (t) => t.nodes.join(", ")], ["what happened", (t) => t.message, "reason"],
  ], rows) : element("p", "Nothing happened yet.", "note"));
}

function drawStrip() {
  const canvas = $("strip-canvas"), style = getComputedStyle(document.documentElement), p = state.picture;
  const color = (name) => style.getPropertyValue(name).trim();
  const order = rowsOf(p), rows = order.length, label = Math.min(110, canvas.parentElement.clientWidth / 4);
  const height = rows > 24 ? 12 : 26, width = Math.max(4, Math.floor((canvas.parentElement.clientWidth - label) / STRIP));
  const scale = window.devicePixelRatio || 1;
  canvas.width = (label + STRIP * width) * scale; canvas.height = Math.max(1, rows * height) * scale;
  canvas.style.width = `${label + STRIP * width}px`; canvas.style.height = `${rows * height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = `${Math.min(12, height - 1)}px system-ui, sans-serif`; pen.textBaseline = "middle";
  const colors = ["--io", "--compute", "--update", "--wait"].map(color), columns = state.columns.slice(-STRIP);
  const bad = new Map(p.nodes.map((node) => [node.name, moodOf(node) === "bad"]));
  order.forEach((node, row) => {
    pen.fillStyle = bad.get(state.names[node]) ? color("--bad") : color("--ink");
    pen.fillText(state.names[node], 0, row * height + height / 2, label - 6);
  });
  columns.forEach((column, i) => {
    const x = label + (STRIP - columns.length + i) * width;
    order.forEach((node, row) => {
      let y = (row + 1) * height - 2;
      (column[1][node] || []).forEach((part, phase) => {
        const tall = Math.min(part, 1) * (height - 3);
        y -= tall;
        pen.fillStyle = colors[phase];
        pen.fillRect(x, y, width - 1, tall);
      });
      if (column[2] === node && rows > 1) {
        pen.strokeStyle = color("--bad"); pen.lineWidth = 1;
        pen.strokeRect(x - 0.5, row * height + 0.5, width, height - 2);
      }
    });
  });
  $("strip-title").textContent = p.is_pipeline ? "Stages by phase: the pipeline" : "Steps by phase";
  const last = p.nodes.find((node) => node.is_waited_for);
  canvas.setAttribute("aria-label", `Where the time of ${rows} nodes went in the last steps; ${last ? `${last.name} is waited for` : "nobody is waited for"}`);
}

function rowsOf(p) {
  const stage = new Map(p.nodes.map((node) => [node.name, node.stage]));
  const rows = state.names.map((_, index) => index);
  return p.is_pipeline ? rows.sort((a, b) => stage.get(state.names[a]) - stage.get(state.names[b])) : rows;
}

// --- curves ------------------------------------------------------------------------------------------------------

const plots = {};
const asPercents = (_, all) => all.map((value) => percent(value));

function axes(right, isShare, label) {
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--muted").trim(), line = style.getPropertyValue("--line").trim();
  const axis = (more) => ({ stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line }, ...more });
  const found = [axis({ label, ...(label === "epoch" ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] } : {}), size: 40, labelSize: 18, labelGap: 0 }), axis({ size: 55, ...(isShare ? { values: asPercents } : {}) })];
  if (right) found.push(axis({ scale: "right", side: 1, size: 55, grid: { show: false }, values: asPercents }));
  return found;
}

function plot(id, series, data, right, hooks = {}, label = "step") {
  const place = $(id), width = place.clientWidth, key = JSON.stringify([series.map((one) => [one.label, one.width, one.dash]), right, label]);
  const old = plots[id];
  if (old && old.key === key) {
    old.made.setData(data);
    if (old.made.width !== width) old.made.setSize({ width, height: HEIGHT });
    return;
  }
  if (old) old.made.destroy();
  const options = { width, height: HEIGHT, series: [{ label }, ...series], axes: axes(right, ["share-plot", "compare-accuracy-plot"].includes(id), label), hooks, scales: { x: { time: false }, ...(right ? { right: { range: [0, 1] } } : {}) }, legend: { live: true, show: series.length <= 12 && id !== "score-plot" } };
  plots[id] = { key, made: new uPlot(options, data, place) };
}

function drawCurves() {
  const trained = [[], []], checked = new Map();
  for (const [step, loss] of state.points) { trained[0].push(step); trained[1].push(loss); }
  for (const entry of state.log) for (const [name, value] of Object.entries(entry.scalars)) {
    if (!checked.has(name)) checked.set(name, [[], []]);
    const [steps, values] = checked.get(name);
    if (steps.at(-1) === entry.step) values[values.length - 1] = value; else { steps.push(entry.step); values.push(value); }
  }
  if (!trained[0].length && !checked.size) return;
  const names = [...checked.keys()].sort(), isRight = (name) => name !== "loss/validation" && checked.get(name)[1].every((v) => v >= 0 && v <= 1);
  const line = (label, i, more) => ({ label, stroke: LINES[i % LINES.length], width: 1.5, spanGaps: true, value: (_, v) => number(v), ...more });
  const series = [line("loss", 0, { points: { show: false } }), ...names.map((name, i) => line(name, i + 1, { points: { show: true, size: 5 }, ...(isRight(name) ? { scale: "right" } : {}) }))];
  plot("curve-plot", series, uPlot.join([trained, ...names.map((name) => checked.get(name))]), names.some(isRight));
}

function drawShares() {
  if (!state.points.length) return;
  const data = [state.points.map((point) => point[0]), ...state.names.map((_, i) => state.points.map((point) => point[3][i] ?? 0))];
  const series = state.names.map((label, i) => ({ label, stroke: LINES[i % LINES.length], width: 1.5, dash: i >= LINES.length ? [6, 3] : undefined, points: { show: false }, value: (_, v) => percent(v, 1) }));
  plot("share-plot", series, data, false, { draw: [markEvents] });
}

function markEvents(u) {
  const style = getComputedStyle(document.documentElement), pen = u.ctx, { left, width, top, height } = u.bbox;
  pen.save();
  pen.setLineDash([4, 4]);
  for (const entry of state.log) {
    if (!MARKED.has(entry.kind)) continue;
    const x = u.valToPos(entry.step, "x", true);
    if (x < left || x > left + width) continue;
    pen.strokeStyle = style.getPropertyValue(BAD_EVENTS.has(entry.kind) ? "--bad" : "--muted").trim();
    pen.beginPath(); pen.moveTo(x, top); pen.lineTo(x, top + height); pen.stroke();
  }
  pen.restore();
}

// --- what comes, and when it is drawn ----------------------------------------------------------------------------

const drawRoutes = routePanel({ $, element, bytes, seconds, state, moodOf, LINES });
const COMPARE = comparePanel({ $, element, table, number, percent, bytes, seconds, plot, state, uPlot, mark, LINES });
const RUN = { now: drawNow, nodes: drawNodes, waits: drawWaits, links: drawLinks, events: drawEvents, strip: drawStrip, curves: drawCurves, shares: drawShares, ...COMPARE.panels };
const SEARCH = searchPanels({ $, element, table, number, percent, seconds, plot, state, uPlot });
const PANELS = { facts: drawFacts, ...RUN, ...SEARCH };
const ofKind = () => ["facts", ...Object.keys(state.search ? SEARCH : RUN)];

function draw() {
  for (const name of state.dirty) if (name === "facts" || state.picture) PANELS[name]();
  state.dirty.clear();
  if (state.picture && !state.first) { state.first = true; performance.mark("first-picture"); }
}

function mark(...names) {
  if (!state.dirty.size) requestAnimationFrame(draw);
  for (const name of names) state.dirty.add(name);
}

function showKind() {
  // a search has panels of its own in the place of those of a run
  for (const part of document.querySelectorAll("[data-of]")) part.hidden = part.dataset.of !== (state.search ? "search" : "run");
}

function take(message) {
  const wasSearch = Boolean(state.search);
  state.search = message.search;
  if (wasSearch !== Boolean(state.search)) showKind();
  if (message.is_whole) { state.points = []; state.columns = []; state.log = []; }
  const isOther = state.picture?.run !== message.picture.run;
  state.picture = message.picture; state.names = message.names;
  state.points.push(...message.points); state.columns.push(...message.columns); state.log.push(...message.log);
  state.columns = state.columns.slice(-STRIP); state.points = state.points.slice(-MOST_POINTS);
  showRuns(message.runs);
  if (state.search) { mark(...ofKind()); return; }
  if (isOther) COMPARE.ask();
  mark("facts", "now", "nodes", "waits", "links");
  if (message.columns.length || message.is_whole) mark("strip");
  if (message.log.length || message.is_whole) mark("events");
  if (message.points.length || message.log.length || message.is_whole) mark("curves", "shares");
}

function showRuns(runs) {
  const select = $("runs"), key = runs.join("\n");
  $("choice").hidden = runs.length < 2;
  if (select.dataset.key === key) return;
  select.dataset.key = key;
  select.replaceChildren(new Option("the newest", ""), ...runs.map((name) => new Option(name, name)));
  select.value = state.wanted ?? "";
}

function listen() {
  state.source?.close();
  const wanted = state.wanted ? `?run=${encodeURIComponent(state.wanted)}` : "";
  state.source = new EventSource(`/events${wanted}`);
  state.source.onmessage = (event) => { state.isConnected = true; take(JSON.parse(event.data)); };
  state.source.onopen = () => { state.isConnected = true; mark("facts"); };
  state.source.onerror = () => { state.isConnected = false; mark("facts"); };
}

$("runs").addEventListener("change", (event) => { state.wanted = event.target.value; listen(); });
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || event.target instanceof HTMLSelectElement) return;
  const panel = document.querySelectorAll("main > section:not([hidden])")[Number(event.key) - 1];
  if (!panel) return;
  panel.scrollIntoView();
  panel.focus({ preventScroll: true });
});
function redraw() {
  for (const id of Object.keys(plots)) { plots[id].made.destroy(); delete plots[id]; }
  mark(...ofKind());
}
window.addEventListener("resize", () => mark(...(state.search ? ["scores", "parallel"] : ["strip", "curves", "shares", "links", "compare"])));
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
setInterval(() => mark("facts"), 1000);
listen();
