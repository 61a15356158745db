"""Table and plot of the paper's cluster, from records alone: results/tables/paper.md, results/plots/paper_speedup.png."""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console

from experiments.cells import paper, timelines
from experiments.cells.paper import Cell
from experiments.cells.replay import nic_bytes
from experiments.records.record import ResultRecord, read_all, write_file
from experiments.report import paper_check, published
from experiments.report.formats import DASH, number, percent, size, times
from experiments.report.table import WIDTH, Table
from launch.errors import UserError

MARK = "Made by make paper-table"
TABLE, PLOT = "tables/paper.md", "plots/paper_speedup.png"
NEAR = 0.15
"""An assumption reproduces a published factor when its best speedup is this close to it."""
GPU_GB_PER_S = 1300.0
"""What element-wise kernels reach of an A100-80GB's 2 TB/s: an assumption."""
GPU_BYTES = {"onebit_adam": 100.0, "birder": 28.0, "birder_hierarchical": 28.0 / paper.GPUS + 8.0}
"""Bytes of memory traffic per element for encoding and update on a GPU, about; hierarchical: encoding of its own shard."""
COLOURS = {
    "fp32": "#4477aa",
    "bf16": "#66ccee",
    "onebit_adam": "#ccbb44",
    "birder": "#ee6677",
    "birder_hierarchical": "#aa3377",
    "none": "#bbbbbb",
}
HEADLINES = {"resnet50": "resnet50", "bert_base": "bert_squad"}
"""Architecture -> the experiment under which results/paper keeps its published speedup."""


@dataclass(frozen=True)
class Results:
    """All cells that have been measured."""

    records: dict[Cell, ResultRecord]

    def get(self, model: str, rate: str, nodes: int, link: str, method: str) -> ResultRecord | None:
        """The record that this place of the table shows."""
        return self.records.get(paper.cell(model, rate, nodes, link, method))

    def ms(self, model: str, rate: str, nodes: int, link: str, method: str) -> float | None:
        """Step time on the cluster: that of this machine's clock divided by the dilation."""
        found = self.get(model, rate, nodes, link, method)
        return None if found is None else found.timing["median_ms"] / found.link["dilation"]

    def speedup(self, model: str, rate: str, nodes: int, link: str, method: str, base: str = "fp32") -> float | None:
        ours, theirs = (self.ms(model, rate, nodes, link, m) for m in (method, base))
        return theirs / ours if ours and theirs else None

    def best(self, model: str, rate: str, link: str, method: str, base: str = "fp32") -> float | None:
        """The largest speedup over the numbers of nodes, where there is more than one."""
        found = [self.speedup(model, rate, n, link, method, base) for n in paper.NODES[1:]]
        return max((s for s in found if s is not None), default=None)

    def settings(self) -> list[tuple[str, str, str]]:
        """(model, rate, link) for which something has been sent over a link."""
        sent = {(c.model, c.rate, c.link) for c in self.records if c.link}
        every = itertools.product(paper.MODELS, paper.RATES, paper.LINKS)
        return [setting for setting in every if setting in sent]

    @property
    def models(self) -> list[str]:
        return [m for m in paper.MODELS if any(c.model == m for c in self.records)]


def collect(records: Sequence[ResultRecord]) -> Results:
    """The latest completed record of every cell."""
    found: dict[Cell, ResultRecord] = {}
    fields = ("model", "rate", "nodes", "link", "method")
    for r in sorted(records, key=lambda r: (r.time, r.id)):
        plan = r.config.get("paper", {})
        if r.exp == paper.EXP and r.status == "completed" and "method" in plan:
            found[Cell(**{f: plan[f] for f in fields})] = r
    return Results(found)


def load(results_dir: str | Path) -> Results:
    """Results of a folder. Raises UserError when there are none."""
    results = collect(read_all(results_dir))
    if not results.records:
        raise UserError(f"no record of the paper's table in {results_dir}/records: leave out --tables-only")
    return results


def write(results_dir: str | Path) -> list[Path]:
    """Brings table and plot up to date with the records; returns their paths. Raises UserError."""
    results = load(results_dir)
    paths = [Path(results_dir) / TABLE, Path(results_dir) / PLOT]
    write_file(paths[0], markdown(results).encode(), "table")
    write_file(paths[1], plot(results), "plot")
    return paths


def show(results_dir: str | Path, console: Console | None = None) -> None:
    """Prints what the table says: honesty first, then the summary, the sentences and the check."""
    results = load(results_dir)
    console = console or Console(width=WIDTH)

    def say(text: str, mark: str = "") -> None:
        console.print(text, style=mark or None, markup=False, highlight=False)

    say(honesty(results), "yellow")
    say(SUMMARY_NOTE, "dim")
    summary(results).show(console)
    for line in verdicts(results):
        say(line, "bold")
    paper_check.table(results).show(console)
    say(paper_check.sentence(results), "bold")
    for what, path in (("table:", TABLE), ("plot:", PLOT)):
        console.print(f"{what:<8}{Path(results_dir) / path}", soft_wrap=True, markup=False, highlight=False)


def honesty(results: Results) -> str:
    """What these numbers are not."""
    rs = list(results.records.values())
    dilations = [r.link["dilation"] for r in rs]
    fractions = sorted({r.config["paper"]["fraction"] for r in rs})
    rates = sorted({r.link["set_mbit_per_s"] for r in rs if r.link.get("set_mbit_per_s")})
    goodputs = sorted(r.link["mbit_per_s"] for r in rs if r.nodes > 1 and r.link["mbit_per_s"])
    text = "Replayed and emulated, not measured on GPUs: "
    text += "computation is waited for as timelines of an A100 say; nodes of 8 GPUs are one process each; "
    if rates:
        text += f"links between nodes are shaped to {', '.join(map(number, rates))} Mbit/s"
        text += f" ({number(goodputs[0])} to {number(goodputs[-1])} of TCP measured)" if goodputs else ""
        text += "; "
    text += f"time runs {number(min(dilations))} to {number(max(dilations))} times slower than on the cluster; "
    shares = ", ".join(f"1/{round(1 / f)}" for f in fractions)
    return text + f"of every tensor {shares} of the elements is there, and the link is as much slower"


SUMMARY = ("assumption", "fp32, ms", "Birder, ms", "vs fp32", "best", "vs bf16", "best", "bound", "paper")
SUMMARY_NOTE = (
    "64 GPUs: step times of fp32 DDP and of Birder (hierarchical), its speedup over fp32 and bf16 DDP, each beside the best "
    "over 2, 4 and 8 nodes; the bound is the speedup of no communication over fp32 DDP."
)


def summary(results: Results) -> Table:
    """One row for each assumption: Birder against fp32 and bf16, beside the paper."""
    rows = []
    for model, rate, link in results.settings():
        factor = headline(model)[1]
        at, ours = (model, rate, paper.NODES[-1], link), "birder_hierarchical"
        row = [
            f"{model}, {paper.RATES[rate]}, {link} Gbit/s",
            number(results.ms(*at, "fp32")),
            number(results.ms(*at, ours)),
        ]
        for base in ("fp32", "bf16"):
            row += [times(results.speedup(*at, ours, base)), times(results.best(model, rate, link, ours, base))]
        rows.append([*row, times(results.speedup(*at, "none")), times(factor)])
    return Table.text(SUMMARY, rows)


def headline(model: str) -> tuple[str, float | None]:
    """(sentence, factor) of the paper for a model's architecture."""
    exp = HEADLINES.get(paper.architecture_of(model), "")
    for e in published.load():
        if e.get("kind") == "speedup" and exp in e.get("exps", ()) and isinstance(e["value"], int | float):
            return f"{e['quantity']}: {e['value']:g}x ({e['source']}; {e['status']})", float(e["value"])
    return "", None


def verdicts(results: Results) -> list[str]:
    """For each architecture, which assumptions give the paper's factor and which do not, from the numbers."""
    said = []
    for architecture in dict.fromkeys(paper.architecture_of(m) for m in results.models):
        quoted, factor = headline(f"{architecture}_b1")
        if factor is None:
            continue
        found: list[tuple[float, str]] = []
        for model, rate, link in results.settings():
            for base in ("fp32", "bf16"):
                best = results.best(model, rate, link, "birder_hierarchical", base)
                if best is not None and paper.architecture_of(model) == architecture:
                    batch = model.rpartition("_b")[2]
                    found.append((best, f"batch {batch}, {paper.RATES[rate]}, {link} Gbit/s, against {base}"))
        if found:
            said.append(_verdict(quoted, factor, found))
    return said


def _verdict(quoted: str, factor: float, found: list[tuple[float, str]]) -> str:
    # How far off in either direction: half of a factor is as far from it as twice.
    ordered = sorted(found, key=lambda f: (max(f[0] / factor, factor / f[0]), f[1]))
    near = [f for f in ordered if abs(f[0] / factor - 1) <= NEAR]
    text = f"Published: {quoted}. Here, best over the numbers of nodes: "
    if near:
        each = "; ".join(f"{where} ({times(value)})" for value, where in near)
        text += f"reproduced within {percent(NEAR)} by {each}. "
    else:
        text += (
            f"reproduced within {percent(NEAR)} by no assumption; nearest is {ordered[0][1]} ({times(ordered[0][0])}). "
        )
    rest = sorted((f for f in ordered if f not in near), key=lambda f: f[0])
    below = [f for f in rest if f[0] < factor]
    above = [f for f in rest if f[0] > factor]
    if below:
        text += "Less: " + "; ".join(f"{where} ({times(value)})" for value, where in below) + ". "
    if above:
        text += "More: " + "; ".join(f"{where} ({times(value)})" for value, where in above) + ". "
    return text.rstrip()


def markdown(results: Results) -> str:
    """The page results/tables/paper.md."""
    lines = [f"<!-- {MARK} from the records; do not edit. -->", "# The paper's cluster, replayed", ""]
    lines += [
        f"**{honesty(results)}.**",
        "",
        "How it is made, and what it leaves out: [replay](../../docs/replay.md).",
        "",
    ]
    lines += ["## In short", "", SUMMARY_NOTE, "", summary(results).grid()]
    lines += [paragraph for said in verdicts(results) for paragraph in (said, "")]
    lines += [f"![speedup over nodes](../{PLOT})", ""]
    lines += ["## Check: fp32 DDP against arithmetic", "", paper_check.EXPLANATION, ""]
    lines += [paper_check.table(results).grid()]
    lines += [f"**{paper_check.sentence(results)}**", ""]
    for model in results.models:
        lines += [f"## {paper.MODELS[model]}", "", *_timelines(model)]
        for rate, link in ((r, at) for m, r, at in results.settings() if m == model):
            lines += [f"### {paper.RATES[rate]}, {paper.LINKS[link]}", "", _times_table(results, model, rate, link)]
    lines += ["## How each cell was measured", "", _details_note(), "", _details(results)]
    return "\n".join(lines).rstrip() + "\n"


def _timelines(model: str) -> list[str]:
    lines = []
    for rate, label in paper.RATES.items():
        t = timelines.load(f"{model}_{rate}")
        rest = "; ".join(filter(None, [t.source or t.command, t.note]))
        lines += [
            f"- {label}: {number(t.step_ms)} ms of computation a step, {t.elements / 1e6:.1f} M parameters. {rest}."
        ]
    return [*lines, ""]


def _times_table(results: Results, model: str, rate: str, link: str) -> str:
    head = ["method", *(f"ms, {n * paper.GPUS} GPUs" for n in paper.NODES)]
    head += [f"vs fp32, {n * paper.GPUS}" for n in paper.NODES[1:]] + [
        f"vs bf16, {n * paper.GPUS}" for n in paper.NODES[1:]
    ]
    rows = []
    for method in paper.ROWS:
        row = [paper.METHODS[method].label]
        row += [number(results.ms(model, rate, n, link, method)) for n in paper.NODES]
        for base in ("fp32", "bf16"):
            row += [times(results.speedup(model, rate, n, link, method, base)) for n in paper.NODES[1:]]
        rows.append(row)
    return Table.text(head, rows).grid()


def _details_note() -> str:
    return (
        "Times of this machine's clock: step time and its smallest and largest value over the steps, of the slowest node; "
        "divided by D they are those of the cluster. NIC is what the interface counted per node and step, arithmetic what "
        "the method sends for this share of the elements, without headers. CPU is what encoding and the update took here, "
        "as a share of the step, much of encoding beside backward; on a GPU they would take about the share in the next "
        f"column ({GPU_GB_PER_S:.0f} GB/s of memory traffic; dense updates are in the timelines already)."
    )


def _details(results: Results) -> str:
    head = ["cell", "D", "share", "step, ms", "NIC tx", "arithmetic", "ratio", "CPU", "GPU", "record"]
    rows = []
    for c in sorted(results.records, key=lambda c: _order(c)):
        r = results.records[c]
        plan, timing, method = r.config["paper"], r.timing, paper.METHODS[c.method]
        expected = nic_bytes(method.traffic, plan["elements"], c.nodes, plan["gpus"])
        nic = r.bytes_per_step["nic_tx"] if c.nodes > 1 else None
        cpu = (timing["split"]["encode_ms"] + timing["split"]["update_ms"]) / timing["median_ms"]
        step = timing["median_ms"] / r.link["dilation"]
        name = f"{c.model}, {paper.RATES[c.rate]}, {c.nodes} x {paper.GPUS}" + (f", {c.link}" if c.link else "")
        rows.append(
            [
                f"{name}: {method.label}",
                number(r.link["dilation"]),
                f"1/{round(1 / plan['fraction'])}",
                f"{number(timing['median_ms'])} ({number(timing['p10_ms'])}–{number(timing['p90_ms'])})",
                size(nic),
                size(expected) if c.nodes > 1 else DASH,
                number(nic / expected) if nic is not None and expected else DASH,
                percent(cpu),
                percent(gpu_ms(c) / step) if c.method in GPU_BYTES else DASH,
                f"[record](../records/{r.id}.json)",
            ]
        )
    return Table.text(head, rows).grid()


def gpu_ms(cell: Cell) -> float:
    """What encoding and update of a compressed method would take on a GPU, by its memory traffic alone."""
    return timelines.load(cell.timeline).elements * GPU_BYTES[cell.method] / (GPU_GB_PER_S * 1e6)


def _order(c: Cell) -> tuple[Any, ...]:
    places = (list(paper.MODELS), list(paper.RATES), list(paper.METHODS))
    model, rate, method = (p.index(v) for p, v in zip(places, (c.model, c.rate, c.method), strict=True))
    return model, rate, c.nodes, list(paper.LINKS).index(c.link) if c.link else -1, method


def plot(results: Results) -> bytes:
    """Speedup against fp32 over GPUs, one panel for each model (rows) and assumption (columns)."""
    columns = [(rate, link) for rate in paper.RATES for link in paper.LINKS]
    drawn: list[object] = []
    with style.context("default"):
        figure = Figure(figsize=(13, 1.2 + 2.9 * len(results.models)), layout="constrained")
        grid = figure.subplots(len(results.models), len(columns), squeeze=False, sharex=True, sharey="row")
        for row, model in zip(grid, results.models, strict=True):
            factor = headline(model)[1]
            for axes, (rate, link) in zip(row, columns, strict=True):
                for method in paper.ROWS if (model, rate, link) in results.settings() else ():
                    points = [(n * paper.GPUS, results.speedup(model, rate, n, link, method)) for n in paper.NODES]
                    known = [(x, y) for x, y in points if y is not None]
                    if known:
                        label = paper.METHODS[method].label
                        axes.plot(
                            *zip(*known, strict=True), marker="o", markersize=3, color=COLOURS[method], label=label
                        )
                        drawn.append([model, rate, link, method, known])
                if factor:
                    axes.axhline(factor, linestyle=":", color="black", linewidth=1, label="the paper's best")
                axes.set_xscale("log", base=2)
                axes.set_xticks([n * paper.GPUS for n in paper.NODES], [str(n * paper.GPUS) for n in paper.NODES])
                axes.grid(alpha=0.3)
                axes.set_title(f"{model}, {paper.RATES[rate]}, {link} Gbit/s", fontsize=8)
            row[0].set_ylabel("speedup over fp32 DDP")
        for axes in grid[-1]:
            axes.set_xlabel("GPUs, 8 per node")
        grid[0][0].legend(fontsize=6)
        figure.suptitle("Replayed and emulated, not measured on GPUs (docs/replay.md)", fontsize=9)
        FigureCanvasAgg(figure)
        buffer = io.BytesIO()
        described = f"{MARK}, data {hashlib.sha256(repr(drawn).encode()).hexdigest()}"
        figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None, "Description": described})
        return buffer.getvalue()
