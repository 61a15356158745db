"""Measures the time of training steps, and of nothing else."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from birder.predict.recording import clock_of
from experiments.training.world import gathered

ROUND = 16
"""Steps after which a device is waited for and its events are read."""


class StepClock:
    """Seconds per optimizer step and per part of it, from the step after `skip` on.

    What lies between `stop` and the next `start` (evaluation, checkpoints, logging) is in no figure.

    On CUDA the host only queues work, so that its clock says little: times are those between events on the device's
    current stream, which are read every `every` steps and by `settle`. Nothing waits for the device at the end of a step.
    """

    def __init__(self, skip: int, device: torch.device, every: int = ROUND) -> None:
        """every: steps after which a device is waited for."""
        self.skip, self.device, self._clock = skip, device, clock_of(device)
        self.every = every if device.type == "cuda" else 1
        self.steps: list[float] = []
        self.parts: dict[str, list[float]] = {}
        self.known: float | None = None
        """Seconds a step: of the last one; on CUDA of the last round that was waited for."""
        self._seen = 0
        self._marks: list[tuple[str, Any]] = []  # of the step under way: what ends there, and when
        self._waiting: list[list[tuple[str, Any]]] = []  # of steps that are not read yet

    @property
    def counting(self) -> bool:
        """Whether the step that runs now is past the warm-up."""
        return self._seen >= self.skip

    @property
    def unread(self) -> bool:
        """Whether there are steps of which only the device knows how long they took."""
        return bool(self._waiting)

    def start(self) -> None:
        self._marks = [("", self._clock.mark())]

    def part(self, name: str, seconds: float | None = None) -> None:
        """Time since the last `part` or `start`, or the given seconds, goes to part `name` of this step."""
        if seconds is None:
            self._marks.append((name, self._clock.mark()))
        if self.counting:
            self.parts.setdefault(name, []).extend([] if seconds is None else [seconds])

    def stop(self) -> float | None:
        """Ends the step. Returns `known`."""
        self._marks.append(("", self._clock.mark()))
        if self.counting:
            self._waiting.append(self._marks)
            if len(self._waiting) >= self.every:
                self.settle()
        elif self.device.type != "cuda":
            self.known = self._clock.ms(self._marks[0][1], self._marks[-1][1]) / 1000
        self._seen += 1
        return self.known

    def settle(self) -> None:
        """Reads all steps so far, after waiting for the device, once. On the CPU there is nothing to do."""
        if not self._waiting:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        new = len(self.steps)
        for marks in self._waiting:
            self.steps.append(self._clock.ms(marks[0][1], marks[-1][1]) / 1000)
            for (_, began), (name, ended) in itertools.pairwise(marks):
                if name:
                    self.parts.setdefault(name, []).append(self._clock.ms(began, ended) / 1000)
        self._waiting = []
        self.known = statistics.fmean(self.steps[new:])

    def split(self) -> dict[str, float]:
        """The record's `timing.split`: median milliseconds of each part, on this rank."""
        self.settle()
        return {f"{k}_ms": round(1000 * float(np.median(v)), 3) for k, v in self.parts.items()}

    def summary(self, samples_per_step: int, uneven: bool = False) -> dict[str, Any]:
        """The record's `timing`. The slowest rank counts in every step. Called on every rank, same result on all.

        samples_per_step: over all ranks. uneven: steps differ by design (some send nothing, or less), so that the mean and
        not the median says what training costs.
        """
        self.settle()
        per_rank = gathered(self.steps) if dist.is_initialized() else [self.steps]
        if not self.steps:
            return {"steps": 0}
        return summary(1000 * np.array(per_rank).max(axis=0), samples_per_step, uneven, self.split())


class Stopwatch:
    """Seconds between `start` and `stop`; on CUDA those of the device, which `stop` waits for, once."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._clock = device, clock_of(device)

    def start(self) -> None:
        self._began = self._clock.mark()

    def stop(self) -> float:
        ended = self._clock.mark()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self._clock.ms(self._began, ended) / 1000


def summary(
    milliseconds: np.ndarray, samples_per_step: int, uneven: bool, split: dict[str, float], steps: int | None = None
) -> dict[str, Any]:
    """The record's `timing` of so many milliseconds a step, of the slowest rank.

    steps: how many there were, where the figures are not one for each of them.
    """
    median, mean = float(np.median(milliseconds)), float(np.mean(milliseconds))
    return {
        "steps": len(milliseconds) if steps is None else steps,
        "median_ms": round(median, 3),
        "mean_ms": round(mean, 3),
        "typical": "mean" if uneven else "median",
        "p10_ms": round(float(np.percentile(milliseconds, 10)), 3),
        "p90_ms": round(float(np.percentile(milliseconds, 90)), 3),
        "samples_per_s": round(1000 * samples_per_step / (mean if uneven else median), 3),
        "split": split,
    }
