"""Efficient-Adam against its one-process reference, bit for bit; bytes; what does not move; a rate of 0; nodes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from birder import EfficientAdam, Topology
from birder.comm.runtime import OwnTurn, lockstep
from birder.comm.virtual import communicators
from tests.helpers import reference, toy
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import slow
from tests.helpers.virtual import OwnRank

STEPS, LR, DECAY = 40, 0.003, 0.1


def rate(step: int) -> float:
    return 0.0 if step > STEPS else LR


def hook_run(rank: int, world: int, how: dict[str, Any]) -> dict[str, Any]:
    made = OwnRank(lambda p: EfficientAdam(p, LR, weight_decay=DECAY), rank, **how)
    (sent,) = made.train(range(1, STEPS + 1))
    (unit,) = made.optimizers[0].units
    found = {"x": toy.flat(made.model).numpy(), "sent": sent, "padded": unit.padded}
    found |= {name: unit.state[name].clone().numpy() for name in ("m", "worker_error", "server_error")}
    made.train(range(STEPS + 1, STEPS + 4), rate)
    same = np.array_equal(found["worker_error"], unit.state["worker_error"].numpy())
    return found | {"waits": same and np.array_equal(found["x"], toy.flat(made.model).numpy())}


@functools.cache
def flat(world: int) -> list[dict[str, Any]]:
    return run_ranks(hook_run, world, {})


def oracle_run(workers: int, per_node: int = 1) -> tuple[reference.EfficientAdam, np.ndarray]:
    """The first shard's reference and all of x. per_node: shards, each of which has its own scales."""
    torch.set_num_threads(1)
    model = toy.make()
    layout = reference.Layout(model, workers * per_node)

    def gather(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(layout.gather(tensors).chunk(per_node))

    real = gather([torch.ones_like(p) for p in layout.params])
    oracles = [
        reference.EfficientAdam(x.clone(), there > 0, workers, LR, DECAY)
        for x, there in zip(gather(layout.params), real, strict=True)
    ]
    for step in range(1, STEPS + 1):
        grads = reference.worker_gradients(model, toy.loss, workers, per_node, step)
        for oracle, *parts in zip(oracles, *(gather(g) for g in grads), strict=True):
            oracle.step(torch.stack(parts))
        layout.load(torch.cat([oracle.x for oracle in oracles]))
    return oracles[0], toy.flat(model).numpy()


@pytest.mark.parametrize("world", [1, slow(2), 3, slow(4)])
def test_equals_the_reference_bit_for_bit(world: int) -> None:
    oracle, x = oracle_run(world)
    for w, r in enumerate(flat(world)):
        assert np.array_equal(r["x"], x)
        assert np.array_equal(r["m"], oracle.m[w].numpy())
        assert np.array_equal(r["worker_error"], oracle.error[w].numpy())
        assert np.array_equal(r["server_error"], oracle.server_error[w].numpy())


def test_a_bit_each_way_from_the_first_step_and_nothing_at_a_rate_of_0() -> None:
    for r in flat(3):
        messages = 2 * 2 * (r["padded"] // 3 // 8 + 4)  # to and from two others, a scale behind the bits
        sent = [total for total, _ in r["sent"]]
        assert all(messages <= total < messages + r["padded"] // 2 for total in sent)  # and the map of coordinates seen
        assert sent[-1] <= messages + 8  # of which a few are left
        assert sent[-1] < 2 * 2 / 3 * 4 * r["padded"] / 20  # of an all-reduce in fp32
        assert r["waits"]


def test_what_never_has_a_gradient_is_left_to_weight_decay() -> None:
    before = toy.part(toy.flat(toy.make()).numpy(), "embed.weight")[toy.USED :]
    rows = toy.part(flat(3)[0]["x"], "embed.weight")[toy.USED :]
    assert torch.allclose(rows, before * (1 - LR * DECAY) ** STEPS, rtol=1e-5)


def test_nodes_as_workers_equal_the_reference() -> None:
    _, x = oracle_run(2, 2)
    for r in run_ranks(hook_run, 4, {"hierarchical": True}, ranks_per_node=2):
        assert np.array_equal(r["x"], x)


def test_a_rank_whose_rate_alone_is_0_keeps_nobody_waiting() -> None:
    """Ranks compare their rates after the messages: one that sent none left the others waiting for ever."""
    comms, optimizers = communicators(Topology(2, 1), False), []
    for comm, lr in zip(comms, (LR, 0.0), strict=True):
        p = torch.nn.Parameter(torch.ones(40))
        p.grad = torch.ones(40)
        optimizers.append(EfficientAdam([p], lr))
        optimizers[-1].bind(comm, OwnTurn())
    with torch.no_grad():
        lockstep(comms, [optimizer.stepping() for optimizer in optimizers], lambda rank: None)
    assert [optimizer.steps for optimizer in optimizers] == [1, 1]
