"""How far methods end from a baseline, and what they send for it: what the pictures of accuracies show. No torch.

Two kinds of comparison: all studies, a `Panel` each (`panels`, `with_bytes`), and all methods on one task (`against_bytes`).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from experiments.records.labels import is_compressed
from experiments.records.record import ResultRecord
from experiments.report.accuracy import AccuracyTable, full_precision
from experiments.report.comparison import Cell
from experiments.report.curves import baseline
from experiments.report.differences import grouped
from experiments.report.formats import metric_axis, metric_unit
from experiments.report.methods_table import Line, MethodsTable
from experiments.report.metrics import BETTER, OPEN, PARITY, WORSE, Difference, difference
from experiments.report.sentences import say

Studies = dict[str, list[AccuracyTable]]
"""By experiment: `accuracy_page.studies`."""
FAR = 3.0
"""Differences beyond so many times the median one are named at the edge: on the axis they would hide all others."""
FAR_ON_ONE_TASK = 10.0
"""The same where all methods share one task."""
SMALL = 1 / 16
"""Methods that send at most this share of fp32's bytes are what the picture of one task is about."""


# ---- all studies ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GapRow:
    """A method, in its best variant, against the baseline.

    gap: in the unit of the axis; without an interval only where lost seeds make the verdict. each: bytes per parameter and
    step that a rank sends; 0 where that is not known.
    """

    label: str
    gap: Difference
    verdict: str
    each: float


@dataclass(frozen=True)
class Panel:
    """One study. limit: differences up to it are drawn."""

    task: str
    title: str
    axis: str
    higher_is_better: bool
    baseline: str
    margin: float
    rows: tuple[GapRow, ...]
    limit: float


def chosen(studies: Studies) -> list[AccuracyTable]:
    """Of each task the longest study; of several the one with most methods, then with most seeds, then most runs."""
    return [max(every, key=_weight) for every in _of_tasks(studies)]


def shown(studies: Studies) -> list[AccuracyTable]:
    """The `chosen` studies, each with others of its task that are as long: those to the same baseline with another
    number of workers and at least half as many methods, and the weightiest one with more methods, to another baseline or of
    another number of workers. Each table once."""
    found: dict[str, AccuracyTable] = {}
    for first, every in zip(chosen(studies), _of_tasks(studies), strict=True):
        others = sorted((t for t in every if _length(t) >= _length(first)), key=_weight)
        scaled = [t for t in others if _baseline(t) == _baseline(first) and t.setting.workers != first.setting.workers]
        scaled = [t for t in scaled if 2 * len(_methods(t)) >= len(_methods(first))]
        elsewhere = [
            t for t in others if (_baseline(t), t.setting.workers) != (_baseline(first), first.setting.workers)
        ]
        more = [t for t in elsewhere if _methods(t) - _methods(first)][-1:]
        found |= {t.slug: t for t in (first, *scaled, *more)}
    return list(found.values())


def _of_tasks(studies: Studies) -> list[list[AccuracyTable]]:
    """The studies of each task: an experiment may have several (GLUE's)."""
    return [of_one for every in studies.values() for of_one in grouped(every, lambda t: t.task).values()]


def _baseline(table: AccuracyTable) -> str | None:
    return None if table.baseline is None else table.baseline.method


def _length(table: AccuracyTable) -> tuple[int, int]:
    """Epochs of a study whose runs are not cut short, and else their steps."""
    train = table.first.config.get("train", {})
    steps = train.get("max_steps")
    return (int(train.get("epochs") or 0), 0) if steps is None else (0, int(steps))


def _methods(table: AccuracyTable) -> set[str]:
    """Those with more than one seed."""
    return {c.method for c in table.chosen if len(c.by_seed) > 1}


def _weight(table: AccuracyTable) -> tuple[int, int, int, int]:
    seeds = [len(c.by_seed) for c in table.chosen if len(c.by_seed) > 1]
    return _length(table)[0], len(seeds), max(seeds, default=0), sum(len(c.records) for c in table.cells)


def panels(studies: Studies) -> list[Panel]:
    """Those of the `shown` studies that have a baseline and, of another method, an interval or lost seeds."""
    return [made for table in shown(studies) if (made := panel(table)) is not None]


def panel(table: AccuracyTable) -> Panel | None:
    base, parity = table.baseline, table.parity
    if base is None or parity is None:
        return None
    scale = 100.0 if parity.relative else 1.0
    rows = tuple(
        GapRow(cell.method, gap.times(scale), table.verdict(cell), bytes_each(table, cell))
        for cell in table.one_of_each
        if (gap := table.compared(cell)) is not None and (gap.low is not None or table.verdict(cell) is WORSE)
    )
    if not rows:
        return None
    metric = str(table.metric["name"])
    unit = "%" if parity.relative else metric_unit(metric).strip() or "nats per token"
    return Panel(
        table.task,
        table.name,
        f"{metric_axis(metric).partition(', ')[0]}, {unit}",
        table.higher_is_better,
        base.label,
        scale * parity.margin,
        rows,
        max(FAR * statistics.median_high(abs(row.gap.value) for row in rows), 2 * scale * parity.margin),
    )


def point(found: Sequence[Panel]) -> str:
    """How the paper's Birder ended, in one sentence."""
    by: dict[str, dict[str, None]] = {}  # tasks in order, each once
    for panel in found:
        for row in panel.rows:
            if row.label == "Birder":
                by.setdefault(row.verdict, {})[panel.task] = None
    return say("panels", by={verdict: list(by[verdict]) for verdict in (BETTER, PARITY, OPEN, WORSE) if verdict in by})


def with_bytes(studies: Studies) -> list[Panel]:
    """The `panels`, with the methods whose bytes are known, the fewest first; a panel without any is left out."""
    sent = [(p, sorted((row for row in p.rows if row.each), key=lambda row: row.each)) for p in panels(studies)]
    return [replace(p, rows=tuple(rows)) for p, rows in sent if rows]


def bytes_each(table: AccuracyTable, cell: Cell) -> float:
    """`GapRow.each` of a cell, by a run of the table that all-reduces fp32, whose 8 (n-1)/n are known."""
    dense = next((r for c in table.cells for r in c.valid if full_precision(r) and _payload(r)), None)
    if dense is None:
        return 0.0
    n = dense.nodes * dense.ranks_per_node
    return 8 * (n - 1) / n * _payload(cell.valid[0]) / _payload(dense)


def _payload(r: ResultRecord) -> float:
    return float(sum(r.bytes_per_step.get(f"payload_{side}") or 0 for side in ("inter", "intra")))


def point_of_bytes(found: Sequence[Panel]) -> str:
    """How many of those that send less than a byte keep the baseline's accuracy, in one sentence."""
    return say("kept", by=Counter(row.verdict for panel in found for row in panel.rows if row.each < 1))


# ---- all methods on one task ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """One method at its chosen learning rate.

    payload: bytes per node and step; share: of what fp32 sends.
    mean, sd: of the metric over seeds.
    gap:     of the means to the baseline's, with an interval where both have the same seeds; None: no run ended well.
    failed:  how many of its runs failed.
    beyond:  too far off to be drawn.
    """

    label: str
    compressed: bool
    payload: float
    share: float | None
    mean: float | None
    sd: float | None
    gap: Difference | None
    failed: int
    beyond: bool = False


@dataclass(frozen=True)
class Against:
    """All methods of a table, those that send most first. axis: range of differences that are drawn."""

    table: MethodsTable
    baseline: str
    points: tuple[Point, ...]
    axis: tuple[float, float]

    def point(self) -> str:
        """What the picture shows, in one sentence: the best of those that send little."""
        scored = [(p, p.gap.value) for p in self.points if p.gap and p.label != self.baseline]
        small = [(p, gap) for p, gap in scored if p.share is not None and p.share <= SMALL] or scored
        metric = self.table.metric
        if not small:
            return f"{self.baseline} alone has a {metric}"
        sign = 1 if self.table.scores.higher_is_better else -1
        best, gap = max(small, key=lambda found: sign * found[1])
        return say("against", best=best, gap=gap, metric=metric, baseline=self.baseline)


def against_bytes(table: MethodsTable) -> Against | None:
    """None for a table in which nothing has ended well."""
    if not table.scores.chosen:
        return None
    base = baseline(table.scores) or table.scores.chosen[0]
    found = [_point(table, line, base) for line in table.lines if line.tried]
    found.sort(key=lambda p: (-p.payload, p.label))
    apart = [abs(p.gap.value) for p in found if p.gap and p.gap.value and p.label != base.label]
    limit = (FAR_ON_ONE_TASK * statistics.median(apart) or max(apart)) if apart else 1.0
    kept = [replace(p, beyond=p.gap is not None and abs(p.gap.value) > limit) for p in found]
    ends = [v for p in kept if p.gap and not p.beyond for v in (p.gap.low, p.gap.high, p.gap.value) if v is not None]
    low, high = max(min(ends, default=0.0), -2 * limit), min(max(ends, default=0.0), 2 * limit)
    room = 0.08 * (high - low) or 1.0
    return Against(table, base.label, tuple(kept), (low - room, high + room))


def _point(table: MethodsTable, line: Line, base: Cell) -> Point:
    compressed = is_compressed(line.tried[0].records[0].wire)
    about = line.label, compressed, line.payload or 0.0, table.payload_ratio(line)
    if line.best is None:
        return Point(*about, None, None, None, len(line.failures))
    own, theirs = line.best.by_seed, base.by_seed
    gap: Difference | None = Difference(fmean(own.values()) - fmean(theirs.values()), None, None, len(own))
    # An interval of the seeds that both have is that of the means only where all seeds are the same.
    if line.best is not base and own.keys() == theirs.keys():
        gap = difference(own, theirs)
    return Point(*about, *line.best.summary(None), gap, len(line.failures))
