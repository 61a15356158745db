"""What tables say of methods that took turns: ratios with intervals, ties, and whether the machine was busy. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from experiments.records.record import ResultRecord
from experiments.report.formats import number, percent, times
from experiments.timing import intervals
from experiments.timing.intervals import Ratio, Rounds
from experiments.training import machine

TIE = " ="


def rounds(r: ResultRecord, dilation: float = 1.0) -> Rounds | None:
    """The rounds in a record; None where it has none, as in every record of a run of its own.

    dilation: what their times are divided by, where records of one world have each its own clock.
    """
    found = intervals.of_record(r.turns, r.timing.get("typical")) if r.status == "completed" else None
    return found if found is None else replace(found, ms=tuple(ms / dilation for ms in found.ms))


def ratio(base: ResultRecord, other: ResultRecord) -> Ratio | None:
    """How many times as fast `other` is, with its interval; None unless both took turns in the same world."""
    theirs, mine = rounds(base), rounds(other)
    if theirs is None or mine is None or base.turns["world"] != other.turns["world"]:
        return None
    return intervals.ratio(theirs, mine)


def faster(value: float | None, found: Ratio | None, same: bool = False) -> str:
    """A speedup: 3.75x, and its interval where there is one: 3.75x [3.61, 3.82]; a tie is marked. same: with itself."""
    if found is None or same:
        return times(value)
    return f"{times(value)} [{found.low:.2f}, {found.high:.2f}]{TIE if found.tie else ''}"


def share(value: float | None, found: Ratio | None, same: bool = False) -> str:
    """A share of the bound's rate: 97 %, or 97 % [95, 99]."""
    if found is None or same or value is None:
        return percent(value)
    return f"{percent(value)} [{100 * found.low:.0f}, {100 * found.high:.0f}]"


def notes(records: Sequence[ResultRecord]) -> list[tuple[str, bool]]:
    """Sentences about how the rounds came about, and whether each is a caution. None for records without rounds."""
    worlds: dict[str, dict[str, Any]] = {r.turns["world"]: r.turns for r in records if r.turns}
    said: list[tuple[str, bool]] = []
    for about in worlds.values():
        told = (
            f"Methods took turns in one world, {len(about['ms'])} rounds in shuffled order; [low, high] is the ratio's 95 % "
            f"interval, a bootstrap over rounds, paired;{TIE} marks a tie, an interval that holds 1. The bound: forward and "
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
