"""SLAMB against its one-process reference, through many averagings of the models; masks, staleness, bytes, resume.

Virtual ranks; on real ones the paper's form, nodes, and what is interrupted.
"""

from __future__ import annotations

import functools
import random
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from birder import SLAMB, attach
from birder.comm import ByteCounter
from tests.helpers import toy
from tests.helpers.ranks import run_ranks
from tests.helpers.reference_slamb import Slamb, mean
from tests.helpers.tiers import slow
from tests.helpers.virtual import World, begun, ends, resumed

STEPS, EVERY = 60, 7
OPTIONS: dict[str, Any] = {
    "lr": 0.02,
    "fraction": 0.25,
    "sync_every": EVERY,
    "dense_below": 200,
    "weight_decay": 0.1,
    "seed": 2**40 + 7,
}
"""`embed` (207 elements) and `first.weight` (333) are masked, `second.weight` (185) and what has one dimension is not."""
STOP = 17  # within the third interval


def by_parameter(optimizer: SLAMB, model: nn.Module, name: str) -> list:
    """A state, flat for each of the model's parameters in their order."""
    found = {p: view for u in optimizer.units for p, view in zip(u.params, u.views(u.state[name]), strict=True)}
    return [found[p].flatten().clone().numpy() for p in model.parameters()]


def outcome(model: nn.Module, optimizer: SLAMB) -> dict:
    """Of a rank after its last step."""
    names = {p: n for n, p in model.named_parameters()}
    found = {name: by_parameter(optimizer, model, name) for name in optimizer.units[0].state}
    return {"units": [([names[p] for p in u.params], u.padded) for u in optimizer.units], **found}


def of_step(model: nn.Module, optimizer: SLAMB, counter: ByteCounter) -> dict:
    """Of a rank after any step."""
    return {
        "sent": counter.total,
        "collectives": counter.collectives,
        "models": toy.flat(model).numpy().copy(),
        "masks": [u.result.numpy().copy() for u in optimizer.units],
        "momentum": [u.state["m"].clone().numpy() for u in optimizer.units],
    }


def columns(rows: list[dict]) -> dict:
    return {key: [row[key] for row in rows] for key in rows[0]}


def build(options: dict, rank: int, ranks: int = 0, **how: Any) -> World:
    """So many virtual ranks, or with 0 the own one."""
    return begun(lambda p: SLAMB(p, **options), rank, ranks, unit_mb=0.0015, **how)


def hook_run(rank: int, world: int, options: dict, ranks: int = 0, broken: tuple = (), **how: Any) -> list[dict]:
    """Of every rank here. broken: as for `World.train`."""
    made = build(options, rank, ranks, **how)
    random.seed(5)
    torch.manual_seed(5)
    states = random.getstate(), torch.get_rng_state().clone()
    rows: list[list[dict]] = [[] for _ in made.optimizers]
    for step in range(1, STEPS + 1):
        made.ranks.counter.reset()
        local = made.step(step, [w for w, at in broken if at == step])
        for w, optimizer in enumerate(made.optimizers):
            with made.ranks.turn(w):
                found = of_step(made.model, optimizer, made.counters[w])
            rows[w].append({"gradients": [g.flatten().numpy() for g in local[w]], **found})
    if not ranks:
        assert random.getstate() == states[0]
        assert torch.equal(torch.get_rng_state(), states[1])
    with made.ranks.averaged():
        averages = made.models()
    results = []
    for w, optimizer in enumerate(made.optimizers):
        with made.ranks.turn(w):
            assert (toy.flat(made.model).numpy() == rows[w][-1]["models"]).all()
            results.append({**columns(rows[w]), "average": averages[w].numpy(), **outcome(made.model, optimizer)})
    return results


def real_run(world: int, options: dict, ranks_per_node: int | None = None, **how: Any) -> list[dict]:
    found = run_ranks(functools.partial(hook_run, **how), world, options, ranks_per_node=ranks_per_node)
    return [of_rank[0] for of_rank in found]


VARIANTS: dict[str, dict] = {"broken": {}, "everything": {"fraction": 1.0}}


@functools.cache
def run(world: int, name: str) -> list[dict]:
    """On every virtual rank: a form by its name; "broken": with a NaN on the last rank; "everything": with k = 1."""
    options = {**OPTIONS, **VARIANTS.get(name, {"form": name})}
    return run_ranks(hook_run, 1, options, world, ((world - 1, 10),) if name == "broken" else ())[0]


def gradients(model: nn.Module, worker: int, step: int) -> list[torch.Tensor]:
    model.zero_grad()
    toy.loss(model, worker, step).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


@functools.cache
def oracle_run(world: int, form: str, broken: bool = False) -> dict:
    """The same training in this process."""
    torch.set_num_threads(1)
    models = [toy.make() for _ in range(world)]
    names = [n for n, _ in models[0].named_parameters()]
    oracle = Slamb(list(models[0].parameters()), world, form=form, **OPTIONS)
    history, counts = [], []
    for step in range(1, STEPS + 1):
        grads = [gradients(model, w, step) for w, model in enumerate(models)]
        if broken and step == 10:
            grads[-1] = [torch.zeros_like(g) for g in grads[-1]]
        oracle.step(grads)
        with torch.no_grad():
            for w, model in enumerate(models):
                for p, x in zip(model.parameters(), oracle.x, strict=True):
                    p.copy_(x[w].view_as(p))
        history.append([toy.flat(model) for model in models])
        counts.append({n: int(mask.sum()) for n, mask in zip(names, oracle.masks, strict=True)})
    return {"oracle": oracle, "models": history, "counts": counts}


WORLDS = [(w, f) for f in ("paper", "v1") for w in (1, 2, 3, 4, 8)] + [(3, "v2")]


@pytest.mark.parametrize(("world", "form"), [case if case == (3, "paper") else slow(*case) for case in WORLDS])
def test_models_and_state_equal_the_reference_bit_for_bit(world: int, form: str) -> None:
    check(run(world, form), form)


@pytest.mark.parametrize("form", ["paper", slow("v1"), slow("v2")])
def test_real_ranks_equal_the_reference_bit_for_bit(form: str) -> None:
    check(real_run(3, {**OPTIONS, "form": form}), form)


def check(results: list[dict], form: str) -> None:
    expected = oracle_run(len(results), form)
    assert len(results[0]["units"]) > 1
    for rank, r in enumerate(results):
        for step in range(STEPS):
            assert (r["models"][step] == expected["models"][step][rank].numpy()).all(), f"rank {rank}, step {step + 1}"
        for i in range(len(expected["oracle"].x)):
            assert (r["m"][i] == expected["oracle"].m[i][rank].numpy()).all()
            assert (r["v"][i] == expected["oracle"].v[i][rank].numpy()).all()
            if form != "v1":
                assert (r["tau"][i] == expected["oracle"].tau[i].numpy()).all()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["paper", "v1"])
def test_mask_and_what_is_averaged_are_equal_on_eight_ranks(form: str) -> None:
    results = run(8, form)
    for step in range(STEPS):
        for u, mask in enumerate(results[0]["masks"][step]):
            for r in results[1:]:
                assert (r["masks"][step][u] == mask).all()
                assert (r["momentum"][step][u][mask] == results[0]["momentum"][step][u][mask]).all()
    stale = [~mask for mask in results[0]["masks"][-1]]
    assert any(
        (results[1]["momentum"][-1][u][s] != results[0]["momentum"][-1][u][s]).any() for u, s in enumerate(stale)
    )


@pytest.mark.parametrize(("form", "phase"), [("paper", 0), slow("v1", 1)])
def test_models_are_equal_after_each_averaging_and_at_no_other_time(form: str, phase: int) -> None:
    first, *others = run(4, form)
    for step in range(1, STEPS + 1):
        equal = [bool((first["models"][step - 1] == r["models"][step - 1]).all()) for r in others]
        assert equal == [step % EVERY == phase] * 3


@pytest.mark.parametrize(("world", "form"), [slow(2, "paper"), (3, "paper"), slow(8, "paper"), slow(3, "v1")])
def test_bytes_and_collectives_are_those_of_the_mask_and_the_model(world: int, form: str) -> None:
    counts = oracle_run(world, form)["counts"]
    for r in run(world, form):
        for step in range(1, STEPS + 1):
            sent = [-(-sum(counts[step - 1][n] for n in names) // world) for names, _ in r["units"]]
            synced = step % EVERY == (0 if form == "paper" else 1)
            model = sum(padded // world for _, padded in r["units"]) if synced else 0
            assert r["sent"][step - 1] == 2 * 4 * (world - 1) * (sum(sent) + model)
            assert r["collectives"][step - 1] == 2 * len(r["units"]) * (1 + synced)


def test_evaluation_takes_the_mean_of_the_models() -> None:
    results = run(3, "paper")
    last = [r["models"][-1] for r in results]
    assert (last[0] != last[1]).any()
    expected = mean(torch.stack([torch.from_numpy(x) for x in last])).numpy()
    assert all((r["average"] == expected).all() for r in results)


def test_a_nan_on_one_rank_counts_as_no_gradient_there() -> None:
    results = run(3, "broken")
    expected = oracle_run(3, "paper", True)["models"]
    for rank, r in enumerate(results):
        assert (r["models"][-1] == expected[-1][rank].numpy()).all()
        assert all(abs(x).max() < 100 for x in r["models"])


def test_with_all_elements_sent_the_momentum_is_the_dense_one() -> None:
    results = run(2, "everything")
    dense = [torch.zeros(len(g)) for g in results[0]["gradients"][0]]
    for a, b in zip(results[0]["gradients"], results[1]["gradients"], strict=True):
        for i, m in enumerate(dense):
            dense[i] = 0.9 * m + 0.1 * (torch.from_numpy(a[i]) + torch.from_numpy(b[i])) / 2
    for i, m in enumerate(dense):
        assert (results[0]["m"][i] == results[1]["m"][i]).all()
        # Sixty steps, each off by a few roundings of a momentum below 1, of which 0.9 is kept: 10 * 4 * 2^-24.
        assert abs(torch.from_numpy(results[0]["m"][i]) - m).max() < 2.5e-6
    assert (results[0]["models"][-1] != results[1]["models"][-1]).any()  # v is each rank's own all the same


@pytest.mark.slow
def test_hierarchical_averages_over_all_ranks() -> None:
    results = real_run(4, OPTIONS, hierarchical=True, ranks_per_node=2)
    synced = STEPS // EVERY * EVERY
    for r in results:
        assert (r["models"][synced - 1] == results[0]["models"][synced - 1]).all()
        for u, mask in enumerate(results[0]["masks"][-1]):
            assert (r["momentum"][-1][u][mask] == results[0]["momentum"][-1][u][mask]).all()
    # Another order of addition, and from there on rounding only.
    flat = run(4, "paper")[0]["models"][EVERY - 1]
    assert abs(results[0]["models"][EVERY - 1] - flat).max() < 1e-4


def interrupted(rank: int, world: int, options: dict) -> list[tuple]:
    return ends(resumed(lambda: build(options, rank), STOP, 3 * EVERY + 3))


@pytest.mark.parametrize("form", ["paper", "v1"])
def test_resumed_within_an_interval_equals_uninterrupted(form: str) -> None:
    results = run_ranks(interrupted, 3, {**OPTIONS, "form": form})
    assert all((straight == again).all() for ((straight, again),) in results)
    assert (results[0][0][0] != results[1][0][0]).any()


def used_by_one_rank(rank: int, world: int, unseen: str) -> list[str]:
    """What a rank is warned of. An expert is used by rank 0 alone."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"all": nn.Linear(4, 4), "expert": nn.Linear(4, 4)})
    optimizer = SLAMB(model.parameters(), unseen=unseen)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    ddp.module.forward = lambda x: model["expert"](model["all"](x)) if rank == 0 else model["all"](x)
    attach(ddp, optimizer)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(4):
            optimizer.zero_grad()
            ddp(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
    return [str(w.message) for w in said if "on other ranks alone" in str(w.message)]


def test_a_layer_that_only_other_ranks_use_is_warned_of_once() -> None:
    """Its steps there are m/eps, a million times the momentum."""
    for unseen, warned in (("step", 1), ("hold", 0)):
        said = run_ranks(used_by_one_rank, 2, unseen)
        assert [len(s) for s in said] == [0, warned]
        assert all('unseen="hold"' in s for s in said[1])
