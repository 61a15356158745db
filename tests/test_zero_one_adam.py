"""0/1 Adam against its one-process reference, through warm-up, local steps and every change of an interval."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from birder import Plan, ZeroOneAdam, attach
from birder.optimizers import zero_one_schedule as schedule
from tests import reference, toy
from tests.ranks import run_ranks
from tests.reference_zero_one_adam import ZeroOneAdam as Reference

WARMUP, KAPPA, DOUBLING, LIMIT = 12, 3, 11, 4
STEPS, LR, DECAY, EPS = 64, 0.02, 0.05, 1e-3
LOCAL = 37  # a step with local steps before and after it, in both variants
VARIANTS = ("paper", "deepspeed")
OPTIONS = {"warmup_steps": WARMUP, "kappa": KAPPA, "local_doubling": DOUBLING, "local_limit": LIMIT}


def rate(step: int) -> float:
    """Warm-up from 0, then halving every DOUBLING steps."""
    return LR * min(1.0, (step - 1) / WARMUP) * 0.5 ** (max(0, step - WARMUP) / DOUBLING)


def build(variant: str, how: dict):
    model = toy.make()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    optimizer = ZeroOneAdam(model.parameters(), LR, eps=EPS, weight_decay=DECAY, variant=variant, **OPTIONS)
    return model, ddp, optimizer, attach(ddp, optimizer, **how)


def advance(rank: int, ddp, optimizer: ZeroOneAdam, step: int, broken: tuple = ()) -> None:
    for group in optimizer.param_groups:  # before backward, in which the message is made
        group["lr"] = rate(step)
    optimizer.zero_grad()
    (toy.loss(ddp, rank, step) * (float("nan") if (rank, step) in broken else 1.0)).backward()
    optimizer.step()


def one_run(rank: int, variant: str, how: dict, broken: tuple = ()) -> dict:
    model, ddp, optimizer, attachment = build(variant, how)
    xs, sent, average = [], [], None
    for step in range(1, STEPS + 1):
        attachment.counter.reset()
        advance(rank, ddp, optimizer, step, broken)
        sent.append((attachment.counter.total, attachment.counter.collectives))
        xs.append(toy.flat(model).numpy().copy())
        if step == LOCAL:
            with optimizer.averaged():
                average = toy.flat(model).numpy().copy()
            assert (toy.flat(model).numpy() == xs[-1]).all()
    state = {k: v.numpy() for k, v in optimizer.units[0].state.items()}
    return {"x": np.stack(xs), "sent": sent, "average": average, "units": len(optimizer.units), **state}


def hook_run(rank: int, world: int, how: dict, broken: tuple = ()) -> list[dict]:
    return [one_run(rank, variant, how, broken) for variant in VARIANTS]


@functools.cache
def plain_run(world: int) -> list[list[dict]]:
    """[variant][rank]"""
    return list(zip(*run_ranks(hook_run, world, {}), strict=True))


@functools.cache
def oracle_run(world: int, variant: str) -> tuple[Reference, np.ndarray, list[dict]]:
    """The reference at its end; x of every step and rank; the rounds of every step."""
    torch.set_num_threads(1)
    model = toy.make()
    params = list(model.parameters())
    places = [torch.from_numpy(e) for e in reference.element_numbers(params)]
    size = max(int(e[-1]) for e in places) + 1

    def gather(tensors: list[torch.Tensor]) -> torch.Tensor:
        out = torch.zeros(-(-size // (32 * world)) * 32 * world)
        for e, t in zip(places, tensors, strict=True):
            out[e] = t.detach().flatten()
        return out

    oracle = Reference(
        gather(params),
        world,
        warmup=WARMUP,
        kappa=KAPPA,
        doubling=DOUBLING,
        limit=LIMIT,
        deepspeed=variant == "deepspeed",
        eps=EPS,
        decay=DECAY,
    )
    xs, had = [], []
    for step in range(1, STEPS + 1):
        grads = []
        for w in range(world):
            with torch.no_grad():
                for e, p in zip(places, params, strict=True):
                    p.copy_(oracle.x[w][e].view_as(p))
            model.zero_grad()
            toy.loss(model, w, step).backward()
            grads.append(gather([p.grad for p in params]))
        oracle.step(torch.stack(grads), rate(step))
        xs.append(torch.stack([torch.cat([row[e] for e in places]) for row in oracle.x]).numpy())
        had.append(oracle.had)
    return oracle, np.stack(xs), had


CASES = [(world, variant) for world in (1, 2, 3, 4, 8) for variant in VARIANTS]


@pytest.mark.parametrize(("world", "variant"), CASES)
def test_hook_equals_the_reference_bit_for_bit(world, variant):
    results = plain_run(world)[VARIANTS.index(variant)]
    oracle, xs, _ = oracle_run(world, variant)
    assert np.isfinite(xs).all()
    for w, r in enumerate(results):
        differ = np.flatnonzero((r["x"] != xs[:, w]).any(1))
        assert not differ.size, f"first in step {differ[0] + 1}"
        for name in ("m", "u"):
            assert (r[name] == getattr(oracle, name)[w].numpy()).all()
        assert (r["v"] == oracle.v.numpy()).all()
        assert (r["worker_error"] == oracle.one_bit.worker_error[w].numpy()).all()
        assert (r["server_error"] == oracle.one_bit.server_error[w].numpy()).all()


@pytest.mark.parametrize(("world", "variant"), [c for c in CASES if c[0] > 1])
def test_models_agree_after_every_sync_and_differ_between(world, variant):
    results = plain_run(world)[VARIANTS.index(variant)]
    for step in range(1, STEPS + 1):
        equal = all((r["x"][step - 1] == results[0]["x"][step - 1]).all() for r in results)
        synced = schedule.sync(step, WARMUP, DOUBLING, LIMIT, variant == "deepspeed")
        assert equal == synced, step


@pytest.mark.parametrize(("world", "variant"), CASES)
def test_bytes_of_every_step(world, variant):
    results = plain_run(world)[VARIANTS.index(variant)]
    size = results[0]["m"].size
    for step, had in enumerate(oracle_run(world, variant)[2], start=1):
        # All-to-all and all-gather of size/n floats; of size/n bits and a scale behind them.
        dense = 2 * (world - 1) * 4 * size // world
        onebit = 2 * (world - 1) * (size // world // 8 + 4)
        expected = dense * had["variance"] + onebit * had["onebit"]
        rounds = 2 * had["variance"] + 2 * had["onebit"]
        for r in results:
            assert r["units"] == 1
            assert r["sent"][step - 1] == (expected, rounds if world > 1 else 0), step


def test_evaluation_takes_the_mean_of_the_models():
    for results in plain_run(3):
        total = results[0]["x"][LOCAL - 1].copy()
        for r in results[1:]:
            total += r["x"][LOCAL - 1]
        assert all((r["average"] == total / np.float32(3)).all() for r in results)


def test_a_row_without_gradient_only_decays():
    before = toy.make().embed.weight.detach()[toy.USED :]
    for variant, results in zip(VARIANTS, plain_run(2), strict=True):
        after = toy.part(results[0]["x"][-1], "embed.weight")[toy.USED :]
        # deepspeed: the decay of local steps is in the buffer, which has nothing outside of the support.
        steps = [t for t in range(1, STEPS + 1) if variant == "paper" or t <= WARMUP]
        shrunk = np.prod([1 - rate(t) * DECAY for t in steps])
        assert torch.allclose(after, before * shrunk, rtol=1e-5, atol=0)


def test_hierarchical_agrees_on_all_ranks():
    for variant, results in zip(VARIANTS, zip(*run_ranks(hook_run, 4, {"hierarchical": True}, ranks_per_node=2))):
        for step in range(1, STEPS + 1):
            if schedule.sync(step, WARMUP, DOUBLING, LIMIT, variant == "deepspeed"):
                assert all((r["x"][step - 1] == results[0]["x"][step - 1]).all() for r in results)
        assert np.isfinite(results[0]["x"]).all()
        assert results[0]["worker_error"].size == results[0]["m"].size // 2


def test_a_gradient_that_is_not_finite_leaves_ranks_consistent():
    # A step with a variance round, one with a 1-bit round alone, a local step.
    broken = ((1, 6), (0, 7), (1, LOCAL))
    for variant, results in zip(VARIANTS, zip(*run_ranks(hook_run, 2, {}, broken), strict=True), strict=True):
        assert all(np.isfinite(r["x"]).all() for r in results)
        last = max(t for t in range(STEPS + 1) if schedule.sync(t, WARMUP, DOUBLING, LIMIT, variant == "deepspeed"))
        assert (results[0]["x"][last - 1] == results[1]["x"][last - 1]).all()
        assert (results[0]["v"] == results[1]["v"]).all()


def interrupted(rank: int, world: int, cases: list[tuple[str, int]]) -> list[tuple]:
    found, until = [], LOCAL + 8
    for variant, at in cases:
        model, ddp, optimizer, _ = build(variant, {"unit_mb": 0.0015})
        for step in range(1, until + 1):
            advance(rank, ddp, optimizer, step)
            if step == at:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        fresh, ddp, optimizer, _ = build(variant, {"unit_mb": 0.0015})
        assert len(optimizer.units) > 1
        fresh.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        for step in range(at + 1, until + 1):
            advance(rank, ddp, optimizer, step)
        found.append((toy.flat(model).numpy(), toy.flat(fresh).numpy()))
    return found


def test_resumed_equals_uninterrupted_bit_for_bit():
    """Within the warm-up, at its last step, and within a local interval."""
    cases = [(variant, at) for variant in VARIANTS for at in (5, WARMUP, LOCAL)]
    for rank in run_ranks(interrupted, 2, cases):
        for case, (straight, resumed) in zip(cases, rank, strict=True):
            assert (straight == resumed).all(), case


# ---- one process ---------------------------------------------------------------------------------------------------------


def lonely(size: int, lr: float = 0.01, **options) -> tuple[torch.nn.Parameter, ZeroOneAdam]:
    x = torch.nn.Parameter(torch.zeros(size))
    return x, ZeroOneAdam([x], lr, **{"warmup_steps": 8, "kappa": 2, **options})


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_coordinate_joins_after_its_first_variance_round(variant):
    x, optimizer = lonely(96, eps=1e-2, variant=variant)
    rounds = sorted(schedule.variance_steps(8, 2, variant == "deepspeed"))
    assert rounds == ([1, 2, 4, 6, 8] if variant == "deepspeed" else [1, 2, 3, 5, 7])
    # Coordinate 0 from the start; 1 from step 4 on; 2 only after the freeze; 3 never.
    moved: dict[int, int] = {}
    for step in range(1, 31):
        x.grad = torch.zeros(96)
        x.grad[0] = 1.0
        x.grad[1] = float(step >= 4)
        x.grad[2] = float(step > 8)
        before = x.detach().clone()
        optimizer.step()
        for i in (x.detach() != before).nonzero().flatten().tolist():
            moved.setdefault(i, step)
    # paper: the model moves before the variance is refreshed. deepspeed: after it.
    assert moved == ({0: 1, 1: 4} if variant == "deepspeed" else {0: 2, 1: 6})


def test_what_was_not_sent_is_kept():
    """sum of what was applied + errors = sum of the buffers: with v frozen, over syncs of every interval."""
    x, optimizer = lonely(256, lr=0.1, warmup_steps=4, local_doubling=10, local_limit=4)
    buffers = torch.zeros(256, dtype=torch.float64)
    original = optimizer.onebit_mean

    def recorded(unit, message):
        buffers.add_(message)
        return original(unit, message)

    generator = torch.Generator().manual_seed(1)
    for step in range(1, 61):
        x.grad = torch.randn(256, generator=generator) + 0.5
        if step == 5:
            state = optimizer.units[0].state
            errors = state["worker_error"].double() + state["server_error"].double()
            start = x.detach().double()
            optimizer.onebit_mean = recorded
        optimizer.step()
        if step > 5 and optimizer.synced(step):
            applied = (start - x.detach().double()) * (state["v"].double().sqrt() + 1e-8)
            left = state["worker_error"].double() + state["server_error"].double() - errors
            # fp32 rounding of x, 60 times, times the denominator.
            assert torch.allclose(applied + left, buffers, rtol=0, atol=1e-4)
    assert buffers.abs().max() > 0.1


def test_steps_without_learning_rate_change_nothing_but_the_variance():
    x, optimizer = lonely(64)
    optimizer.param_groups[0]["lr"] = 0.0
    for _ in range(3):
        x.grad = torch.ones(64)
        optimizer.step()
    state = optimizer.units[0].state
    assert (x == 0).all()
    assert (state["m"] == 0).all()
    assert (state["v"] > 0).all()


def test_it_converges():
    for variant in VARIANTS:
        torch.manual_seed(0)
        target = torch.randn(1000)
        options = {"warmup_steps": 60, "kappa": 16, "local_doubling": 80, "local_limit": 4}
        x, optimizer = lonely(1000, eps=1e-2, variant=variant, **options)
        for step in range(600):
            optimizer.param_groups[0]["lr"] = 0.02 * min(1, step / 60) * 0.5 ** (max(0, step - 60) / 80)
            x.grad = x.detach() - target
            optimizer.step()
        assert (x - target).abs().mean() < 0.1  # 0.8 at the start, 0.04 at the end


@pytest.mark.parametrize("aligned", [False, True])
def test_the_schedule_by_counting(aligned):
    """Closed forms against the reference's counters, with a limit that is no power of two as well."""
    for warmup, kappa, doubling, limit in ((12, 3, 11, 4), (40, 1, 7, 16), (1, 1, 1, 16), (9, 16, 5, 6), (7, 2, 3, 1)):
        oracle = Reference(
            torch.zeros(1), 1, warmup=warmup, kappa=kappa, doubling=doubling, limit=limit, deepspeed=aligned
        )
        counted = {"variance": 0, "onebit": 0, "sync": 0}
        for step in range(1, 200):
            oracle.steps = step
            oracle.rounds_now()
            counted = {name: counted[name] + oracle.had[name] for name in counted}
            found = schedule.rounds(step, warmup, kappa, doubling, limit, aligned)
            assert found == schedule.Rounds(step, counted["variance"], counted["onebit"], step - counted["sync"])
            assert oracle.had["variance"] == (step in schedule.variance_steps(warmup, kappa, aligned))
            assert oracle.had["sync"] == schedule.sync(step, warmup, doubling, limit, aligned), (step, warmup)


def test_the_plan_is_a_function_of_the_step_alone():
    _, optimizer = lonely(1, local_doubling=4, local_limit=4)
    plans = [optimizer.plan(t) for t in range(1, 40)]
    assert plans == [optimizer.plan(t) for t in range(39, 0, -1)][::-1]
    assert plans[:12] == [Plan.COMPRESSED] * 12
    assert {Plan.SKIP, Plan.COMPRESSED} == set(plans[12:])


@pytest.mark.parametrize("name", ["warmup_steps", "kappa", "local_doubling", "local_limit"])
@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_numbers_must_be_whole_and_positive(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must be a whole number"):
        lonely(1, **{name: value})


def test_the_variant_must_be_known():
    with pytest.raises(ValueError, match=r"^variant must be paper or deepspeed"):
        lonely(1, variant="0/1")
