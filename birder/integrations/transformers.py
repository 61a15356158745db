"""Hugging Face Trainer: `BirderTrainer` in the place of `Trainer`, or the mixin before your own Trainer.

    trainer = BirderTrainer(
        model,
        TrainingArguments("out", max_grad_norm=0, learning_rate=1e-4),
        train_dataset=data,
        optimizer_cls_and_kwargs=(Birder, {}),
    )
    trainer.train()

Started with torchrun. Checkpoints hold every rank's state, in `birder` of the checkpoint's folder, and
`train(resume_from_checkpoint=True)` continues as if uninterrupted. Runnable: examples/transformers_trainer.py.
"""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

from birder.hooks.attachment import unwrap_method, unwrap_model, unwrap_optimizer
from birder.hooks.ddp import attached
from birder.hooks.other_optimizers import open_attachments
from birder.integrations import every_rank
from birder.integrations.accelerate import EveryRank, attach
from birder.optim.base import BucketOptimizer

if TYPE_CHECKING:
    _Trainer = Trainer
else:
    _Trainer = object


class BirderTrainerMixin(_Trainer):
    """For `class MyTrainer(BirderTrainerMixin, Trainer)`.

    attach_options: arguments of `birder.attach`, e.g. {"hierarchical": True}; for fp16 {"overlap": False}.

    The optimizer is given as the Trainer takes any: `optimizers=(Birder(model.parameters()), None)`, or
    `optimizer_cls_and_kwargs=(Birder, {})`, which keeps weight decay from biases and norms and takes `learning_rate`.

    Where ranks' models differ (`local_models`), their mean is evaluated and saved; every rank then has to call `save_model`.
    The gradient norm in the log is that of rank 0's own gradient, except in dense steps.

    Raises ValueError when the Trainer is to clip (`max_grad_norm` is 1 by default) messages that are taken during backward,
    TypeError for an optimizer of another package.
    """

    def __init__(self, *args: Any, attach_options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.attach_options = dict(attach_options or {})
        self._save_late = False
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's; what the accelerator then prepares is attached."""
        super().create_accelerator_and_postprocess()
        prepare = self.accelerator.prepare

        def prepare_and_attach(*args: Any, **kwargs: Any) -> Any:
            for model in args if self.accelerator.num_processes > 1 else ():
                if isinstance(model, nn.Module) and not isinstance(model, DistributedDataParallel):
                    every_rank.make_equal(model.parameters())
            prepared = prepare(*args, **kwargs)
            self._attach(prepared if isinstance(prepared, tuple) else (prepared,))
            return prepared

        self.accelerator.prepare = prepare_and_attach

    def _attach(self, prepared: tuple[Any, ...]) -> None:
        optimizers = [x for x in prepared if hasattr(x, "param_groups")]
        models = [x for x in prepared if isinstance(x, nn.Module)]
        for optimizer in optimizers:
            method, model = unwrap_method(optimizer), models[0] if models else self.model_wrapped
            if method.units and (self.accelerator.num_processes == 1 or attached(model, method)):
                continue  # `train` was called again
            method.begin_again()  # of auto_find_batch_size: a first step that did not fit
            limit = self.args.max_grad_norm
            if limit and every_rank.clips_in_vain(method, self.attach_options.get("overlap", True)):
                raise ValueError(f"TrainingArguments(max_grad_norm={limit}): {every_rank.no_clipping(method, limit)}")
            if self.accelerator.num_processes > 1 and not models:  # `train` was called again, with another optimizer
                every_rank.make_equal(model.parameters())
                for earlier in open_attachments():
                    if any(earlier.optimizer.holds(p) for group in method.param_groups for p in group["params"]):
                        earlier.close()
            attach(self.accelerator, model, optimizer, **self.attach_options)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's."""
        self._forget_evaluation()
        return super().train(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; `learning_rate` is the optimizer's where `optimizer_cls_and_kwargs` has no `lr`."""
        given = getattr(self, "optimizer_cls_and_kwargs", None)
        if given is None or not (isinstance(given[0], type) and issubclass(given[0], BucketOptimizer)):
            return super().create_optimizer(*args, **kwargs)  # it may be a function, too
        (kind, options), rate = given, self.args.learning_rate
        if options.get("lr", rate) != rate != type(self.args).__dataclass_fields__["learning_rate"].default:
            warnings.warn(
                f"TrainingArguments(learning_rate={rate:g}) has no effect, as optimizer_cls_and_kwargs has "
                f"lr={options['lr']:g}: leave one of them out",
                RuntimeWarning,
                stacklevel=2,
            )
        self.optimizer_cls_and_kwargs = kind, {"lr": rate, **options}
        try:
            return super().create_optimizer(*args, **kwargs)
        finally:
            self.optimizer_cls_and_kwargs = given

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's. A batch that is not the last of its step sends no message.

        A dataset without length may end with fewer batches than a step has: the Trainer adds them to the next epoch's first
        step, and lets DDP average their gradients before.
        """
        method = unwrap_optimizer(self.optimizer)
        state = self.accelerator.gradient_state
        last = state.sync_gradients or state.plugin_kwargs.get("sync_each_batch", False)
        sends = isinstance(method, BucketOptimizer) and method.compressed
        with self.accelerator.no_sync(model) if sends and not last else contextlib.nullcontext():
            return super().training_step(model, *args, **kwargs)

    def _forget_evaluation(self) -> None:
        """`evaluate` before `train` marks the bare model as prepared: Accelerate would never wrap it in DDP."""
        model = unwrap_model(self.model_wrapped)
        if model is None or self.accelerator.num_processes == 1 or model is not self.model:
            return  # none yet (hyperparameter_search); one process needs no wrapper; another one is there already
        self.model_wrapped = self.model  # without what compiles it for evaluation alone
        vars(self.model).pop("_is_accelerate_prepared", None)
        if (forward := vars(self.model).pop("_original_forward", None)) is not None:  # without its autocast
            self.model.forward = forward

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def _every_rank(self) -> EveryRank | None:
        return getattr(self.optimizer, "every_rank", None)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As the Trainer's. One that is asked for in the middle of a step (`enable_jit_checkpoint`) is made after it."""
        self._save_late = every_rank.in_a_step(self.optimizer)
        if not self._save_late:
            super()._save_checkpoint(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.control.should_save |= self._save_late
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        kept = self._every_rank
        if kept is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        kept.save(output_dir)
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            kept.saved()  # rank 0 alone has asked for the note

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        kept = self._every_rank
        if kept is not None and checkpoint is not None:
            there = (Path(checkpoint) / kept.name).is_dir()
            of_one_process = kept.any_world and (Path(checkpoint) / "optimizer.pt").is_file()
            if not (there or of_one_process):  # the Trainer would go on without a word
                raise ValueError(
                    f"{checkpoint} has no folder {kept.name!r} with every rank's state of the optimizer (save_only_model?): "
                    "load its model alone, and train without resume_from_checkpoint"
                )
            for name in ("optimizer.pt", "scheduler.pt"):
                if not (Path(checkpoint) / name).is_file():
                    raise ValueError(
                        f"{checkpoint} has no {name}: without it the Trainer loads no state of the optimizer"
                    )
            kept.look_in(checkpoint)
        super()._load_optimizer_and_scheduler(checkpoint)

    # ---- models that differ between ranks ----------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer's. Every rank calls it where ranks' models differ: what is saved is their mean."""
        with every_rank.averaged(self.optimizer):
            super().save_model(output_dir, _internal_call=_internal_call)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's, on the mean of the ranks' models where they differ."""
        with every_rank.averaged(self.optimizer):
            return super().evaluation_loop(*args, **kwargs)


class BirderTrainer(BirderTrainerMixin, Trainer):
    """`transformers.Trainer` with an optimizer of this package; see `BirderTrainerMixin`."""
