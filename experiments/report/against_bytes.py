"""Accuracy against bytes: what every method on one task sends, and how far its metric is from a baseline's. No torch."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from experiments.report.curves import baseline
from experiments.report.formats import between, fraction, metric_gap
from experiments.report.methods_table import Line, MethodsTable
from experiments.report.paired import difference

FAR = 10.0
"""A difference so many times the median one is named beside the axis: on it, it would hide all others."""
SMALL = 1 / 16
"""Methods that send at most this share of fp32's bytes are what the picture is about."""


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
    mean: float | None
    sd: float | None
    seeds: int
    difference: float | None
    low: float | None
    high: float | None
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
        said = f"{best.label} sends {fraction(best.share)} of the bytes of fp32 and ends"
        return f"{said} {metric_gap(self.metric, best.difference)} from {self.baseline}"


def build(table: MethodsTable) -> Against | None:
    """None for a table in which nothing has ended well."""
    scored = [line for line in table.lines if line.record is not None and line.best is not None]
    if not scored:
        return None
    held_against = baseline(table.scores)
    base = next((line for line in scored if line.best is held_against), scored[0])
    found = [_point(table, line, base) for line in table.lines if line.tried]
    found.sort(key=lambda p: (-p.payload, p.label))
    apart = [abs(p.difference) for p in found if p.difference and p.label != base.label]
    limit = (FAR * statistics.median(apart) or max(apart)) if apart else 1.0
    kept = [replace(p, beyond=p.difference is not None and abs(p.difference) > limit) for p in found]
    ends = [v for p in kept if not p.beyond for v in (p.low, p.high, p.difference) if v is not None]
    low, high = max(min(ends, default=0.0), -2 * limit), min(max(ends, default=0.0), 2 * limit)
    room = 0.08 * (high - low) or 1.0
    failures = tuple(said for line in table.lines for said in line.failures)
    axis = (low - room, high + room)
    return Against(
        table.scores.title, table.metric, table.scores.higher_is_better, base.label, tuple(kept), axis, failures
    )


def _point(table: MethodsTable, line: Line, base: Line) -> Point:
    share = table.payload_ratio(line)
    sent = line.tried[0].records[0]
    payload = line.payload or 0.0
    compressed = sent.wire not in ("fp32", "bf16", "fp16", "none")
    if line.best is None or line.record is None or base.best is None:
        return Point(line.label, compressed, payload, share, None, None, 0, None, None, None, len(line.failures))
    mean, sd = line.best.summary(None)
    theirs = base.best.summary(None)[0]
    apart = None if mean is None or theirs is None else mean - theirs
    paired = difference(line.best.by_seed, base.best.by_seed)
    # An interval of the seeds that both have is that of the means only where all seeds are the same.
    same = paired is not None and line is not base and line.best.by_seed.keys() == base.best.by_seed.keys()
    low, high = (paired.low, paired.high) if same and paired is not None else (None, None)
    seeds = len(line.best.valid)
    return Point(line.label, compressed, payload, share, mean, sd, seeds, apart, low, high, len(line.failures))
