"""Tables and plots of predictions over link rates and nodes. No torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from birder.predict import METHODS, Prediction
from birder.predict.gpus import GPU
from birder.predict.table import decide
from experiments.records.record import write_file
from experiments.report import figure
from experiments.report.formats import number
from experiments.report.sentences import MODELS, say
from experiments.report.table import Note, Table

MARK = "Made by experiments/predict.py"
Fits = Callable[[Prediction, str], bool]
"""Whether a method, by its name, has the memory that it needs on a prediction's cluster."""
COLOURS = {
    "fp32": "#4477aa",
    "bf16": "#66ccee",
    "powersgd4": "#228833",
    "onebit_adam": "#ccbb44",
    "birder": "#ee6677",
    "birder_hierarchical": "#aa3377",
    "none": "#888888",
}


def sweep_table(found: Sequence[Prediction], over: str, fits: Fits, gpu: GPU | None = None) -> str:
    """Step times in ms: a row for each value, a column for each method. What matters least stands last, where a narrow
    terminal leaves it out.

    gpu: the one whose memory does not do for some of them, marked `!`.
    """
    rows = [r.method for r in found[0].rows]
    names = [m.name for m in sorted(rows, key=lambda m: (not m.dense, m.name == "none", not m.hierarchical))]
    too_full = [n for n in names if not all(fits(p, n) for p in found)]
    head = [over, *(METHODS[n].label + " !" * (n in too_full) for n in names)]
    times = [[f"{_value(p, over):g}", *(number(p[n].ms) for n in names)] for p in found]
    notes = [Note(f"{point(found, over, fits)}.", "strong"), Note(_setting(found[0], over))]
    notes += Note.of(say("too_full", gpu=gpu if too_full else None), kind="caution")
    return Table.text(head, times, title="Predicted step, ms", notes=tuple(notes)).drawn()


def _value(p: Prediction, over: str) -> float:
    return p.cluster.nic_gbps if over == "gbps" else p.cluster.nodes


def _setting(p: Prediction, over: str) -> str:
    return say(
        "sweep_setting", c=p.cluster, t=p.timeline, over=over, model=MODELS.get(p.timeline.model, p.timeline.model)
    )


def draw_sweep(found: Sequence[Prediction], over: str, path: Path, fits: Fits = lambda p, name: True) -> Path:
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
            figure.plain(axes.yaxis)
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
        grid[0].set_ylabel("predicted step, ms")
        figure.head(picture, point(found, over, fits), _setting(found[0], over))
        drawn = [[x, [[row.name, row.ms] for row in p.rows]] for p in found]
        write_file(path, figure.png(picture, drawn, MARK), "the plot")
        return path


def point(found: Sequence[Prediction], over: str, fits: Fits) -> str:
    """What the first and the last value have come to, in one sentence."""
    said = []
    for p in (found[0], found[-1]):
        nodes = "one node" if p.cluster.nodes == 1 else f"{p.cluster.nodes:,} nodes"
        where = f"on {nodes}" if over == "nodes" else f"at {p.cluster.nic_gbps:g} Gbit/s"
        best = decide(p, functools.partial(fits, p))[0]
        if p.cluster.nodes == 1 and best in ("bf16", "none"):
            said.append(f"{where} compression gains nothing")
        elif all(r.method.dense for r in p.rows):
            said.append(f"{where} nothing is compared that compresses")
        elif best is None:
            said.append(f"{where} nothing is decided")
        else:
            gain = f"{number(p.speedup(best)[0])}x as fast as fp32" if p.has("fp32") else "the fastest"
            said.append(f"{where} {p[best].method.label} is predicted to be {gain}")
    text = "; ".join(said)
    return text[0].upper() + text[1:]


def tints(names: Sequence[str]) -> list[str]:
    """A method's own colour, whichever panel it is in; colours of others that no method of the panel has."""
    free = [c for c in figure.OTHERS if c not in COLOURS.values()]
    return [COLOURS.get(name) or free[i % len(free)] for i, name in enumerate(names)]


def rate_axis(axes: Axes, gbps: Sequence[float]) -> None:
    """A logarithmic axis of link rates, each of `gbps` with its number."""
    axes.set_xscale("log")
    axes.set_xticks(gbps, [f"{g:g}" for g in gbps])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("link of a node, Gbit/s")
