"""What all frameworks need: state that differs from rank to rank in a checkpoint that has room for one; words on clipping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from birder import checkpoint
from birder.optim.base import BucketOptimizer

FOLDER = "birder"
"""Below the framework's own checkpoint; a second optimizer has `birder_1`."""
NO_CLIPPING = (
    "clipping by the framework has no effect on messages that were taken during backward: give the optimizer "
    "max_grad_norm={limit} and turn the framework's clipping off, or attach with overlap=False"
)


def rank_state(optimizer: BucketOptimizer) -> dict[str, Any]:
    """What this rank alone has: the optimizer's state, and the parameters where ranks' models differ."""
    own: dict[str, Any] = {"optimizer": optimizer.state_dict()}
    if optimizer.local_models:
        own["parameters"] = [optimizer.own_parameters(unit) for unit in optimizer.units]
    return own


def set_parameters(optimizer: BucketOptimizer, own: dict[str, Any]) -> None:
    """Puts this rank's parameters in place, where `rank_state` kept any. After DDP, which gives all ranks rank 0's."""
    saved = own.get("parameters", [])
    if saved and len(saved) != len(optimizer.units):
        raise ValueError(f"the checkpoint has parameters of {len(saved)} units, here are {len(optimizer.units)}")
    with torch.no_grad():
        for unit, flat in zip(optimizer.units, saved):
            torch._foreach_copy_(unit.params, unit.views(flat.to(unit.device)))


def save(folder: str | Path, optimizer: BucketOptimizer, name: str = FOLDER) -> None:
    """Writes every rank's state below `folder`, as birder.checkpoint does. Every rank calls it. Raises as that does."""
    checkpoint.save(Path(folder) / name, optimizer.steps, {}, rank_state(optimizer), keep=1)


def load(folder: str | Path, optimizer: BucketOptimizer, name: str = FOLDER) -> None:
    """Restores what `save` wrote on the same rank. Every rank calls it, after `attach`.

    Raises ValueError where there is none, and for that of another number of ranks or of another method.
    """
    found = checkpoint.restore(Path(folder) / name)
    if found is None:
        raise ValueError(
            f"{Path(folder).name} has no folder {name!r} with every rank's state of {type(optimizer).__name__}: "
            "birder.integrations did not save it, and training cannot resume from it"
        )
    set_parameters(optimizer, found.local)
    optimizer.load_state_dict(found.local["optimizer"])
