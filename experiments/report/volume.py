"""What 0/1 Adam sends over a whole run, from its schedule alone. No torch.

Volumes are bits per parameter in one direction; scales and padding are left out. studies/volume.py makes the page.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LENGTHS = (118_000, 152_511)
"""Steps of the published runs of BERT-Base and BERT-Large."""
SEARCH = range(20_000, 400_001, 100)
"""Run lengths among which those are looked for that give a published number."""


@dataclass(frozen=True)
class RoundCounts:
    """How often a run of `steps` steps communicates.

    dense:   rounds in floats.
    onebit:  rounds in one bit.
    skipped: steps without any round. A step may have both rounds, so that the three may add up to more than `steps`.
    """

    steps: int
    dense: int
    onebit: int
    skipped: int


Measure = Callable[[RoundCounts], float]


@dataclass(frozen=True)
class VolumeSchedules:
    """The two schedules. onebit_warmups: 1-bit Adam's dense steps, with the model that they are published for."""

    kappa: int = 16
    warmup_steps: int = 12_500
    local_doubling: int = 32_678
    local_limit: int = 16
    onebit_warmups: tuple[tuple[str, int], ...] = (("BERT-Large", 23_000), ("BERT-Base", 16_000))

    def rounds(self, steps: int, aligned: bool) -> RoundCounts:
        """Counts the rounds of steps 1 to `steps`. Imports torch, as all of birder.optim.

        aligned: a variance round takes the place of that step's sync.
        """
        from birder.optim.zero_one_schedule import sync_phases, variance_steps

        dense = sum(step <= steps for step in variance_steps(self.warmup_steps, self.kappa, aligned))
        synced = min(steps, self.warmup_steps)
        phases = sync_phases(self.warmup_steps, self.local_doubling, self.local_limit, aligned)
        ends = [start for start, _ in phases[1:]] + [max(steps, phases[-1][0])]
        for (start, interval), end in zip(phases, ends, strict=True):
            origin = 0 if aligned else start
            if steps > start:
                synced += (min(end, steps) - origin) // interval - (start - origin) // interval
        return RoundCounts(steps, dense, synced - dense if aligned else synced, steps - synced)


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
