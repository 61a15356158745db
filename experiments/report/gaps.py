"""How far methods end from a baseline, and what they send for it: what the pictures of accuracies show. No torch.

Two kinds of comparison: all studies, a `Panel` each (`panels`, `with_bytes`), and all methods on one task (`against_bytes`).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.records.labels import is_compressed
from experiments.records.record import ResultRecord
from experiments.report.accuracy import AccuracyTable, Cell, full_precision
from experiments.report.curves import baseline
from experiments.report.formats import between, metric_axis, metric_unit
from experiments.report.methods_table import Line, MethodsTable
from experiments.report.paired import BETTER, OPEN, PARITY, WORSE, Difference, difference
from experiments.report.sentences import say

Studies = dict[str, list[list[AccuracyTable]]]
"""By experiment: `accuracy_page.studies`."""
FAR = 3.0
"""Differences beyond so many times the median one are named at the edge: on the axis they would hide all others."""
FAR_ON_ONE_TASK = 10.0
"""The same where all methods share one task."""
SMALL = 1 / 16
"""Methods that send at most this share of fp32's bytes are what the picture of one task is about."""


# ---- all studies ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A method, in its best variant, against the baseline. `gap` in the unit of the axis."""

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


@dataclass(frozen=True)
class Sent:
    """A method of a panel. each: bytes per parameter and step that a rank sends."""

    row: Row
    each: float


def chosen(studies: Studies) -> list[AccuracyTable]:
    """Of each experiment the study with most seeds; of several the longer one, then that with most runs."""
    return [max((t for tables in every for t in tables), key=_weight) for every in studies.values()]


def _weight(table: AccuracyTable) -> tuple[int, int, int]:
    train = table.first.config.get("train", {})
    whole = 0 if train.get("max_steps") is not None else int(train.get("epochs") or 0)
    seeds = max((len(c.by_seed) for c in table.chosen), default=0)
    return seeds, whole, sum(len(c.records) for c in table.cells)


def panels(studies: Studies) -> list[Panel]:
    """Those of the `chosen` studies that have a baseline and intervals."""
    return [made for table in chosen(studies) if (made := panel(table)) is not None]


def panel(table: AccuracyTable) -> Panel | None:
    base, parity = table.baseline, table.parity
    if base is None or parity is None:
        return None
    scale = 100.0 if parity.relative else 1.0
    rows = []
    for cell in table.one_of_each:
        gap = table.compared(cell)
        if gap is not None and gap.low is not None and gap.high is not None:
            rows.append(Row(cell.records[0].method, gap.times(scale), table.verdict(cell)))
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
        tuple(rows),
        max(FAR * statistics.median_high(abs(row.gap.value) for row in rows), 2 * scale * parity.margin),
    )


def point(found: Sequence[Panel]) -> str:
    """How the paper's Birder ended, in one sentence."""
    by: dict[str, list[str]] = {}
    for panel in found:
        verdict = panel.verdict("Birder")
        if verdict is not None:
            by.setdefault(verdict, []).append(panel.task)
    return say("panels", by={verdict: by[verdict] for verdict in (BETTER, PARITY, OPEN, WORSE) if verdict in by})


def with_bytes(studies: Studies) -> list[tuple[Panel, list[Sent]]]:
    """The `panels`, their methods with bytes; those without any are left out."""
    found = []
    for table in chosen(studies):
        made = panel(table)
        rows = {} if made is None else {row.label: row for row in made.rows}
        each = {c.records[0].method: bytes_each(table, c) for c in table.one_of_each if c.records[0].method in rows}
        sent = [Sent(rows[label], value) for label, value in each.items() if value]
        if made is not None and sent:
            found.append((made, sorted(sent, key=lambda s: s.each)))
    return found


def bytes_each(table: AccuracyTable, cell: Cell) -> float | None:
    """Bytes per parameter and step of each rank, by a run of the table that all-reduces fp32, whose 8 (n-1)/n are known."""
    dense = next((r for c in table.cells for r in c.valid if full_precision(r) and _payload(r)), None)
    if dense is None or not _payload(cell.valid[0]):
        return None
    n = dense.nodes * dense.ranks_per_node
    return 8 * (n - 1) / n * _payload(cell.valid[0]) / _payload(dense)


def _payload(r: ResultRecord) -> float:
    return float(sum(r.bytes_per_step.get(f"payload_{side}") or 0 for side in ("inter", "intra")))


def point_of_bytes(found: Sequence[tuple[Panel, list[Sent]]]) -> str:
    """How many of those that send less than a byte keep the baseline's accuracy, in one sentence."""
    return say("kept", by=Counter(s.row.verdict for _, sent in found for s in sent if s.each < 1))


# ---- all methods on one task ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """One method at its chosen learning rate.

    payload: bytes per node and step; share: of what fp32 sends.
    difference: of the means to the baseline's; low, high: its 95 % interval, paired by seed, None where there is none.
    failed:  how many of its runs failed.
    beyond:  too far off to be drawn.
    """

    label: str
    compressed: bool
    payload: float
    share: float | None
    mean: float | None = None
    sd: float | None = None
    seeds: int = 0
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    failed: int = 0
    beyond: bool = False

    def text(self) -> str:
        """-51.9 [-94.2, -9.5]; the difference alone where it has no interval."""
        if self.difference is None:
            return "failed"
        return f"{self.difference:+.1f}{between(self.low, self.high, 1)}"

    def drawn(self) -> list[object]:
        """What a picture shows of it."""
        return [self.label, self.payload, self.share, self.difference, self.low, self.high, self.failed, self.beyond]


@dataclass(frozen=True)
class Against:
    """All methods of a table, those that send most first. axis: range of differences that are drawn."""

    title: str
    metric: str
    higher_is_better: bool
    baseline: str
    points: tuple[Point, ...]
    axis: tuple[float, float]
    failures: tuple[str, ...]

    def point(self) -> str:
        """What the picture shows, in one sentence: the best of those that send little."""
        scored = [p for p in self.points if p.difference is not None and p.label != self.baseline]
        small = [p for p in scored if p.share is not None and p.share <= SMALL] or scored
        if not small:
            return f"{self.baseline} alone has a {self.metric}"
        sign = 1 if self.higher_is_better else -1
        best = max(small, key=lambda p: sign * (p.difference or 0.0))
        return say("against", best=best, metric=self.metric, baseline=self.baseline)


def against_bytes(table: MethodsTable) -> Against | None:
    """None for a table in which nothing has ended well."""
    scored = [line for line in table.lines if line.record is not None and line.best is not None]
    if not scored:
        return None
    held_against = baseline(table.scores)
    base = next((line for line in scored if line.best is held_against), scored[0])
    found = [_point(table, line, base) for line in table.lines if line.tried]
    found.sort(key=lambda p: (-p.payload, p.label))
    apart = [abs(p.difference) for p in found if p.difference and p.label != base.label]
    limit = (FAR_ON_ONE_TASK * statistics.median(apart) or max(apart)) if apart else 1.0
    kept = [replace(p, beyond=p.difference is not None and abs(p.difference) > limit) for p in found]
    ends = [v for p in kept if not p.beyond for v in (p.low, p.high, p.difference) if v is not None]
    low, high = max(min(ends, default=0.0), -2 * limit), min(max(ends, default=0.0), 2 * limit)
    room = 0.08 * (high - low) or 1.0
    return Against(
        table.scores.title,
        table.metric,
        table.scores.higher_is_better,
        base.label,
        tuple(kept),
        (low - room, high + room),
        tuple(said for line in table.lines for said in line.failures),
    )


def _point(table: MethodsTable, line: Line, base: Line) -> Point:
    compressed = is_compressed(line.tried[0].records[0].wire)
    made = Point(line.label, compressed, line.payload or 0.0, table.payload_ratio(line), failed=len(line.failures))
    if line.best is None or line.record is None or base.best is None:
        return made
    (mean, sd), theirs = line.best.summary(None), base.best.summary(None)[0]
    apart = None if mean is None or theirs is None else mean - theirs
    made = replace(made, mean=mean, sd=sd, seeds=len(line.best.valid), difference=apart)
    # An interval of the seeds that both have is that of the means only where all seeds are the same.
    paired = difference(line.best.by_seed, base.best.by_seed)
    if paired is None or line is base or line.best.by_seed.keys() != base.best.by_seed.keys():
        return made
    return replace(made, low=paired.low, high=paired.high)
