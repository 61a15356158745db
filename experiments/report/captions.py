"""Who won, in words: one rule for tables, pictures, pages and the command line. No torch.

What is said follows from `Speedup.verdict`: where an interval holds "no difference", or there is no interval, the words are
"not decided". The texts are in sentences.j2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.records.labels import is_compressed
from experiments.records.record import ResultRecord
from experiments.report import metrics
from experiments.report.formats import DASH, number, percent, times
from experiments.report.metrics import FASTER, OPEN, Speedup
from experiments.report.sentences import say
from experiments.report.speedup import SpeedupRow, SpeedupTable
from experiments.report.table import Note
from experiments.training import machine

TIE = " ="
"""Marks a speedup whose interval holds 1."""
NEAR = 0.15
"""A published factor is met by what is as close as this to it."""


def faster(found: Speedup | None) -> str:
    """A speedup: 3.75x, and its interval where there is one: 3.75x [3.61, 3.82]; a tie is marked."""
    if found is None:
        return DASH
    return times(found.value) + f"{found.between()}{TIE * found.tie}" * (not found.itself)


def share(found: Speedup | None) -> str:
    """A share of the bound's rate: 97 %, or 97 % [95, 99]."""
    return DASH if found is None else percent(found.value) + found.between(0, 100) * (not found.itself)


def versus(table: SpeedupTable, row: SpeedupRow, wire: str) -> str:
    """A speedup of a table over its baseline of `wire`, as `faster` writes it."""
    return faster(table.compared(row, wire))


# ---- a published factor -----------------------------------------------------------------------------------------------

Found = tuple[Any, ...]
"""(a factor, under which assumption, ...)"""


def by_factor(published: float, found: Sequence[Found]) -> tuple[list[Found], list[Found], list[Found]]:
    """Those within `NEAR` of a published factor, those below and those above it, each in rising order."""
    close = [f for f in sorted(found) if abs(f[0] / published - 1) <= NEAR]
    rest = [f for f in sorted(found) if f not in close]
    return close, [f for f in rest if f[0] < published], [f for f in rest if f[0] > published]


# ---- whether to compress ----------------------------------------------------------------------------------------------


def compression(table: SpeedupTable) -> str | None:
    """Whether compression pays in this table, in one to three sentences; None without an fp32 row or a compressed one."""
    rows = [row for row in _timed(table) if is_compressed(row.record.wire)]
    won = [(row, found) for row in rows if (found := table.compared(row, "fp32")) is not None]
    if not won:
        return None
    said = {
        verdict: ", ".join(f"{row.label} {times(found.value)}" for row, found in won if found.verdict == verdict)
        for verdict in (FASTER, OPEN)
    }
    best, at = next(((row, found) for row, found in won if found.verdict == FASTER), won[0])
    return say(
        "compression",
        faster=said[FASTER],
        open=said[OPEN],
        best=best.label,
        value=times(at.value),
        intervals=at.low is not None,
        bound=_bound(table),
        half=table.compared(best, "bf16"),
        rivals=[row.label for row in rows if row is not best and _open(row, best)],
    )


def fastest(table: SpeedupTable) -> str:
    """What a table of step times shows, as the title of its picture."""
    timed = _timed(table)
    mine = next((row for row in timed if is_compressed(row.record.wire)), None)
    won = None if mine is None else table.compared(mine, "fp32")
    if mine is None or won is None:
        best = next((row for row in timed if row is not table.baseline("none")), timed[0])
        return f"{best.label} is the fastest: {number(best.ms)} ms a step"
    return say("fastest", mine=mine.label, won=won, half=table.speedup(mine, "bf16"), bound=_bound(table))


def _timed(table: SpeedupTable) -> list[SpeedupRow]:
    """The rows that were timed, the fastest first."""
    return sorted((row for row in table.rows if row.ms), key=lambda row: row.ms or 0.0)


def _bound(table: SpeedupTable) -> str | None:
    bound = table.baseline("none")
    return None if bound is None else times(table.speedup(bound, "fp32"))


def _open(row: SpeedupRow, best: SpeedupRow) -> bool:
    """Whether it is not decided which of two is faster, as where one of them stands for several runs."""
    found = metrics.speedup(row.record, best.record) if row.runs == best.runs == 1 else None
    return found is None or found.verdict == OPEN


# ---- how the numbers came about ---------------------------------------------------------------------------------------


def notes(records: Sequence[ResultRecord]) -> list[Note]:
    """How the rounds came about, and what makes them doubtful. None for records without rounds."""
    worlds = {r.turns["world"]: r.turns for r in records if r.turns}.values()
    return [
        note
        for about in worlds
        for note in (
            Note(say("rounds", about=about, fewest=metrics.LEAST_ROUNDS)),
            *Note.of(caution(about), kind="caution"),
        )
    ]


def caution(about: dict[str, Any]) -> str | None:
    """What makes the rounds doubtful: a busy machine, a pace that has changed. None where nothing does."""
    busy, drift = about.get("busy"), about.get("drift") or 0.0
    known = {
        "busy": busy if machine.is_busy(busy) else None,
        "drift": drift if abs(drift) > machine.DRIFT else None,
        "repeated": about.get("repeated"),
    }
    return say("caution", **known) or None
