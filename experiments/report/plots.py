"""Plots of the tables, as PNG files that are the same bytes for the same records and version of matplotlib."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from experiments.records.labels import OURS, is_compressed
from experiments.report import captions, curves, figure, gaps, sentences
from experiments.report.accuracy import AccuracyTable
from experiments.report.curves import Curve, Curves
from experiments.report.formats import fraction, mean_sd, metric_axis, metric_gap, metric_unit, number
from experiments.report.gaps import Against, GapRow, Panel, Point, Studies
from experiments.report.metrics import BETTER, OPEN, PARITY, WORSE
from experiments.report.speedup import SpeedupTable
from experiments.report.time_to_loss import GBPS, GPUS, Race

EVALUATIONS = 3
"""So many make a curve of the metric; fewer stand in the legend and in the table alone."""
BARS = 6.0
"""Inches of the panel of step times, at least."""
LINE = 0.15
"""Inches of a legend's line."""
WIDE, ROOM = 5.2, 1.4
"""Inches of a study's panel with its labels; height of a panel above its first and below its last row, in rows."""
ACROSS, COLUMNS = 2, 3
"""Panels of studies next to each other; the same where bytes are shown."""
GREY = "#888888"
VERDICTS = {PARITY: "#228833", BETTER: "#4477aa", WORSE: "#ee6677", OPEN: GREY}


def step_times(table: SpeedupTable) -> bytes | None:
    """Horizontal bars of step times with p10-p90 whiskers; None when nothing was timed."""
    rows = [row for row in table.rows if row.ms is not None][::-1]
    if not rows:
        return None
    with figure.styled():
        picture = figure.blank(8, 0.7 + 0.3 * len(rows))
        axes = picture.add_subplot()
        axes.grid(visible=False)
        base, limit = table.baseline("fp32"), 0.0
        for place, row in enumerate(rows):
            t, typical = row.record.timing, row.ms or 0.0
            low, high = t.get("p10_ms") or typical, t.get("p90_ms") or typical
            spread = [[max(0.0, typical - low)], [max(0.0, high - typical)]]
            wire = row.record.wire
            tint = figure.COMPRESSED if is_compressed(wire) else figure.WIRES.get(wire, figure.WIRES["fp32"])
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
        figure.head(picture, captions.fastest(table), sentences.say("step_times", rows=rows, records=table.records))
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
        height = max(2.4, LINE * lines + 0.6)  # the legend stands next to the panels
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
            handles, labels = panels[0].get_legend_handles_labels()
            panels[-1].legend(handles, labels, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
        for axes, what in zip(grid[0], columns, strict=True):
            axes.set_title(named[what][0], loc="left")
        for axes in grid[-1]:
            axes.set_xlabel("optimizer step")
        figure.head(picture, outcome(found), sentences.say("curves", title=table.title, window=curves.WINDOW))
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
    """A method, its learning rate and its final metric."""
    cell = curve.cell
    rate = f", lr {cell.lr:g}" if cell.lr else ""
    # A label may hold the keys in which runs differ: each on a separate line.
    name = curve.label.replace("optimizer.", "").replace(" (", "\n  (").replace(", workload.", ",\n  workload.")
    return f"{name}{rate}\n  {found.table.metric['name']} {mean_sd(*cell.summary(None))}"


def outcome(found: Curves) -> str:
    """How the best compressed method ends, compared with the baseline, in one sentence."""
    table, base = found.table, found.baseline
    name = str(table.metric["name"])
    candidates = [c for c in found.others if c.compressed] or found.curves
    best = max(candidates, key=lambda c: table.value(c.cell))
    value = f"{_short(best.label)} ends at {metric_axis(name).partition(', ')[0]} {mean_sd(*best.cell.summary(None))}"
    apart = found.metric_difference(best)
    if base is None or apart is None:
        return value
    return f"{value}, {metric_gap(name, apart.value, table.relative)} from {_short(base.label)}"


def _short(label: str) -> str:
    """A label without the keys in which runs differ."""
    return re.sub(r" \([^()]*=[^()]*\)", "", label)


def against_bytes(found: Against) -> bytes | None:
    """A row for each method: the bytes that it sends, and how far its metric is from the baseline's. None without rows.

    Rows too far off for the axis, and methods without a metric, are named at the edge.
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
        right.axvline(0, color=GREY, linewidth=0.8)
        right.set_xlim(*found.axis)
        metric = found.table.metric
        unit = metric_unit(metric).strip() or metric
        name = metric_axis(metric).partition(", ")[0]
        right.set_xlabel(f"{name}: difference, {unit}")
        figure.head(picture, found.point(), sentences.say("against_setting", found=found))
        return figure.png(picture, [found.axis, points])


def _row(p: Point) -> str:
    """A method, its share of fp32's bytes, and how many of its runs failed."""
    failed = f", {p.failed} failed" if p.failed else ""
    return f"{p.label}   {fraction(p.share)}{failed}"


def _difference(axes: Axes, place: int, p: Point, found: Against, tint: str) -> None:
    if p.gap is None or p.beyond:
        low, high = found.axis
        at, side = (high, "right") if p.gap and p.gap.value > 0 else (low, "left")
        text = p.gap.text(False, 1) if p.gap else ""
        arrow = f"{text} ▸" if side == "right" else f"◂ {text}" if p.gap else "failed"
        axes.annotate(
            arrow, (at, place), (4 if side == "left" else -4, 0), textcoords="offset points", ha=side, va="center"
        )
        return
    figure.interval(axes, p.gap.value, place, p.gap, tint, dot=5)


# ---- all studies ------------------------------------------------------------------------------------------------------


def accuracies(studies: Studies) -> bytes | None:
    """A panel for each study, a row for each of its methods. Right is better in every panel. None without intervals."""
    found = gaps.panels(studies)
    if not found:
        return None
    columns = min(ACROSS, len(found))
    lines = [max(len(panel.rows) for panel in found[i : i + columns]) for i in range(0, len(found), columns)]
    with figure.styled():
        made = figure.blank(WIDE * columns, 0.6 + sum(0.9 + 0.2 * n for n in lines))
        grid = made.subplots(len(lines), columns, squeeze=False, height_ratios=[n + ROOM for n in lines])
        for axes in grid.flat[len(found) :]:
            axes.remove()
        for place, (axes, panel) in enumerate(zip(grid.flat, found, strict=False)):
            axes.axvspan(-panel.margin, panel.margin, color=VERDICTS[PARITY], alpha=0.12, linewidth=0)
            axes.axvline(0, color=GREY, linewidth=0.8)
            top = lines[place // columns] - 1
            rows = sorted(panel.rows, key=lambda row: _order(row.label))
            for down, row in enumerate(rows):
                _gap(axes, top - down, row, panel)
            axes.set_yticks([top - down for down in range(len(rows))], [row.label.replace(OURS, "") for row in rows])
            axes.set_ylim(-ROOM / 2, top + ROOM / 2)
            axes.set_xlim(*_upwards(panel, 1.1))
            axes.set_xlabel(panel.axis)
            axes.set_title(textwrap.fill(f"{panel.title}; to {panel.baseline}", 38), loc="left", fontsize=8)
        _verdict_key(made, grid[0, 0])
        figure.head(made, gaps.point(found), sentences.say("panels_setting"))
        return figure.png(made, [[panel] for panel in found])


def _order(label: str) -> tuple[int, str]:
    """Methods that send no bits first, Birder's forms last and together."""
    return 2 * label.startswith("Birder") + ("fp32" not in label and "bf16" not in label), label


def _gap(axes: Axes, place: int, row: GapRow, panel: Panel) -> None:
    gap, tint = row.gap, VERDICTS[row.verdict]
    if abs(gap.value) <= panel.limit:
        figure.interval(axes, gap.value, place, gap, tint, dot=4.5)
        return
    rightmost = (gap.value > 0) == panel.higher_is_better
    at, side = (panel.limit if gap.value > 0 else -panel.limit), ("right" if rightmost else "left")
    said = f"{gap.value:+.0f} ▸" if rightmost else f"◂ {gap.value:+.0f}"
    axes.annotate(said, (at, place), ha=side, va="center", color=tint, fontsize=8)


def _upwards(panel: Panel, room: float) -> tuple[float, float]:
    """The ends of an axis of differences on which better is further right, or further up."""
    end = room * panel.limit if panel.higher_is_better else -room * panel.limit
    return -end, end


def _verdict_key(made: Figure, axes: Axes) -> None:
    for verdict, tint in VERDICTS.items():
        axes.plot([], [], "o", color=tint, label=verdict, markersize=5)
    figure.key(made, len(VERDICTS))


def accuracies_by_bytes(studies: Studies) -> bytes | None:
    """A panel for each study, a point for each method; up is better. None without a study whose bytes are known."""
    found = gaps.with_bytes(studies)
    if not found:
        return None
    rows = -(-len(found) // COLUMNS)
    columns = -(-len(found) // rows)
    with figure.styled():
        made = figure.blank(2.9 * columns + 0.4, 3.0 * rows)
        grid = made.subplots(rows, columns, sharex=True, squeeze=False)
        for axes in grid.flat[len(found) :]:
            axes.remove()
        names = [_by_bytes(axes, panel) for axes, panel in zip(grid.flat, found, strict=False)]
        _verdict_key(made, grid[0, 0])
        figure.head(made, gaps.point_of_bytes(found), sentences.say("panels_bytes_setting"))
        figure.lay_out(made)  # for good: names that then move keep their panels where they are
        for some in names:
            _thin_out(some)
        return figure.png(made, found)


def _by_bytes(axes: Axes, panel: Panel) -> list[Annotation]:
    axes.axhspan(-panel.margin, panel.margin, color=VERDICTS[PARITY], alpha=0.12, linewidth=0)
    axes.axhline(0, color=GREY, linewidth=0.8)
    names = []
    for row in panel.rows:
        gap, tint = row.gap, VERDICTS[row.verdict]
        y = max(-panel.limit, min(panel.limit, gap.value))
        if abs(gap.value) > panel.limit:
            axes.plot(row.each, y, "v" if (y < 0) == panel.higher_is_better else "^", color=tint, markersize=5)
        else:
            figure.interval(axes, row.each, y, gap, tint, dot=4.5, upright=True)
        place: dict[str, Any] = {"textcoords": "offset points", "xytext": NEAR[0][0], "fontsize": 6.5, "color": tint}
        names.append(axes.annotate(row.label.replace(OURS, ""), (row.each, y), annotation_clip=True, **place))
        names[-1].set_in_layout(False)  # it stays inside its panel
    axes.set_ylim(*_upwards(panel, 1.15))
    axes.set_xscale("log")
    axes.set_xlabel("bytes per parameter and step")
    axes.xaxis.set_tick_params(labelbottom=True)
    axes.set_ylabel(panel.axis)
    axes.set_title(textwrap.fill(f"{panel.title}; to {panel.baseline}", 36), loc="left", fontsize=8)
    return list(names)


NEAR: tuple[tuple[tuple[int, int], Literal["left", "right"]], ...] = (
    *(((4, 3), "left"), ((4, -9), "left")),
    *(((-4, 3), "right"), ((-4, -9), "right")),
)
"""Where a name may stand next to its point, in points, and how it is aligned; the first one that is free."""


def _thin_out(names: Sequence[Annotation]) -> None:
    """Moves a name that lies upon one before it, or beyond its panel; hides it where no place is free."""
    kept: list[Any] = []
    for text in names:
        assert text.axes is not None
        panel = text.axes.bbox
        for offset, side in NEAR:
            text.set_position(offset)
            text.set_horizontalalignment(side)
            box = text.get_window_extent()
            inside = panel.x0 < box.x0 and box.x1 < panel.x1 and panel.y0 < box.y0 and box.y1 < panel.y1
            if inside and not any(box.overlaps(other) for other in kept):
                kept.append(box)
                break
        else:
            text.set_visible(False)


def time_to_loss(race: Race) -> bytes:
    """A panel for each GPU and link, a row for each method."""
    rows = race.methods[::-1]
    places = [(gpu, gbps) for gbps in GBPS for gpu in GPUS]
    aside: dict[str, Any] = {"va": "center", "fontsize": 7.5, "color": "#777777"}
    with figure.styled():
        made = figure.blank(11, 1.4 + 0.24 * len(rows))
        grid = made.subplots(1, len(places), sharey=True)
        for axes, place in zip(grid, places, strict=True):
            for y, m in enumerate(rows):
                seconds = m.seconds(place)
                tint = figure.COMPRESSED if "fp32" not in m.label else figure.WIRES["fp32"]
                if seconds is None:
                    axes.text(0.03, y, "not reached", transform=axes.get_yaxis_transform(), **aside)
                else:
                    axes.plot(seconds, y, "o", color=tint, markersize=5)
            axes.set_xlim(left=0, right=1.06 * axes.get_xlim()[1])
            axes.set_title(f"{place[0].upper()}, {place[1]:g} Gbit/s", loc="left")
            axes.set_xlabel("steps x predicted step, s")
        grid[0].set_yticks(range(len(rows)), [m.label.removesuffix(OURS) for m in rows])
        grid[0].set_ylim(-0.7, len(rows) - 0.3)
        figure.head(made, race.point(), race.setting())
        return figure.png(made, [[race]])
