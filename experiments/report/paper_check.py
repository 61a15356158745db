"""Whether the replay keeps time: fp32 DDP's step against arithmetic, without overlap and with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments.cells import paper, timelines
from experiments.cells.replay import BUCKET_MB, bucket_delay_ms, nic_bytes
from experiments.cells.timelines import Timeline
from experiments.report.formats import number
from experiments.report.table import Table

if TYPE_CHECKING:
    from experiments.report.paper_report import Results

TOLERANCE = 0.10
EXPLANATION = """\
Without overlap (all gradients in one bucket) a step takes compute + bytes/rate. With overlap it cannot be shorter than
max over k of (when bucket k is ready + what is to be sent from then on / rate), k running over DDP's buckets of 25 MB. Bytes
are 2(N-1)/N of the fp32 gradient per NIC, the rate is that of the link; the wait for a node's own GPUs is in both. A flat
NCCL ring over all GPUs would send 2(n-1)/n, n the number of GPUs: 1.88, 1.29 and 1.13 times as much on 2, 4 and 8 nodes of
8, so that fp32 and bf16 DDP here are those of an all-reduce that works by nodes."""


def without_overlap(t: Timeline, nodes: int, gbit_per_s: float) -> float:
    """compute + bytes/rate, in ms."""
    return t.step_ms + bucket_delay_ms(t) + _ms(nic_bytes("fp32", t.elements, nodes, t.gpus_per_node), gbit_per_s)


def with_overlap(t: Timeline, nodes: int, gbit_per_s: float) -> float:
    """The largest of (ready + remaining bytes/rate) over buckets, in ms."""
    left = 4.0 * t.elements
    longest, filled = 0.0, 0.0
    order = [i for layer in t.layers for i in reversed(layer)]
    rest = 0.0  # of the bucket that is being filled
    for place, i in enumerate(order):
        g = t.gradients[i]
        rest += 4 * g.numel
        if rest >= BUCKET_MB * 2**20 or place == len(order) - 1:
            wire = _ms(nic_bytes("fp32", round((left - filled) / 4), nodes, t.gpus_per_node), gbit_per_s)
            longest = max(longest, g.ready_ms + wire)
            filled += rest
            rest = 0.0
    return longest + bucket_delay_ms(t)


def rows(results: Results) -> list[tuple[str, float, float]]:
    """(cell, replayed ms, expected ms) of every fp32 cell on more than one node."""
    found = []
    for cell, r in sorted(results.records.items(), key=lambda item: item[0].id):
        if cell.method not in ("fp32", "fp32_serial") or cell.link is None:
            continue
        expect = without_overlap if cell.method == "fp32_serial" else with_overlap
        t = timelines.load(cell.timeline)
        name = f"{cell.model}, {paper.RATES[cell.rate]}, {cell.nodes} nodes, {cell.link} Gbit/s"
        name += ", without overlap" if cell.method == "fp32_serial" else ", with overlap"
        replayed = r.timing["median_ms"] / r.link["dilation"]
        found.append((name, replayed, expect(t, cell.nodes, float(cell.link))))
    return found


HEAD = ("fp32 DDP", "replayed, ms", "arithmetic, ms", "difference")


def table(results: Results) -> Table:
    """The check, one line for each cell."""
    found = rows(results)
    return Table.text(
        HEAD, [[n, number(ours), number(theirs), f"{ours / theirs - 1:+.1%}"] for n, ours, theirs in found]
    )


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
