"""1-bit Adam and Efficient-Adam on uneven or empty shards, against their one-process references on the same shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import reference, toy
from tests.helpers.hsdp import full, hsdp, make_mesh
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import slow

STEPS, WARMUP, RATE = 8, 3, 0.01
TOLERANCE = 2e-6
"""Of parameters that have moved by up to STEPS * RATE: means are added up in another order, 6e-8 of each step's values."""


def load(model: torch.nn.Module, values: Tensor) -> None:
    with torch.no_grad():
        for p, part in zip(model.parameters(), values.split([p.numel() for p in model.parameters()]), strict=True):
            p.copy_(part.view_as(p))


def laid_out(optimizer: Any, unit: Any, tensors: list[Tensor], index: int, shards: int) -> Tensor:
    """This rank's rows of whole tensors, in the unit's flat layout."""
    flat = torch.zeros(unit.padded)
    order = [p for group in optimizer.param_groups for p in group["params"]]
    for i, p in enumerate(unit.wholes):
        whole = tensors[next(k for k, q in enumerate(order) if q is p)]
        rows = -(-whole.shape[0] // shards)
        mine = whole[index * rows : (index + 1) * rows].flatten()
        flat[unit.offsets[i] : unit.offsets[i] + mine.numel()] = mine
    return flat


def compare(
    rank: int, world: int, replicas: int, shards: int, method: str, options: dict[str, Any]
) -> tuple[float, float, int]:
    mesh, plain = make_mesh(replicas, shards), toy.make()
    model, optimizer, _ = hsdp("toy", mesh, method, {"lr": RATE, **options}, unit_mb=0.001)
    index = rank % shards
    start = [p.detach().clone() for p in plain.parameters()]
    cut = [laid_out(optimizer, unit, start, index, shards) for unit in optimizer.units]
    ones = [torch.ones_like(p) for p in plain.parameters()]
    oracles = [
        reference.OneBitAdam(x.clone(), replicas, RATE, WARMUP)
        if options
        else reference.EfficientAdam(x.clone(), laid_out(optimizer, unit, ones, index, shards) > 0, replicas, RATE)
        for unit, x in zip(optimizer.units, cut, strict=True)
    ]
    for step in range(1, STEPS + 1):
        load(plain, full(model))
        grads = reference.local_gradients(plain, toy.loss, world, step)
        means = [[sum(g) / shards for g in zip(*grads[r * shards : (r + 1) * shards])] for r in range(replicas)]
        for unit, oracle in zip(optimizer.units, oracles, strict=True):
            oracle.step(torch.stack([laid_out(optimizer, unit, mean, index, shards) for mean in means]))
        optimizer.zero_grad()
        toy.loss(model, rank, step).backward()
        optimizer.step()
    found = [optimizer.flat_parameters(unit) for unit in optimizer.units]
    worst = max(float((x - oracle.x).abs().max()) for x, oracle in zip(found, oracles, strict=True))
    moved = max(float((x - first).abs().max()) for x, first in zip(found, cut, strict=True))
    return worst, moved, sum(shard.numel() == 0 for unit in optimizer.units for shard in unit.params)


@pytest.mark.parametrize(("method", "options"), [("OneBitAdam", {"warmup_steps": WARMUP}), slow("EfficientAdam", {})])
def test_it_equals_the_reference_on_every_shard(method: str, options: dict[str, Any]) -> None:
    results = run_ranks(compare, 6, 2, 3, method, options, ranks_per_node=3)
    assert max(worst for worst, _, _ in results) < TOLERANCE, results
    assert max(moved for _, moved, _ in results) > 3 * RATE
    assert max(empty for _, _, empty in results) > 0
