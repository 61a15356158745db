"""torch.compile around a model of FSDP2 and around its blocks, activation checkpointing: equal to eager bit for bit.

On 2 replicas of 2 shards.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import birder
from birder import attach
from tests.helpers import hsdp, toy
from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.long]
STEPS = 5
METHODS: dict[str, dict[str, Any]] = {"Birder": {"lr": 0.01}, "OneBitAdam": {"lr": 0.01, "warmup_steps": 2}}
WAYS = ("eager", "model", "blocks", "checkpointed")
RUNS = [("Birder", way) for way in WAYS] + [("OneBitAdam", way) for way in WAYS[:2]]


def train(rank: int, mesh: Any, name: str, way: str) -> np.ndarray:
    torch._dynamo.reset()
    model: nn.Module = toy.make()
    if way == "blocks":
        for block in (model.first, model.second):
            block.compile(backend="aot_eager")
    if way == "checkpointed":
        for name_of in ("first", "second"):
            setattr(model, name_of, checkpoint_wrapper(getattr(model, name_of)))
    hsdp.shard(model, mesh)
    optimizer = getattr(birder, name)(model.parameters(), **METHODS[name])
    outer: Any = torch.compile(model, backend="aot_eager") if way == "model" else model
    attach(outer, optimizer, mesh=mesh)
    hsdp.train(outer, optimizer, toy.loss, rank, range(1, STEPS + 1))
    assert optimizer.steps == STEPS
    return hsdp.full(model).numpy()


def every_way(rank: int, world: int) -> dict[tuple[str, str], np.ndarray]:
    mesh = hsdp.make_mesh(2, 2)
    found = {(name, way): train(rank, mesh, name, way) for name, way in RUNS}
    return found | {("start", ""): hsdp.full(toy.make()).numpy()}


@pytest.fixture(scope="module")
def ends() -> list[dict[tuple[str, str], np.ndarray]]:
    return run_ranks(every_way, 4, ranks_per_node=2)


@pytest.mark.parametrize(("method", "way"), RUNS)
def test_a_compiled_or_checkpointed_sharded_model_equals_eager(ends: Any, method: str, way: str) -> None:
    for mine in ends:
        assert np.array_equal(mine[method, way], ends[0][method, "eager"])
        assert not np.array_equal(mine[method, way], mine["start", ""])
