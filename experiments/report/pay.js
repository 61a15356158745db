// Will it pay? Between the cells of the grid logarithms are linear.

let pay = null;
const PAY = ["paymodel", "paygpu", "payranks", "paybatch", "paynodes", "paygbps"];

function between(values, wanted) {
  const at = Math.min(Math.max(wanted, values[0]), values[values.length - 1]);
  let k = 0;
  while (k < values.length - 2 && at > values[k + 1]) k += 1;
  if (values.length === 1) return [[0, 1]];
  const share = Math.log(at / values[k]) / Math.log(values[k + 1] / values[k]);
  return [[k, 1 - share], [k + 1, share]].filter(([, weight]) => weight > 0);
}

function payAt(c, gbps) {
  const table = (b) => pay.cells[c.model][b][c.gpu][c.ranks], count = pay.methods.length, sum = Array(3 * count).fill(0);
  between(pay.batches[c.model], c.batch).forEach(([b, x]) => between(pay.nodes, c.nodes).forEach(([n, y]) => between(pay.gbps, gbps).forEach(([g, z]) =>
    table(b)[n][g].forEach((value, i) => { sum[i] += x * y * z * (i < count ? Math.log(value) : value); }))));
  return sum.map((value, i) => i < count ? Math.exp(value) : value);
}

function chosenPay() {
  const [model, gpu, ranks, batch, nodes, gbps] = PAY.map((id) => Number($(id).value));
  return {model, gpu, ranks, batch: Math.round(batch), nodes: Math.round(nodes), gbps};
}

function offered(c) {  // nodes of one GPU are flat
  return pay.methods.map((_, i) => i).filter((i) => pay.ranks[c.ranks] > 1 || !pay.hierarchical.includes(i));
}

function payLine(c) {  // the rule of the command line
  const ms = payAt(c, c.gbps), bf16 = ms[pay.bf16], bound = ms[pay.bound];
  const count = pay.methods.length, low = (i) => ms[count + i], high = (i) => ms[2 * count + i];
  const compressed = offered(c).filter((i) => pay.compressed.includes(i)), gaining = compressed.filter((i) => bf16 >= (1 + pay.near) * ms[i]), paying = gaining.filter((i) => low(i) > 0);
  const some = paying.length ? paying : compressed, run = (i) => pay.warm[i] * ms[pay.fp32] + (1 - pay.warm[i]) * ms[i];
  const quickest = some.reduce((a, b) => ms[b] < ms[a] ? b : a), least = Math.min(...some.map(run));
  const close = paying.length ? some.filter((i) => run(i) <= (1 + pay.near) * least) : [quickest], price = Math.min(...close.map((i) => pay.lost[i]));
  const kept = close.filter((i) => pay.lost[i] === price), first = Math.min(...kept.map(run)), best = kept.find((i) => run(i) <= (1 + pay.tie) * first);
  const near = Math.round(100 * pay.near) + " %";
  if (bf16 <= (1 + pay.near) * bound) return [false, "Do not compress: bf16 is within " + near + " of the bound.", best, ms];
  const fastest = pay.methods[best] + ", the fastest whose ranks share one model, gains ";
  if (!gaining.length) return [false, "Do not compress: " + fastest + "less than " + near + ".", best, ms];
  if (!paying.length) return [false, "Not decided: " + fastest + "no more than this prediction can tell.", best, ms];
  const percent = (v) => Math.round(100 * v);
  return [true, "Compress: " + pay.methods[best] + " saves " + percent(1 - ms[best] / bf16) + " % of the step [" + percent(low(best)) + ", " + percent(high(best)) + "] against bf16.", best, ms];
}

function showPay() {
  if (!pay) return;
  const c = chosenPay();
  if (!PAY.every((id) => $(id).value !== "" && Number.isFinite(Number($(id).value)) && ($(id).tagName === "SELECT" || Number($(id).value) > 0))) return;
  const batches = pay.batches[c.model], limits = {paybatch: batches, paynodes: pay.nodes, paygbps: pay.gbps};
  const outside = Object.entries(limits).filter(([id, v]) => Number($(id).value) < v[0] || Number($(id).value) > v[v.length - 1])
    .map(([id, v]) => $(id).labels[0].firstChild.textContent.trim() + " " + v[0] + " to " + v[v.length - 1]);
  const [, said, best, ms] = payLine(c);
  const gb = Math.exp(between(batches, c.batch).reduce((sum, [b, x]) => sum + x * Math.log(pay.gb[c.model][b]), 0));
  $("payanswer").textContent = said;
  const where = pay.names[c.model] + ", batch " + c.batch + ", on " + c.nodes + " nodes of " + pay.ranks[c.ranks] + " " + pay.gpus[c.gpu] + " at " + c.gbps + " Gbit/s";
  const full = gb > pay.gpu_gb[c.gpu] ? " It needs about " + Math.round(gb) + " GB of " + pay.gpu_gb[c.gpu] + " a GPU: take a smaller batch, or shard the model." : "";
  $("paywhere").textContent = where + "." + full + (outside.length ? " Taken as the nearest that is known: " + outside.join(", ") + "." : "");
  const order = offered(c).sort((a, b) => ms[b] - ms[a]);
  fill($("paytable"), "", ["method", "ms a step", "saves against bf16"], order.map((i) => [pay.methods[i], number(ms[i]),
    i === pay.bf16 ? DASH : String(Math.round(100 * (1 - ms[i] / ms[pay.bf16]))).replace("-", "\u2212") + " %"]), order.indexOf(best));
  const xs = [...Array(41).keys()].map((k) => pay.gbps[0] * Math.pow(pay.gbps[pay.gbps.length - 1] / pay.gbps[0], k / 40)), ys = xs.map((x) => payAt(c, x));
  const traces = offered(c).map((i) => ({name: pay.methods[i], x: xs, y: ys.map((v) => v[i]), mode: "lines", visible: pay.curves.includes(i) ? true : "legendonly",
    line: {color: colour(i === pay.bound ? 6 : i), width: 2, dash: i === pay.bound ? "dot" : "solid"}, hovertemplate: pay.methods[i] + ", %{x:.3g} Gbit/s: %{y:.4g} ms<extra></extra>"}));
  draw("paycurves", "A step by link rate: " + pay.names[c.model] + ", " + c.nodes + " nodes", traces, {
    xaxis: {title: "link, Gbit/s of a node", type: "log", tickvals: narrow.matches ? [1, 10, 100] : [1, 2, 5, 10, 25, 50, 100, 200, 400]}, yaxis: {title: "ms a step", type: "log", dtick: "D2"},
    shapes: [{type: "line", x0: c.gbps, x1: c.gbps, yref: "paper", y0: 0, y1: 1, line: {width: 1, dash: "dash", color: "#888888"}}]});
  const ask = pay.asks[c.model];
  $("paycommand").textContent = "make predict MODEL=" + ask.model + (ask.seq ? " SEQ=" + ask.seq : "") + " GPU=" + pay.gpu_names[c.gpu] + " BATCH=" + c.batch +
    " PRECISION=bf16 NODES=" + c.nodes + " RANKS=" + pay.ranks[c.ranks] + " GBPS=" + c.gbps + " ARGS=cluster.latency_us=20";
  const hash = "#model=" + pay.names[c.model] + "&gpu=" + pay.gpu_names[c.gpu] + "&batch=" + c.batch + "&nodes=" + c.nodes + "&ranks=" + pay.ranks[c.ranks] + "&gbps=" + c.gbps;
  $("paylink").href = hash;
  $("paylink").textContent = where;
}

function readPay() {  // from the address
  const said = new URLSearchParams(location.hash.slice(1));
  const place = (list, name, other) => Math.max(0, list.map(String).indexOf(said.get(name) || other));
  const given = (name, other) => Number(said.get(name)) > 0 ? Number(said.get(name)) : other;
  $("paymodel").value = String(place(pay.names, "model", pay.names[Math.min(1, pay.names.length - 1)]));
  $("paygpu").value = String(place(pay.gpu_names, "gpu", pay.gpu));
  $("payranks").value = String(place(pay.ranks, "ranks", "8"));
  $("paybatch").value = String(given("batch", 8));
  $("paynodes").value = String(given("nodes", 4));
  $("paygbps").value = String(given("gbps", 25));
}

function startPay() {
  pay = data.pay || null;
  if (!pay) { $("pay").remove(); return; }
  choose("paymodel", pay.models);
  choose("paygpu", pay.gpus);
  choose("payranks", pay.ranks);
  readPay();
  PAY.forEach((id) => $(id).addEventListener("input", showPay));
  $("paynear").textContent = Math.round(100 * pay.near) + " %";
  $("payunsure").textContent = Math.round(100 * pay.unsure) + " %";
  addEventListener("hashchange", () => { if (location.hash.startsWith("#model=")) { readPay(); showPay(); } });
  $("paylink").addEventListener("click", (event) => {
    event.preventDefault();
    history.replaceState(null, "", $("paylink").getAttribute("href"));
    if (navigator.clipboard) navigator.clipboard.writeText(location.href).catch(() => {});
  });
}
