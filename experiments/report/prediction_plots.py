"""Tables and plots of predictions: sweeps, published times, and what the paper's speedups need. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, StrMethodFormatter

from birder.predict import METHODS, Cluster, Costs, Link, Prediction, simulate
from experiments.cells import published as published_times
from experiments.cells import timelines
from experiments.records.record import write_file
from experiments.report import figure
from experiments.report.formats import number
from experiments.report.metrics import OPEN
from experiments.report.table import Table

MARK = "Made by experiments/predict.py"
CLAIMS = {"resnet50_b32_tf32": ("ResNet-50", 2.5), "bert_base_b12_tf32": ("BERT-Base", 6.3)}
"""The timeline whose shape is taken, the model's name, the largest speedup over fp32 that the paper's abstract states."""
NODES, RANKS = 8, 8
COMPUTE_MS = (5.0, 300.0)
GBPS = (1.0, 40.0)
GRID = 28
PROFILE = ("", "published, ms", "ring, ms", "difference", "by nodes, ms", "difference")
MARKS = 7.5
"""Size of what is written at the marks of the paper's plot, points."""
FORMS = {"birder": "-", "birder_hierarchical": "--"}
COLOURS = {
    "fp32": "#4477aa",
    "bf16": "#66ccee",
    "powersgd4": "#228833",
    "onebit_adam": "#ccbb44",
    "birder": "#ee6677",
    "birder_hierarchical": "#aa3377",
    "none": "#888888",
}


def sweep_table(found: Sequence[Prediction], over: str) -> str:
    """Step times in ms: a row for each value, a column for each method."""
    names = [r.name for r in found[0].rows]
    head = [over, *(METHODS[n].label for n in names)]
    rows = [[f"{_value(p, over):g}", *(number(p[n].ms) for n in names)] for p in found]
    return Table.text(head, rows).grid().rstrip()


def _value(p: Prediction, over: str) -> float:
    return p.cluster.between.gbps if over == "gbps" else p.cluster.nodes


def draw_sweep(found: Sequence[Prediction], over: str, path: Path) -> Path:
    """Step times over link rates or nodes, with their intervals: small multiples, fp32 and the bound in each."""
    with figure.styled():
        every = [row.name for row in found[0].rows]
        always = [name for name in ("fp32", "none") if name in every]
        others = [name for name in every if name not in always]
        parts = figure.groups(others, figure.SERIES - len(always)) or [[]]
        picture = figure.blank(4.2 * len(parts) + 0.6, 3.9)
        grid = picture.subplots(1, len(parts), squeeze=False, sharey=True)[0]
        x = [_value(p, over) for p in found]
        for axes, part in zip(grid, parts, strict=True):
            names = [name for name in every if name in always or name in part]
            for name, tint in zip(names, tints(names), strict=True):
                label = found[0][name].method.label
                look = {"linestyle": ":"} if name == "none" else {"marker": "o", "markersize": 3}
                axes.plot(x, [p[name].ms for p in found], color=tint, label=label, **look)
                low, high = ([getattr(p[name], end) for p in found] for end in ("low", "high"))
                axes.fill_between(x, low, high, color=tint, alpha=0.12, linewidth=0)
            rate_axis(axes, x[:: 1 + (len(x) > 8)])
            if over == "nodes":
                axes.set_xlabel("nodes")
            axes.set_yscale("log")
            plain(axes.yaxis)
            axes.grid(visible=True)
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
        grid[0].set_ylabel("predicted step, ms")
        figure.head(picture, ends(found, over), _setting(found, over))
        return _save(picture, path, [[x, [[row.name, row.ms] for row in p.rows]] for p in found])


def tints(names: Sequence[str]) -> list[str]:
    """A method's own colour, whichever panel it is in; colours of others that no method of the panel has."""
    free = [c for c in figure.OTHERS if c not in COLOURS.values()]
    return [COLOURS.get(name) or free[i % len(free)] for i, name in enumerate(names)]


def ends(found: Sequence[Prediction], over: str) -> str:
    """Which method wins at either end of a sweep, and by how much (`Prediction.winner`)."""
    said = []
    for p in (found[0], found[-1]):
        best = None if p.winner is None else p[p.winner]
        value = _value(p, over)
        where = f"{value:g} node{'s' * (value != 1)}" if over == "nodes" else f"{value:g} Gbit/s"
        if p.cluster.nodes == 1:
            said.append(f"{where}: nothing to win")
            continue
        gain = f", {p.speedup(best.name)[0]:.2f}x as fast as fp32 DDP" if best is not None and p.has("fp32") else ""
        said.append(f"{where}: {OPEN if best is None else best.method.label}{gain}")
    return "; ".join(said)


def _setting(found: Sequence[Prediction], over: str) -> str:
    c, t = found[0].cluster, found[0].timeline
    where = f"{c.between.gbps:g} Gbit/s" if over == "nodes" else f"{c.nodes} nodes"
    return f"{t.name} on {t.gpu}, {where}, {c.ranks_per_node} GPUs a node. Predicted, with the prediction's interval."


def rate_axis(axes: Axes, gbps: Sequence[float]) -> None:
    """A logarithmic axis of link rates, each of `gbps` with its number."""
    axes.set_xscale("log")
    axes.set_xticks(gbps, [f"{g:g}" for g in gbps])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("link of a node, Gbit/s")


def plain(axis: Axis) -> None:
    """1, 2, 5, 10, 20, ... on a logarithmic axis."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


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
    drawn: list[Any] = []
    with figure.styled():
        picture = figure.blank(10, 4.4)
        for axes, (name, (label, claim)) in zip(picture.subplots(1, 2), CLAIMS.items(), strict=True):
            for form, line in FORMS.items():
                compute, rates, found = claims(name, form, grid=grid)
                for level, tint in ((1.5, "#888888"), (claim, "#aa3377")):
                    axes.contour(compute, rates, found, levels=[level], colors=[tint], linestyles=line)
                    axes.plot([], [], line, color=tint, label=f"{level:g}x, {METHODS[form].label}")
                drawn.append([name, form, found.round(3).tolist()])
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlabel("forward and backward, ms")
            axes.set_ylabel("link of a node, Gbit/s")
            # Above what is written along the top.
            axes.set_title(f"{label}: the paper's {claim:g}x", loc="left", pad=10 * MARKS)
            for axis in (axes.xaxis, axes.yaxis):
                plain(axis)
            _marks(axes, timelines.load(name).model)
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
        point = "The published speedups come out below and to the left of the red lines: slow links, little computing"
        setting = f"{NODES} nodes of {RANKS} GPUs, Birder over fp32 DDP; a timeline with its times scaled. Predicted."
        figure.head(picture, point, setting)
        return _save(picture, path, drawn)


def _marks(axes: Axes, family: str) -> None:
    """Batches and precisions for which there is a timeline along the top; what TCP gives of 10 GbE along the right."""
    top, right = axes.get_xaxis_transform(), axes.get_yaxis_transform()
    for t in (t for t in map(timelines.load, timelines.names()) if t.model == family):
        axes.axvline(t.step_ms, color="#4477aa", linewidth=0.6)
        look: dict[str, Any] = {"fontsize": MARKS, "color": "#4477aa", "rotation": 90, "ha": "center", "va": "bottom"}
        axes.text(t.step_ms, 1.01, f"batch {t.batch_per_gpu}, {t.precision.upper()}", transform=top, **look)
    for rate, text in ((10.0, "10 GbE"), (7.2, "7.2: NCCL's\nsockets")):
        axes.axhline(rate, color="#228833", linewidth=0.6)
        axes.text(1.01, rate, text, transform=right, fontsize=MARKS, color="#228833", va="center")


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


def _save(picture: Figure, path: Path, drawn: object) -> Path:
    write_file(path, figure.png(picture, drawn, MARK), "the plot")
    return path
