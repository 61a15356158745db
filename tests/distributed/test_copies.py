"""A model is copied and saved with torch's own tools after attach; a copy knows nothing of the original's optimizer."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from birder import attach
from tests.distributed.test_guards import make, train
from tests.helpers import toy
from tests.helpers.ranks import run_ranks

METHODS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Birder": {},
    "OneBitAdam": {},
    "EFSGD": {},
    "without overlap": {"overlap": False},
}
"""Whose ranks have the same model, with options of attach."""


def saved(model: nn.Module) -> Any:
    kept = io.BytesIO()
    torch.save(model, kept)
    kept.seek(0)
    return torch.load(kept, weights_only=False)


def gradients(model: nn.Module, rank: int) -> Tensor:
    model.zero_grad()
    toy.loss(model, rank, 9).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def copied(rank: int, world: int) -> dict[str, list[bool]]:
    found = {}
    for name, options in METHODS.items():
        model = toy.make()
        ddp = DistributedDataParallel(model)
        optimizer = make("Birder" if " " in name else name, model, lr=0.01)
        attach(ddp, optimizer, **options)
        train(ddp, optimizer, range(1, 5), rank)
        before = toy.flat(model)
        plain = gradients(DistributedDataParallel(copy.deepcopy(model)), rank)
        copies = [copy.deepcopy(ddp), saved(ddp), AveragedModel(ddp)]
        good = [torch.equal(gradients(c, rank), plain) for c in copies]  # averaged, by DDP alone
        good.append(not optimizer._feeding and optimizer.steps == 4)
        # A copy of both goes on as they do.
        theirs, other = copy.deepcopy((ddp, optimizer))
        attach(theirs, other, **options)
        for m, o in ((ddp, optimizer), (theirs, other)):
            train(m, o, range(5, 9), rank)
        good.append(torch.equal(toy.flat(model), toy.flat(theirs.module)))
        good.append(
            all(torch.equal(toy.flat(c.module if i < 2 else c.module.module), before) for i, c in enumerate(copies))
        )
        found[name] = good
    return found


def test_a_copied_model_is_a_plain_ddp_model() -> None:
    for results in run_ranks(copied, 2):
        for name, good in results.items():
            assert all(good), (name, good)
