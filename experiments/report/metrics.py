"""Speedups: how many times as fast, how sure that is, and what it decides: the one definition. Imports no torch.

A speedup is t_baseline / t_method: medians of the step time, or means where a method's steps differ in what they send.

Interleaved methods have an interval. In every round each method has run a few steps, so that whatever slows the machine down
for a while slows all of them: times of one round belong together. With s the standard error of the logarithm of a ratio r of
n rounds,

    (1) interval = r exp(+-t s sqrt(n / (n - 1))),    t: Student's, n - 1 degrees of freedom

s comes from a bootstrap over rounds that keeps them together (paired), with a fixed seed: the same rounds give the same
interval. Percentiles of that bootstrap hold the true ratio in 88 % of experiments of 4 rounds; (1) does in 95 % or more,
with 4 rounds as with 12 (tests/unit/experiments/report/test_metrics.py).

Runs that were made one after the other have no interval. Then the spreads of their steps, 10th to 90th percentile, decide:
where they overlap, or are not known, nothing is decided.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import numpy as np

from experiments.records.record import ResultRecord

LEVEL = 0.95
RESAMPLES = 4000
LEAST_ROUNDS = 4
"""With fewer rounds there is no interval."""
FASTER, SLOWER, OPEN = "faster", "slower", "not decided"


@dataclass(frozen=True)
class Rounds:
    """One method's rounds.

    ms:    milliseconds a step of each round, of the slowest rank.
    steps: how many steps each round had.
    mean:  steps differ in kind, and a round may hold a part of their cycle: all rounds together are what counts.
    """

    ms: tuple[float, ...]
    steps: tuple[int, ...]
    mean: bool = False

    @property
    def typical(self) -> float:
        """Milliseconds a step: the median round's, or of all steps together."""
        return float(_typical(np.array(self.ms), np.array(self.steps, dtype=float), self.mean))


@dataclass(frozen=True)
class Speedup:
    """How many times as fast a run is as another one.

    low, high: of the interval that holds the true value with a probability of at least `LEVEL`; None where the two did not
    take turns. apart: whether the spreads of their steps do not overlap.
    """

    value: float
    low: float | None = None
    high: float | None = None
    apart: bool = False

    @property
    def tie(self) -> bool:
        """Whether there is an interval and it holds 1: neither is the faster one."""
        return self.low is not None and self.high is not None and self.low <= 1 <= self.high

    @property
    def verdict(self) -> str:
        """`FASTER`, `SLOWER`, or `OPEN`: the interval holds 1, or without one spreads overlap or are not known."""
        decided = self.apart if self.low is None else not self.tie
        return OPEN if not decided else FASTER if self.value > 1 else SLOWER


def uneven(r: ResultRecord) -> bool:
    """Whether a method's steps differ in what they send, so that the mean step time is the one that counts."""
    return bool(r.timing.get("typical") == "mean")


def step_ms(r: ResultRecord) -> float | None:
    """Step time in milliseconds, the median or the mean (`uneven`); None for a failed run."""
    ms = r.timing.get("mean_ms" if uneven(r) else "median_ms")
    return float(ms) if ms and r.status == "completed" else None


def rounds(r: ResultRecord, clock: float = 1.0) -> Rounds | None:
    """The rounds in a record; None where it has none, as in the record of a single run. clock: as `speedup`."""
    if r.status != "completed" or not r.turns or not r.turns.get("ms"):
        return None
    return Rounds(tuple(ms / clock for ms in r.turns["ms"]), tuple(r.turns["steps"]), uneven(r))


def interval(base: ResultRecord, own: ResultRecord, clocks: tuple[float, float] = (1.0, 1.0)) -> Speedup | None:
    """Of the speedup of `own` over `base`; None unless both took turns in the same world. clocks: as `speedup`."""
    theirs, mine = rounds(base, clocks[0]), rounds(own, clocks[1])
    if theirs is None or mine is None or base.turns["world"] != own.turns["world"]:
        return None
    return ratio(theirs, mine)


def speedup(base: ResultRecord, own: ResultRecord, clocks: tuple[float, float] = (1.0, 1.0)) -> Speedup | None:
    """How many times as fast `own` is as `base`; None where one of them has no step time.

    clocks: what the times of the two are divided by, where records of one world have each its own clock.
    """
    theirs, mine = step_ms(base), step_ms(own)
    if not theirs or not mine:
        return None
    value = theirs / clocks[0] / (mine / clocks[1])
    return replace(interval(base, own, clocks) or Speedup(value), value=value, apart=_apart(base, own, clocks))


def _apart(base: ResultRecord, own: ResultRecord, clocks: tuple[float, float]) -> bool:
    """Whether the spreads of the steps do not overlap; False where one is unknown, or is of different kinds of step."""
    if uneven(base) or uneven(own):
        return False
    (low, high), (least, most) = (_spread(r, clock) for r, clock in zip((base, own), clocks, strict=True))
    if None in (low, high, least, most):
        return False
    return bool(high < least or most < low)  # type: ignore[operator]


def _spread(r: ResultRecord, clock: float) -> tuple[float | None, float | None]:
    ends = ((r.timing.get(p, r.timing.get(end))) for p, end in (("p10_ms", "min_ms"), ("p90_ms", "max_ms")))
    low, high = (None if ms is None else float(ms) / clock for ms in ends)
    return low, high


@functools.lru_cache(maxsize=4096)
def ratio(base: Rounds, other: Rounds, *, seed: int = 0) -> Speedup | None:
    """Step time of `base` over that of `other`, paired by rounds. None for too few rounds, or not as many of both."""
    if len(base.ms) != len(other.ms) or len(base.ms) < LEAST_ROUNDS:
        return None
    from scipy.special import stdtrit

    data = [np.array(part, dtype=float) for part in (base.ms, base.steps, other.ms, other.steps)]

    def statistic(base_ms: np.ndarray, base_steps: np.ndarray, ms: np.ndarray, steps: np.ndarray) -> np.ndarray:
        return _typical(base_ms, base_steps, base.mean) / _typical(ms, steps, other.mean)

    value, n = float(statistic(*data)), len(base.ms)
    if base.ms == other.ms and base.steps == other.steps:
        return Speedup(value, value, value)
    drawn = np.random.default_rng(seed).integers(0, n, (RESAMPLES, n))
    error = float(np.log(statistic(*(part[drawn] for part in data))).std()) * math.sqrt(n / (n - 1))
    reach = math.exp(float(stdtrit(n - 1, (1 + LEVEL) / 2)) * error)  # (1)
    return Speedup(value, value / reach, value * reach)


def _typical(ms: np.ndarray, steps: np.ndarray, mean: bool) -> np.ndarray:
    if mean:
        return (ms * steps).sum(axis=-1) / steps.sum(axis=-1)
    return np.asarray(np.median(ms, axis=-1))
