"""Lightning: `BirderCallback` among the Trainer's callbacks, with strategy "ddp".

    trainer = Trainer(strategy="ddp", callbacks=[BirderCallback()])
    trainer.fit(module, batches)

`configure_optimizers` of the module returns one optimizer of this package, alone or with schedulers. Checkpoints hold every
rank's state, in the one file that Lightning writes: rank 0 has all of it in memory while it saves.
Runnable: examples/lightning_callback.py.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

import birder
from birder.comm import Topology
from birder.hooks.attachment import unwrap_optimizer
from birder.integrations import every_rank
from birder.optim.base import BucketOptimizer

KEY = "every_rank"


class BirderCallback(Callback):
    """Attaches when the module has been wrapped; saves, loads and averages what differs between ranks.

    any_world: takes checkpoints of another number of ranks, too (birder/checkpoint/elastic.py). options: of `birder.attach`.

    Raises TypeError for other optimizers or several, and for strategies other than DDP; ValueError for the Trainer's
    `gradient_clip_val` where it would have no effect, and for a checkpoint of another number of ranks without `any_world`.
    """

    def __init__(self, any_world: bool = False, **options: Any) -> None:
        self.any_world, self.options = any_world, options
        self.attachment: birder.Attachment | None = None
        self._late: list[Callable[[], None]] = []
        """Checkpoints that were asked for in the middle of a step, by a signal."""
        self._failed = False
        self._average = contextlib.ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Before each stage Lightning gives all ranks rank 0's model: make that the mean of all."""
        if trainer.world_size > 1:
            every_rank.make_equal(pl_module.parameters())
        if stage == "fit":
            self._late, self._failed = [], False  # of an earlier fit that failed
            self._attach_after_setup(trainer.strategy)

    def _attach_after_setup(self, strategy: Any) -> None:
        """As soon as the module is wrapped: Lightning's finder of learning rates trains before other callbacks begin."""
        vars(strategy).pop("setup", None)  # of an earlier fit that failed before the strategy was set up
        setup = strategy.setup

        def setup_and_attach(trainer: Trainer) -> None:
            vars(strategy).pop("setup", None)  # what the class has, again
            setup(trainer)
            self._attach(trainer)

        strategy.setup = setup_and_attach

    def _attach(self, trainer: Trainer) -> None:
        method = self._method(trainer)
        if method is None:
            found = ", ".join(type(unwrap_optimizer(o)).__name__ for o in trainer.optimizers) or "none"
            raise TypeError(
                f"BirderCallback needs one optimizer of the birder package from configure_optimizers, and found {found}: use "
                "one for all parameters, or a plain loop, where each optimizer is attached"
            )
        if trainer.world_size > 1 or self.any_world:
            method.register_load_state_dict_pre_hook(self._own_state)
        if trainer.world_size == 1:
            if self.any_world and not method.units:  # in the units of several ranks
                method.bind(**{k: v for k, v in self.options.items() if k == "unit_mb"})
            return
        topology = Topology(trainer.num_nodes, trainer.world_size // trainer.num_nodes)
        nodes = {} if "mesh" in self.options else {"topology": topology}
        model: Any = trainer.strategy.model
        if self.attachment is not None:  # of an earlier fit
            self.attachment.close()
        self.attachment = birder.attach(model, method, **nodes | self.options)
        limit = trainer.gradient_clip_val
        if limit and every_rank.clips_in_vain(method, self.attachment.overlap):
            norm = "..." if trainer.gradient_clip_algorithm == "value" else limit  # of values it says nothing of a norm
            raise ValueError(f"Trainer(gradient_clip_val={limit}): {every_rank.no_clipping(method, norm)}")
        if method.compressed and "save_checkpoint" not in vars(trainer):
            self._save_whole_steps(trainer)

    def _save_whole_steps(self, trainer: Trainer) -> None:
        """A checkpoint that a signal asks for in the middle of a step is made after it, of an exception there none.
        Where models differ, one of weights alone has their mean, too: Lightning calls no callback for it.
        """
        save = trainer.save_checkpoint

        def save_checkpoint(filepath: Any, weights_only: bool | None = None, *args: Any, **kwargs: Any) -> None:
            method = self._method(trainer)
            if every_rank.in_a_step(method):
                if self._failed:  # it has no end, and state_dict() would hide why
                    warnings.warn(
                        f"{filepath} is not saved: the step that failed is half done, with messages taken in backward. "
                        "Resume from the checkpoint before",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                    return
                self._late.append(functools.partial(save_checkpoint, filepath, weights_only, *args, **kwargs))
                return
            with every_rank.averaged(method if weights_only else None):
                save(filepath, weights_only, *args, **kwargs)

        trainer.save_checkpoint = save_checkpoint  # type: ignore[method-assign]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Every rank's state in the place of rank 0's."""
        method = self._method(trainer)
        if method is None or trainer.world_size == 1 or not method.compressed:
            return
        everyone: list[Any] | None = [None] * trainer.world_size if trainer.is_global_zero else None
        # Pickled elsewhere than on the CPU, tensors would come to the GPU of the same number on rank 0's node.
        mine = move_data_to_device(every_rank.rank_state(method), "cpu")
        dist.gather_object(mine, everyone, dst=0)
        checkpoint["optimizer_states"] = [{KEY: everyone}]
        self._average_averages(trainer)
        if method.local_models and method.steps:  # before it models are equal, and their mean may be rounded
            with method.averaged():
                for name in {"state_dict", "current_model_state"} & checkpoint.keys():  # the latter: WeightAveraging's
                    checkpoint[name] = copy.deepcopy(checkpoint[name])

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Raises ValueError for another number of ranks.

        To test, validate or predict, the model is enough.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            return
        everyone = (checkpoint.get("optimizer_states") or [{}])[0].get(KEY)
        if everyone is None:
            return  # of one process, or of a dense method; another rank's state is refused by the optimizer
        if len(everyone) != trainer.world_size and not self.any_world:
            raise ValueError(
                f"the checkpoint was saved by {len(everyone)} ranks, this run has {trainer.world_size}: "
                f"use {len(everyone)} ranks, or BirderCallback(any_world=True)"
            )

    def _own_state(self, method: Any, state: dict[str, Any]) -> dict[str, Any]:
        """This rank's of every rank's, and before it its own parameters: Lightning has given all ranks those of one."""
        if KEY in state:
            if len(state[KEY]) == method.comm.world_size:
                every_rank.set_parameters(method, state[KEY][method.comm.rank])
            return every_rank.fitting(method, [own["optimizer"] for own in state[KEY]], self.any_world)
        return every_rank.own_or_of_one(method, state, self.any_world)

    def _average_averages(self, trainer: Trainer, module: LightningModule | None = None) -> None:
        """Where models differ, so do the averages of them that other callbacks keep (WeightAveraging, SWA). On all ranks they
        become their mean, which is the average of the mean models. module: may have been given this rank's average before."""
        method = self._method(trainer)
        if method is None or trainer.world_size == 1 or not method.local_models:
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if not isinstance(average := getattr(callback, "_average_model", None), nn.Module):
                continue
            kept, own = list(average.parameters()), [] if module is None else list(module.parameters())
            given = all(torch.equal(p, x.to(p.device)) for p, x in zip(own, kept))
            every_rank.make_mean(kept)
            with torch.no_grad():
                for p, x in zip(own, kept) if given else ():
                    p.copy_(x)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        late, self._late = self._late, []
        for save in late:
            save()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """SWA puts its average into the module, for one more epoch that trains nothing but batch norms."""
        self._average_averages(trainer, pl_module if trainer.fit_loop._skip_backward else None)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Other callbacks put their average into the module."""
        self._average_averages(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Where ranks' models differ, their mean is what is evaluated."""
        self._average_averages(trainer)
        self._average.enter_context(every_rank.averaged(self._method(trainer)))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._average.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Validation has failed: a checkpoint that is saved now has this rank's own parameters again."""
        self._failed = True  # this step does not end
        self.on_validation_end(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Where Lightning has started the ranks (ddp_notebook), the script gets rank 0's model: make it the mean."""
        if trainer.world_size > 1 and isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
            every_rank.make_equal(pl_module.parameters())

    @staticmethod
    def _method(trainer: Trainer) -> BucketOptimizer | None:
        """The only optimizer, where it is one of this package."""
        if len(trainer.optimizers) != 1:
            return None
        method = unwrap_optimizer(trainer.optimizers[0])
        return method if isinstance(method, BucketOptimizer) else None
