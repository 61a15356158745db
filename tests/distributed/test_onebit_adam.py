"""1-bit Adam against its one-process reference, through the warm-up and long after it."""

from __future__ import annotations

import functools

import pytest
import torch

from birder import OneBitAdam
from tests.helpers import reference, toy
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import slow
from tests.helpers.virtual import OwnRank

WARMUP, STEPS, LR = 12, 60, 0.003

# The dense warm-up adds up gradients in the order of gloo's ring, the reference in rank order. The sign of a sum near 0
# can then differ, which error feedback repairs over the next steps: a difference of a few steps' length, lr each.
TOLERANCE = 5 * LR


def hook_run(rank: int, world: int, how: dict) -> dict:
    made = OwnRank(lambda p: OneBitAdam(p, LR, warmup_steps=WARMUP), rank, **how)
    (sent,) = made.train(range(1, STEPS + 1))
    (unit,) = made.optimizers[0].units
    return {
        "x": toy.flat(made.model).numpy(),
        "m": unit.state["m"].numpy(),
        "v": unit.state["v"].numpy(),
        "worker_error": unit.state["worker_error"].numpy(),
        "sent": [total for total, _ in sent],
    }


@functools.cache
def plain_run(world: int = 2) -> list[dict]:
    return run_ranks(hook_run, world, {})


def oracle_run(world: int) -> tuple[reference.OneBitAdam, torch.Tensor]:
    torch.set_num_threads(1)
    model = toy.make()
    layout = reference.Layout(model, world)
    oracle = reference.OneBitAdam(layout.parameters(), world, LR, WARMUP)
    for step in range(1, STEPS + 1):
        local = reference.local_gradients(model, toy.loss, world, step)
        oracle.step(torch.stack([layout.gather(g) for g in local]))
        layout.load(oracle.x)
    return oracle, toy.flat(model)


@pytest.mark.parametrize("world", [slow(1), slow(2), 3, slow(4)])
def test_hook_equals_the_reference(world):
    results = plain_run(world)
    oracle, x = oracle_run(world)
    for r in results:
        assert (r["x"] == results[0]["x"]).all()
        assert (r["m"] == results[0]["m"]).all()
        assert abs(torch.from_numpy(r["x"]) - x).max() <= TOLERANCE
    # Two summands have one sum: with up to 2 ranks every bit must agree, errors included.
    if world <= 2:
        assert (results[0]["x"] == x.numpy()).all()
        for w, r in enumerate(results):
            assert (r["worker_error"] == oracle.worker_error[w].numpy()).all()
            assert (r["v"] == oracle.v.numpy()).all()


def test_bytes_fall_when_compression_starts():
    sent = plain_run()[0]["sent"]
    assert len(set(sent[:WARMUP])) == 1
    assert len(set(sent[WARMUP:])) == 1
    assert sent[WARMUP] < sent[0] / 20  # 32 in the limit; 4 scales and padding weigh in a model this small


def test_the_error_is_what_was_not_sent():
    from birder import kernels
    from birder.optim.onebit import scale

    kept = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    error, sent = kept.clone(), torch.empty(4096)
    squares = kernels.add_message(error, torch.zeros_like(error), None)
    message = kernels.split_signs(error, scale(squares, torch.tensor(4096)), None)
    assert message.shape == (1, 4096 // 8 + 4)
    kernels.write_signs(sent, message, None)
    # sent + error is z again but for the rounding of two operations.
    assert torch.allclose(sent + error, kept, rtol=0, atol=2 * torch.finfo(torch.float32).eps * 4)
    ratio = float(error.square().sum() / kept.square().sum())
    assert 0.35 < ratio < 0.45  # 0.40 for a normal distribution: neither nothing nor everything was compressed


def test_coordinates_without_gradient_in_the_warmup_do_not_move():
    results = plain_run()
    before = toy.make().embed.weight.detach()
    x = toy.part(results[0]["x"], "embed.weight")
    assert torch.equal(x[toy.USED :], before[toy.USED :])


def test_hierarchical_trains_and_agrees_on_all_ranks():
    results = run_ranks(hook_run, 4, {"hierarchical": True}, ranks_per_node=2)
    assert all((r["x"] == results[0]["x"]).all() for r in results)
    assert results[0]["worker_error"].size == results[0]["m"].size // 2
