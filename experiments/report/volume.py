"""What 0/1 Adam sends over a whole run, from its schedule alone. No torch.

Volumes are bits per parameter in one direction; scales and padding are left out. studies/volume.py makes the page.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from birder.optim.zero_one_schedule import RoundCounts

    Measure = Callable[[RoundCounts], float]

LENGTHS = (118_000, 152_511)
"""Steps of the published runs of BERT-Base and BERT-Large."""
SEARCH = range(20_000, 400_001, 100)
"""Run lengths among which those are looked for that give a published number."""


@dataclass(frozen=True)
class VolumeSchedules:
    """The two schedules. onebit_warmups: 1-bit Adam's dense steps, with the model that they are published for."""

    kappa: int = 16
    warmup_steps: int = 12_500
    local_doubling: int = 32_678
    local_limit: int = 16
    onebit_warmups: tuple[tuple[str, int], ...] = (("BERT-Large", 23_000), ("BERT-Base", 16_000))

    def rounds(self, steps: int, aligned: bool) -> RoundCounts:
        """How often a run of so many steps communicates. Imports torch, as all of birder.optim."""
        from birder.optim import zero_one_schedule as schedule

        return schedule.rounds(
            steps, self.warmup_steps, self.kappa, self.local_doubling, self.local_limit, aligned=aligned
        )


def bits(rounds: RoundCounts, wire: int) -> float:
    """Bits per parameter over the run, one way; `wire`: bits of a float in variance rounds."""
    return wire * rounds.dense + rounds.onebit


def onebit_adam_bits(steps: int, warmup: int, wire: int) -> float:
    """The same of 1-bit Adam."""
    dense = min(steps, warmup)
    return wire * dense + (steps - dense)


def against_adam(rounds: RoundCounts, wire: int) -> float:
    """How many times less than an all-reduce of floats in every step."""
    return wire * rounds.steps / bits(rounds, wire)


def against_onebit_adam(rounds: RoundCounts, warmup: int, wire: int) -> float:
    """The share of 1-bit Adam's volume that is saved."""
    return 1 - bits(rounds, wire) / onebit_adam_bits(rounds.steps, warmup, wire)


def rounds_saved(rounds: RoundCounts) -> float:
    """The share of steps without any round."""
    return rounds.skipped / rounds.steps


def readings(setting: VolumeSchedules, kind: str) -> list[tuple[str, Measure]]:
    """The ways in which a published number can be read."""
    if kind == "rounds":
        return [("steps without any round", rounds_saved)]
    if kind == "adam":
        return [("against fp16 Adam", functools.partial(against_adam, wire=16))]
    return [
        (
            f"against 1-bit Adam with {warmup:,} fp{wire} steps ({name})",
            functools.partial(against_onebit_adam, warmup=warmup, wire=wire),
        )
        for name, warmup in setting.onebit_warmups
        for wire in (16, 32)
    ]


def measured(setting: VolumeSchedules, kind: str, lengths: Sequence[int] = LENGTHS) -> list[tuple[float, str]]:
    """(value, reading and length of the run) by the rule as published, least first."""
    return sorted(
        (measure(setting.rounds(steps, False)), f"{words}, {steps:,} steps")
        for words, measure in readings(setting, kind)
        for steps in lengths
    )


def passed_at(setting: VolumeSchedules, measure: Measure, value: float) -> str:
    """Run lengths at which the measure passes `value`, to 100 steps, by the rule as published."""
    above = [measure(setting.rounds(steps, False)) >= value for steps in SEARCH]
    crossings = [steps for steps, now, before in zip(SEARCH[1:], above[1:], above, strict=False) if now != before]
    return ", ".join(f"{c:,}" for c in crossings) or ("always more" if above[0] else "always less")
