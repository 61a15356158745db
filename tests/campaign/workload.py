"""The digits, with steps that take long enough to be hit, and once, where CAMPAIGN_NAN says so, a NaN on one rank."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor

from experiments.workloads.digits import Digits

STEP_S = 0.03


class SlowDigits(Digits):
    """CAMPAIGN_NAN="RANK STEP FILE": the loss of that rank's STEP-th batch is NaN, if FILE is not there; then it is made."""

    batches = 0

    def loss(self, model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(STEP_S)
        self.batches += 1
        loss = super().loss(model, batch)
        rank, step, file = (os.environ.get("CAMPAIGN_NAN") or "-1 0 /").split(" ", 2)
        if int(rank) == int(os.environ["RANK"]) and int(step) == self.batches and not Path(file).exists():
            Path(file).touch()
            return loss * float("nan")
        return loss
