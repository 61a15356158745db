"""1-bit LAMB against its one-process reference, bit for bit, through the warm-up and long after it; its invariants.

Virtual ranks; on real ones a single unit, nodes, broken gradients and what is resumed.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from birder import OneBitLAMB
from birder.comm import ByteCounter
from tests.helpers import reference, toy
from tests.helpers.ranks import run_ranks
from tests.helpers.reference_onebit_lamb import OneBitLAMB as Reference
from tests.helpers.tiers import slow
from tests.helpers.virtual import World, begun, ends, resumed

WARMUP, STEPS, LR, DECAY = 20, 64, 0.02, 0.01
SMALL = {"unit_mb": 0.0008}  # several units in a model this small
FEW = {"unit_mb": 0.002}  # three, on real ranks: each costs messages
NAMES = ("m", "v", "fresh", "worker_error", "server_error", "coeff", "factor", "scale")


def rate(step: int) -> float:
    """A learning rate that changes in every step."""
    return LR * (1 - (step - 1) / (2 * STEPS))


def build(options: dict, rank: int, ranks: int = 0, **how: Any) -> World:
    """So many virtual ranks, or with 0 the own one."""
    options = {"warmup_steps": WARMUP, "weight_decay": DECAY, **options}
    return begun(lambda p: OneBitLAMB(p, LR, **options), rank, ranks, **how)


def of_step(optimizer: OneBitLAMB, counter: ByteCounter) -> tuple:
    """Of a rank after any step."""
    sent = (counter.total, counter.collectives)
    return sent, *(torch.cat([u.state[name] for u in optimizer.units]).numpy() for name in ("factor", "coeff"))


def outcome(model: torch.nn.Module, optimizer: OneBitLAMB, steps: list[tuple]) -> dict:
    """Of a rank after the last one."""
    order = list(model.parameters())
    sent, factors, coeffs = (list(column) for column in zip(*steps, strict=True))
    return {
        "x": toy.flat(model).numpy(),
        "units": [[next(i for i, q in enumerate(order) if q is p) for p in u.params] for u in optimizer.units],
        "padded": [u.padded for u in optimizer.units],
        "sent": sent,
        "factors": factors,
        "coeffs": coeffs,
        **{name: torch.cat([u.state[name] for u in optimizer.units]).numpy() for name in NAMES},
    }


def hook_run(
    rank: int, world: int, options: dict, how: dict, broken: tuple[int, ...] = (), last: int = STEPS
) -> list[dict]:
    """Of every rank here. broken: in these steps rank 1 has gradients that are not finite."""
    made = build(options, rank, **how)
    steps: list[list[tuple]] = [[] for _ in made.optimizers]
    for step in range(1, last + 1):
        made.train([step], rate, [(1, step)] if step in broken else [])
        for mine, optimizer, counter in zip(steps, made.optimizers, made.counters, strict=True):
            mine.append(of_step(optimizer, counter))
    results = []
    for w, optimizer in enumerate(made.optimizers):
        with made.ranks.turn(w):
            results.append(outcome(made.model, optimizer, steps[w]))
    return results


def real_run(world: int, *arguments: Any, ranks_per_node: int | None = None) -> list[dict]:
    return [of_rank[0] for of_rank in run_ranks(hook_run, world, *arguments, ranks_per_node=ranks_per_node)]


@functools.cache
def small_run(world: int, decay: float = DECAY) -> list[dict]:
    """On virtual ranks, in several units."""
    return run_ranks(hook_run, 1, {"weight_decay": decay}, {"ranks": world, **SMALL})[0]


def oracle_run(
    units: list[list[int]], workers: int, per_worker: int = 1, last: int = STEPS
) -> tuple[Reference, torch.Tensor]:
    """A worker's gradient is the mean over its `per_worker` ranks, which are also the shards."""
    torch.set_num_threads(1)
    model = toy.make()
    oracle = Reference(list(model.parameters()), units, workers, LR, WARMUP, DECAY, shards=per_worker)
    for step in range(1, last + 1):
        oracle.lr = rate(step)
        local = reference.local_gradients(model, toy.loss, workers * per_worker, step)
        rows = [local[w * per_worker : (w + 1) * per_worker] for w in range(workers)]
        oracle.step([[sum(g[1:], g[0]) / per_worker for g in zip(*row, strict=True)] for row in rows])
    return oracle, toy.flat(model)


def check(results: list[dict], oracle: Reference, x: torch.Tensor) -> None:
    units = results[0]["units"]
    order = [i for unit in units for i in unit]
    for r in results:
        assert (r["x"] == x.numpy()).all()
        for name, mine in (("m", oracle.m), ("v", oracle.v), ("fresh", oracle.w)):
            assert (r[name] == torch.cat([oracle.flat(unit, mine) for unit in units]).numpy()).all()
        for name, mine in (("coeff", oracle.coeff), ("factor", oracle.factor), ("scale", oracle.scale)):
            assert (r[name] == torch.stack([mine[i] for i in order]).numpy()).all()


@pytest.mark.parametrize("world", [1, slow(2), 3, slow(4), slow(8)])
def test_hook_equals_the_reference_bit_for_bit(world: int) -> None:
    check_all(small_run(world))


@pytest.mark.slow
def test_real_ranks_equal_the_reference_bit_for_bit() -> None:
    check_all(real_run(3, {}, SMALL))


def check_all(results: list[dict]) -> None:
    world = len(results)
    assert len(results[0]["units"]) > 1
    oracle, x = oracle_run(results[0]["units"], world)
    check(results, oracle, x)
    for w, r in enumerate(results):
        assert (r["worker_error"] == torch.cat([e[w] for e in oracle.worker_error]).numpy()).all()
        parts = [e.view(world, -1)[w] for e in oracle.server_error]
        assert (r["server_error"] == torch.cat(parts).numpy()).all()
        assert abs(r["worker_error"]).max() > 0


def test_one_unit_is_one_fused_message() -> None:
    results = real_run(2, {}, {})
    assert len(results[0]["units"]) == 1
    check(results, *oracle_run(results[0]["units"], 2))


def test_hierarchical_equals_the_reference_with_nodes_as_workers() -> None:
    how = {"hierarchical": True, **FEW}
    results = real_run(4, {}, how, (), STEPS // 2, ranks_per_node=2)
    check(results, *oracle_run(results[0]["units"], 2, 2, STEPS // 2))
    assert results[0]["worker_error"].size == results[0]["m"].size // 2
    padded, units = sum(results[0]["padded"]), len(results[0]["padded"])
    # 2 nodes of 2 ranks. Warm-up: fp32 within the node each way, half of it between nodes each way.
    assert results[0]["sent"][0] == (2 * padded // 2 * 4 + 2 * padded // 2 // 2 * 4, 4 * units)
    bits = padded // 2 * 4 + 2 * padded // 2 // 16 + padded // 2 // 8
    assert results[0]["sent"][-1] == (bits + (8 + 4 * 2) * units, 4 * units)


@pytest.mark.parametrize("world", [1, 3, slow(4)])
def test_bytes_and_collectives_are_those_of_the_formula(world: int) -> None:
    r = small_run(world)[0]
    padded, units = sum(r["padded"]), len(r["padded"])
    dense = 2 * (world - 1) * padded // world * 4
    bits = 2 * (world - 1) * padded // world // 8 + 8 * (world - 1) * units
    several = world > 1
    assert r["sent"][:WARMUP] == [(dense, 2 * units * several)] * WARMUP
    assert r["sent"][WARMUP:] == [(bits, 2 * units * several)] * (STEPS - WARMUP)


@pytest.mark.slow
def test_a_half_precision_wire_halves_the_warmup_alone() -> None:
    full, half = (real_run(2, options, FEW) for options in ({}, {"wire": "bf16"}))
    assert half[0]["sent"][0][0] * 2 == full[0]["sent"][0][0]
    assert half[0]["sent"][-1] == full[0]["sent"][-1]
    assert (half[0]["x"] == half[1]["x"]).all()
    assert (half[0]["x"] != full[0]["x"]).any()


def test_ratios_freeze_and_factors_move_within_their_bounds() -> None:
    r = small_run(3)[0]
    coeffs, factors = torch.tensor(np.array(r["coeffs"])), torch.tensor(np.array(r["factors"]))
    assert (coeffs[WARMUP - 1 :] == coeffs[-1]).all()
    assert (coeffs[WARMUP - 2] != coeffs[-1]).any()
    assert (factors[:WARMUP] == 1).all()
    assert (factors[WARMUP:] != 1).any()
    assert (factors >= 0.5).all()
    assert (factors <= 4).all()
    change = factors[WARMUP:] / factors[WARMUP - 1 : -1] - 1
    assert change.abs().max() <= 0.1 + 1e-6  # three roundings of 2^-24 on top
    assert change.abs().max() > 0.09  # the limit is at work here


def test_coordinates_without_gradient_in_the_warmup_only_decay() -> None:
    free = small_run(2, decay=0.0)
    before = toy.make().embed.weight.detach()
    after = toy.part(free[0]["x"], "embed.weight")
    assert torch.equal(after[toy.USED :], before[toy.USED :])
    assert (after[: toy.USED] != before[: toy.USED]).all()
    after = toy.part(small_run(2)[0]["x"], "embed.weight")
    ratio = after[toy.USED :] / before[toy.USED :]
    assert (ratio < 1).all()
    assert ratio.max() - ratio.min() < 1e-5  # one factor for all of them


def test_gradients_that_are_not_finite_leave_all_ranks_consistent() -> None:
    """One step in the warm-up and one after it."""
    results = real_run(2, {}, FEW, (WARMUP - 3, WARMUP + 3), STEPS // 2)
    for r in results:
        assert (r["x"] == results[0]["x"]).all()
        assert all(torch.from_numpy(r[name]).isfinite().all() for name in ("x", *NAMES))


def resumed_run(rank: int, world: int, stops: tuple[int, ...]) -> list[tuple]:
    return [both for at in stops for both in ends(resumed(lambda: build({}, rank, **FEW), at, STEPS // 2, rate))]


def test_resumed_equals_uninterrupted_bit_for_bit() -> None:
    """From within the warm-up, from its last step, and from within the compressed stage."""
    for found in run_ranks(resumed_run, 2, (WARMUP - 7, WARMUP, WARMUP + 5)):
        assert all((again == straight).all() for straight, again in found)
