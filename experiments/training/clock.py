"""Measures the time of training steps, and of nothing else."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


class StepClock:
    """Seconds per optimizer step and per part of it, from the step after `skip` on.

    What lies between `stop` and the next `start` (evaluation, checkpoints, logging) is in no figure. On CUDA the device
    is waited for at the end of a step, not within it.
    """

    def __init__(self, skip: int, device: torch.device) -> None:
        self.skip = skip
        self.device = device
        self.steps: list[float] = []
        self.parts: dict[str, list[float]] = {}
        self._seen = 0
        self._began = self._part_began = 0.0

    @property
    def counting(self) -> bool:
        """Whether the step that runs now is past the warm-up."""
        return self._seen >= self.skip

    def start(self) -> None:
        self._began = self._part_began = time.perf_counter()

    def part(self, name: str, seconds: float | None = None) -> None:
        """Time since the last `part` or `start`, or the given seconds, goes to part `name` of this step."""
        now = time.perf_counter()
        if self.counting:
            self.parts.setdefault(name, []).append(now - self._part_began if seconds is None else seconds)
        if seconds is None:
            self._part_began = now

    def stop(self) -> float:
        """Ends the step and returns its seconds."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        took = time.perf_counter() - self._began
        if self.counting:
            self.steps.append(took)
        self._seen += 1
        return took

    def summary(self, samples_per_step: int, uneven: bool = False) -> dict[str, Any]:
        """The record's `timing`. The slowest rank counts in every step. Called on every rank, same result on all.

        samples_per_step: over all ranks. uneven: steps differ by design (some send nothing, or less), so that the mean and
        not the median says what training costs.
        """
        per_rank: list[Any] = [self.steps]
        if dist.is_initialized():
            per_rank = [None] * dist.get_world_size()
            dist.all_gather_object(per_rank, self.steps)
        if not self.steps:
            return {"steps": 0}
        milliseconds = 1000 * np.array(per_rank).max(axis=0)
        median, mean = float(np.median(milliseconds)), float(np.mean(milliseconds))
        return {
            "steps": len(milliseconds),
            "median_ms": round(median, 3),
            "mean_ms": round(mean, 3),
            "typical": "mean" if uneven else "median",
            "p10_ms": round(float(np.percentile(milliseconds, 10)), 3),
            "p90_ms": round(float(np.percentile(milliseconds, 90)), 3),
            "samples_per_s": round(1000 * samples_per_step / (mean if uneven else median), 3),
            "split": {f"{k}_ms": round(1000 * float(np.median(v)), 3) for k, v in self.parts.items()},
        }
