"""1-bit LAMB against its one-process reference, bit for bit, through the warm-up and long after it; its invariants."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from birder import LAMB, OneBitLAMB, attach
from tests import reference, toy
from tests.ranks import run_ranks
from tests.reference_onebit_lamb import OneBitLAMB as Reference

WARMUP, STEPS, LR, DECAY = 20, 64, 0.02, 0.01
SMALL = {"unit_mb": 0.0008}  # several units in a model this small
NAMES = ("m", "v", "fresh", "worker_error", "server_error", "coeff", "factor", "scale")


def rate(step: int) -> float:
    """A learning rate that changes in every step."""
    return LR * (1 - (step - 1) / (2 * STEPS))


def build(options: dict, how: dict) -> tuple:
    model = toy.make()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    options = {"warmup_steps": WARMUP, "weight_decay": DECAY, **options}
    optimizer = OneBitLAMB(model.parameters(), LR, **options)
    return model, ddp, optimizer, attach(ddp, optimizer, **how)


def advance(rank: int, ddp, optimizer, first: int, last: int, broken: tuple[int, ...] = ()) -> None:
    """broken: in these steps rank 1 has gradients that are not finite."""
    for step in range(first, last + 1):
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.zero_grad()
        value = toy.loss(ddp, rank, step)
        (value * float("nan") if rank == 1 and step in broken else value).backward()
        optimizer.step()


def hook_run(rank: int, world: int, options: dict, how: dict, broken: tuple[int, ...] = ()) -> dict:
    model, ddp, optimizer, attachment = build(options, how)
    order = list(model.parameters())
    sent, factors, coeffs = [], [], []
    for step in range(1, STEPS + 1):
        attachment.counter.reset()
        advance(rank, ddp, optimizer, step, step, broken)
        sent.append((attachment.counter.total, attachment.counter.collectives))
        factors.append(torch.cat([u.state["factor"] for u in optimizer.units]).numpy())
        coeffs.append(torch.cat([u.state["coeff"] for u in optimizer.units]).numpy())
    return {
        "x": toy.flat(model).numpy(),
        "units": [[next(i for i, q in enumerate(order) if q is p) for p in u.params] for u in optimizer.units],
        "padded": [u.padded for u in optimizer.units],
        "sent": sent,
        "factors": factors,
        "coeffs": coeffs,
        **{name: torch.cat([u.state[name] for u in optimizer.units]).numpy() for name in NAMES},
    }


@functools.cache
def small_run(world: int) -> list[dict]:
    return run_ranks(hook_run, world, {}, SMALL)


def oracle_run(units: list[list[int]], workers: int, per_worker: int = 1) -> tuple[Reference, torch.Tensor]:
    """A worker's gradient is the mean over its `per_worker` ranks, which are also the shards."""
    torch.set_num_threads(1)
    model = toy.make()
    oracle = Reference(list(model.parameters()), units, workers, LR, WARMUP, DECAY, shards=per_worker)
    for step in range(1, STEPS + 1):
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


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_hook_equals_the_reference_bit_for_bit(world: int) -> None:
    results = small_run(world)
    assert len(results[0]["units"]) > 1
    oracle, x = oracle_run(results[0]["units"], world)
    check(results, oracle, x)
    for w, r in enumerate(results):
        assert (r["worker_error"] == torch.cat([e[w] for e in oracle.worker_error]).numpy()).all()
        parts = [e.view(world, -1)[w] for e in oracle.server_error]
        assert (r["server_error"] == torch.cat(parts).numpy()).all()
        assert abs(r["worker_error"]).max() > 0


def test_one_unit_is_one_fused_message() -> None:
    results = run_ranks(hook_run, 2, {}, {})
    assert len(results[0]["units"]) == 1
    check(results, *oracle_run(results[0]["units"], 2))


def test_hierarchical_equals_the_reference_with_nodes_as_workers() -> None:
    results = run_ranks(hook_run, 4, {}, {"hierarchical": True, **SMALL}, ranks_per_node=2)
    check(results, *oracle_run(results[0]["units"], 2, 2))
    assert results[0]["worker_error"].size == results[0]["m"].size // 2
    padded, units = sum(results[0]["padded"]), len(results[0]["padded"])
    # 2 nodes of 2 ranks. Warm-up: fp32 within the node each way, half of it between nodes each way.
    assert results[0]["sent"][0] == (2 * padded // 2 * 4 + 2 * padded // 2 // 2 * 4, 4 * units)
    bits = padded // 2 * 4 + 2 * padded // 2 // 16 + padded // 2 // 8
    assert results[0]["sent"][-1] == (bits + (8 + 4 * 2) * units, 4 * units)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_bytes_and_collectives_are_those_of_the_formula(world: int) -> None:
    r = small_run(world)[0]
    padded, units = sum(r["padded"]), len(r["padded"])
    dense = 2 * (world - 1) * padded // world * 4
    bits = 2 * (world - 1) * padded // world // 8 + 8 * (world - 1) * units
    several = world > 1
    assert r["sent"][:WARMUP] == [(dense, 2 * units * several)] * WARMUP
    assert r["sent"][WARMUP:] == [(bits, 2 * units * several)] * (STEPS - WARMUP)


def test_a_half_precision_wire_halves_the_warmup_alone() -> None:
    full, half = small_run(2), run_ranks(hook_run, 2, {"wire": "bf16"}, SMALL)
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
    free = run_ranks(hook_run, 2, {"weight_decay": 0.0}, SMALL)
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
    results = run_ranks(hook_run, 2, {}, SMALL, (WARMUP - 3, WARMUP + 3))
    for r in results:
        assert (r["x"] == results[0]["x"]).all()
        assert all(torch.from_numpy(r[name]).isfinite().all() for name in ("x", *NAMES))


def resumed_run(rank: int, world: int, stops: tuple[int, ...]) -> tuple:
    model, ddp, optimizer, attachment = build({}, SMALL)
    saved, done = [], 0
    for stop in stops:
        advance(rank, ddp, optimizer, done + 1, stop)
        saved.append((copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())))
        done = stop
    advance(rank, ddp, optimizer, done + 1, STEPS // 2)
    attachment.close()
    ends = []
    for stop, (parameters, state) in zip(stops, saved, strict=True):
        fresh, ddp, optimizer, attachment = build({}, SMALL)
        fresh.load_state_dict(parameters)
        optimizer.load_state_dict(state)
        advance(rank, ddp, optimizer, stop + 1, STEPS // 2)
        attachment.close()
        ends.append(toy.flat(fresh).numpy())
    return toy.flat(model).numpy(), ends


def test_resumed_equals_uninterrupted_bit_for_bit() -> None:
    """From within the warm-up, from its last step, and from within the compressed stage."""
    for straight, ends in run_ranks(resumed_run, 3, (WARMUP - 7, WARMUP, WARMUP + 5)):
        assert all((end == straight).all() for end in ends)


def alone(*params: torch.nn.Parameter, **options) -> OneBitLAMB:
    return OneBitLAMB(params, 0.01, **{"warmup_steps": 5, **options})


def grads(step: int, size: int, length: float = 1.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(step)) * length


def test_tensors_are_scaled_to_one_size_before_they_share_a_message() -> None:
    lengths = (1e-4, 1.0, 30.0)
    params = [torch.nn.Parameter(grads(50 + k, 200 + 31 * k)) for k in range(3)]
    optimizer = alone(*params)
    for step in range(1, 6):
        for k, p in enumerate(params):
            p.grad = grads(step * 10 + k, p.numel(), lengths[k])
        optimizer.step()
    (unit,) = optimizer.units
    rms = [float(m.square().mean().sqrt()) for m in unit.views(unit.state["m"])]
    scaled = [a * float(s) for a, s in zip(rms, unit.state["scale"], strict=True)]
    assert scaled == pytest.approx([sum(rms) / 3] * 3, rel=1e-5)
    assert max(rms) > 1e5 * min(rms)


@pytest.mark.parametrize("kind", ["never used", "used long ago"])
def test_a_tensor_without_momentum_at_the_freeze_stays_and_spoils_nothing(kind: str) -> None:
    """Its scale would be infinite, and every message of its unit with it."""

    def run(*params: torch.nn.Parameter) -> list[torch.Tensor]:
        optimizer = alone(*params)
        frozen = params
        for step in range(1, 21):
            params[0].grad = grads(step, 64)
            if params[1:]:
                quiet = step == 5 or (kind == "never used" and step < 5)
                params[1].grad = torch.zeros(40) if quiet else grads(step + 100, 40)
            if step == 5 and kind == "used long ago" and params[1:]:
                (unit,) = optimizer.units
                unit.view(unit.state["m"], 0).fill_(1e-30)  # the last parameter is the first of its unit
            optimizer.step()
            if step == 5:
                frozen = tuple(p.detach().clone() for p in params)
        return [*(p.detach() for p in params), *frozen]

    alone_end, _ = run(torch.nn.Parameter(torch.ones(64)))
    end, idle, _, idle_before = run(torch.nn.Parameter(torch.ones(64)), torch.nn.Parameter(torch.full((40,), 2.0)))
    assert torch.equal(idle, idle_before)
    assert torch.equal(end, alone_end)


def test_before_the_freeze_it_is_lamb() -> None:
    """One worker's warm-up, bit for bit LAMB with the same bounds and without bias correction."""
    bounds = {"min_coeff": 0.01, "max_coeff": 0.3, "eps": 1e-8, "weight_decay": 0.02}
    ends = []
    for make in (
        lambda p: LAMB(p, 0.01, bias_correction=False, **bounds),
        lambda p: OneBitLAMB(p, 0.01, warmup_steps=15, **bounds),
    ):
        model = toy.make()
        optimizer = make(model.parameters())
        for step in range(1, 16):
            optimizer.zero_grad()
            toy.loss(model, 0, step).backward()
            optimizer.step()
        ends.append(toy.flat(model))
    assert torch.equal(*ends)


def test_the_loss_falls_on_in_the_compressed_stage() -> None:
    p = torch.nn.Parameter(grads(1, 500))
    target = grads(2, 500)
    optimizer = OneBitLAMB([p], 0.05, warmup_steps=40)
    losses = []
    for step in range(1, 201):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 201)
        optimizer.zero_grad()
        loss = (p - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[39] / 10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warmup_steps": 0}, r"^warmup_steps must be a whole number"),
        ({"warmup_steps": 1.5}, r"^warmup_steps must be a whole number"),
        ({"eps": 0.0}, "^eps must be above 0"),
        ({"min_coeff": -1.0}, "^min_coeff must be at least 0"),
        ({"min_coeff": 2.0, "max_coeff": 1.0}, "^max_coeff must be above 0, at least min_coeff"),
        ({"coeff_beta": 1.0}, "^coeff_beta must be in"),
        ({"factor_min": 1.5}, "^factor_min must be in"),
        ({"factor_max": 0.9}, "^factor_max must be at least 1"),
        ({"factor_threshold": 1.0}, "^factor_threshold must be in"),
        ({"wire": "int8"}, "^wire must be one of"),
    ],
)
def test_arguments_out_of_range_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        alone(torch.nn.Parameter(torch.zeros(1)), **options)
