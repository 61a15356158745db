"""Who won, in words: one rule for tables, pictures, pages and the command line. No torch.

What is said follows from `Speedup.verdict` and `Difference.verdict`: where an interval holds "no difference", or there is no
interval, the words are "not decided".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.records.labels import is_compressed
from experiments.records.record import ResultRecord
from experiments.report import metrics
from experiments.report.formats import between, metric_gap, number, percent, times
from experiments.report.metrics import FASTER, OPEN, SLOWER, Speedup
from experiments.report.paired import Difference
from experiments.report.speedup import Row, SpeedupTable
from experiments.training import machine

TIE = " ="
"""Marks a speedup whose interval holds 1."""


def faster(found: Speedup | None, same: bool = False) -> str:
    """A speedup: 3.75x, and its interval where there is one: 3.75x [3.61, 3.82]; a tie is marked. same: with itself."""
    if found is None or found.interval is None or same:
        return times(None if found is None else found.value)
    at = found.interval
    return f"{times(found.value)}{between(at.low, at.high)}{TIE if at.tie else ''}"


def share(found: Speedup | None, same: bool = False) -> str:
    """A share of the bound's rate: 97 %, or 97 % [95, 99]."""
    if found is None or found.interval is None or same:
        return percent(None if found is None else found.value)
    return percent(found.value) + between(found.interval.low, found.interval.high, 0, 100)


def versus(table: SpeedupTable, row: Row, wire: str) -> str:
    """A speedup of a table over its baseline of `wire`, as `faster` writes it."""
    return faster(table.compared(row, wire), row is table.baseline(wire))


# ---- whether to compress ----------------------------------------------------------------------------------------------


def compression(table: SpeedupTable) -> str | None:
    """Whether compression pays in this table, in one to three sentences; None without an fp32 row or a compressed one."""
    base = table.baseline("fp32")
    rows = [row for row in table.rows if is_compressed(row.record.wire) and row.seconds]
    if base is None or not rows:
        return None
    rows.sort(key=lambda row: row.seconds or 0.0)
    won = {row.label: table.compared(row, "fp32") for row in rows}
    by = {verdict: [r for r in rows if _verdict(won[r.label]) == verdict] for verdict in (FASTER, OPEN, SLOWER)}
    said = {
        verdict: ", ".join(f"{r.label} {times(_value(won[r.label]))}" for r in some) for verdict, some in by.items()
    }
    best = rows[0]
    if by[FASTER]:
        best = by[FASTER][0]
        text = f"Faster than fp32 DDP: {said[FASTER]}" + (f"; not decided: {said[OPEN]}" if by[OPEN] else "")
    elif by[OPEN]:
        text = f"Whether to compress on this link is not decided: {said[OPEN]} of the speed of fp32 DDP, "
        text += "and intervals hold 1" if table.ratio(best, "fp32") else "and step times overlap or have no spread"
    else:
        text = f"On this link, do not compress: the fastest compressed method, {best.label}, reaches "
        text += f"{times(_value(won[best.label]))} of the speed of fp32 DDP"
    bound = table.baseline("none")
    text += f"; the bound, without communication, is {times(table.speedup(bound, 'fp32'))}." if bound else "."
    if (half := table.compared(best, "bf16")) is not None and (by[FASTER] or by[OPEN]):
        verb = {FASTER: "beats", SLOWER: "does not beat", OPEN: "is not decided against"}[half.verdict]
        text += f" The fastest, {best.label}, {verb} bf16 DDP ({times(half.value)})."
    rivals = [row for row in rows if row is not best and _verdict(_between(row, best)) == OPEN]
    return text + (f" Not decided against {best.label}: {', '.join(r.label for r in rivals)}." if rivals else "")


def fastest(table: SpeedupTable) -> str:
    """What a table of step times shows, as the title of its picture."""
    timed = sorted((row for row in table.rows if row.seconds), key=lambda row: row.seconds or 0.0)
    mine = next((row for row in timed if is_compressed(row.record.wire)), None)
    bound = table.baseline("none")
    won = None if mine is None else table.compared(mine, "fp32")
    if mine is None or won is None:
        best = next((row for row in timed if row is not bound), timed[0])
        return f"{best.label} is the fastest: {number(1000 * (best.seconds or 0.0))} ms a step"
    said = {
        FASTER: f"{mine.label} is the fastest compressed method: {times(won.value)} as fast as fp32",
        SLOWER: f"Do not compress here: the fastest, {mine.label}, is {times(won.value)} as fast as fp32",
        OPEN: f"Not decided whether to compress: the fastest, {mine.label}, is {times(won.value)} as fast as fp32",
    }[won.verdict]
    if won.verdict != SLOWER and (half := table.speedup(mine, "bf16")) is not None:
        said += f", {times(half)} as fast as bf16"
    return said + (f"; the bound is {times(table.speedup(bound, 'fp32'))}" if bound is not None else "")


def beside(own: str, own_ms: float, rival: str, rival_ms: float, found: Speedup | None, about: str) -> str:
    """Whether a method is the fastest compressed one. found: its speedup over `rival`, the fastest of the others."""
    took, next_best = f"{number(own_ms)} ms{', ' if about else ''}{about}", f"{rival}, {number(rival_ms)} ms"
    return {
        FASTER: f"{own} is the fastest compressed method ({took}); the next is {next_best}.",
        SLOWER: f"{own} is not the fastest compressed method ({took}); that is {next_best}.",
        OPEN: f"{own} ({took}) is not decided against {next_best}.",
    }[_verdict(found)]


def _between(row: Row, best: Row) -> Speedup | None:
    """Of `best` over `row`; None where one of them stands for several runs."""
    return metrics.speedup(row.record, best.record) if row.runs == best.runs == 1 else None


def _verdict(found: Speedup | None) -> str:
    return OPEN if found is None else found.verdict


def _value(found: Speedup | None) -> float | None:
    return None if found is None else found.value


# ---- accuracy ---------------------------------------------------------------------------------------------------------


def apart(label: str, found: Difference, metric: str, base: str, verdict: str, relative: bool = False) -> str:
    """How far a method ends from a baseline, and what that decides: Birder: -0.45 points from SGDM fp32, not decided."""
    return f"{label}: {metric_gap(metric, found.value, relative)} from {base}, {verdict}"


# ---- how the numbers came about ---------------------------------------------------------------------------------------


def notes(records: Sequence[ResultRecord]) -> list[tuple[str, bool]]:
    """Sentences about how the rounds came about, and whether each is a caution. None for records without rounds."""
    worlds: dict[str, dict[str, Any]] = {r.turns["world"]: r.turns for r in records if r.turns}
    said: list[tuple[str, bool]] = []
    for about in worlds.values():
        told = (
            f"Methods took turns in one world, {len(about['ms'])} rounds in shuffled order; [low, high] is the ratio's 95 % "
            f"interval, paired by rounds, Student's t;{TIE} marks a tie, an interval that holds 1. The bound: forward and "
            "backward, nothing sent, nothing updated"
        )
        if about.get("held") == "one":
            told += "; each method was made anew in every turn, as memory does not hold all of them"
        said.append((told + ".", False))
        if (cautious := caution(about)) is not None:
            said.append((cautious, True))
    return said


def caution(about: dict[str, Any]) -> str | None:
    """What makes the rounds doubtful: a busy machine, a pace that has changed. None where nothing does."""
    words = []
    busy = about.get("busy")
    if machine.is_busy(busy):
        assert busy is not None
        words.append(
            f"The machine was busy: other programs took {percent(busy['others'])} of its {busy['cores']} cores' time during "
            f"the rounds, the hypervisor {percent(busy['steal'])}; load {number(busy['load'])}."
        )
    drift = about.get("drift") or 0.0
    if abs(drift) > machine.DRIFT:
        words.append(
            f"The machine's pace has changed: the bound took {drift:+.0%} of the time from which the dilation was taken, "
            "also when the rounds were repeated."
        )
    elif about.get("repeated"):
        words.append("The rounds were repeated once: the machine's pace had changed.")
    return " ".join(words) or None
