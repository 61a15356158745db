"""torch.compile, static graph, activation checkpointing and gradients as views of buckets: equal to eager bit for bit.

On 2 ranks, where a dense sum does not depend on where in a bucket an element lies.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import birder
from birder import attach
from tests.helpers import toy
from tests.helpers.ranks import fresh_world

STEPS = 6
METHODS: dict[str, dict[str, Any]] = {
    "Birder": {"lr": 0.01},
    "OneBitAdam": {"lr": 0.01, "warmup_steps": 2},
    "CSER": {"lr": 0.05, "block": 32, "gradient_ratio": None, "model_ratio": 2, "reset_every": 2},  # with SKIP steps
}
CASES: dict[str, dict[str, Any]] = {
    "eager": {},
    "compiled outside": {"compile": "ddp"},
    "compiled inside": {"compile": "model"},
    "gradients as views": {"ddp": {"gradient_as_bucket_view": True}},
    "static graph": {"ddp": {"static_graph": True}},
    "checkpointed": {"reentrant": False},
    "checkpointed, static graph": {"reentrant": False, "ddp": {"static_graph": True}},
    "checkpointed, reentrant": {"reentrant": True},
    "checkpointed, reentrant, static graph": {"reentrant": True, "ddp": {"static_graph": True}},
    "all": {"compile": "ddp", "reentrant": False, "ddp": {"gradient_as_bucket_view": True, "static_graph": True}},
}
pytestmark = [pytest.mark.slow, pytest.mark.long]
ACCUMULATED = ["eager", "compiled outside", "gradients as views", "checkpointed"]
"""Also with two micro-batches a step."""
FEW = ["eager", "compiled outside", "all"]
"""What methods other than Birder run: views, static graph and checkpoints alone know no method."""
RUNS = {
    name: [(c, a) for a, cs in ((False, CASES), (True, ACCUMULATED)) for c in cs if name == "Birder" or c in FEW]
    for name in METHODS
}


class Checkpointed(toy.Net):
    """The same model, with its middle computed again in backward."""

    reentrant = False

    def forward(self, rows: Tensor) -> Tensor:
        hidden: Any = checkpoint(lambda x: torch.tanh(self.first(x)), self.embed(rows), use_reentrant=self.reentrant)
        return self.second(hidden) * self.scale


def build(case: dict[str, Any]) -> tuple[toy.Net, nn.Module]:
    model = toy.make()
    if "reentrant" in case:
        model.__class__ = Checkpointed
        model.reentrant = case["reentrant"]  # type: ignore[assignment]
    inner: Any = torch.compile(model, backend="aot_eager") if case.get("compile") == "model" else model
    return model, DistributedDataParallel(inner, bucket_cap_mb=0.0005, **case.get("ddp", {}))


def train(rank: int, name: str, case: dict[str, Any], accumulate: bool) -> np.ndarray:
    torch._dynamo.reset()
    model, ddp = build(case)
    optimizer = getattr(birder, name)(model.parameters(), **METHODS[name])
    attach(ddp, optimizer, unit_mb=0.0008)  # type: ignore[arg-type]
    outer: Any = torch.compile(ddp, backend="aot_eager") if case.get("compile") == "ddp" else ddp
    for step in range(1, STEPS + 1):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if accumulate:
            with ddp.no_sync():  # type: ignore[operator]
                toy.loss(outer, rank, 100 + step).backward()
        toy.loss(outer, rank, step).backward()
        optimizer.step()
    assert optimizer.steps == STEPS
    return toy.flat(model).numpy()


def every_case(rank: int, world: int, name: str) -> dict[tuple[str, bool], np.ndarray]:
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 256  # several buckets; compiling wants the first to be the smallest
    return {(case, more): train(rank, name, CASES[case], more) for case, more in RUNS[name]}


@pytest.mark.parametrize("name", METHODS)
def test_equal_to_eager_bit_for_bit(name: str) -> None:
    """In new processes: what was compiled before leaves traces."""
    start = toy.flat(toy.make()).numpy()
    for mine in fresh_world(every_case, 2, name):
        assert mine.keys() == set(RUNS[name])
        for (case, accumulate), x in mine.items():
            assert np.array_equal(x, mine["eager", accumulate]), (case, accumulate)
        assert not np.array_equal(mine["eager", False], start)
        assert not np.array_equal(mine["eager", True], mine["eager", False])


def whole_step(rank: int, world: int) -> int:
    model = toy.make()
    ddp = DistributedDataParallel(model)
    optimizer = birder.Birder(model.parameters())
    attach(ddp, optimizer)
    ours: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        ours.extend(node.stack_trace for node in graph.graph.nodes if "/birder/" in (node.stack_trace or ""))
        return graph.forward

    torch.compile(toy.train, backend=backend)(ddp, optimizer, rank, [1, 2])
    assert optimizer.steps == 2
    return len(ours)


def test_a_compiled_training_step_does_not_compile_the_hook() -> None:
    """What the hook calls inside backward was compiled, again in each of the first steps."""
    assert fresh_world(whole_step, 2) == [0, 0]
