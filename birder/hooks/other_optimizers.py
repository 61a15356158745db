"""Refuses steps of another optimizer over parameters whose gradients an attached one takes instead of averaging them.

A run that continues with torch's optimizer after some steps with one of this package, or warms up with it, would train every
rank's replica on that rank's own gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from birder.hooks.attachment import Attachment
from birder.optim.base import BucketOptimizer

_ATTACHED: WeakSet[Attachment] = WeakSet()


def watch(attachment: Attachment) -> None:
    """From now on other optimizers' steps over the attached one's parameters are refused where gradients are not averaged."""
    _ATTACHED.add(attachment)
    _register()


def open_attachments() -> list[Attachment]:
    """Those of this process that were not closed."""
    return [attachment for attachment in _ATTACHED if not attachment.closed]


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before_step)


@torch._disable_dynamo
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Called by torch before the step of any optimizer, `args` with the optimizer itself. Raises RuntimeError.

    A closure makes gradients after this: with one they need not be there.
    """
    closure = len(args) > 1 or kwargs.get("closure") is not None
    if isinstance(optimizer, BucketOptimizer):
        return
    for attachment in list(_ATTACHED):
        owner = attachment.optimizer
        if attachment.closed or not attachment.communicate or not owner.compressed:
            continue
        shared = (
            p
            for group in optimizer.param_groups
            for p in group["params"]
            if owner.holds(p) and (closure or p.grad is not None)
        )
        if (p := next(shared, None)) is not None and not _drives(optimizer, owner):
            raise RuntimeError(
                f"{type(optimizer).__name__} steps {owner.named(p)}, but {owner.kind} is attached for it and takes its "
                "gradient instead of averaging it: give each parameter to one optimizer, or first call close() of what "
                f"birder.attach returned (after a framework's run: {owner.kind}'s attachment.close())"
            )


def _drives(outer: Optimizer, owner: Optimizer) -> bool:
    """Whether `outer` is a wrapper of `owner`: keeps it as an attribute, or in lists and dicts of these."""
    kept = [value for name, value in vars(outer).items() if name not in ("state", "param_groups")]
    inner = [o for o in _optimizers(kept) if o is not outer]
    return any(o is owner or _drives(o, owner) for o in inner)


def _optimizers(value: Any, depth: int = 4) -> Iterable[Optimizer]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)) and depth:
        return [found for one in value for found in _optimizers(one, depth - 1)]
    return [value] if isinstance(value, Optimizer) else []
