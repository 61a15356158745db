"""How far the speedups of repeated comparisons differ: one line for each group of runs of one setting. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.records.labels import NO_COMMUNICATION
from experiments.records.record import ResultRecord
from experiments.report import speedup
from experiments.report.formats import DASH, number, percent, times
from experiments.report.sentences import lines
from experiments.report.speedup import SpeedupTable
from experiments.report.table import Column, Note, Table
from experiments.training import machine

BASES = ("fp32", "bf16")
IDLE, BUSY = 0.05, 0.10
"""How far speedups of runs on an idle machine may lie apart, and of all runs, those on a busy one among them."""


@dataclass(frozen=True)
class Run:
    """One comparison of the study."""

    table: SpeedupTable

    @property
    def busy(self) -> bool:
        """Whether other programs had a part of the machine during its rounds."""
        return any(machine.is_busy(r.turns.get("busy")) for r in self.table.records if r.turns)

    def ratios(self) -> dict[tuple[str, str], float]:
        """{(method, baseline): speedup}, the bound's among them."""
        found = {(row.label, wire): self.table.speedup(row, wire) for row in self.table.rows for wire in BASES}
        return {key: value for key, value in found.items() if value is not None and key[0] != f"SGDM {key[1]}"}


def runs(records: Sequence[ResultRecord], exp: str, nodes: int) -> list[Run]:
    """All interleaved comparisons of an experiment on so many nodes, the oldest first; only those in which nothing failed."""
    wanted = [r for r in records if r.exp == exp and r.nodes == nodes and r.group is not None]
    failed = {r.group for r in wanted if r.status != "completed"}
    wanted = [r for r in wanted if r.turns and r.group not in failed]
    groups = sorted({(min(r.time for r in wanted if r.group == g), g) for g in {r.group for r in wanted}})
    found = []
    for _, group in groups:
        found += [Run(table) for table in speedup.build(wanted, group)]
    return found


def largest(some: Sequence[Run], bound: bool = False) -> float | None:
    """By what share the speedups of any two runs differ at most, of any method and baseline; None for fewer than two.

    With `bound` those of the bound alone, else those of all methods: what a method gains is the product's claim, what
    the bound would gain is the scale next to it.
    """
    if len(some) < 2:
        return None
    every = [run.ratios() for run in some]
    shared = set.intersection(*(set(ratios) for ratios in every))
    pairs = [[ratios[key] for ratios in every] for key in sorted(shared) if (key[0] == NO_COMMUNICATION) is bound]
    return max((max(values) / min(values) - 1 for values in pairs), default=None)


def as_table(found: Sequence[Run]) -> Table:
    """One line for each run, and below what the study found."""
    keys = list(dict.fromkeys(key for run in found for key in run.ratios()))
    columns = [
        Column("run", "left", value=lambda run: run.table.group),
        Column("others' share of the cores", value=_others),
        Column("dilation", value=lambda run: number(run.table.records[0].link.get("dilation"))),
        Column("bound, ms", value=_bound),
    ]
    columns += [_ratio(method, wire) for method, wire in keys]
    return Table.of(columns, found, footnotes=tuple(Note(said) for said in sentences(found)))


def sentences(found: Sequence[Run]) -> list[str]:
    """What the study found, against what is asked for."""
    idle, rows = [run for run in found if not run.busy], []
    for some, limit, what in ((idle, IDLE, "on the idle machine"), (found, BUSY, "with those on the busy one")):
        if (worst := largest(some)) is not None and (some is idle or len(idle) < len(found)):
            rows.append((len(some), what, limit, worst, largest(some, bound=True)))
    return lines("spread", rows=rows)


def _ratio(method: str, wire: str) -> Column:
    return Column(f"{method} vs {wire}", value=lambda run: times(run.ratios().get((method, wire))))


def _others(run: Run) -> str:
    busy = next((r.turns["busy"] for r in run.table.records if r.turns), None)
    return DASH if busy is None else percent(busy["others"] + busy["steal"])


def _bound(run: Run) -> str:
    bound = run.table.baseline("none")
    return number(1000 * bound.seconds if bound and bound.seconds else None)
