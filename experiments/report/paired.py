"""Differences between methods that saw the same seeds and batches, with intervals, and what they decide.

Where several methods are held against one baseline, "better" is said only of a difference that Holm's correction over all of
them leaves (`holm`); what was lost needs none to be said.

For each seed s the difference d_s is that of two runs which began with the same weights and read the same batches: what
they share drops out. The interval is Student's, of the mean of d_s with n - 1 degrees of freedom. What difference counts as
none, the margin, is part of the configuration (`parity`), so that it is stated before the runs and kept in their records.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ConfigDict

from experiments.config import schema
from experiments.report.formats import between

LEVEL = 0.95
"""Of the intervals."""
PARITY, BETTER, WORSE, OPEN = "parity", "better", "worse", "not decided"


class Parity(schema.Parity):
    """What a comparison was stated to be, before it was made. baseline: in any case of letters."""

    model_config = ConfigDict(frozen=True)

    baseline: str
    margin: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Parity | None:
        """As a configuration says; None where it says nothing."""
        said = config.get("parity") or {}
        return cls(**said) if said.get("baseline") and said.get("margin") else None

    def text(self) -> str:
        """The margin as tables show it."""
        return f"{100 * self.margin:g} %" if self.relative else f"{self.margin:g}"


@dataclass(frozen=True)
class Difference:
    """Mean of method - baseline over `n` seeds, and its 95 % interval; low and high are None for a single seed."""

    value: float
    low: float | None
    high: float | None
    n: int

    @property
    def p(self) -> float:
        """Of Student's t, both sides, that the mean is 0; 1 without an interval."""
        if self.low is None or self.high is None:
            return 1.0
        from scipy.special import stdtr, stdtrit  # what scipy.stats.t calls, which takes a second to load

        reach = (self.high - self.low) / 2
        if reach == 0:
            return float(self.value == 0)
        return 2 * float(stdtr(self.n - 1, -abs(self.value) / reach * float(stdtrit(self.n - 1, (1 + LEVEL) / 2))))

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
        return f"{scale * self.value:+.{digits}f}{between(self.low, self.high, digits, scale)}{unit}"


def difference(method: Mapping[int, float], baseline: Mapping[int, float], relative: bool = False) -> Difference | None:
    """Of the seeds that both have: values by seed. None without any, and where a baseline of 0 has no shares."""
    shared = sorted(set(method) & set(baseline))
    if not shared or (relative and any(baseline[s] == 0 for s in shared)):
        return None
    d = [method[s] / baseline[s] - 1 if relative else method[s] - baseline[s] for s in shared]
    mean = statistics.fmean(d)
    if len(d) < 2:
        return Difference(mean, None, None, len(d))
    from scipy.special import stdtrit  # what scipy.stats.t.ppf calls, which takes a second to load

    reach = float(stdtrit(len(d) - 1, (1 + LEVEL) / 2)) * statistics.stdev(d) / math.sqrt(len(d))
    return Difference(mean, mean - reach, mean + reach, len(d))


def holm(found: Sequence[Difference]) -> list[float]:
    """p of each of several differences to one baseline, by Holm's method: in rising order p_k (m - k + 1), never falling."""
    order, least = sorted(range(len(found)), key=lambda i: found[i].p), 0.0
    corrected = [1.0] * len(found)
    for rank, i in enumerate(order):
        least = corrected[i] = min(1.0, max(least, found[i].p * (len(found) - rank)))
    return corrected
