"""Habits of the users of Hugging Face's Trainer."""

from __future__ import annotations

import tempfile
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from birder.hooks.attachment import unwrap_optimizer
from tests.distributed.habits.base import CLIPS, FirstStays, FirstUnused, HalvedSumOfTwo, Plain, habit
from tests.distributed.habits.script import Gradients, Script, drawn
from tests.distributed.habits.surgery import HalvedLate


class Trained(Script):
    """The Hugging Face Trainer."""

    ways = ("Trainer",)
    twin: ClassVar[Any] = Plain
    twin_way = "DDP"
    arguments: ClassVar[dict[str, Any]] = {}
    micro: ClassVar[int] = 1

    def build(self) -> None:
        from accelerate.state import AcceleratorState
        from torch.utils.data import SequentialSampler
        from transformers import Trainer, TrainerCallback, TrainingArguments

        from birder.integrations.transformers import BirderTrainerMixin

        AcceleratorState._reset_state(True)
        script = self

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = script.make_model()

            def forward(self, number: Tensor) -> dict[str, Tensor]:
                k = int(number[0]) // script.way.ranks
                return {"loss": self.net(script.of_batch(k // script.micro + 1, k % script.micro))}

        class Recorder(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **k: Any) -> None:
                if script.opt is None:
                    script.opt = unwrap_optimizer(k["optimizer"])
                script.begin(state.global_step + 1)
                script.step_begins()

            def on_pre_optimizer_step(self, *args: Any, **k: Any) -> None:
                script.between()

            def on_step_end(self, *args: Any, **k: Any) -> None:
                script.record()

        bases = (Trainer,) if self.method.torch else (BirderTrainerMixin, Trainer)

        class Mine(*bases):  # type: ignore[misc]
            def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
                return SequentialSampler(self.train_dataset)

            def training_step(self, *args: Any, **kwargs: Any) -> Any:
                return script.training_step(super().training_step, *args, **kwargs)

        self.folder = tempfile.TemporaryDirectory()
        self.whole = Model()
        self.model = self.whole.net
        self.opt = None
        chosen = self.make_optimizer(self.trained())
        arguments = {
            "max_grad_norm": 0.0,
            "per_device_train_batch_size": 1,
            "max_steps": self.steps,
            "lr_scheduler_type": "constant",
            "report_to": "none",
            "disable_tqdm": True,
            "save_strategy": "no",
            "logging_strategy": "no",
            "use_cpu": True,
            "gradient_accumulation_steps": self.micro,
            "ddp_find_unused_parameters": bool(self.ddp_options.get("find_unused_parameters")),
            "remove_unused_columns": False,
        } | self.arguments
        options = {} if self.method.torch else {"attach_options": {"unit_mb": 0.002, **self.way.options}}
        data = [{"number": k} for k in range(self.way.ranks * self.steps * self.micro)]
        self.trainer = Mine(
            self.whole,
            TrainingArguments(self.folder.name, **arguments),
            train_dataset=data,
            optimizers=(chosen, None),
            callbacks=[Recorder()],
            **options,
        )

    def of_batch(self, t: int, micro: int) -> Gradients:
        return drawn(self.rank, t, micro) if self.micro > 1 else self.gradients(t, self.rank)

    def step_begins(self) -> None:
        pass

    def training_step(self, usual: Any, *args: Any, **kwargs: Any) -> Any:
        return usual(*args, **kwargs)

    def train(self) -> None:
        try:
            self.trainer.train()
        finally:
            self.folder.cleanup()


@habit
class TrainerPlain(Trained):
    """the Trainer"""


@habit
class TrainerAccumulates(Trained):
    """the Trainer: gradient_accumulation_steps=2"""

    micro = 2
    twin = HalvedSumOfTwo
    tolerance = 1e-6


@habit
class TrainerClips(Trained):
    """the Trainer: max_grad_norm"""

    arguments: ClassVar[dict[str, Any]] = {"max_grad_norm": 1e9}
    says = CLIPS


@habit
class TrainerSurgery(HalvedLate, Trained):
    """the Trainer: a callback changes gradients before the step (on_pre_optimizer_step)"""


@habit
class TrainerFreezes(FirstStays, Trained):
    """the Trainer: a callback freezes layers in mid-training"""

    def step_begins(self) -> None:
        if self.t == 4:
            self.model.first.requires_grad_(False)


@habit
class TrainerUnused(FirstUnused, Trained):
    """the Trainer: a branch that is not used in some steps"""


@habit
class TrainerChannelsLast(Trained):
    """the Trainer: a channels_last model"""

    norm_tolerance = 1e-5

    def make_model(self) -> nn.Module:
        return super().make_model().to(memory_format=torch.channels_last)


@habit
class TrainerOwnStep(Trained):
    """the Trainer: a training_step of one's own that goes backward twice (two losses)"""

    says = r"twice|no_sync"
    twin = Plain

    def training_step(self, usual: Any, model: nn.Module, inputs: Any, *args: Any) -> Any:
        usual(model, inputs, *args)
        for p in self.model.parameters():
            p.grad = None
        return usual(model, inputs, *args)
