"""Whether the replay keeps time: fp32 and bf16 DDP's steps against arithmetic, without overlap and with it."""

from __future__ import annotations

from birder.predict.timeline import Timeline
from experiments.cells.traffic import BUCKET_MB, bucket_delay_ms, nic_bytes
from experiments.report import arithmetic
from experiments.report.arithmetic import TOLERANCE, WIRES, Check
from experiments.report.formats import number
from experiments.report.replayed import Results
from experiments.report.table import Note, Table


def without_overlap(t: Timeline, nodes: int, gbit_per_s: float, wire: str = "fp32", delay: bool = True) -> float:
    """compute + bytes/rate, in ms. delay: of the part inside a node of many GPUs."""
    return t.step_ms + delay * bucket_delay_ms(t) + _wire_ms(t, nodes, gbit_per_s, wire)


def with_overlap(t: Timeline, nodes: int, gbit_per_s: float, wire: str = "fp32", delay: bool = True) -> float:
    """The largest of (ready + remaining bytes/rate) over DDP's buckets, in ms."""
    return arithmetic.last(t, _wire_ms(t, nodes, gbit_per_s, wire), bucket_mb=BUCKET_MB) + delay * bucket_delay_ms(t)


def rows(results: Results) -> list[Check]:
    """Every cell of fp32 and bf16 DDP over a link of a set rate; ms of the cluster's clock."""
    found, suite = [], results.suite
    for cell, r in sorted(results.records.items(), key=lambda item: suite.id(item[0])):
        method = suite.methods[cell.method]
        goodput = suite.links[cell.link].goodput_mbit if cell.link is not None else None
        if cell.nodes == 1 or goodput is None or method.wire not in WIRES:
            continue
        expect, how = (without_overlap, "without") if method.one_bucket else (with_overlap, "with")
        timeline, delay = suite.timeline(cell.model, cell.rate), suite.gpus_per_node > 1
        expected = expect(timeline, cell.nodes, goodput / 1000, method.wire, delay)
        setting = [cell.model, suite.rates.get(cell.rate or ""), f"{cell.nodes} nodes", _gbit(results, cell.link)]
        name = ", ".join(filter(None, [*setting, f"{method.wire}, {how} overlap"]))
        found.append(Check(name, results.clock(cell), expected, float(r.link.get("off_by") or 0.0)))
    return found


def table(results: Results) -> Table:
    """The check, one line for each cell, and what it found."""
    head = ("fp32 and bf16 DDP", "replayed, ms", "arithmetic, ms", "difference")
    cells = [(c.name, number(c.measured), number(c.expected), f"{c.difference:+.1%}") for c in rows(results)]
    return Table.text(head, cells, footnotes=(Note(sentence(results), "strong"),))


def sentence(results: Results) -> str:
    """What the check found."""
    found = rows(results)
    if not found:
        return "Check: no cell of fp32 or bf16 DDP on more than one node has been measured."
    worst, good = max(found, key=lambda c: abs(c.difference)), sum(c.holds for c in found)
    text = f"Check: {good} of {len(found)} step times of fp32 and bf16 DDP are within {TOLERANCE:.0%} of arithmetic"
    text += f"; the largest difference is {abs(worst.difference):.1%} ({worst.name}). {arithmetic.missed(found)}"
    return text.rstrip()


def _gbit(results: Results, link: str | None) -> str:
    gbit = results.suite.links[link].gbit if link else None
    return f"{gbit:g} Gbit/s" if gbit is not None else str(link)


def _wire_ms(t: Timeline, nodes: int, gbit_per_s: float, wire: str) -> float:
    return nic_bytes(wire, t.elements, nodes, t.gpus_per_node) * 8 / (gbit_per_s * 1e6)
