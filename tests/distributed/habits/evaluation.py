"""Evaluation in mid-training."""

from __future__ import annotations

import torch

from tests.distributed.habits.base import (
    EVERYWHERE,
    Plain,
    habit,
)
from tests.distributed.habits.script import Script, drawn


@habit
class Evaluation(Script):
    """forward passes in eval mode and without gradients: between steps, between backward and step, before the first step"""

    ways = EVERYWHERE
    twin = Plain

    def evaluate(self) -> None:
        self.ddp.eval()
        with torch.no_grad():
            self.ddp(drawn(self.rank, 60))
        self.ddp.train()

    def prepared(self) -> None:
        self.evaluate()

    def between(self) -> None:
        self.evaluate()

    def after(self) -> None:
        self.evaluate()


@habit
class EvaluationInTrainMode(Script):
    """forward passes in train mode, whose backward never comes"""

    twin = Plain

    def after(self) -> None:
        if self.t % 2:
            with torch.no_grad():
                self.ddp(drawn(self.rank, 60))


@habit
class EvaluationByInferenceMode(Script):
    """the same under torch.inference_mode"""

    twin = Plain

    def after(self) -> None:
        with torch.inference_mode():
            self.inner()(drawn(self.rank, 60))


@habit
class EvaluationOfTheMean(Script):
    """with optimizer.averaged() after every step"""

    accelerate = False

    twin = Plain

    def applies(self) -> bool:
        return not self.method.torch

    def after(self) -> None:
        with self.opt.averaged(), torch.no_grad():
            self.ddp(drawn(self.rank, 60))


@habit
class EvaluationOfTheMeanBetween(Script):
    """with optimizer.averaged() between backward and step"""

    accelerate = False

    twin = Plain
    since = 1
    says = r"averaged|backward"

    def applies(self) -> bool:
        return not self.method.torch

    def between(self) -> None:
        with self.opt.averaged():
            pass
