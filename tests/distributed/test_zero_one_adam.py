"""0/1 Adam against its one-process reference, through warm-up, local steps and every change of an interval.

Virtual ranks; on real ones a flat world, nodes, broken gradients and what is interrupted.
"""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from birder import ZeroOneAdam, attach
from birder.optim import zero_one_schedule as schedule
from tests.helpers import reference, toy
from tests.helpers.ranks import run_ranks
from tests.helpers.reference_zero_one_adam import ZeroOneAdam as Reference
from tests.helpers.tiers import slow
from tests.helpers.virtual import World

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


def outcome(optimizer: ZeroOneAdam, xs: list[np.ndarray], sent: list[tuple[int, int]], average: np.ndarray) -> dict:
    state = {k: v.numpy() for k, v in optimizer.units[0].state.items()}
    return {"x": np.stack(xs), "sent": sent, "average": average, "units": len(optimizer.units), **state}


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
    assert average is not None
    return outcome(optimizer, xs, sent, average)


def hook_run(rank: int, world: int, variants: list[str], how: dict, broken: tuple = ()) -> list[dict]:
    return [one_run(rank, variant, how, broken) for variant in variants]


def virtual_run(rank: int, world: int, ranks: int, variant: str, ranks_per_node: int = 0) -> list[dict]:
    """`one_run` on so many virtual ranks. ranks_per_node: nodes are the workers."""
    options = {"eps": EPS, "weight_decay": DECAY, "variant": variant, **OPTIONS}
    how = {"hierarchical": ranks_per_node > 0}
    made = World(lambda p: ZeroOneAdam(p, LR, **options), ranks, ranks_per_node or 1, **how)
    xs, sent, averages = [], [], []
    for step in range(1, STEPS + 1):
        made.ranks.counter.reset()
        made.set_lr(rate(step))
        made.step(step)
        sent.append([(counter.total, counter.collectives) for counter in made.counters])
        xs.append([x.numpy() for x in made.models()])
        if step == LOCAL:
            with made.ranks.averaged():
                averages = [x.numpy() for x in made.models()]
            assert all((a.numpy() == b).all() for a, b in zip(made.models(), xs[-1], strict=True))
    found = zip(made.optimizers, zip(*xs, strict=True), zip(*sent, strict=True), averages, strict=True)
    return [outcome(optimizer, list(x), list(s), average) for optimizer, x, s, average in found]


@functools.cache
def plain_run(world: int, variant: str) -> list[dict]:
    return run_ranks(virtual_run, 1, world, variant)[0]


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
TIERS = [case if case[0] == 3 else slow(*case) for case in CASES]


@pytest.mark.parametrize(("world", "variant"), TIERS)
def test_hook_equals_the_reference_bit_for_bit(world, variant):
    check(plain_run(world, variant), variant)


@pytest.mark.parametrize(("world", "variant"), [(2, "paper"), slow(3, "paper"), slow(3, "deepspeed")])
def test_real_ranks_equal_the_reference_bit_for_bit(world, variant):
    check([of_rank[0] for of_rank in run_ranks(hook_run, world, [variant], {})], variant)


def check(results: list[dict], variant: str) -> None:
    world = len(results)
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


@pytest.mark.parametrize(("world", "variant"), TIERS[2:])
def test_models_agree_after_every_sync_and_differ_between(world, variant):
    results = plain_run(world, variant)
    for step in range(1, STEPS + 1):
        equal = all((r["x"][step - 1] == results[0]["x"][step - 1]).all() for r in results)
        synced = schedule.sync(step, WARMUP, DOUBLING, LIMIT, variant == "deepspeed")
        assert equal == synced, step


@pytest.mark.parametrize(("world", "variant"), TIERS)
def test_bytes_of_every_step(world, variant):
    results = plain_run(world, variant)
    size = results[0]["m"].size
    for step, had in enumerate(oracle_run(world, variant)[2], start=1):
        # All-to-all and all-gather of size/n floats; of size/n bits and a scale behind them.
        dense = 2 * (world - 1) * 4 * size // world
        onebit = 2 * (world - 1) * (size // world // 8 + 4)
        expected = dense * had["variance"] + onebit * had["onebit"]
        rounds = 2 * had["variance"] + 2 * had["onebit"]
        aligned = variant == "deepspeed"
        synced = [schedule.sync(s, WARMUP, DOUBLING, LIMIT, aligned) for s in (step - 1, step)]
        if synced == [False, True]:  # were parameters changed meanwhile? A byte to each.
            expected, rounds = expected + world - 1, rounds + 1
        for r in results:
            assert r["units"] == 1
            assert r["sent"][step - 1] == (expected, rounds if world > 1 else 0), step


def test_evaluation_takes_the_mean_of_the_models():
    for variant in VARIANTS:
        results = plain_run(3, variant)
        total = results[0]["x"][LOCAL - 1].copy()
        for r in results[1:]:
            total += r["x"][LOCAL - 1]
        assert all((r["average"] == total / np.float32(3)).all() for r in results)


def test_a_row_without_gradient_only_decays():
    before = toy.make().embed.weight.detach()[toy.USED :]
    for variant in VARIANTS:
        results = plain_run(2, variant)
        after = toy.part(results[0]["x"][-1], "embed.weight")[toy.USED :]
        # deepspeed: the decay of local steps is in the buffer, which has nothing outside of the support.
        steps = [t for t in range(1, STEPS + 1) if variant == "paper" or t <= WARMUP]
        shrunk = np.prod([1 - rate(t) * DECAY for t in steps])
        assert torch.allclose(after, before * shrunk, rtol=1e-5, atol=0)


@pytest.mark.slow
def test_hierarchical_agrees_on_all_ranks():
    (real,) = zip(*run_ranks(hook_run, 4, ["paper"], {"hierarchical": True}, ranks_per_node=2), strict=True)
    virtual = run_ranks(virtual_run, 1, 4, "deepspeed", 2)[0]
    for variant, results in zip(VARIANTS, (real, virtual), strict=True):
        for step in range(1, STEPS + 1):
            if schedule.sync(step, WARMUP, DOUBLING, LIMIT, variant == "deepspeed"):
                assert all((r["x"][step - 1] == results[0]["x"][step - 1]).all() for r in results)
        assert np.isfinite(results[0]["x"]).all()
        assert results[0]["worker_error"].size == results[0]["m"].size // 2


def test_a_gradient_that_is_not_finite_leaves_ranks_consistent():
    # A step with a variance round, one with a 1-bit round alone, a local step.
    broken = ((1, 6), (0, 7), (1, LOCAL))
    for variant, results in zip(
        VARIANTS, zip(*run_ranks(hook_run, 2, list(VARIANTS), {}, broken), strict=True), strict=True
    ):
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


def interrupted_virtually(rank: int, world: int, cases: list[tuple[str, int]]) -> list[list[tuple]]:
    """For each case the two ends of each of two ranks."""
    found = []
    for variant, at in cases:
        options = {"eps": EPS, "weight_decay": DECAY, "variant": variant, **OPTIONS}
        whole, fresh = (World(lambda p: ZeroOneAdam(p, LR, **options), 2, unit_mb=0.0015) for _ in range(2))  # noqa: B023
        for step in range(1, LOCAL + 9):
            if step == at + 1:
                fresh.load(whole.saved())
            for made in (whole, fresh) if step > at else (whole,):
                made.set_lr(rate(step))
                made.step(step)
        found.append(list(zip(whole.models(), fresh.models(), strict=True)))
    return found


def test_resumed_equals_uninterrupted_bit_for_bit():
    """Within the warm-up, at its last step, and within a local interval; the last on real ranks too."""
    cases = [(variant, at) for variant in VARIANTS for at in (5, WARMUP, LOCAL)]
    for case, ends in zip(cases, run_ranks(interrupted_virtually, 1, cases)[0], strict=True):
        assert all((straight == resumed).all() for straight, resumed in ends), case
    for ((straight, resumed),) in run_ranks(interrupted, 2, [("paper", LOCAL)]):
        assert (straight == resumed).all()
