"""Whether dense all-reduce takes what arithmetic says: compute + bytes/rate, less what hides behind backward. No torch.

A step without overlap takes compute + bytes/rate. With DDP's buckets it cannot be shorter than the largest, over buckets, of
(when the bucket is ready + what is left to be sent from then on / rate). A row that is further than `TOLERANCE` from it is
named where it is published.

Where nodes are emulated the exchange also works on the cores on which they compute: copies to and from sockets,
sums, casts. Interleaved comparisons measure it (experiments/timing/opened.py): E = unthrottled step - bound - update.
A bucket then is work of the cores, which backward waits for, and after that bytes on the wire, which hide behind the backward
and the work of later buckets. Buckets k = 1..n with shares s of the elements, ready in the bound at r_k, W = bytes/rate:

    (1) step = max over k of ( r_k + E (s_1 + ... + s_k) + W (s_k + ... + s_n) ) + update

With unthrottled links, W = 0, this is what was measured; with E = 0 it is the sentence above. Nothing in it is taken from the
step that it is held against. What a link's token bucket lets pass at once after the pause between two steps is not in W.

Whether the link itself is right is checked separately: the same buckets, all-reduced on the same links while nobody
computes, take W.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from birder.predict.simulation import Layout, buckets
from birder.predict.timeline import Timeline
from experiments.cells import timelines, trained
from experiments.records.record import ResultRecord
from experiments.report.sentences import say
from launch.emulated.network import GOODPUT, burst_bytes
from launch.errors import UserError

TOLERANCE, WITHIN = 0.05, "5%"
"""Share by which a step may differ from arithmetic without being named."""
WIRES = {"fp32": 4, "bf16": 2}
"""Bytes of an element on the wire, of the methods that are checked."""
SAME = 0.02
"""A timeline is that of the model when their numbers of elements differ by no more than this share."""


@dataclass(frozen=True)
class Check:
    """One row. Times in ms. off_by: how far the link was from what its set rate should give when it was measured.

    own:  the exchange's own work as a share of the step, where it was measured, on unthrottled links; `expected` has it then.
    link: time of the exchange alone over bytes/rate, less 1, where that was measured.
    """

    name: str
    measured: float
    expected: float
    off_by: float = 0.0
    own: float | None = None
    link: float | None = None

    @property
    def difference(self) -> float:
        """Measured over expected, less 1."""
        return self.measured / self.expected - 1

    @property
    def holds(self) -> bool:
        return abs(self.difference) <= TOLERANCE

    @property
    def link_holds(self) -> bool:
        """Whether the exchange alone took what arithmetic says, or was not measured."""
        return self.link is None or abs(self.link) <= TOLERANCE

    def __str__(self) -> str:
        return f"{self.name} ({self.difference:+.1%})"


def last(t: Timeline, wire_ms: float, *, scale: float = 1.0, bucket_mb: float = 25.0) -> float:
    """When the last gradient has been sent, ms after the step's begin, with DDP's buckets.

    wire_ms: of all gradients. scale: how much slower than the timeline the computing is.
    """
    cut = buckets(t, Layout(bucket_mb=bucket_mb, first_mb=bucket_mb))
    return last_with_work([(sum(g.numel for g in b.gradients), scale * b.ready) for b in cut], 0.0, wire_ms)


def last_with_work(ready: Sequence[Sequence[float]], own_ms: float, wire_ms: float) -> float:
    """When the last gradient has been sent, ms after the step's begin: (1) of the module's docstring, without the update.

    ready: [elements, ms] of each bucket in the order in which they are sent. own_ms, wire_ms: of all of them.
    """
    whole = sum(elements for elements, _ in ready)
    before, longest = 0.0, 0.0
    for elements, at in ready:
        share = elements / whole
        longest = max(longest, at + own_ms * (before + share) + wire_ms * (1 - before))
        before += share
    return longest


def of_runs(records: Sequence[ResultRecord]) -> list[Check]:
    """fp32 and bf16 DDP of one table, over links of a set rate, next to the run without communication: its compute.

    Rows for which nothing tells when gradients are ready, and that do not fit into one bucket, are left out.
    """
    timed = [r for r in records if r.status == "completed" and r.timing.get("median_ms")]
    done = [r for r in timed if r.nodes > 1 and r.link["shaped"]]
    bound = next((r for r in done if r.wire == "none"), None)
    if bound is None:
        return []
    compute = bound.timing["median_ms"] - _update_ms(bound)
    checks = (_with_work(r, compute) or _without_work(r, compute) for r in done if r.wire in WIRES)
    return [check for check in checks if check is not None]


def _with_work(r: ResultRecord, compute: float) -> Check | None:
    """The check of a row whose exchange was measured with unthrottled links; None for any other."""
    wire_ms, ready, opened = _wire_ms(r), r.turns.get("ready"), r.turns.get("open_ms")
    if wire_ms is None or not ready or not opened:
        return None
    at_once = burst_bytes(r.link["set_mbit_per_s"]) if r.link.get("set_mbit_per_s") else 0
    wire_ms *= max(0.0, 1 - at_once / r.bytes_per_step["payload_inter"])
    own = max(0.0, statistics.median(opened) - compute - _update_ms(r))
    expected = last_with_work(trained.paced(ready, compute), own, wire_ms) + _update_ms(r)
    measured = r.timing["median_ms"]
    return Check(r.method, measured, expected, off_by(r), own / measured, _link(r, wire_ms))


def _link(r: ResultRecord, wire_ms: float) -> float | None:
    """How much longer the exchange alone took than bytes/rate, each turn at the rate that the links then had."""
    taken, rates, usual = r.turns.get("exchange_ms"), r.turns.get("exchange_mbit_per_s"), r.link.get("set_mbit_per_s")
    if not taken or not rates or not usual or wire_ms <= 0:  # what a burst holds takes no time
        return None
    return statistics.median(ms * rate / usual for ms, rate in zip(taken, rates, strict=True)) / wire_ms - 1


def off_by(r: ResultRecord) -> float:
    """By what share the link missed its set rate; 0 where nothing is known."""
    return float(r.link.get("off_by") or 0.0)


def _wire_ms(r: ResultRecord) -> float | None:
    """What all bytes of a step take on the wire; None where bytes or rate are not known, or steps differ."""
    rate = r.link["mbit_per_s"] or GOODPUT * (r.link.get("set_mbit_per_s") or 0.0)
    payload, train = r.bytes_per_step["payload_inter"], r.config.get("train", {})
    if not rate or not payload or train.get("accumulate", 1) != 1 or r.timing.get("typical") == "mean":
        return None
    return float(payload * 8 / (rate * 1e3))


def _without_work(r: ResultRecord, compute: float) -> Check | None:
    """The check of any other row; None where nothing tells when its gradients are ready."""
    wire_ms, update = _wire_ms(r), _update_ms(r)
    if wire_ms is None:
        return None
    elements = r.bytes_per_step["payload_inter"] * r.nodes / (2 * (r.nodes - 1) * WIRES[r.wire])
    bucket_mb = r.config.get("comm", {}).get("bucket_cap_mb", 25.0)
    if 4 * elements <= bucket_mb * 2**20:
        return Check(r.method, r.timing["median_ms"], compute + wire_ms + update, off_by(r))
    try:
        t = timelines.load(str(r.config.get("timeline")))
    except UserError:
        return None
    if abs(t.elements / elements - 1) > SAME:
        return None
    sent = last(t, wire_ms, scale=compute / t.step_ms, bucket_mb=bucket_mb)
    return Check(r.method, r.timing["median_ms"], sent + update, off_by(r))


def _update_ms(r: ResultRecord) -> float:
    """What the update took; in records of single runs it is what `optimizer.step` did."""
    taken = r.timing.get("update_ms")
    return float(r.timing.get("split", {}).get("optimizer_step_ms") or 0.0 if taken is None else taken)


def listed(checks: Sequence[Check]) -> str:
    """What the check of a table found, every row named: compute, the exchange's own work, links, what is further off."""
    return say(
        "arithmetic",
        plain=[c for c in checks if c.own is None],
        with_work=[c for c in checks if c.own is not None],
        links=[c for c in checks if c.link is not None],
        missed=missed(checks),
        within=WITHIN,
    )


def missed(checks: Sequence[Check]) -> str:
    """Which rows are further off than `TOLERANCE`, and whether their links were; empty where none is."""
    bad = [c for c in checks if not c.holds]
    return say("missed", bad=bad, off=[c.off_by for c in bad if c.off_by > SAME], within=WITHIN)
