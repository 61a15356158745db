"""Accuracy against bytes over all studies: a panel for each task, a point for each method. No torch."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.records.record import ResultRecord
from experiments.report import glance
from experiments.report.accuracy import AccuracyTable, Cell, full_precision
from experiments.report.glance import TINTS, Panel, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

COLUMNS = 3
"""Panels side by side."""


@dataclass(frozen=True)
class Sent:
    """A method of a panel. each: bytes per parameter and step that a rank sends."""

    row: Row
    each: float


def payload(r: ResultRecord) -> float:
    return float(sum(r.bytes_per_step.get(f"payload_{side}") or 0 for side in ("inter", "intra")))


def bytes_each(table: AccuracyTable, cell: Cell) -> float | None:
    """Bytes per parameter and step of each rank, by a run of the table that all-reduces fp32, whose 8 (n-1)/n are known."""
    dense = next((r for c in table.cells for r in c.valid if full_precision(r) and payload(r)), None)
    if dense is None or not payload(cell.valid[0]):
        return None
    n = dense.nodes * dense.ranks_per_node
    return 8 * (n - 1) / n * payload(cell.valid[0]) / payload(dense)


def build(studies: dict[str, list[list[AccuracyTable]]]) -> list[tuple[Panel, list[Sent]]]:
    """The panels of `glance`, their methods with bytes; those without any are left out."""
    found = []
    for table in glance.chosen(studies):
        panel = glance.panel(table)
        rows = {} if panel is None else {row.label: row for row in panel.rows}
        each = {c.records[0].method: bytes_each(table, c) for c in table.one_of_each if c.records[0].method in rows}
        sent = [Sent(rows[label], value) for label, value in each.items() if value]
        if panel is not None and sent:
            found.append((panel, sorted(sent, key=lambda s: s.each)))
    return found


def point(found: Sequence[tuple[Panel, list[Sent]]]) -> str:
    """How many of those that send less than a byte keep the baseline's accuracy, in one sentence."""
    small = [s for _, sent in found for s in sent if s.each < 1]
    kept = sum(s.row.verdict in (glance.PARITY, glance.BETTER) for s in small)
    lost = sum(s.row.verdict == glance.WORSE for s in small)
    rest = len(small) - kept - lost
    said = f"accuracy kept {kept} times, lost {lost} times, not decided {rest} times"
    return f"With less than a byte per parameter and step: {said}"


def picture(studies: dict[str, list[list[AccuracyTable]]]) -> bytes | None:
    """A PNG, up is better in every panel. None without a study whose bytes are known."""
    from experiments.report import figure

    found = build(studies)
    if not found:
        return None
    rows = -(-len(found) // COLUMNS)
    with figure.styled():
        made = figure.blank(2.9 * min(len(found), COLUMNS) + 0.4, 3.0 * rows)
        grid = made.subplots(rows, min(len(found), COLUMNS), sharex=True, squeeze=False)
        for axes in grid.flat[len(found) :]:
            axes.remove()
        names = [_draw(axes, panel, sent) for axes, (panel, sent) in zip(grid.flat, found, strict=False)]
        for verdict, tint in TINTS.items():
            grid[0, 0].plot([], [], "o", color=tint, label=verdict, markersize=5)
        figure.key(made, grid[0, 0], len(TINTS))
        setting = (
            "Difference to the baseline, paired by seed, 95 % intervals, up is better; the band is the stated margin. "
            "Across: what a rank sends. Arrows: beyond the panel. Names where there is room; all of them in docs/accuracy.md."
        )
        figure.head(made, point(found), setting)
        made.draw_without_rendering()
        for some in names:
            _thin_out(some)
        return figure.png(made, [[panel, sent] for panel, sent in found])


def _draw(axes: Axes, panel: Panel, sent: Sequence[Sent]) -> list[Text]:
    axes.axhspan(-panel.margin, panel.margin, color=TINTS[glance.PARITY], alpha=0.12, linewidth=0)
    axes.axhline(0, color="#888888", linewidth=0.8)
    names = []
    for s in sent:
        gap, tint = s.row.gap, TINTS[s.row.verdict]
        assert gap.low is not None
        assert gap.high is not None
        far = abs(gap.value) > panel.limit
        y = max(-panel.limit, min(panel.limit, gap.value))
        if far:
            axes.plot(s.each, y, "v" if (y < 0) == panel.higher_is_better else "^", color=tint, markersize=5)
        else:
            reach = [[gap.value - gap.low], [gap.high - gap.value]]
            axes.errorbar(s.each, y, yerr=reach, fmt="o", color=tint, markersize=4.5, capsize=2, elinewidth=1)
        place: dict[str, Any] = {"textcoords": "offset points", "xytext": (4, 3), "fontsize": 6.5, "color": "#333333"}
        names.append(
            axes.annotate(s.row.label.replace(" (this project's)", ""), (s.each, y), annotation_clip=True, **place)
        )
    low, high = -1.15 * panel.limit, 1.15 * panel.limit
    axes.set_ylim(*((low, high) if panel.higher_is_better else (high, low)))
    axes.set_xscale("log")
    axes.set_xlabel("bytes per parameter and step")
    axes.xaxis.set_tick_params(labelbottom=True)
    axes.set_ylabel(panel.axis)
    axes.set_title(textwrap.fill(f"{panel.title}; to {panel.baseline}", 40), loc="left", fontsize=8)
    axes.grid(visible=True)
    return list(names)


def _thin_out(names: Sequence[Text]) -> None:
    """Hides what lies upon a name before it, or beyond its panel."""
    kept: list[Any] = []
    for text in names:
        box = text.get_window_extent()
        assert text.axes is not None
        inside = box.x1 < text.axes.bbox.x1 and box.y1 < text.axes.bbox.y1 and box.y0 > text.axes.bbox.y0
        if inside and not any(box.overlaps(other) for other in kept):
            kept.append(box)
        else:
            text.set_visible(False)
