"""Tables and plots of predictions: sweeps, published times, and what the paper's speedups need. No torch."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from birder.predict import METHODS, Cluster, Costs, Link, Prediction, simulate
from experiments.cells import published as published_times
from experiments.cells import timelines
from experiments.records.record import write_file
from experiments.report.formats import number
from experiments.report.table import Table

MARK = "Made by experiments/predict.py"
CLAIMS = {"resnet50_b32_tf32": ("ResNet-50", 2.5), "bert_base_b12_tf32": ("BERT-Base", 6.3)}
"""The timeline whose shape is taken, the model's name, the largest speedup over fp32 that the paper's abstract states."""
NODES, RANKS = 8, 8
COMPUTE_MS = (5.0, 300.0)
GBPS = (1.0, 40.0)
GRID = 28
PROFILE = ("", "published, ms", "ring, ms", "difference", "by nodes, ms", "difference")
FORMS = {"birder": "-", "birder_hierarchical": "--"}


def sweep_table(found: Sequence[Prediction], over: str) -> str:
    """Step times in ms: a row for each value, a column for each method."""
    names = [r.name for r in found[0].rows]
    head = [over, *(METHODS[n].label for n in names)]
    rows = [[f"{_value(p, over):g}", *(number(p[n].ms) for n in names)] for p in found]
    return Table.text(head, rows).grid().rstrip()


def _value(p: Prediction, over: str) -> float:
    return p.cluster.between.gbps if over == "gbps" else p.cluster.nodes


def draw_sweep(found: Sequence[Prediction], over: str, path: Path) -> Path:
    """Step times over link rates or nodes, with their intervals."""
    with style.context("default"):
        figure = Figure(figsize=(7.5, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        x = [_value(p, over) for p in found]
        for row in found[0].rows:
            axes.plot(x, [p[row.name].ms for p in found], marker="o", markersize=3, label=row.method.label)
            axes.fill_between(x, [p[row.name].low for p in found], [p[row.name].high for p in found], alpha=0.12)
        axes.set_xscale("log", base=2 if over == "nodes" else 10)
        axes.set_yscale("log")
        c, t = found[0].cluster, found[0].timeline
        axes.set_xlabel("nodes" if over == "nodes" else "Gbit/s between nodes")
        axes.set_ylabel("ms per step, predicted")
        where = f"{c.between.gbps:g} Gbit/s" if over == "nodes" else f"{c.nodes} nodes"
        axes.set_title(f"{t.name} on {t.gpu}, {where}, {c.ranks_per_node} ranks a node", fontsize=9)
        axes.legend(fontsize=7)
        return _save(figure, path)


def claims(name: str, form: str, costs: Costs | None = None, grid: int = GRID) -> tuple[Any, Any, Any]:
    """(compute in ms, Gbit/s, speedup[gbps, compute] of Birder over fp32) on 64 GPUs, the timeline's shape scaled in time."""
    whole = timelines.load(name)
    costs = costs or Costs.of_gpu(whole.gpu)
    compute = np.geomspace(*COMPUTE_MS, grid)
    rates = np.geomspace(*GBPS, grid)
    found = np.empty((grid, grid))
    for column, ms in enumerate(compute):
        t = whole.scaled(ms / whole.step_ms)
        for row, gbps in enumerate(rates):
            cluster = Cluster(NODES, RANKS, Link(float(gbps), 20.0))
            fp32, own = (simulate(t, cluster, METHODS[m], costs).ms for m in ("fp32", form))
            found[row, column] = fp32 / own
    return compute, rates, found


def draw_paper(path: Path, grid: int = GRID) -> Path:
    """The set of (compute per step, link rate) under which the paper's speedups come out; batches that there are as marks."""
    with style.context("default"):
        figure = Figure(figsize=(11, 4.8), layout="constrained")
        FigureCanvasAgg(figure)
        for axes, (name, (label, claim)) in zip(figure.subplots(1, 2), CLAIMS.items(), strict=True):
            for form, line in FORMS.items():
                compute, rates, found = claims(name, form, grid=grid)
                shown = axes.contour(
                    compute, rates, found, levels=[1.5, claim], colors=["#888888", "#aa3377"], linestyles=line
                )
                axes.clabel(shown, fmt="%gx", fontsize=7)
            family = label_of(name)
            for other in timelines.names():
                t = timelines.load(other)
                if t.model == family:
                    axes.axvline(t.step_ms, color="#4477aa", linewidth=0.6)
                    text = f" batch {t.batch_per_gpu}, {t.precision}"
                    axes.text(t.step_ms, 1.05, text, rotation=90, fontsize=6, va="bottom", color="#4477aa")
            for rate, text in ((10.0, "10 Gbit/s"), (7.2, "7.2, NCCL's sockets")):
                axes.axhline(rate, color="#228833", linewidth=0.6)
                axes.text(COMPUTE_MS[1], rate, text, fontsize=6, ha="right", va="bottom", color="#228833")
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlabel("forward and backward, ms")
            axes.set_ylabel("Gbit/s of a node's NIC")
            title = f"{label}: where Birder is {claim:g}x as fast as fp32"
            axes.set_title(f"{title}\n8 x 8 GPUs; full lines flat, broken ones hierarchical", fontsize=8)
        return _save(figure, path)


def label_of(name: str) -> str:
    """The model of a timeline's name."""
    return timelines.load(name).model


def published() -> str:
    """Published step times beside predicted ones, as Markdown."""
    profile = [
        [b.what, number(b.published), number(b.predicted), f"{b.predicted / b.published - 1:+.0%}", number(b.by_nodes),
         f"{(b.by_nodes or 0) / b.published - 1:+.0%}"]
        for b in published_times.profiles()
    ]  # fmt: skip
    rates = [
        [b.what, number(b.published), number(b.predicted), f"{b.predicted / b.published - 1:+.0%}"]
        for b in published_times.rates()
    ]
    return "\n\n".join(
        [
            "## Published step times",
            "BERT-Large pre-training with Adam, all-reduce after backward (1-bit Adam, Table 1; secondary source).",
            Table.text(PROFILE, profile).grid().rstrip(),
            "Whole steps, from throughputs read off charts (+-5 %) of the authors' blog.",
            Table.text(["", "published, ms", "predicted, ms", "difference"], rates).grid().rstrip(),
        ]
    )


def _save(figure: Figure, path: Path) -> Path:
    content = io.BytesIO()
    figure.savefig(content, dpi=110, metadata={"Software": MARK})
    write_file(path, content.getvalue(), "the plot")
    return path
