"""Whether the replay keeps time: fp32 DDP's step against arithmetic, without overlap and with it."""

from __future__ import annotations

from birder.predict.simulation import Layout, buckets
from birder.predict.timeline import Timeline
from experiments.cells.traffic import BUCKET_MB, bucket_delay_ms, nic_bytes
from experiments.report.formats import number
from experiments.report.replayed import Results
from experiments.report.table import Note, Table

TOLERANCE = 0.10


def without_overlap(t: Timeline, nodes: int, gbit_per_s: float) -> float:
    """compute + bytes/rate, in ms."""
    return t.step_ms + bucket_delay_ms(t) + _ms(nic_bytes("fp32", t.elements, nodes, t.gpus_per_node), gbit_per_s)


def with_overlap(t: Timeline, nodes: int, gbit_per_s: float) -> float:
    """The largest of (ready + remaining bytes/rate) over DDP's buckets, in ms."""
    left, longest = t.elements, 0.0
    for bucket in buckets(t, Layout(bucket_mb=BUCKET_MB, first_mb=BUCKET_MB)):
        longest = max(longest, bucket.ready + _ms(nic_bytes("fp32", left, nodes, t.gpus_per_node), gbit_per_s))
        left -= sum(g.numel for g in bucket.gradients)
    return longest + bucket_delay_ms(t)


def rows(results: Results) -> list[tuple[str, float, float]]:
    """(cell, replayed ms, expected ms) of every fp32 cell on more than one node."""
    found, suite = [], results.suite
    for cell, r in sorted(results.records.items(), key=lambda item: suite.id(item[0])):
        method = suite.methods[cell.method]
        if cell.link is None or "fp32" not in (cell.method, method.checks):
            continue
        expect, how = (without_overlap, "without") if method.one_bucket else (with_overlap, "with")
        gbit = suite.links[cell.link].gbit
        if gbit is not None:
            rate = suite.rates.get(cell.rate or "", "")
            name = f"{cell.model}, {rate}, {cell.nodes} nodes, {gbit:g} Gbit/s, {how} overlap"
            expected = expect(suite.timeline(cell.model, cell.rate), cell.nodes, gbit)
            found.append((name, r.timing["median_ms"] / r.link["dilation"], expected))
    return found


def table(results: Results) -> Table:
    """The check, one line for each cell, and what it found."""
    head = ("fp32 DDP", "replayed, ms", "arithmetic, ms", "difference")
    cells = [(name, number(ours), number(theirs), f"{ours / theirs - 1:+.1%}") for name, ours, theirs in rows(results)]
    return Table.text(head, cells, footnotes=(Note(sentence(results), "strong"),))


def sentence(results: Results) -> str:
    """What the check found."""
    found = rows(results)
    if not found:
        return "Check: no fp32 cell on more than one node has been measured."
    off = [(abs(ours / theirs - 1), name) for name, ours, theirs in found]
    worst, where = max(off)
    bad = [name for o, name in off if o > TOLERANCE]
    text = f"Check: {len(found) - len(bad)} of {len(found)} step times of fp32 DDP are within {TOLERANCE:.0%} of arithmetic"
    text += f"; the largest difference is {worst:.1%} ({where})."
    return text + (f" Not within: {'; '.join(bad)}." if bad else "")


def _ms(nbytes: float, gbit_per_s: float) -> float:
    return nbytes * 8 / (gbit_per_s * 1e6)
