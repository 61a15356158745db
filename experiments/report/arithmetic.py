"""Whether dense all-reduce takes what arithmetic says: compute + bytes/rate, less what hides behind backward. No torch.

A step without overlap takes compute + bytes/rate. With DDP's buckets it cannot be shorter than the largest, over buckets, of
(when the bucket is ready + what is left to be sent from then on / rate). A row that is further than `TOLERANCE` from it is
named where it is published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from birder.predict.simulation import Layout, buckets
from birder.predict.timeline import Timeline
from experiments.cells import timelines
from experiments.records.record import ResultRecord
from launch.emulated.network import GOODPUT
from launch.errors import UserError

TOLERANCE = 0.05
"""Share by which a step may differ from arithmetic without being named."""
WIRES = {"fp32": 4, "bf16": 2}
"""Bytes of an element on the wire, of the methods that are checked."""
SAME = 0.02
"""A timeline is that of the model when their numbers of elements differ by no more than this share."""


@dataclass(frozen=True)
class Check:
    """One row. Times in ms. off_by: how far the link was from what its set rate should give when it was measured."""

    name: str
    measured: float
    expected: float
    off_by: float = 0.0

    @property
    def difference(self) -> float:
        """Measured over expected, less 1."""
        return self.measured / self.expected - 1

    @property
    def holds(self) -> bool:
        return abs(self.difference) <= TOLERANCE

    def __str__(self) -> str:
        return f"{self.name} ({self.difference:+.1%})"


def last(t: Timeline, wire_ms: float, *, scale: float = 1.0, bucket_mb: float = 25.0) -> float:
    """When the last gradient has been sent, ms after the step's begin, with DDP's buckets.

    wire_ms: of all gradients. scale: how much slower than the timeline the computing is.
    """
    left, longest = t.elements, 0.0
    for bucket in buckets(t, Layout(bucket_mb=bucket_mb, first_mb=bucket_mb)):
        longest = max(longest, scale * bucket.ready + wire_ms * left / t.elements)
        left -= sum(g.numel for g in bucket.gradients)
    return longest


def of_runs(records: Sequence[ResultRecord]) -> list[Check]:
    """fp32 and bf16 DDP of one table, over links of a set rate, beside the run without communication: its compute.

    Rows for which nothing tells when gradients are ready, and that do not fit into one bucket, are left out.
    """
    done = [r for r in records if r.status == "completed" and r.nodes > 1 and r.link["shaped"]]
    bound = next((r for r in done if r.wire == "none"), None)
    found = []
    for r in done if bound is not None else ():
        assert bound is not None
        expected = _expected(r, bound.timing["median_ms"] - _update_ms(bound)) if r.wire in WIRES else None
        if expected is not None:
            found.append(Check(r.method, r.timing["median_ms"], expected, float(r.link.get("off_by") or 0.0)))
    return found


def _expected(r: ResultRecord, compute: float) -> float | None:
    rate = r.link["mbit_per_s"] or GOODPUT * (r.link.get("set_mbit_per_s") or 0.0)
    payload, train = r.bytes_per_step["payload_inter"], r.config.get("train", {})
    if not rate or not payload or train.get("accumulate", 1) != 1 or r.timing.get("typical") == "mean":
        return None
    wire_ms = payload * 8 / (rate * 1e3)
    elements = payload * r.nodes / (2 * (r.nodes - 1) * WIRES[r.wire])
    bucket_mb = r.config.get("comm", {}).get("bucket_mb", 25.0)
    if 4 * elements <= bucket_mb * 2**20:
        return compute + wire_ms + _update_ms(r)
    try:
        t = timelines.load(str(r.config.get("timeline")))
    except UserError:
        return None
    if abs(t.elements / elements - 1) > SAME:
        return None
    return last(t, wire_ms, scale=compute / t.step_ms, bucket_mb=bucket_mb) + _update_ms(r)


def _update_ms(r: ResultRecord) -> float:
    """What the update took; in records of single runs it is what `optimizer.step` did."""
    taken = r.timing.get("update_ms")
    return float(r.timing.get("split", {}).get("optimizer_step_ms") or 0.0 if taken is None else taken)


def listed(checks: Sequence[Check]) -> str:
    """What the check of a table found, every row named."""
    text = "Against arithmetic (compute + bytes/rate, less what hides behind backward): "
    text += ", ".join(map(str, checks))
    return f"{text}. {missed(checks)}".rstrip()


def missed(checks: Sequence[Check]) -> str:
    """Which rows are further off than `TOLERANCE`, and whether their links were; empty where none is."""
    bad = [c for c in checks if not c.holds]
    if not bad:
        return ""
    text = f"Not within {TOLERANCE:.0%}: {'; '.join(map(str, bad))}."
    links = [c.off_by for c in bad if c.off_by > SAME]
    if links:
        off = f"{min(links):.1%} to {max(links):.1%} off what its set rate gives"
        text += f" In {len(links)} of these {len(bad)} rows the link had been measured {off}."
    return text
