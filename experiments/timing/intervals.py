"""Ratios of step times with intervals, from methods that took turns. Imports no torch.

In every round each method has run a few steps, so that whatever slows the machine down for a while slows all of them: times
of one round belong together. A ratio's interval is a bootstrap over rounds that keeps them together (paired), percentile
method, with a fixed seed: the same rounds give the same interval.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LEVEL = 0.95
RESAMPLES = 4000
LEAST_ROUNDS = 4
"""With fewer rounds there is no interval."""


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
class Ratio:
    """How many times as fast: the value and its interval."""

    value: float
    low: float
    high: float

    @property
    def tie(self) -> bool:
        """Whether the interval holds 1: neither is the faster one."""
        return self.low <= 1 <= self.high


def of_record(turns: dict[str, Any] | None, typical: str | None) -> Rounds | None:
    """The rounds that a record's `turns` holds; None where it has none. typical: of its `timing`."""
    if not turns or not turns.get("ms"):
        return None
    return Rounds(tuple(turns["ms"]), tuple(turns["steps"]), typical == "mean")


@functools.lru_cache(maxsize=4096)
def ratio(base: Rounds, other: Rounds, *, seed: int = 0) -> Ratio | None:
    """Step time of `base` over that of `other`, paired by rounds. None for too few rounds, or not as many of both."""
    if len(base.ms) != len(other.ms) or len(base.ms) < LEAST_ROUNDS:
        return None
    from scipy import stats

    data = [np.array(part, dtype=float) for part in (base.ms, base.steps, other.ms, other.steps)]

    def statistic(*parts: np.ndarray, axis: int = -1) -> np.ndarray:
        base_ms, base_steps, ms, steps = parts
        return _typical(base_ms, base_steps, base.mean, axis) / _typical(ms, steps, other.mean, axis)

    value = float(statistic(*data))
    if base.ms == other.ms and base.steps == other.steps:
        return Ratio(value, value, value)
    found = stats.bootstrap(
        data,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Ratio(value, float(found.low), float(found.high))


def tied(rounds: Sequence[Rounds], *, seed: int = 0) -> list[bool]:
    """For each whether it cannot be told from the fastest of them; True for the fastest itself only if another one is."""
    if not rounds:
        return []
    best = min(rounds, key=lambda r: r.typical)
    same = []
    for r in rounds:
        found = None if r is best else ratio(r, best, seed=seed)
        same.append(found is not None and found.tie)
    return [is_tied or (r is best and any(same)) for r, is_tied in zip(rounds, same, strict=True)]


def _typical(ms: np.ndarray, steps: np.ndarray, mean: bool, axis: int = -1) -> np.ndarray:
    if mean:
        return (ms * steps).sum(axis=axis) / steps.sum(axis=axis)
    return np.asarray(np.median(ms, axis=axis))
