"""Rounds: the steps of a run in which anything is sent. Read off the byte counter, step by step."""

from __future__ import annotations

import statistics

from birder.comm import ByteCounter

NEAR = 0.05
"""Median and mean of the bytes that are this close to each other tell the same."""


class Rounds:
    """What each step of one rank has sent since the last `reset`. All ranks follow the same plan, so one speaks for all.

    `end_step` is called after every step, outside of evaluation and checkpoints.
    """

    def __init__(self, counter: ByteCounter) -> None:
        self.counter = counter
        self.reset()

    def reset(self) -> None:
        """Forgets the steps so far. Call it right after the counter's own reset, or before the first step."""
        self._steps: list[tuple[int, int]] = []
        self.follow(self.counter)

    def follow(self, counter: ByteCounter) -> None:
        """Goes on with another counter, or with the same one after a reset or after steps that are not to count."""
        self.counter = counter
        self._before = (counter.collectives, counter.total)

    def end_step(self) -> None:
        """Notes the collectives and bytes since the end of the step before."""
        now = (self.counter.collectives, self.counter.total)
        self._steps.append((now[0] - self._before[0], now[1] - self._before[1]))
        self._before = now

    @property
    def per_step(self) -> float | None:
        """Share of the steps that started at least one collective; None without steps."""
        if not self._steps:
            return None
        return sum(1 for collectives, _ in self._steps if collectives) / len(self._steps)

    @property
    def uneven(self) -> bool:
        """Whether, in the second half of the steps, the median step does not send what a step sends on average.

        A dense warm-up that ends before does not count: the steps after it are alike.
        """
        late = [sent for _, sent in self._steps[len(self._steps) // 2 :]]
        mean = statistics.fmean(late) if late else 0.0
        return mean > 0 and abs(statistics.median(late) - mean) > NEAR * mean
