"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const grid = data.grid;
const $ = (id) => document.getElementById(id);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const narrow = window.matchMedia("(max-width: 600px)");
const SERIES = 6;  // at most in one chart
const DASH = "\u2014";
const colour = (place) => (dark.matches
  ? ["#7fb2e5", "#ff8095", "#5ec46a", "#e0b040", "#5cc8e8", "#b59cf0", "#a8a8a8"]
  : ["#4477aa", "#cc3355", "#228833", "#aa7a00", "#1c8fb0", "#6a3fb0", "#777777"])[place % 7];
const symbols = ["circle", "square", "diamond", "triangle-up", "cross", "star", "circle-open"];

// Texts

const number = (v) => v === null ? DASH : v >= 1000 ? v.toFixed(0) : String(Number(v.toPrecision(3)));
const times = (v) => v === null ? DASH : v.toFixed(2) + "x";
const share = (v) => !v ? DASH : Math.abs(v - 1) < 0.005 ? "1" : v > 1 ? times(v) : "1/" + number(1 / v);
const signed = (v, digits) => (v < 0 ? "\u2212" : "+") + Math.abs(v).toFixed(digits);

function difference(found, digits, unit) {
  if (found === null) return DASH;
  const between = found.low === null ? "" : " [" + signed(found.low, digits) + ",\u00a0" + signed(found.high, digits) + "]";
  return signed(found.value, digits) + between + (unit || "");
}

function wrapped(text, width) {
  const lines = [""];
  text.split(" ").forEach((word) => {
    const last = lines[lines.length - 1];
    if (last && last.length + 1 + word.length > width) lines.push(word);
    else lines[lines.length - 1] = last ? last + " " + word : word;
  });
  return lines.join("<br>");
}

// Tables

function cell(row, text, head, name) {
  const made = document.createElement(head ? "th" : "td");
  if (head) made.scope = "col";
  if (name) made.className = name;
  made.textContent = text;
  row.append(made);
}

function fill(table, caption, head, rows, best, bestColumn) {
  table.replaceChildren();
  if (caption) table.createCaption().textContent = caption;
  const top = table.createTHead().insertRow();
  head.forEach((text) => cell(top, text, true));
  const body = table.createTBody();
  rows.forEach((texts, place) => {
    const row = body.insertRow();
    if (place === best && bestColumn === undefined) row.className = "best";
    texts.forEach((text, column) => cell(row, text, false, place === best && column === bestColumn ? "best" : ""));
  });
}

// Charts

function draw(id, title, traces, given) {
  const style = getComputedStyle(document.documentElement);
  const text = style.getPropertyValue("--text").trim(), line = style.getPropertyValue("--line").trim();
  const axis = (own) => ({gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, ...own,
    title: {text: own.title, font: {size: 13}, standoff: 8}});
  $(id + "title").textContent = title;
  const layout = {paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: {color: text, size: 12, family: "system-ui, sans-serif"},
    margin: {l: 50, r: 12, t: 10, b: 45}, legend: {orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal"}, hovermode: "closest", ...given,
    xaxis: axis(given.xaxis), yaxis: axis(given.yaxis)};
  Plotly.react(id, traces, layout, {responsive: true, displaylogo: false, displayModeBar: false});
}

function choose(id, values) {
  $(id).replaceChildren();
  values.forEach((value, place) => $(id).add(new Option(String(value), String(place))));
}

// Predicted

function showPrediction(event) {
  const [m, n, g] = ["model", "nodes", "gbps"].map((id) => Number($(id).value));
  const ms = grid.ms[m][n][g], fp32 = ms[grid.fp32];
  const order = ms.map((_, i) => i).filter((i) => i !== grid.bound).sort((a, b) => ms[a] - ms[b]);
  const rows = [...order, grid.bound].map((i) => [grid.methods[i], number(ms[i]), times(fp32 / ms[i]), times(ms[grid.bf16] / ms[i])]);
  fill($("predicted"), "", ["method", "ms a step", "vs fp32", "vs bf16"], rows, order.indexOf(grid.wins[m][n][g]));
  $("answer").textContent = grid.answers[m][n][g];
  const traces = grid.curves.map((i, k) => ({name: grid.methods[i], x: grid.gbps, y: grid.gbps.map((_, r) => grid.ms[m][n][r][grid.fp32] / grid.ms[m][n][r][i]),
    mode: "lines+markers", marker: {symbol: symbols[k], size: 7}, line: {color: colour(k), width: 2, dash: i === grid.bound ? "dot" : "solid"}}));
  draw("rates", "The slower the link, the more there is to win: " + grid.models[m] + ", " + grid.nodes[n] + " nodes", traces, {
    xaxis: {title: "link, Gbit/s of a node", type: "log", tickvals: grid.gbps}, yaxis: {title: "times as fast as fp32 DDP", type: "log", tickvals: [0.5, 1, 2, 5, 10, 20, 50, 100, 200]},
    shapes: [{type: "line", x0: grid.gbps[g], x1: grid.gbps[g], yref: "paper", y0: 0, y1: 1, line: {width: 1, dash: "dash", color: "#888888"}}]});
  showWins(m, n, g);
  if (event) history.replaceState(null, "", "#" + m + "," + n + "," + g);
}

function showWins(m, n, g) {
  const short = (i) => grid.methods[i].replace("DDP ", "").replace(", hierarchical", " hier.").replace(/ rank \d+/, "");
  const rows = grid.nodes.map((count, row) => [String(count), ...grid.gbps.map((_, column) => {
    const i = grid.wins[m][row][column], ms = grid.ms[m][row][column];
    return i === null ? "not decided" : short(i) + " " + (ms[grid.fp32] / ms[i]).toFixed(1) + "x";
  })]);
  const caption = "What wins, and how many times as fast as fp32 DDP it is: " + grid.models[m] + ", by nodes and Gbit/s";
  fill($("wins"), caption, ["nodes", ...grid.gbps.map(String)], rows, n, g + 1);
}

// Accuracy against bytes: a row for each method, those that send most on top

function bytesLabel(row) {
  const failed = row.failed ? ", " + row.failed + " failed" : "";
  return narrow.matches ? wrapped(row.label, 17) + "<br>" + share(row.share) + failed : row.label + (row.share ? "   " + share(row.share) + " of the bytes" : "") + failed;
}

function showAccuracy() {
  const a = data.accuracy;
  if (!a.rows.length) return;
  $("bytesnote").textContent = a.title + ". Mean " + a.metric + " less that of " + a.baseline + "; bars are 95 % intervals, paired by seed. " +
    "What is too far off for the axis, or failed, is named beside it, each method with its share of fp32's bytes.";
  const style = getComputedStyle(document.documentElement).getPropertyValue("--text").trim();
  const drawn = a.rows.map((r, i) => ({...r, place: i})).filter((r) => r.gap !== null && !r.beyond);
  const traces = [["all-reduce", false], ["compressed", true]].map(([name, compressed], k) => {
    const mine = drawn.filter((r) => r.compressed === compressed);
    return {name, x: mine.map((r) => r.gap.value), y: mine.map((r) => r.place), text: mine.map((r) => r.label), mode: "markers",
      hovertemplate: "%{text}: %{x:+.2f}<extra></extra>", marker: {size: 9, color: colour(k), symbol: symbols[k]},
      error_x: {type: "data", symmetric: false, thickness: 1.5, width: 3, color: colour(k),
        array: mine.map(({gap}) => gap.high === null ? 0 : gap.high - gap.value), arrayminus: mine.map(({gap}) => gap.low === null ? 0 : gap.value - gap.low)}};
  });
  const beside = a.rows.map((r, i) => ({r, i})).filter(({r}) => r.gap === null || r.beyond).map(({r, i}) => {
    const right = r.gap !== null && r.gap.value > 0, text = r.gap === null ? "failed" : difference(r.gap, 1);
    return {x: a.axis[right ? 1 : 0], y: i, text: right ? text + " \u25b8" : r.gap === null ? text : "\u25c2 " + text, showarrow: false,
      xanchor: right ? "right" : "left", font: {size: 11, color: style}};
  });
  $("bytes").style.height = a.rows.length * (narrow.matches ? 50 : 26) + 110 + "px";
  draw("bytes", a.point + ".", traces, {annotations: beside,
    xaxis: {title: "difference to " + a.baseline + "," + (a.unit || " " + a.metric), range: a.axis, zeroline: true, zerolinewidth: 2},
    yaxis: {tickvals: a.rows.map((_, i) => i), ticktext: a.rows.map((r) => bytesLabel(r)), range: [a.rows.length - 0.5, -0.5],
      tickfont: {size: narrow.matches ? 10.5 : 12}}});
  fill($("accuracies"), "", ["method", a.metric, "\u00b1", "difference, 95 %", "share of fp32's bytes", "seeds"],
    a.rows.map((r) => [r.label, r.mean === null ? "failed" : r.mean.toFixed(2), r.sd === null ? DASH : r.sd.toFixed(2),
      difference(r.gap, 2), share(r.share), String(r.gap === null ? 0 : r.gap.n)]), -1);
  if (a.failures.length) {
    const head = document.createElement("p"), list = document.createElement("ul");
    head.textContent = "Runs that failed, and are in no mean:";
    a.failures.forEach((text) => { const item = document.createElement("li"); item.textContent = text; list.append(item); });
    $("failures").replaceChildren(head, list);
  }
}

// Loss curves: at most SERIES at once

const chosen = [];  // for each task its slots: the place of a method, or null

function better(task, a, b) { return (task.higher_is_better ? 1 : -1) * (b.mean - a.mean); }

function firstChoice(task) {
  const base = task.methods.filter((c) => c.method === task.baseline);
  const rest = task.methods.filter((c) => c.method !== task.baseline);
  const order = [...rest.filter((c) => c.compressed).sort((a, b) => better(task, a, b)), ...rest.filter((c) => !c.compressed)];
  const places = [...base, ...order].slice(0, SERIES).map((c) => task.methods.indexOf(c));
  return [...places, ...Array(SERIES - places.length).fill(null)];
}

function offerMethods() {
  const t = Number($("task").value), task = data.tasks[t], slots = chosen[t];
  const legend = document.createElement("legend");
  legend.textContent = "Methods, at most " + SERIES;
  const checks = task.methods.map((c, place) => {
    const label = document.createElement("label"), box = document.createElement("input"), name = document.createElement("span");
    label.className = "check";
    box.type = "checkbox";
    box.value = String(place);
    box.checked = slots.includes(place);
    name.textContent = c.method;
    box.addEventListener("input", () => {
      if (box.checked) slots[slots.indexOf(null)] = place;
      else slots[slots.indexOf(place)] = null;
      showLosses();
    });
    label.append(box, name);
    return label;
  });
  $("methods").replaceChildren(legend, ...checks);
}

function showLosses() {
  if (!data.tasks.length) return;
  const t = Number($("task").value), task = data.tasks[t], slots = chosen[t], gap = $("shown").value === "gap" && task.baseline !== null;
  const full = !slots.includes(null);
  $("methods").querySelectorAll("input").forEach((box) => { box.disabled = full && !box.checked; });
  const shown = slots.map((place, slot) => ({slot, place, c: place === null ? null : task.methods[place]})).filter(({c}) => c !== null);
  const faint = (hex) => "rgba(" + [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)).join(",") + ",0.15)";
  const bands = gap ? [] : shown.filter(({c}) => c.seeds > 1).flatMap(({c, slot}) => [
    {x: c.steps, y: c.low, mode: "lines", line: {width: 0}, showlegend: false, hoverinfo: "skip"},
    {x: c.steps, y: c.high, mode: "lines", line: {width: 0}, fill: "tonexty", fillcolor: faint(colour(slot)), showlegend: false, hoverinfo: "skip"}]);
  const lines = shown.map(({c, slot}) => ({name: c.method, x: c.steps, y: gap ? c.gap : c.loss, mode: "lines",
    hovertemplate: c.method + ", step %{x}: %{y:.3f}<extra></extra>",
    line: {color: colour(slot), width: 2, dash: c.method === task.baseline ? "dash" : "solid"}}));
  const what = gap ? "Training loss less that of " + task.baseline : "Training loss";
  draw("losses", what + ": " + task.title, [...bands, ...lines], {xaxis: {title: "optimizer step"},
    yaxis: {title: gap ? "difference, nats" : "training loss, nats", zeroline: gap}});
  sayGap(task, shown.map(({c}) => c));
  const rows = task.methods.map((c) => [c.method, c.lr === null ? DASH : String(c.lr), String(c.seeds), c.final.toFixed(3),
    difference(c.final_gap, 3), c.mean.toFixed(2) + (c.sd === null ? "" : " \u00b1 " + c.sd.toFixed(2)),
    difference(c.difference, 2, task.unit), c.verdict || DASH]);
  const beside = task.baseline === null ? "a baseline" : task.baseline;
  fill($("finals"), "", ["method", "lr", "seeds", "last training loss", "less that of " + beside, task.metric, "difference", "verdict"], rows, -1);
}

function sayGap(task, shown) {
  const mine = shown.filter((c) => c.compressed).sort((a, b) => better(task, a, b))[0];
  if (!mine) { $("gaps").textContent = ""; return; }
  const name = task.metric.split(",")[0];
  $("gaps").textContent = mine.final_gap === null
    ? mine.method + " ends at a training loss of " + mine.final.toFixed(3) + " nats, " + name + " " + mine.mean.toFixed(2) + "."
    : "Best of the compressed ones shown: " + mine.method + ", training loss " + difference(mine.final_gap, 3, " nats") + ", " + name + " " +
      difference(mine.difference, 2, task.unit) + " from " + task.baseline + ".";
}

// Prediction against replay

function showReplays() {
  const kinds = [...new Set(data.replays.map((r) => r.kind))];
  const traces = kinds.map((kind, k) => {
    const mine = data.replays.filter((r) => r.kind === kind);
    return {name: kind, x: mine.map((r) => r.replayed), y: mine.map((r) => 100 * (r.predicted / r.replayed - 1)), text: mine.map((r) => r.id), mode: "markers",
      hovertemplate: "%{text}: %{x:.4g} ms, %{y:+.1f} %<extra></extra>", marker: {size: 6, color: colour(k), symbol: symbols[k]}};
  });
  const near = data.replays.filter((r) => Math.abs(r.predicted / r.replayed - 1) <= 0.1).length;
  const all = data.replays.length;
  draw("cells", all ? Math.round(100 * near / all) + " % of the cells are predicted within 10 %" : "No replayed cell has a prediction here", traces, {xaxis: {title: "replayed step, ms", type: "log", tickvals: narrow.matches ? [10, 100, 1000] : [5, 10, 20, 50, 100, 200, 500, 1000, 2000]},
    yaxis: {title: "predicted, difference in %", zeroline: true}});
  $("within").textContent = all ? near + " of " + all + " cells are predicted within 10 %." : "";
}

// The page

function showAll() { showPay(); showPrediction(); showAccuracy(); showLosses(); showReplays(); }

choose("model", grid.models);
choose("nodes", grid.nodes);
choose("gbps", grid.gbps);
choose("task", data.tasks.map((task) => task.title));
$("ranks").textContent = grid.ranks_per_node;
$("near").textContent = Math.round(100 * grid.near) + " %";
const wanted = location.hash.slice(1).split(",").map(Number);
const start = [0, grid.nodes.indexOf(8), grid.gbps.indexOf(10)];
["model", "nodes", "gbps"].forEach((id, k) => {
  const given = wanted.length === 3 && Number.isInteger(wanted[k]) && wanted[k] >= 0 && wanted[k] < $(id).length;
  $(id).value = String(given ? wanted[k] : Math.max(0, start[k]));
  $(id).addEventListener("input", showPrediction);
});
data.tasks.forEach((task) => chosen.push(firstChoice(task)));
if (data.tasks.length) offerMethods();
$("task").addEventListener("input", () => { offerMethods(); showLosses(); });
$("shown").addEventListener("input", showLosses);
document.querySelectorAll("form").forEach((form) => form.addEventListener("submit", (event) => event.preventDefault()));
startPay();
showAll();
[dark, narrow].forEach((query) => query.addEventListener("change", showAll));
document.documentElement.dataset.ready = "yes";
