"""Habits of Lightning's users."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch
from torch import nn

from birder.hooks.attachment import unwrap_optimizer
from tests.distributed.habits.base import CLIPS, FIRST, FirstStays, FirstUnused, HalvedSumOfTwo, Plain, habit, others
from tests.distributed.habits.rates import SchedulerAfterByHand
from tests.distributed.habits.script import Script, Stop, drawn
from tests.distributed.habits.surgery import HalvedLate


class Fitted(Script):
    """Lightning's Trainer. What a habit changes are the module's and a callback's hooks."""

    ways = ("Lightning",)
    twin: ClassVar[Any] = Plain
    twin_way = "DDP"
    trainer_options: ClassVar[dict[str, Any]] = {}
    manual: ClassVar[bool] = False

    def build(self) -> None:
        from lightning.pytorch import Callback, LightningModule, Trainer
        from lightning.pytorch.strategies import DDPStrategy

        from birder.integrations.lightning import BirderCallback

        script = self
        os.environ.update(LOCAL_RANK=str(self.rank), WORLD_SIZE=str(self.way.ranks))

        class Module(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = script.make_model()
                self.automatic_optimization = not script.manual

            def training_step(self, batch: Any, number: int) -> Any:
                return script.training_step(self, number)

            def configure_optimizers(self) -> Any:
                return script.configure(self.net)

            def train_dataloader(self) -> Any:
                return torch.utils.data.DataLoader(list(range(2 * script.batches())), batch_size=1)

        class Recorder(Callback):
            def setup(self, trainer: Any, module: Any, stage: str) -> None:
                script.opt = None

            def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
                script.opt = unwrap_optimizer(trainer.optimizers[0])
                script.batch_begins(number)

            def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
                script.between()

            def on_train_batch_end(self, *args: Any) -> None:
                script.batch_ends()

        self.module = Module()
        self.model = self.module.net
        callbacks: list[Any] = [Recorder(), *self.callbacks()]
        if not self.method.torch:
            callbacks.insert(0, BirderCallback(unit_mb=0.002, **self.way.options))
        self.trainer = Trainer(
            accelerator="cpu",
            strategy=DDPStrategy(**self.ddp_options),
            devices=self.way.ranks,
            max_epochs=1,
            callbacks=callbacks,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            use_distributed_sampler=True,
            **self.trainer_options,
        )

    def batches(self) -> int:
        return self.steps

    def callbacks(self) -> list[Any]:
        return []

    def configure(self, net: nn.Module) -> Any:
        return self.make_optimizer(self.trained())

    def batch_begins(self, number: int) -> None:
        self.begin(number + 1)

    def batch_ends(self) -> None:
        self.record()

    def training_step(self, module: Any, number: int) -> Any:
        return module.net(self.gradients(self.t, self.rank))

    def train(self) -> None:
        self.trainer.fit(self.module)


@habit
class LightningPlain(Fitted):
    """Lightning: automatic optimization"""


@habit
class LightningManual(Fitted):
    """Lightning: manual optimization"""

    manual = True
    says = r"manual"

    def training_step(self, module: Any, number: int) -> Any:
        opt = module.optimizers()
        opt.zero_grad()
        module.manual_backward(module.net(self.gradients(self.t, self.rank)))
        opt.step()


@habit
class LightningAccumulates(Fitted):
    """Lightning: accumulate_grad_batches=2"""

    trainer_options: ClassVar[dict[str, Any]] = {"accumulate_grad_batches": 2}
    twin = staticmethod(lambda m, w: HalvedSumOfTwo)
    tolerance = 1e-6

    def batches(self) -> int:
        return 2 * self.steps

    def batch_begins(self, number: int) -> None:
        self.micro = number % 2
        if self.micro == 0:
            self.begin(number // 2 + 1)

    def batch_ends(self) -> None:
        if self.micro:
            self.record()

    def training_step(self, module: Any, number: int) -> Any:
        return module.net(drawn(self.rank, self.t, self.micro))


@habit
class LightningClips(Fitted):
    """Lightning: gradient_clip_val"""

    trainer_options: ClassVar[dict[str, Any]] = {"gradient_clip_val": 1e9}
    says = CLIPS


@habit
class LightningSurgery(HalvedLate, Fitted):
    """Lightning: on_before_optimizer_step halves gradients"""


@habit
class LightningFreezes(FirstStays, Fitted):
    """Lightning: a callback freezes layers in mid-training (BackboneFinetuning the other way round)"""

    def batch_begins(self, number: int) -> None:
        super().batch_begins(number)
        if self.t == 4:
            self.model.first.requires_grad_(False)


@habit
class LightningUnfreezes(Fitted):
    """Lightning: BackboneFinetuning: frozen layers are trained from the middle on, in a new parameter group"""

    twin = None
    names = others(*FIRST)
    apart = "dense"
    says = r"requires_grad|froze|attach|group"
    since = 4

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model.first.requires_grad_(False)
        return model

    def trained(self) -> Any:
        return [p for p in self.model.parameters() if p.requires_grad]

    def batch_begins(self, number: int) -> None:
        super().batch_begins(number)
        if self.t == 4:
            self.model.first.requires_grad_(True)
            self.method.add(self.opt, self.of("first"))

    def finish(self) -> None:
        if any(torch.equal(torch.from_numpy(self.trace[-1][n]), torch.from_numpy(self.trace[3][n])) for n in FIRST):
            raise Stop("unfrozen parameters are not trained, and nothing is said")


@habit
class LightningUnused(FirstUnused, Fitted):
    """Lightning: a branch that is not used in some steps"""


@habit
class LightningSchedules(Fitted):
    """Lightning: a scheduler that is stepped with every batch"""

    twin = SchedulerAfterByHand

    def configure(self, net: nn.Module) -> Any:
        opt = self.make_optimizer(self.trained())
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 1.0 / (1 + n))
        return {"optimizer": opt, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@habit
class LightningChannelsLast(Fitted):
    """Lightning: a channels_last model"""

    norm_tolerance = 1e-5

    def make_model(self) -> nn.Module:
        return super().make_model().to(memory_format=torch.channels_last)
