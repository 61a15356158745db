"""Birder against its one-process reference, bit for bit, and the properties that its law promises.

Real ranks for each topology; options of the method on virtual ones.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from birder import Birder, attach
from tests.helpers import reference, toy
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import slow
from tests.helpers.virtual import begun

STEPS = 30


def run(rank: int, world: int, options: dict, ranks: int = 0, ranks_per_node: int = 1, **how) -> list[dict]:
    """Of every rank here: so many virtual ones, or with 0 the own one. Three units, as each costs messages."""
    made = begun(lambda p: Birder(p, **{"lr": 0.01, **options}), rank, ranks, ranks_per_node, unit_mb=0.002, **how)
    sent = made.train(range(1, STEPS + 1))
    return [outcome(*found) for found in zip(made.models(), made.optimizers, sent, strict=True)]


def really(ranks: int, options: dict, ranks_per_node: int | None = None, **how) -> list[dict]:
    """On real ranks; ranks_per_node: nodes are the workers."""
    how = {"hierarchical": ranks_per_node is not None, **how}
    return [of[0] for of in run_ranks(functools.partial(run, **how), ranks, options, ranks_per_node=ranks_per_node)]


def virtually(ranks: int, options: dict, ranks_per_node: int | None = None) -> list[dict]:
    """The same on virtual ones."""
    how = {"ranks_per_node": ranks_per_node or 1, "hierarchical": ranks_per_node is not None}
    return run_ranks(functools.partial(run, **how), 1, options, ranks)[0]


@functools.cache
def plain_run() -> list[dict]:
    """Flat training of two ranks with default options, for all tests that look at its outcome."""
    return really(2, {})


def outcome(x: torch.Tensor, optimizer: Birder, sent: list[tuple[int, int]]) -> dict:
    m, b = (torch.cat([u.state[k] for u in optimizer.units]) for k in ("m", "b"))
    shards = optimizer.comm.shards
    return {
        "x": x.numpy(),
        "bounded": bool((m.abs() <= b).all()),
        "units": len(optimizer.units),
        "parts": [(u.start, u.start + u.numel, u.padded // shards) for u in optimizer.units],
        "padded": sum(u.padded for u in optimizer.units),
        "state": optimizer.state_bytes(),
        "sent": sent,
    }


def of_a_step(result: dict, first: int = STEPS // 2) -> tuple[float, float]:
    """Mean bytes and collectives of the steps from `first` on: from there the map of seen coordinates has settled."""
    later = result["sent"][first - 1 :]
    return sum(s for s, _ in later) / len(later), sum(c for _, c in later) / len(later)


def oracle_run(workers: int, per_worker: int, options: dict) -> torch.Tensor:
    """The same training in this process; a worker's gradient is the mean over its `per_worker` ranks."""
    torch.set_num_threads(1)
    model = toy.make()
    oracle = reference.Birder(list(model.parameters()), workers, **options)
    for step in range(1, STEPS + 1):
        oracle.step(reference.worker_gradients(model, toy.loss, workers, per_worker, step))
    return toy.flat(model)


@pytest.mark.parametrize("world", [1, slow(2), 3, slow(4), slow(8)])
def test_flat_hook_equals_the_reference_bit_for_bit(world):
    options = {"lr": 0.01, "weight_decay": 0.1, "seed": 2**40 + 7}
    results = really(world, options)
    expected = oracle_run(world, 1, options).numpy()
    assert results[0]["units"] > 1
    for r in results:
        assert (r["x"] == expected).all()
        assert r["bounded"]


@pytest.mark.parametrize(("nodes", "local"), [slow(1, 2), (2, 2), slow(3, 1), slow(2, 4), slow(1, 3)])
def test_hierarchical_hook_equals_the_reference_with_nodes_as_workers(nodes, local):
    results = really(nodes * local, {}, local)
    expected = oracle_run(nodes, local, {"lr": 0.01}).numpy()
    for r in results:
        assert (r["x"] == expected).all()
        assert r["bounded"]


def expected(nodes: int, local: int, options: dict, results: list[dict]) -> np.ndarray:
    """What the reference makes of these options, with nodes of `local` ranks as workers."""
    given = {"lr": 0.01, "beta2": options.get("beta2"), "weyl": options.get("bits") == "weyl"}
    parts = {"parts": results[0]["parts"]} if options.get("reduce") == "one_phase" else {}
    return oracle_run(nodes, local, given | parts).numpy()


ONE_PHASE, WEYL = {"reduce": "one_phase"}, {"bits": "weyl", "beta2": 0.999}
SHAPES = [(1, 1), slow(2, 1), (3, 1), slow(4, 1), slow(8, 1), (2, 2), slow(3, 2), slow(1, 3)]


@pytest.mark.parametrize("options", [ONE_PHASE, WEYL, WEYL | ONE_PHASE], ids=["one phase", "weyl", "weyl, one phase"])
@pytest.mark.parametrize(("nodes", "local"), SHAPES)
def test_other_forms_equal_the_reference_bit_for_bit(nodes, local, options):
    results = virtually(nodes * local, options, local if local > 1 else None)
    assert results[0]["units"] > 1
    assert all((r["x"] == expected(nodes, local, options, results)).all() for r in results)


@pytest.mark.parametrize(
    ("nodes", "local", "options"),
    [
        (3, 1, ONE_PHASE),
        (2, 2, ONE_PHASE),
        (2, 2, WEYL),
        slow(3, 2, WEYL | ONE_PHASE),
    ],
)
def test_other_forms_on_real_ranks_equal_the_reference_bit_for_bit(nodes, local, options):
    results = really(nodes * local, options, local if local > 1 else None)
    assert all((r["x"] == expected(nodes, local, options, results)).all() for r in results)


@pytest.mark.parametrize("options", [{"bits": "weyl"}, {"beta2": 0.999}], ids=["weyl", "beta2"])
def test_each_option_alone_equals_the_reference(options):
    results = virtually(2, options)
    assert (results[1]["x"] == expected(2, 1, options, results)).all()


def test_a_single_node_is_a_single_worker():
    expected = oracle_run(1, 3, {"lr": 0.01}).numpy()
    assert all((r["x"] == expected).all() for r in virtually(3, {}, 3))


def test_hierarchical_state_shrinks_by_the_ranks_per_node():
    flat = plain_run()[0]["state"]
    halved = virtually(2, {}, 2)[0]["state"]
    # m and b of half the elements each; the map of coordinates seen (1 byte each) stays whole, padding differs.
    assert 0.45 * flat < halved < 0.65 * flat


@pytest.mark.parametrize(
    "options",
    [{"decoupled": False, "weight_decay": 0.3}, {"hold": True}, {"beta": 0.5}],
    ids=["coupled", "hold", "beta"],
)
def test_options_equal_the_reference(options):
    real = dict(options)
    if real.pop("hold", False):
        real["idle"] = "hold"
    results = virtually(2, real)
    assert (results[1]["x"] == oracle_run(2, 1, {**options, "lr": 0.01}).numpy()).all()


def test_communicating_inside_step_changes_nothing():
    outside = plain_run()[0]["x"]
    inside = really(2, {}, overlap=False)[0]["x"]
    assert (outside == inside).all()


def test_u_on_every_rank_is_an_option_of_hierarchical_communication():
    results = virtually(4, {"intra": "u"}, 2)
    assert all((r["x"] == results[0]["x"]).all() for r in results)
    assert (results[0]["x"] != plain_run()[0]["x"]).any()
    assert results[0]["state"] > 0.9 * plain_run()[0]["state"]


def test_number_of_collectives_is_two_for_each_unit_and_at_most_two_for_the_map():
    result = plain_run()[0]
    # The map of coordinates seen: one flag message in each step, and now and then the coordinates themselves.
    assert 2 * result["units"] <= of_a_step(result, first=1)[1] <= 2 * result["units"] + 2


def test_coordinates_without_gradient_do_not_move():
    results = plain_run()
    before = toy.make().embed.weight.detach()
    x = toy.part(results[0]["x"], "embed.weight")
    assert torch.equal(x[toy.USED :], before[toy.USED :])
    assert (x[: toy.USED] != before[: toy.USED]).any(1).all()


def test_a_coordinate_moves_from_the_step_of_its_first_gradient():
    p = torch.nn.Parameter(torch.zeros(40))
    optimizer = Birder([p], lr=1.0)
    for step in range(1, 6):
        p.grad = torch.zeros(40)
        p.grad[step] = 1.0
        optimizer.step()
        assert p[step] == -1.0  # u = +1 exactly: the sign is certain
        assert (p[step + 1 :] == 0).all()
        assert p[0] == 0


def test_alone_the_first_step_is_the_sign_of_the_gradient():
    p = torch.nn.Parameter(torch.zeros(1000))
    optimizer = Birder([p], lr=0.5, beta=0.9)
    p.grad = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    assert torch.equal(p.detach(), -0.5 * p.grad.sign())


def test_scaling_all_gradients_by_a_power_of_two_changes_nothing():
    ends = []
    for scale in (1.0, 2.0**-20):
        p = torch.nn.Parameter(torch.zeros(500))
        optimizer = Birder([p], lr=0.1)
        gen = torch.Generator().manual_seed(1)
        for _ in range(10):
            p.grad = torch.randn(500, generator=gen) * scale
            optimizer.step()
        ends.append(p.detach().clone())
    assert torch.equal(*ends)


def test_idle_coordinates_drift_under_decay_and_stop_under_hold():
    moved = {}
    for idle in ("decay", "hold"):
        p = torch.nn.Parameter(torch.zeros(4096))
        optimizer = Birder([p], lr=1.0, idle=idle)
        p.grad = torch.ones(4096)
        for _ in range(400):
            optimizer.step()
            p.grad = torch.zeros(4096)
        moved[idle] = -float(p.detach().mean())
    # decay keeps u = 1: 400 steps of lr. hold: u = beta^k, whose sum is 1/(1-beta) = 20, plus a random walk whose
    # mean over 4096 coordinates has a spread of sqrt(400/4096) = 0.3; 5 sigmas.
    assert moved["decay"] == 400.0
    assert abs(moved["hold"] - 20.0) < 1.6


def early(rank: int, world: int) -> list[int]:
    """How many units were still waiting for gradients at each submission to the pipeline, over three steps."""
    model = toy.make()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    optimizer = Birder(model.parameters(), lr=0.01)
    attach(ddp, optimizer, unit_mb=0.0008)
    submit, open_units = optimizer.pipeline.submit, []

    def watched(*task) -> None:
        open_units.append(sum(bool(u.waiting) for u in optimizer.units))
        submit(*task)

    optimizer.pipeline.submit = watched
    seen = []
    for step in range(1, 4):
        open_units.clear()
        toy.loss(ddp, rank, step).backward()
        seen.append(list(open_units))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def test_communication_starts_during_backward_in_every_step():
    for open_units in run_ranks(early, 2)[0]:
        # One submission for each unit before backward returned, the first while the others had no gradient yet.
        assert open_units == list(range(len(open_units) - 1, -1, -1))
        assert len(open_units) > 1
