"""The picture of a suite: speedups over the number of GPUs as lines, or step times as bars."""

from __future__ import annotations

from typing import Any

from matplotlib import style
from matplotlib.figure import Figure

from experiments.cells.suite import Place
from experiments.report import plots
from experiments.report.formats import number
from experiments.report.replay_verdicts import headline
from experiments.report.replayed import Results


def plot(results: Results, mark: str) -> bytes:
    """A PNG whose description says who made it and holds a digest of what is drawn."""
    with style.context("default"):
        figure, drawn = (_lines if results.suite.report.plot.kind == "lines" else _bars)(results)
        figure.suptitle(results.suite.report.plot.title, fontsize=9)
        return plots.png(figure, drawn, mark)


def _lines(results: Results) -> tuple[Figure, list[Any]]:
    """Speedup against fp32 over GPUs, one panel for each model (rows) and assumption (columns)."""
    suite = results.suite
    drawn: list[Any] = []
    columns = list(dict.fromkeys((p.rate, p.link) for p in suite.places()))
    gpus = [n * suite.gpus_per_node for n in suite.nodes]
    figure = Figure(figsize=(13, 1.2 + 2.9 * len(results.models)), layout="constrained")
    grid = figure.subplots(len(results.models), len(columns), squeeze=False, sharex=True, sharey="row")
    for row, model in zip(grid, results.models, strict=True):
        factor = headline(results, model)[1]
        for axes, (rate, link) in zip(row, columns, strict=True):
            places = suite.across((model, rate, link))
            for name, method in suite.rows.items() if (model, rate, link) in results.settings() else ():
                points = [(n, p, results.speedup(p, name)) for n, p in zip(gpus, places, strict=True)]
                known = [(x, y) for x, _, y in points if y is not None]
                if known:
                    look = {"marker": "o", "markersize": 3, "color": method.colour, "label": method.label}
                    axes.plot(*zip(*known, strict=True), **look)
                    drawn.append([model, rate, link, name, known])
                ratios = [(x, y, results.ratio(p, name)) for x, p, y in points if y is not None and name != "fp32"]
                for x, y, ratio in ratios:
                    if ratio is not None:
                        whiskers = [[max(0.0, y - ratio.low)], [max(0.0, ratio.high - y)]]
                        axes.errorbar(x, y, yerr=whiskers, fmt="none", ecolor=method.colour, elinewidth=0.8, capsize=2)
                        drawn.append([x, ratio.low, ratio.high])
            if factor:
                axes.axhline(factor, linestyle=":", color="black", linewidth=1, label="the paper's best")
            axes.set_xscale("log", base=2)
            axes.set_xticks(gpus, [str(n) for n in gpus])
            axes.grid(alpha=0.3)
            axes.set_title(", ".join(filter(None, [model, suite.rates.get(rate or ""), f"{link} Gbit/s"])), fontsize=8)
        row[0].set_ylabel("speedup over fp32 DDP")
    for axes in grid[-1]:
        axes.set_xlabel(f"GPUs, {suite.gpus_per_node} per node")
    grid[0][0].legend(fontsize=6)
    return figure, drawn


def _bars(results: Results) -> tuple[Figure, list[Any]]:
    """Step times: a row of panels for each model and link, a column for each number of nodes."""
    suite, drawn = results.suite, []
    columns = sorted({p.nodes for p in results.places()})
    figure = Figure(figsize=(4.4 * len(columns) + 1.5, 0.8 + 2.6 * len(results.settings())), layout="constrained")
    grid = figure.subplots(len(results.settings()), len(columns), squeeze=False, sharey=True)
    names = list(suite.rows)[::-1]
    for panels, (model, rate, link) in zip(grid, results.settings(), strict=True):
        for axes, nodes in zip(panels, columns, strict=True):
            place = Place(model, rate, nodes, link)
            for i, name in enumerate(names):
                ms = results.ms(place, name)
                if ms is not None:
                    axes.barh(i, ms, color=suite.methods[name].colour)
                    ratio = results.ratio(place, name) if name != "fp32" else None
                    said = "" if ratio is None else f", {results.versus(place, name)}"
                    axes.text(ms, i, f" {number(ms)}{said}", va="center", fontsize=6)
                    drawn.append([model, link, nodes, name, ms, *([said] if said else [])])
            bound = results.ms(place, "none")
            if bound is not None:
                axes.axvline(bound, color="#888888", linewidth=0.8, linestyle=":")
            axes.set_yticks(range(len(names)), [suite.methods[name].label for name in names], fontsize=7)
            axes.tick_params(axis="x", labelsize=7)
            axes.margins(x=0.15)
            axes.set_title(f"{model}, {suite.links[link].title}, {nodes} nodes", fontsize=8)
    for axes in grid[-1]:
        axes.set_xlabel("step, ms of the cluster's clock", fontsize=7)
    return figure, drawn
