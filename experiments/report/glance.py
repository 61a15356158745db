"""All studies of accuracy in one picture: how far each method ends from its baseline, with intervals. No torch."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from experiments.report.accuracy import AccuracyTable, length_of
from experiments.report.formats import metric_axis, metric_unit, task
from experiments.report.paired import BETTER, OPEN, PARITY, WORSE, Difference

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TINTS = {PARITY: "#228833", BETTER: "#4477aa", WORSE: "#ee6677", OPEN: "#888888"}
FAR = 3.0
"""Differences beyond so many times the median one are named at the edge: on the axis they would hide all others."""
WIDE = 1.9
"""Inches of a panel."""


@dataclass(frozen=True)
class Row:
    """A method, in its best variant, beside the baseline. `gap` in the unit of the axis."""

    label: str
    gap: Difference
    verdict: str


@dataclass(frozen=True)
class Panel:
    """One study. limit: differences up to it are drawn."""

    task: str
    title: str
    axis: str
    higher_is_better: bool
    baseline: str
    margin: float
    rows: tuple[Row, ...]
    limit: float

    def verdict(self, label: str) -> str | None:
        return next((row.verdict for row in self.rows if row.label == label), None)


def panels(studies: dict[str, list[list[AccuracyTable]]]) -> list[Panel]:
    """Those of the `chosen` studies that have a baseline and intervals."""
    return [made for table in chosen(studies) if (made := panel(table)) is not None]


def chosen(studies: dict[str, list[list[AccuracyTable]]]) -> list[AccuracyTable]:
    """Of each experiment the study with most seeds; of several the longer one, then that with most runs."""
    return [max((t for tables in every for t in tables), key=_weight) for every in studies.values()]


def _weight(table: AccuracyTable) -> tuple[int, int, int]:
    train = table.cells[0].records[0].config.get("train", {})
    whole = 0 if train.get("max_steps") is not None else int(train.get("epochs") or 0)
    seeds = max((len(c.by_seed) for c in table.chosen), default=0)
    return seeds, whole, sum(len(c.records) for c in table.cells)


def panel(table: AccuracyTable) -> Panel | None:
    base, parity = table.baseline, table.parity
    if base is None or parity is None:
        return None
    scale = 100.0 if parity.relative else 1.0
    rows = []
    for cell in table.one_of_each:
        gap = table.compared(cell)
        if gap is not None and gap.low is not None and gap.high is not None:
            shown = Difference(scale * gap.value, scale * gap.low, scale * gap.high, gap.n)
            rows.append(Row(cell.records[0].method, shown, table.verdict(cell)))
    if not rows:
        return None
    metric, first = str(table.metric["name"]), base.records[0]
    unit = "%" if parity.relative else metric_unit(metric).strip() or "nats per token"
    name = task(str(first.data["name"]))
    title = f"{name}, {length_of(first)}, {first.nodes * first.ranks_per_node} workers"
    return Panel(
        name,
        title,
        f"{metric_axis(metric).partition(', ')[0]}, {unit}",
        table.higher_is_better,
        base.label,
        scale * parity.margin,
        tuple(rows),
        max(FAR * statistics.median_high(abs(row.gap.value) for row in rows), 2 * scale * parity.margin),
    )


def point(found: Sequence[Panel]) -> str:
    """What became of the paper's Birder, in one sentence."""
    by: dict[str, list[str]] = {}
    for panel in found:
        verdict = panel.verdict("Birder")
        if verdict is not None:
            by.setdefault(verdict, []).append(panel.task)
    said = [f"{verdict} on {', '.join(by[verdict])}" for verdict in (BETTER, PARITY, OPEN, WORSE) if verdict in by]
    return f"Birder against the dense baseline, 95 % intervals: {'; '.join(said)}"


def picture(studies: dict[str, list[list[AccuracyTable]]]) -> bytes | None:
    """A PNG: a column for each study, a row for each method. Right is better in every column. None without intervals."""
    from experiments.report import figure  # loads matplotlib, which an answer in text has no use for

    found = panels(studies)
    if not found:
        return None
    labels = sorted(dict.fromkeys(row.label for panel in found for row in panel.rows), key=_order)[::-1]
    with figure.styled():
        made = figure.blank(3.0 + WIDE * len(found), 1.5 + 0.24 * len(labels))
        grid = made.subplots(1, len(found), sharey=True, squeeze=False)[0]
        for axes, panel in zip(grid, found, strict=True):
            axes.axvspan(-panel.margin, panel.margin, color=TINTS[PARITY], alpha=0.12, linewidth=0)
            axes.axvline(0, color="#888888", linewidth=0.8)
            for row in panel.rows:
                _draw(axes, labels.index(row.label), row, panel)
            left, right = -1.1 * panel.limit, 1.1 * panel.limit
            axes.set_xlim(*((left, right) if panel.higher_is_better else (right, left)))
            axes.set_xlabel(panel.axis)
            axes.set_title(textwrap.fill(f"{panel.title}; to {panel.baseline}", 26), loc="left", fontsize=8)
            axes.grid(visible=True, axis="both")
        grid[0].set_yticks(range(len(labels)), labels)
        grid[0].set_ylim(-0.7, len(labels) - 0.3)
        for verdict, tint in TINTS.items():
            grid[0].plot([], [], "o", color=tint, label=verdict, markersize=5)
        figure.key(made, grid[0], len(TINTS))
        setting = (
            "Differences to the baseline, paired by seed, 95 % intervals; right is better everywhere, the band is the margin "
            "that was stated. Virtual workers, small budgets; learning rates by data held out of training. "
            "Of a method's variants, such as values of eps, the best."
        )
        figure.head(made, point(found), setting)
        return figure.png(made, [[panel] for panel in found])


def _order(label: str) -> tuple[int, str]:
    """Methods that send no bits first, Birder's forms last and together."""
    return 2 * label.startswith("Birder") + ("fp32" not in label and "bf16" not in label), label


def _draw(axes: Axes, place: int, row: Row, panel: Panel) -> None:
    gap, tint = row.gap, TINTS[row.verdict]
    assert gap.low is not None
    assert gap.high is not None
    if abs(gap.value) > panel.limit:
        rightmost = (gap.value > 0) == panel.higher_is_better
        text = f"{gap.value:+.0f}"
        at, side = (panel.limit if gap.value > 0 else -panel.limit), ("right" if rightmost else "left")
        said = f"{text} ▸" if rightmost else f"◂ {text}"
        axes.annotate(said, (at, place), ha=side, va="center", color=tint, fontsize=8)
        return
    reach = [[gap.value - gap.low], [gap.high - gap.value]]
    axes.errorbar(gap.value, place, xerr=reach, fmt="o", color=tint, markersize=4.5, capsize=2, elinewidth=1)
