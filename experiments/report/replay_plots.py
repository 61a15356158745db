"""The picture of a suite: speedups over the number of GPUs as lines, or at each number of nodes as dots."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from experiments.cells.suite import Place
from experiments.report import figure
from experiments.report.replay_words import headline
from experiments.report.replayed import Results
from experiments.report.sentences import say

SHADES = ("#99bbdd", "#4477aa", "#113355")
"""Of the numbers of nodes, from the fewest to the most."""


def plot(results: Results, mark: str) -> bytes:
    """A PNG whose description says who made it and holds a digest of what is drawn."""
    about = results.suite.report.plot
    with figure.styled():
        picture, drawn = (_lines if about.kind == "lines" else _dots)(results)
        point = (_gains if about.kind == "lines" else _winners)(results)
        figure.head(picture, point, about.title)
        return figure.png(picture, drawn, mark)


def _lines(results: Results) -> tuple[Figure, list[Any]]:
    """Speedup against fp32 over GPUs, one panel for each model (rows) and assumption (columns)."""
    suite = results.suite
    drawn: list[Any] = []
    columns = list(dict.fromkeys((p.rate, p.link) for p in suite.places()))
    gpus = [n * suite.gpus_per_node for n in suite.nodes]
    picture = figure.blank(11, 0.9 + 2.2 * len(results.models))
    grid = picture.subplots(len(results.models), len(columns), squeeze=False, sharex=True, sharey="row")
    for row, model in zip(grid, results.models, strict=True):
        factor = headline(results, model)[1]
        for axes, (rate, link) in zip(row, columns, strict=True):
            places = suite.across((model, rate, link))
            for name, method in suite.rows.items() if (model, rate, link) in results.settings() else ():
                found = [(n, results.compared(p, name)) for n, p in zip(gpus, places, strict=True)]
                known = [(n, at.value) for n, at in found if at is not None]
                if not known or name == "fp32":  # fp32 is the line at 1
                    continue
                look = {"marker": "o", "markersize": 3.5, "color": method.colour, "label": method.label}
                axes.plot(*zip(*known, strict=True), **look)
                drawn.append([model, rate, link, name, known])
                for n, at in found:
                    if at is not None and at.low is not None:
                        figure.interval(axes, n, at.value, at, method.colour, upright=True)
                        drawn.append([n, at.low, at.high])
            axes.axhline(1, color="#4477aa", linewidth=0.8)
            if factor:
                axes.axhline(factor, linestyle=":", color="black", linewidth=1, label="the paper's best")
                drawn.append([model, factor])
            axes.set_xscale("log", base=2)
            axes.set_xticks(gpus, [str(n) for n in gpus])
        about = ", ".join(filter(None, [_name(results, model), suite.models[model].short]))
        row[0].set_ylabel(f"{about}\ntimes as fast as fp32 DDP")
    for axes, (rate, link) in zip(grid[0], columns, strict=True):
        axes.set_title(", ".join(filter(None, [suite.rates.get(rate or ""), f"{suite.links[link].gbit:g} Gbit/s"])))
    for axes in grid[-1]:
        axes.set_xlabel(f"GPUs, {suite.gpus_per_node} per node")
    figure.key(picture, 3)
    return picture, drawn


def _name(results: Results, model: str) -> str:
    """The model's title without what was done with it."""
    return results.suite.models[model].title.partition(",")[0].partition(" on ")[0]


def _gains(results: Results) -> str:
    """By how much the suite's own method wins, from the setting in which it wins least to that in which it wins most."""
    suite = results.suite
    found = [best[0] for s in results.settings() if (best := results.best(s, suite.report.ours)) is not None]
    return say("gains", label=suite.methods[suite.report.ours].label, found=found)


def _dots(results: Results) -> tuple[Figure, list[Any]]:
    """Speedup against fp32: a panel for each model (rows) and link (columns), a row for each method, a dot for each
    number of nodes."""
    suite = results.suite
    drawn: list[Any] = []
    nodes = sorted({p.nodes for p in results.places()})
    shades = dict(zip(nodes[::-1], SHADES[::-1] + figure.OTHERS, strict=False))
    links = list(dict.fromkeys((p.rate, p.link) for p in results.places()))
    known = {c.method for c in results.records}
    names = [name for name in suite.rows if name != "fp32" and name in known][::-1]
    drawn.append(names)
    picture = figure.blank(3.6 * len(links) + 2.4, 0.6 + (0.5 + 0.24 * len(names)) * len(results.models))
    grid = picture.subplots(len(results.models), len(links), squeeze=False, sharey=True, sharex="col")
    for row, model in zip(grid, results.models, strict=True):
        for axes, (rate, link) in zip(row, links, strict=True):
            for count in nodes:
                place = Place(model, rate, count, link)
                every = [(i, results.compared(place, name)) for i, name in enumerate(names)]
                found = [(i, at) for i, at in every if at is not None]
                if found:
                    look = {"color": shades[count], "markersize": 5, "label": f"{count} nodes"}
                    axes.plot([at.value for _, at in found], [i for i, _ in found], "o", **look)
                for i, at in found:
                    figure.interval(axes, at.value, i, at, shades[count])
                    drawn.append([model, link, count, names[i], at.value, at.low, at.high])
            axes.axvline(1, color="#888888", linewidth=0.8)
            axes.set_xscale("log")
            figure.plain(axes.xaxis)
            axes.set_yticks(range(len(names)), [suite.methods[name].label for name in names])
            axes.set_title(f"{_name(results, model)}, {suite.links[link].title}", loc="left")
    for axes in grid[-1]:
        axes.set_xlabel("times as fast as PyTorch DDP in fp32")
    figure.key(picture, len(nodes))
    return picture, drawn


def _winners(results: Results) -> str:
    """On each link, with most nodes: what the fastest compressed method gains over fp32."""
    suite = results.suite
    most = max((p.nodes for p in results.places()), default=0)
    won: dict[str, tuple[float, float]] = {}
    for link in dict.fromkeys(p.link for p in results.places()):
        gains = [
            gain.value
            for p in results.places()
            if (p.link, p.nodes) == (link, most)
            for _, name in results.fastest(p)[:1]
            if (gain := results.compared(p, name)) is not None
        ]
        if gains:
            won[suite.links[link].title] = min(gains), max(gains)
    return say("winners", won=won, nodes=most)
