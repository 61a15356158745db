"""How far the speedups of repeated comparisons differ: one line for each group of runs of one setting. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.records.labels import NO_COMMUNICATION
from experiments.records.record import ResultRecord
from experiments.report import speedup
from experiments.report.formats import DASH, number, percent, times
from experiments.report.sentences import lines
from experiments.report.speedup import SpeedupTable
from experiments.report.table import Note, Table
from experiments.training import machine

BASES = ("fp32", "bf16")
IDLE, BUSY = 0.05, 0.10
"""How far speedups of runs on an idle machine may lie apart, and of all runs, those on a busy one among them."""


def busy(run: SpeedupTable) -> bool:
    """Whether other programs had a part of the machine during its rounds."""
    return any(machine.is_busy(r.turns.get("busy")) for r in run.records if r.turns)


def ratios(run: SpeedupTable) -> dict[tuple[str, str], float]:
    """{(method, baseline): speedup}, the bound's among them."""
    found = {(row.label, wire): run.speedup(row, wire) for row in run.rows for wire in BASES}
    return {key: value for key, value in found.items() if value is not None and key[0] != f"SGDM {key[1]}"}


def runs(records: Sequence[ResultRecord], exp: str, nodes: int) -> list[SpeedupTable]:
    """All interleaved comparisons of an experiment on so many nodes, the oldest first; only those in which nothing failed."""
    wanted = [r for r in records if r.exp == exp and r.nodes == nodes and r.group is not None]
    failed = {r.group for r in wanted if r.status != "completed"}
    wanted = [r for r in wanted if r.turns and r.group not in failed]
    groups = dict.fromkeys(r.group for r in sorted(wanted, key=lambda r: (r.time, r.group)))
    return [table for group in groups for table in speedup.build(wanted, group)]


def largest(some: Sequence[SpeedupTable], bound: bool = False) -> float | None:
    """By what share the speedups of any two runs differ at most, of any method and baseline; None for fewer than two.

    With `bound` those of the bound alone, else those of all methods: what a method gains is the product's claim, what
    the bound would gain is the scale next to it.
    """
    if len(some) < 2:
        return None
    every = [ratios(run) for run in some]
    shared = set.intersection(*map(set, every))
    pairs = [[of[key] for of in every] for key in shared if (key[0] == NO_COMMUNICATION) is bound]
    return max((max(values) / min(values) - 1 for values in pairs), default=None)


def as_table(found: Sequence[SpeedupTable]) -> Table:
    """One line for each run, and below what the study found."""
    keys = list(dict.fromkeys(key for run in found for key in ratios(run)))
    rows = []
    for run in found:
        taken = next((r.turns["busy"] for r in run.records if r.turns), None)
        others = DASH if taken is None else percent(taken["others"] + taken["steal"])
        bound = run.baseline("none")
        about = [others, number(run.records[0].link.get("dilation")), number(None if bound is None else bound.ms)]
        rows.append([run.group, *about, *(times(ratios(run).get(key)) for key in keys)])
    head = (
        "run",
        "others' share of the cores",
        "dilation",
        "bound, ms",
        *(f"{method} vs {wire}" for method, wire in keys),
    )
    return Table.text(head, rows, footnotes=tuple(Note(said) for said in sentences(found)))


def sentences(found: Sequence[SpeedupTable]) -> list[str]:
    """What the study found, against what is asked for."""
    idle, rows = [run for run in found if not busy(run)], []
    for some, limit, what in ((idle, IDLE, "on the idle machine"), (found, BUSY, "with those on the busy one")):
        if (worst := largest(some)) is not None and (some is idle or len(idle) < len(found)):
            rows.append((len(some), what, limit, worst, largest(some, bound=True)))
    return lines("spread", rows=rows)
