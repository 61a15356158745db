"""0/1 Adam against its one-process reference, through warm-up, local steps and every change of an interval.

Virtual ranks; on real ones a flat world, nodes, broken gradients and what is interrupted.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from birder import ZeroOneAdam
from birder.optim import zero_one_schedule as schedule
from tests.helpers import reference, toy
from tests.helpers.ranks import run_ranks
from tests.helpers.reference_zero_one_adam import ZeroOneAdam as Reference
from tests.helpers.tiers import slow
from tests.helpers.virtual import World, begun, ends, resumed

WARMUP, KAPPA, DOUBLING, LIMIT = 12, 3, 11, 4
STEPS, LR, DECAY, EPS = 64, 0.02, 0.05, 1e-3
LOCAL = 37  # a step with local steps before and after it, in both variants
VARIANTS = ("paper", "deepspeed")
OPTIONS = {"warmup_steps": WARMUP, "kappa": KAPPA, "local_doubling": DOUBLING, "local_limit": LIMIT}


def rate(step: int) -> float:
    """Warm-up from 0, then halving every DOUBLING steps."""
    return LR * min(1.0, (step - 1) / WARMUP) * 0.5 ** (max(0, step - WARMUP) / DOUBLING)


def build(variant: str, rank: int, ranks: int = 0, ranks_per_node: int = 1, **how) -> World:
    """So many virtual ranks, or with 0 the own one."""
    options = {"eps": EPS, "weight_decay": DECAY, "variant": variant, **OPTIONS}
    return begun(lambda p: ZeroOneAdam(p, LR, **options), rank, ranks, ranks_per_node, **how)


def run(rank: int, world: int, variant: str, broken: tuple = (), **where) -> list[dict]:
    """Of every rank here. broken: as for `World.train`; where: as for `build`."""
    made = build(variant, rank, **where)
    xs, sent, averages = [], [], []
    for step in range(1, STEPS + 1):
        sent += zip(*made.train([step], rate, broken), strict=True)
        xs.append([x.numpy() for x in made.models()])
        if step == LOCAL:
            with made.ranks.averaged():
                averages = [x.numpy() for x in made.models()]
            assert all((a.numpy() == b).all() for a, b in zip(made.models(), xs[-1], strict=True))
    results = []
    for optimizer, x, s, average in zip(
        made.optimizers, zip(*xs, strict=True), zip(*sent, strict=True), averages, strict=True
    ):
        state = {k: v.numpy() for k, v in optimizer.units[0].state.items()}
        found = {"x": np.stack(x), "sent": s, "average": average, "units": len(optimizer.units)}
        results.append({**found, **state})
    return results


def run_all(rank: int, world: int, cases: list[dict]) -> list[list[dict]]:
    return [run(rank, world, **case) for case in cases]


def real_run(world: int, *cases: dict, **how) -> list[list[dict]]:
    """For each case what `run` gives on real ranks."""
    return [
        [of_rank[0] for of_rank in case] for case in zip(*run_ranks(run_all, world, list(cases), **how), strict=True)
    ]


@functools.cache
def plain_run(world: int, variant: str) -> list[dict]:
    return run_ranks(run_all, 1, [{"variant": variant, "ranks": world}])[0][0]


@functools.cache
def oracle_run(world: int, variant: str) -> tuple[Reference, np.ndarray, list[dict]]:
    """The reference at its end; x of every step and rank; the rounds of every step."""
    torch.set_num_threads(1)
    model = toy.make()
    layout = reference.Layout(model, world)
    oracle = Reference(
        layout.parameters(),
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
            layout.load(oracle.x[w])
            model.zero_grad()
            toy.loss(model, w, step).backward()
            grads.append(layout.gather([p.grad for p in layout.params]))
        oracle.step(torch.stack(grads), rate(step))
        xs.append(torch.stack([torch.cat([row[e] for e in layout.where]) for row in oracle.x]).numpy())
        had.append(oracle.had)
    return oracle, np.stack(xs), had


CASES = [(world, variant) for world in (1, 2, 3, 4, 8) for variant in VARIANTS]
TIERS = [case if case[0] == 3 else slow(*case) for case in CASES]


@pytest.mark.parametrize(("world", "variant"), TIERS)
def test_hook_equals_the_reference_bit_for_bit(world, variant):
    check(plain_run(world, variant), variant)


@pytest.mark.parametrize(("world", "variant"), [(2, "paper"), slow(3, "paper"), slow(3, "deepspeed")])
def test_real_ranks_equal_the_reference_bit_for_bit(world, variant):
    check(*real_run(world, {"variant": variant}), variant)


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
    nodes = [{"variant": variant, "hierarchical": True} for variant in VARIANTS]
    (real,) = real_run(4, nodes[0], ranks_per_node=2)
    (virtual,) = run_ranks(run_all, 1, [{**nodes[1], "ranks": 4, "ranks_per_node": 2}])[0]
    for variant, results in zip(VARIANTS, (real, virtual), strict=True):
        for step in range(1, STEPS + 1):
            if schedule.sync(step, WARMUP, DOUBLING, LIMIT, variant == "deepspeed"):
                assert all((r["x"][step - 1] == results[0]["x"][step - 1]).all() for r in results)
        assert np.isfinite(results[0]["x"]).all()
        assert results[0]["worker_error"].size == results[0]["m"].size // 2


def test_a_gradient_that_is_not_finite_leaves_ranks_consistent():
    # A step with a variance round, one with a 1-bit round alone, a local step.
    broken = ((1, 6), (0, 7), (1, LOCAL))
    cases = [{"variant": variant, "broken": broken} for variant in VARIANTS]
    for variant, results in zip(VARIANTS, real_run(2, *cases), strict=True):
        assert all(np.isfinite(r["x"]).all() for r in results)
        last = max(t for t in range(STEPS + 1) if schedule.sync(t, WARMUP, DOUBLING, LIMIT, variant == "deepspeed"))
        assert (results[0]["x"][last - 1] == results[1]["x"][last - 1]).all()
        assert (results[0]["v"] == results[1]["v"]).all()


def interrupted(rank: int, world: int, ranks: int, cases: list[tuple[str, int]]) -> list[list[tuple]]:
    """For each case the two ends of each rank here."""
    how = {"rank": rank, "ranks": ranks, "unit_mb": 0.0015}
    return [ends(resumed(functools.partial(build, variant, **how), at, LOCAL + 8, rate)) for variant, at in cases]


def test_resumed_equals_uninterrupted_bit_for_bit():
    """Within the warm-up, at its last step, and within a local interval; the last on real ranks too."""
    cases = [(variant, at) for variant in VARIANTS for at in (5, WARMUP, LOCAL)]
    for case, both in zip(cases, run_ranks(interrupted, 1, 2, cases)[0], strict=True):
        assert all((straight == again).all() for straight, again in both), case
    for (((straight, again),),) in run_ranks(interrupted, 2, 0, [("paper", LOCAL)]):
        assert (straight == again).all()
