"""The picture of the benchmark: results/plots/bench.png."""

from __future__ import annotations

import hashlib
import io
from typing import Any

from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.cells.bench_plan import LINKS, METHODS
from experiments.report.bench_results import OURS, Results
from experiments.report.formats import number

MARK = "Made by make bench"
COLOURS = {"fp32": "#4477aa", "16": "#66ccee", "lowrank": "#228833", "1bit": "#ccbb44", "none": "#bbbbbb"}


def plot(results: Results) -> bytes:
    """Step times as bars: a row of panels for each model and link, a column for each number of nodes."""
    rows = list(dict.fromkeys((m, at) for m, at, _ in results.places()))
    columns = sorted({n for _, _, n in results.places()})
    drawn: list[Any] = []
    with style.context("default"):
        figure = Figure(figsize=(4.4 * len(columns) + 1.5, 0.8 + 2.6 * len(rows)), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(rows), len(columns), squeeze=False, sharey=True)
        names = list(METHODS)[::-1]
        for panels, (model, link) in zip(grid, rows, strict=True):
            for axes, nodes in zip(panels, columns, strict=True):
                found = [(i, results.ms(model, link, nodes, name)) for i, name in enumerate(names)]
                for i, ms in found:
                    if ms is not None:
                        axes.barh(i, ms, color=_colour(names[i]))
                        axes.text(ms, i, f" {number(ms)}", va="center", fontsize=6)
                        drawn.append([model, link, nodes, names[i], ms])
                bound = results.ms(model, link, nodes, "none")
                if bound is not None:
                    axes.axvline(bound, color="#888888", linewidth=0.8, linestyle=":")
                axes.set_yticks(range(len(names)), [METHODS[name].label for name in names], fontsize=7)
                axes.tick_params(axis="x", labelsize=7)
                axes.margins(x=0.15)
                axes.set_title(f"{model}, {LINKS[link]}, {nodes} nodes", fontsize=8)
        for axes in grid[-1]:
            axes.set_xlabel("step, ms of the cluster's clock", fontsize=7)
        figure.suptitle("Replayed, not measured on GPUs (docs/bench.md)", fontsize=9)
        buffer = io.BytesIO()
        described = f"{MARK}, data {hashlib.sha256(repr(drawn).encode()).hexdigest()}"
        figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None, "Description": described})
        return buffer.getvalue()


def _colour(method: str) -> str:
    if method.startswith("birder"):
        return "#aa3377" if method == OURS else "#ee6677"
    wire = METHODS[method].wire
    return COLOURS["16" if wire in ("bf16", "fp16") else wire]
