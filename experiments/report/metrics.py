"""Speedups and differences: how large, how sure that is, and what it decides: the one definition. Imports no torch.

A speedup is t_baseline / t_method: medians of the step time, or means where a method's steps differ in what they send
(local steps: the median step would be one without communication).

Interleaved methods have an interval. In every round each method has run a few steps, so that whatever slows the machine down
for a while slows all of them: times of one round belong together. With s the standard error of the logarithm of a ratio r of
n rounds,

    (1) interval = r exp(+-t s sqrt(n / (n - 1))),    t: Student's, n - 1 degrees of freedom

s comes from a bootstrap over rounds that keeps them together (paired), with a fixed seed: the same rounds give the same
interval. Percentiles of that bootstrap hold the true ratio in 88 % of experiments of 4 rounds; (1) does in 95 % or more,
with 4 rounds as with 12 (tests/unit/experiments/report/test_metrics.py).

Runs that were made one after the other have no interval. Then the spreads of their steps, 10th to 90th percentile, decide:
where they overlap, or are not known, nothing is decided. Those of fewer than `LEAST_ROUNDS` rounds or steps tell nothing:
of two methods of the same speed they lie apart in 42 % of comparisons of two rounds.

A difference is that of a method's metric to a baseline's. For each seed s the difference d_s is that of two runs which began
with the same weights and read the same batches: what they share drops out. The interval is Student's, of the mean of d_s with
n - 1 degrees of freedom. What difference counts as none, the margin, is part of the configuration (`parity`), so that it is
stated before the runs and kept in their records. Where several methods are held against one baseline, "better" is said only
of a difference that Holm's correction over all of them leaves (`holm`); what was lost needs none to be said.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic import ConfigDict

from experiments.config import schema
from experiments.records.record import ResultRecord

LEVEL = 0.95
RESAMPLES = 4000
LEAST_ROUNDS = 4
"""With fewer rounds there is no interval; with fewer rounds or steps no spread."""
FASTER, SLOWER, OPEN = "faster", "slower", "not decided"
PARITY, BETTER, WORSE = "parity", "better", "worse"


@dataclass(frozen=True)
class Estimate:
    """A value, and the ends of the interval that holds the true one with a probability of `LEVEL`; None: there is none."""

    value: float
    low: float | None = None
    high: float | None = None

    def between(self, digits: int = 2, scale: float = 1.0) -> str:
        """The interval as it stands behind the value: " [0.95, 1.05]"; empty where there is none."""
        if self.low is None or self.high is None:
            return ""
        return f" [{scale * self.low:.{digits}f}, {scale * self.high:.{digits}f}]"


def students_t(n: int) -> float:
    """Student's t that a mean of `n` values stays within with a probability of `LEVEL`."""
    from scipy.special import stdtrit  # what scipy.stats.t.ppf calls, which takes a second to load

    return float(stdtrit(n - 1, (1 + LEVEL) / 2))


# ---- speedups ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimedRounds:
    """One method's rounds.

    ms:    milliseconds a step of each round, of the slowest rank.
    steps: how many steps each round had.
    mean:  steps differ in kind, and a round may hold a part of their cycle: all rounds together are what counts.
    """

    ms: tuple[float, ...]
    steps: tuple[int, ...]
    mean: bool = False


@dataclass(frozen=True)
class Speedup(Estimate):
    """How many times as fast a run is as another one; no interval where the two did not take turns.

    apart:  whether the spreads of their steps do not overlap.
    itself: whether it is one run, whose interval and tie say nothing.
    """

    apart: bool = False
    itself: bool = False

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


def payload(r: ResultRecord) -> float | None:
    """Bytes that a node sends per step over the link that counts: between nodes when there are several."""
    return r.bytes_per_step.get("payload_inter" if r.nodes > 1 else "payload_intra")


def rounds(r: ResultRecord) -> TimedRounds | None:
    """The rounds in a record; None where it has none, as in the record of a single run."""
    if r.status != "completed" or not r.turns.get("ms"):
        return None
    return TimedRounds(tuple(r.turns["ms"]), tuple(r.turns["steps"]), uneven(r))


def interval(base: ResultRecord, own: ResultRecord) -> Speedup | None:
    """Of the speedup of `own` over `base`; None unless both took turns in the same world."""
    theirs, mine = rounds(base), rounds(own)
    if theirs is None or mine is None or base.turns["world"] != own.turns["world"]:
        return None
    return ratio(theirs, mine)


def speedup(base: ResultRecord, own: ResultRecord) -> Speedup | None:
    """How many times as fast `own` is as `base`; None where one of them has no step time, or their machines
    differ."""
    theirs, mine = step_ms(base), step_ms(own)
    if not theirs or not mine or base.hardware != own.hardware:
        return None
    value = theirs / mine
    found = interval(base, own) or Speedup(value)
    return replace(found, value=value, apart=_apart(base, own), itself=base.id == own.id)


def _apart(base: ResultRecord, own: ResultRecord) -> bool:
    """Whether the spreads of the steps do not overlap; False where one is unknown, or is of different kinds of step."""
    theirs, mine = _spread(base), _spread(own)
    if uneven(base) or uneven(own) or theirs is None or mine is None:
        return False
    return theirs[1] < mine[0] or mine[1] < theirs[0]


def _spread(r: ResultRecord) -> tuple[float, float] | None:
    """10th and 90th percentile; None where they are not known, or of fewer than `LEAST_ROUNDS` rounds or steps."""
    low, high = r.timing.get("p10_ms", r.timing.get("min_ms")), r.timing.get("p90_ms", r.timing.get("max_ms"))
    values = len(r.turns.get("ms") or ()) or r.timing.get("steps", LEAST_ROUNDS)
    return None if low is None or high is None or values < LEAST_ROUNDS else (float(low), float(high))


@functools.lru_cache(maxsize=4096)
def ratio(base: TimedRounds, other: TimedRounds, *, seed: int = 0) -> Speedup | None:
    """Step time of `base` over that of `other`, paired by rounds. None for too few rounds, or not as many of both."""
    if len(base.ms) != len(other.ms) or len(base.ms) < LEAST_ROUNDS:
        return None
    data = [np.array(part, dtype=float) for part in (base.ms, base.steps, other.ms, other.steps)]

    def statistic(base_ms: np.ndarray, base_steps: np.ndarray, ms: np.ndarray, steps: np.ndarray) -> np.ndarray:
        return _typical(base_ms, base_steps, base.mean) / _typical(ms, steps, other.mean)

    value, n = float(statistic(*data)), len(base.ms)
    if base.ms == other.ms and base.steps == other.steps:
        return Speedup(value, value, value)
    drawn = np.random.default_rng(seed).integers(0, n, (RESAMPLES, n))
    logs = [math.log(one) for one in statistic(*(part[drawn] for part in data))]  # numpy's differs with the CPU
    error = float(np.std(logs)) * math.sqrt(n / (n - 1))
    reach = math.exp(students_t(n) * error)  # (1)
    return Speedup(value, value / reach, value * reach)


def _typical(ms: np.ndarray, steps: np.ndarray, mean: bool) -> np.ndarray:
    """Milliseconds a step: the median round's, or of all steps together."""
    if mean:
        return (ms * steps).sum(axis=-1) / steps.sum(axis=-1)
    return np.asarray(np.median(ms, axis=-1))


# ---- differences of a metric -------------------------------------------------------------------------------------------


class StatedParity(schema.Parity):
    """What a comparison was stated to be, before it was made. baseline: in any case of letters."""

    model_config = ConfigDict(frozen=True)

    baseline: str
    margin: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> StatedParity | None:
        """As a configuration says; None where it says nothing."""
        said = config.get("parity") or {}
        return cls(**said) if said.get("baseline") and said.get("margin") else None

    def text(self) -> str:
        """The margin as tables show it."""
        return f"{100 * self.margin:g} %" if self.relative else f"{self.margin:g}"


@dataclass(frozen=True)
class Difference(Estimate):
    """Mean of method - baseline over `n` seeds; no interval for a single one, or for two that differ by the same."""

    n: int = 1

    @property
    def p(self) -> float:
        """Of Student's t, both sides, that the mean is 0; 1 without an interval."""
        if self.low is None or self.high is None:
            return 1.0
        from scipy.special import stdtr

        reach = (self.high - self.low) / 2
        if reach == 0:
            return float(self.value == 0)
        return 2 * float(stdtr(self.n - 1, -abs(self.value) / reach * students_t(self.n)))

    def times(self, scale: float) -> Difference:
        """In another unit: 100 makes per cent of shares."""
        low, high = (None if end is None else scale * end for end in (self.low, self.high))
        return replace(self, value=scale * self.value, low=low, high=high)

    def verdict(self, margin: float, higher_is_better: bool) -> str:
        """What the interval decides.

        parity:      it lies within the margin on either side of 0.
        better, worse: it does not, and lies on one side of 0.
        not decided: neither, or there is no interval.
        """
        if self.low is None or self.high is None:
            return OPEN
        if -margin <= self.low and self.high <= margin:
            return PARITY
        if self.low > 0:
            return BETTER if higher_is_better else WORSE
        if self.high < 0:
            return WORSE if higher_is_better else BETTER
        return OPEN

    def text(self, relative: bool, digits: int = 2) -> str:
        """ "+0.31 [-0.12, 0.74]", in per cent where differences are relative."""
        scale, unit = (100, " %") if relative else (1, "")
        return f"{scale * self.value:+.{digits}f}{self.between(digits, scale)}{unit}"


def difference(method: Mapping[int, float], baseline: Mapping[int, float], relative: bool = False) -> Difference | None:
    """Of the seeds that both have: values by seed. None without any, and where a baseline of 0 or less has no shares. No
    interval where two differ by the same: that proves little."""
    shared = sorted(set(method) & set(baseline))
    if not shared or (relative and any(baseline[s] <= 0 for s in shared)):
        return None
    d = [method[s] / baseline[s] - 1 if relative else method[s] - baseline[s] for s in shared]
    mean = statistics.fmean(d)
    if len(d) < 2:
        return Difference(mean)
    reach = students_t(len(d)) * statistics.stdev(d) / math.sqrt(len(d))
    if len(d) == 2 and mean and reach <= 1e-9 * abs(mean):  # as shares of a few hundred samples often give
        return Difference(mean, n=2)
    return Difference(mean, mean - reach, mean + reach, len(d))


def holm(found: Sequence[Difference]) -> list[float]:
    """p of each of several differences to one baseline, by Holm's method: in rising order p_k (m - k + 1), never falling."""
    order, least = sorted(range(len(found)), key=lambda i: found[i].p), 0.0
    corrected = [1.0] * len(found)
    for rank, i in enumerate(order):
        least = corrected[i] = min(1.0, max(least, found[i].p * (len(found) - rank)))
    return corrected
