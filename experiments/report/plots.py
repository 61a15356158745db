"""Plots of the tables, as PNG files that are the same bytes for the same records and version of matplotlib."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from experiments.report import captions, curves, figure, sentences
from experiments.report.accuracy import AccuracyTable
from experiments.report.against_bytes import Against, Point
from experiments.report.curves import Curve, Curves
from experiments.report.formats import fraction, mean_sd, metric_axis, metric_gap, metric_unit, number
from experiments.report.speedup import SpeedupTable

EVALUATIONS = 3
"""So many make a curve of the metric; fewer stand in the legend and in the table alone."""
BARS = 6.0
"""Inches of the panel of step times, at least."""
LINE = 0.15
"""Inches of a legend's line."""


def step_times(table: SpeedupTable) -> bytes | None:
    """Horizontal bars of step times with p10-p90 whiskers; None when nothing was timed."""
    rows = [row for row in table.rows if row.seconds is not None][::-1]
    if not rows:
        return None
    with figure.styled():
        picture = figure.blank(8, 0.7 + 0.3 * len(rows))
        axes = picture.add_subplot()
        base, limit = table.baseline("fp32"), 0.0
        for place, row in enumerate(rows):
            t, typical = row.record.timing, 1000 * (row.seconds or 0.0)
            low, high = t.get("p10_ms") or typical, t.get("p90_ms") or typical
            spread = [[max(0.0, typical - low)], [max(0.0, high - typical)]]
            tint = figure.wire_colour(row.record.wire)
            axes.barh(place, typical, height=0.7, xerr=spread, color=tint, capsize=3, error_kw={"linewidth": 1})
            end = max(typical, high)
            said = f"{number(typical)} ms"
            if base is not None and base is not row:
                said += f", {captions.versus(table, row, 'fp32')} vs fp32"
            limit = max(limit, end / (1 - (len(said) + 3) * figure.CHARACTER / BARS))  # room for what is written there
            axes.annotate(said, (end, place), (5, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.set_xlim(0, limit)
        mean = "; the mean where steps differ in what they send" if any(row.uneven for row in rows) else ""
        axes.set_xlabel(f"step time, ms: median, p10 to p90{mean}")
        setting = f"{sentences.trained(rows[0].record)}. {sentences.honesty(table.records)}."
        figure.head(picture, captions.fastest(table), setting)
        return figure.png(picture, [[row.label, row.record.timing] for row in rows])


def loss_curves(table: AccuracyTable, results_dir: Path) -> bytes | None:
    """Training loss over steps at the best learning rate of each method, in small multiples with the baseline in each.

    Columns: the loss, mean and range over seeds; its difference to the baseline's; the metric, where it was evaluated
    often. None without curves.
    """
    found = curves.read(table, results_dir)
    if not found.curves:
        return None
    base = found.baseline
    parts = figure.groups(found.others, figure.SERIES - 1) or [[]]
    often = any(len(c.evaluated) >= EVALUATIONS for c in found.curves)
    columns = ["loss"] + ["gap"] * (base is not None and bool(found.others)) + ["metric"] * often
    named = {
        "loss": ("training loss", "loss, nats"),
        "gap": (f"less that of {_short(base.label) if base else ''}", "difference, nats"),
        "metric": ("at evaluations", metric_axis(table.metric["name"])),
    }
    drawn: list[object] = []
    with figure.styled():
        shown = [([base] if base is not None else []) + list(part) for part in parts]
        lines = max(sum(legend(found, c).count("\n") + 1 for c in of) for of in shown)
        height = max(2.4, LINE * lines + 0.6)  # the legend stands beside the panels
        picture = figure.blank(3.4 * len(columns) + 3.2, 0.2 + height * len(parts))
        grid = picture.subplots(len(parts), len(columns), squeeze=False, sharex="col")
        for panels, of in zip(grid, shown, strict=True):
            tints = figure.distinct([c.cell.valid[0].method for c in of])
            for curve, tint in zip(of, tints, strict=True):
                for axes, what in zip(panels, columns, strict=True):
                    said = legend(found, curve)
                    drawn.append([said, what, _draw(axes, what, curve, base, tint, said)])
            for axes, what in zip(panels, columns, strict=True):
                axes.set_ylabel(named[what][1])
                axes.grid(visible=True)
            handles, labels = panels[0].get_legend_handles_labels()
            panels[-1].legend(handles, labels, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
        for axes, what in zip(grid[0], columns, strict=True):
            axes.set_title(named[what][0], loc="left")
        for axes in grid[-1]:
            axes.set_xlabel("optimizer step")
        what = table.title.partition(": ")[2]
        setting = f"{what}. Loss: running mean over {curves.WINDOW:.0%} of the steps, mean and range over seeds."
        figure.head(picture, outcome(found), setting)
        return figure.png(picture, drawn)


def _draw(axes: Axes, what: str, curve: Curve, base: Curve | None, tint: str, label: str) -> object:
    """One series of one panel; returns what was drawn."""
    look: dict[str, Any] = {"color": tint, "label": label, "linewidth": 1.3}
    if what == "loss":
        axes.plot(curve.steps, curve.loss, **look)
        axes.fill_between(curve.steps, curve.low, curve.high, color=tint, alpha=0.15, linewidth=0)
        return [curve.steps, curve.loss, curve.low, curve.high]
    if what == "gap":
        assert base is not None
        points = [(s, v) for s, v in zip(curve.steps, curve.gap(base), strict=True) if v is not None]
    else:
        points = list(curve.evaluated)
        look |= {"marker": ".", "markersize": 4}
    axes.plot([s for s, _ in points], [v for _, v in points], **look)
    return points


def legend(found: Curves, curve: Curve) -> str:
    """A method, its learning rate and what became of it."""
    cell = curve.cell
    rate = f", lr {cell.lr:g}" if cell.lr else ""
    # A label may hold the keys in which runs differ: each on a line of its own.
    name = curve.label.replace("optimizer.", "").replace(" (", "\n  (").replace(", workload.", ",\n  workload.")
    return f"{name}{rate}\n  {found.table.metric['name']} {mean_sd(*cell.summary(None))}"


def outcome(found: Curves) -> str:
    """What became of the best compressed method beside the baseline, in one sentence."""
    table, base = found.table, found.baseline
    name = str(table.metric["name"])
    sign = 1 if table.higher_is_better else -1
    best = max(
        [c for c in found.others if c.compressed] or found.curves, key=lambda c: sign * (c.cell.mean or float("-inf"))
    )
    value = f"{_short(best.label)} ends at {metric_axis(name).partition(', ')[0]} {mean_sd(*best.cell.summary(None))}"
    apart = found.metric_difference(best)
    if base is None or apart is None:
        return value
    return f"{value}, {metric_gap(name, apart.value, found.relative)} from {_short(base.label)}"


def _short(label: str) -> str:
    """A label without the keys in which runs differ."""
    return re.sub(r" \([^()]*=[^()]*\)", "", label)


def against_bytes(found: Against) -> bytes | None:
    """A row for each method: the bytes that it sends, and how far its metric is from the baseline's. None without rows.

    Rows too far off for the axis, and methods without a metric, are named beside it.
    """
    points = found.points[::-1]
    if not points:
        return None
    with figure.styled():
        picture = figure.blank(9, 0.9 + 0.26 * len(points))
        left, right = picture.subplots(1, 2, sharey=True, width_ratios=(1, 1.5))
        for place, p in enumerate(points):
            tint = figure.COMPRESSED if p.compressed else figure.WIRES["fp32"]
            if p.payload:
                left.plot(p.payload / 1000, place, "s", color=tint, markersize=5)
            _difference(right, place, p, found, tint)
        left.set_xscale("log")
        left.set_xlabel("payload per node and step, kB")
        left.set_yticks(range(len(points)), [_row(p) for p in points])
        left.set_ylim(-0.7, len(points) - 0.3)
        right.axvline(0, color="#888888", linewidth=0.8)
        right.set_xlim(*found.axis)
        unit = metric_unit(found.metric).strip() or found.metric
        name = metric_axis(found.metric).partition(", ")[0]
        right.set_xlabel(f"{name}: difference, {unit}")
        for axes in (left, right):
            axes.grid(visible=True, axis="both")
        setting = (
            f"{found.title.partition(': ')[2]}. Left, what is sent; behind each name, as a share of fp32's bytes. Right, the "
            f"mean's difference to {found.baseline}, 95 % interval over seeds. Blue: all-reduce, red: compressed."
        )
        figure.head(picture, found.point(), setting)
        return figure.png(picture, [[*found.axis], [p.drawn() for p in points]])


def _row(p: Point) -> str:
    """A method, its share of fp32's bytes, and how many of its runs failed."""
    failed = f", {p.failed} failed" if p.failed else ""
    return f"{p.label}   {fraction(p.share)}{failed}"


def _difference(axes: Axes, place: int, p: Point, found: Against, tint: str) -> None:
    if p.difference is None or p.beyond:
        low, high = found.axis
        at, side = (high, "right") if (p.difference or 0) > 0 else (low, "left")
        arrow = "failed" if p.difference is None else f"◂ {p.text()}" if side == "left" else f"{p.text()} ▸"
        axes.annotate(
            arrow, (at, place), (4 if side == "left" else -4, 0), textcoords="offset points", ha=side, va="center"
        )
        return
    low, high = (p.low, p.high) if p.low is not None and p.high is not None else (p.difference, p.difference)
    axes.errorbar(
        p.difference,
        place,
        xerr=[[p.difference - low], [high - p.difference]],
        fmt="o",
        color=tint,
        markersize=5,
        capsize=2,
        elinewidth=1,
    )
