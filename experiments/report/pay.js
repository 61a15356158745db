// Will it pay? Between the cells of the grid logarithms are linear.

let pay = null;
const PAY = ["paymodel", "paygpu", "payranks", "paybatch", "paynodes", "paygbps"];

function between(values, wanted, scale = Math.log) {
  const at = Math.min(Math.max(wanted, values[0]), values[values.length - 1]);
  let k = 0;
  while (k < values.length - 2 && at > values[k + 1]) k += 1;
  if (values.length === 1) return [[0, 1]];
  const share = (scale(at) - scale(values[k])) / (scale(values[k + 1]) - scale(values[k]));
  return [[k, 1 - share], [k + 1, share]].filter(([, weight]) => weight > 0);
}

function payAt(c, gbps) {  // each method's ms, and the ends of the savings of those that can be advised
  const table = (b) => pay.cells[c.model][b][c.gpu][c.ranks], count = pay.methods.length, sum = Array(count + 2 * pay.compressed.length).fill(0);
  between(pay.batches[c.model], c.batch).forEach(([b, x]) => between(pay.nodes, c.nodes).forEach(([n, y]) => between(pay.gbps, gbps).forEach(([g, z]) =>
    table(b)[n][g].forEach((value, i) => { sum[i] += x * y * z * (i < count ? Math.log(value) : value); }))));
  const end = (first) => { const ends = []; pay.compressed.forEach((i, k) => { ends[i] = sum[first + k]; }); return ends; };
  return {ms: sum.slice(0, count).map(Math.exp), low: end(count), high: end(count + pay.compressed.length)};
}

function payMemory(c) {  // GB of a rank, at last under HSDP and FSDP; activations are as many times as large as the batch
  const sum = Array(pay.methods.length + 2).fill(0);
  between(pay.batches[c.model], c.batch, (v) => v).forEach(([b, x]) => between(pay.nodes, c.nodes).forEach(([n, y]) =>
    pay.gb[c.model][b][c.ranks][n].forEach((value, i) => { sum[i] += x * y * value; })));
  return sum;
}

function chosenPay() {
  const [model, gpu, ranks, batch, nodes, gbps] = PAY.map((id) => Number($(id).value));
  return {model, gpu, ranks, batch: Math.round(batch), nodes: Math.round(nodes), gbps};
}

function offered(c) {  // nodes of one GPU are flat
  return pay.methods.map((_, i) => i).filter((i) => pay.ranks[c.ranks] > 1 || !pay.hierarchical.includes(i));
}

const digits = (v, count) => v >= Math.pow(10, count) - 0.5 ? v.toFixed(0) : String(Number(v.toPrecision(count)));
const percent = (v) => String(Math.round(100 * v));
const leastOf = (places, of) => places.length ? places.reduce((a, b) => of(b) < of(a) ? b : a) : null;

function payAdvice(c) {  // birder.predict.table.advised: a method, or null; whether it pays, null: not decided; why it cannot
  const {ms, low, high} = payAt(c, c.gbps), gb = payMemory(c), fits = (i) => gb[i] <= pay.gpu_gb[c.gpu], bf16 = ms[pay.bf16];
  const able = offered(c).filter((i) => pay.compressed.includes(i) && fits(i)), fastest = leastOf(able, (i) => ms[i]);
  const gaining = able.filter((i) => bf16 / ms[i] >= 1 + pay.near), paying = gaining.filter((i) => low[i] > 0);
  const found = {c, ms, low, high, gb, fits, paying, best: fastest, pays: false, why: ""};
  if (bf16 <= (1 + pay.near) * ms[pay.bound]) found.why = "bf16 is within " + percent(pay.near) + " % of the bound (" + digits(bf16, 4) + " against " + digits(ms[pay.bound], 4) + " ms)";
  else if (fastest !== null && ms[fastest] > bf16) found.why = "bf16 takes " + digits(bf16, 4) + " ms, and no compressed method is faster";
  if (found.why || fastest !== null && !gaining.length) return found;
  if (!paying.length) return {...found, pays: null};
  const run = (i) => pay.warm[i] * ms[pay.fp32] + (1 - pay.warm[i]) * ms[i], least = Math.min(...paying.map(run));
  const near = paying.filter((i) => run(i) <= (1 + pay.near) * least), price = Math.min(...near.map((i) => pay.lost[i]));
  const kept = near.filter((i) => pay.lost[i] === price), first = Math.min(...kept.map(run));
  return {...found, best: kept.find((i) => run(i) <= (1 + pay.tie) * first), pays: true};
}

function paySmaller(c, gb, fits) {  // birder.predict.answers.Answer.smaller
  const batches = pay.batches[c.model], batch = Math.min(Math.max(c.batch, batches[0]), batches[batches.length - 1]);
  const saved = between(batches, batch, (v) => v).reduce((sum, [b, x]) => sum + x * pay.saved[c.model][b], 0);
  const left = (place) => pay.gpu_gb[c.gpu] + saved - gb[place], again = pay.recompute[c.model], fsdp = pay.methods.length + 1;
  const wider = [["hsdp", fsdp - 1], ["fsdp", fsdp]].slice(pay.ranks[c.ranks] > 1 ? 0 : 1), fitting = wider.find(([, at]) => fits(at));
  const enough = (place) => saved / Math.max(batch, 2) <= left(place);
  const [name, place] = [["", pay.bf16], ...wider].find(([, at]) => enough(at)) || wider[wider.length - 1];
  const ways = [...(batch > 1 && (enough(place) || again) ? ["a smaller batch"] : []), ...(again ? ["checkpointing=true"] : [])];
  const fewer = ways.length && left(place) > 0 ? ways.join(enough(place) ? " or " : " and ") : "";
  if (fitting) return "Shard it (sharding=" + fitting[0] + ")" + (fewer && !name ? ", or take " + fewer : "") + ".";
  if (fewer) return (name ? "Shard it (sharding=" + name + ") and take " : "Take ") + fewer + ".";
  return "It needs " + (left(fsdp) > 0 ? "" : "more GPUs to shard it over (sharding=fsdp), or ") + "GPUs with more memory.";
}

function paySentences({c, ms, low, high, gb, fits, paying, best, pays, why}) {  // those of the command line
  const said = [], there = offered(c), bf16 = ms[pay.bf16], saving = (i) => 1 - ms[i] / bf16;
  const ends = (i) => " [" + percent(low[i]) + ", " + percent(high[i]) + "]";
  if (!there.some(fits)) said.push("It does not fit: " + digits(Math.min(...there.map((i) => gb[i])), 3) + " GB of " + pay.gpu_gb[c.gpu] + " GB on one " + pay.gpus[c.gpu] + ". " + paySmaller(c, gb, fits));
  if (pays) {
    said.push("Compress: " + pay.methods[best] + " saves " + percent(saving(best)) + " % of the step" + ends(best) + " against bf16, " +
      (bf16 / ms[best]).toFixed(2) + "x as fast as bf16; " + pay.price[best] + ".", pay.needs[best]);
    if (pay.kept[best] === 0) {
      const good = paying.filter((i) => pay.kept[i]), lost = Math.min(...good.map((i) => pay.lost[i]));
      const other = leastOf(good.filter((i) => pay.lost[i] === lost), (i) => ms[i]);
      said.push("Faster, but no published study shows parity." + (other === null ? "" : " " + pay.methods[other] +
        (pay.about[other] ? " (" + pay.about[other] + ")" : "") + " saves " + percent(saving(other)) + " %; " + pay.price[other] + "."));
    }
  } else if (why) said.push("Do not compress: " + why + ".");
  else if (best === null) said.push("Not decided: " + pay.not_compared + ".");
  else {
    const saves = pay.methods[best] + ", the fastest whose ranks share one model, saves " + percent(saving(best)) + " % of bf16's step" + ends(best);
    said.push(pays === null ? "Not decided: " + saves + ", which is within what this prediction can tell." : "Do not compress: " + saves + ", less than is worth a change.");
  }
  const far = leastOf(there.filter((i) => pay.local.includes(i) && fits(i)), (i) => ms[i]);
  const others = there.filter((i) => i !== pay.bound && !pay.local.includes(i)).map((i) => ms[i]);
  if (far !== null && ms[far] * pay.far < Math.min(...others)) said.push(pay.methods[far] + " (" + pay.about[far] + ") would be " +
    digits(bf16 / ms[far], 3) + "x as fast as bf16, with a model of its own on every rank.");
  return said;
}

function showPay() {
  if (!pay) return;
  const c = chosenPay();
  if (!PAY.every((id) => $(id).value !== "" && Number.isFinite(Number($(id).value)) && ($(id).tagName === "SELECT" || Number($(id).value) > 0))) return;
  const batches = pay.batches[c.model], limits = {paybatch: batches, paynodes: pay.nodes, paygbps: pay.gbps};
  const outside = Object.entries(limits).filter(([id, v]) => Number($(id).value) < v[0] || Number($(id).value) > v[v.length - 1])
    .map(([id, v]) => $(id).labels[0].firstChild.textContent.trim() + " " + v[0] + " to " + v[v.length - 1]);
  const found = payAdvice(c), {ms, gb, fits, best} = found;
  $("payanswer").textContent = paySentences(found).join(" ");
  const where = pay.names[c.model] + ", batch " + c.batch + ", on " + c.nodes + " nodes of " + pay.ranks[c.ranks] + " " + pay.gpus[c.gpu] + " at " + c.gbps + " Gbit/s";
  $("paywhere").textContent = where + "." + (outside.length ? " Taken as the nearest that is known: " + outside.join(", ") + "." : "");
  const order = offered(c).sort((a, b) => ms[b] - ms[a]);
  fill($("paytable"), "", ["method", "ms a step", "saves against bf16", "GB a GPU"], order.map((i) => [pay.methods[i], number(ms[i]),
    i === pay.bf16 ? DASH : percent(1 - ms[i] / ms[pay.bf16]).replace("-", "\u2212") + " %", gb[i].toFixed(1) + (fits(i) ? "" : " !")]), order.indexOf(best));
  const xs = [...Array(41).keys()].map((k) => pay.gbps[0] * Math.pow(pay.gbps[pay.gbps.length - 1] / pay.gbps[0], k / 40)), ys = xs.map((x) => payAt(c, x).ms);
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
