"""Sigma-delta Adam against its one-process reference bit for bit, its bytes, its state.

All forms on virtual ranks, those of REAL on real ones too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from birder import Birder, SigmaDeltaAdam, attach
from studies.sigma_delta_research import SigmaDeltaResearch
from tests.helpers import hsdp, reference, toy
from tests.helpers.ranks import run_ranks
from tests.helpers.reference_sigma_delta import SigmaDelta, shared_steps
from tests.helpers.tiers import slow
from tests.helpers.virtual import begun

STEPS = 25
"""V is shared in the first 20, and in 22 and 24."""
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({"weight_decay": 0.1, "seed": 2**40 + 7}, {"of_mean": True, "weight_decay": 0.1, "seed": 2**40 + 7}),
    "local, gamma 1": ({"variance": "local", "gamma": 1.0}, {"local": True, "gamma": 1.0}),
    "zero start, hold": (
        {"variance": "shared", "start": "zero", "idle": "hold", "betas": (0.8, 0.99)},
        {"uniform": False, "hold": True, "betas": (0.8, 0.99)},
    ),
    "rarely, large eps": ({"share_growth": 2.5, "eps": 1e-3}, {"of_mean": True, "growth": 2.5, "eps": 1e-3}),
    "shared": ({"variance": "shared"}, {}),
    "one phase": ({"reduce": "one_phase", "seed": 5}, {"of_mean": True, "seed": 5}),
    "shared, one phase": ({"variance": "shared", "reduce": "one_phase"}, {}),
    "full scale": ({"full_scale": 1.7, "gamma": 1.3}, {"of_mean": True, "full_scale": 1.7, "gamma": 1.3}),
    "full scale, one phase": ({"full_scale": 1.7, "reduce": "one_phase"}, {"of_mean": True, "full_scale": 1.7}),
}
"""Of each variant: options of the optimizer, and the same of the reference."""
REAL = ("default", "one phase")
"""Of the variants what `make test` runs on real ranks: each exchange."""

SIZES: list[tuple[dict[str, Any], bool, int, int]] = [
    ({}, False, 16, 4),
    ({}, True, 16, 4),
    ({"variance": "shared"}, True, 16, 4),
    ({"variance": "local"}, False, 12, 4),
    ({"errors": "int8"}, False, 13, 1),
    ({"reduce": "one_phase"}, False, 16, 0),
]
"""Options, whether nodes are workers, bytes of state for each element and for each that a server has."""


def outcome(x: torch.Tensor, optimizer: SigmaDeltaAdam) -> dict[str, Any]:
    shards = optimizer.comm.shards
    return {
        "x": x.numpy(),
        "parts": [(u.start, u.start + u.numel, u.padded // shards) for u in optimizer.units],
        "bounded": all(bool((u.state[k].abs() <= 2).all()) for u in optimizer.units for k in u.state if "error" in k),
    }


def run(rank: int, world: int, names: Iterable[str], *where: int, **how: Any) -> list[dict[str, dict[str, Any]]]:
    """Of every rank here: so many virtual ones and how many a node has, or the own one. Three units: each costs messages."""
    results: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        made = begun(lambda p, o=VARIANTS[name][0]: SigmaDeltaAdam(p, lr=0.01, **o), rank, *where, unit_mb=0.002, **how)  # type: ignore[misc]
        made.train(range(1, STEPS + 1))
        results[name] = [outcome(x, o) for x, o in zip(made.models(), made.optimizers, strict=True)]  # type: ignore[arg-type]
        made.close()
    return [dict(zip(results, of_rank, strict=True)) for of_rank in zip(*results.values(), strict=True)]


def virtually(nodes: int, local: int, **how: Any) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(functools.partial(run, **how), 1, tuple(VARIANTS), nodes * local, local)[0]


def oracle(workers: int, per_worker: int, options: dict[str, Any]) -> np.ndarray:
    """The same training in this process; a worker's gradient is the mean over its `per_worker` ranks."""
    torch.set_num_threads(1)
    model = toy.make()
    method = SigmaDelta(list(model.parameters()), workers, 0.01, **options)
    for step in range(1, STEPS + 1):
        method.step(reference.worker_gradients(model, toy.loss, workers, per_worker, step))
    return toy.flat(model).numpy()


def compare(found: list[dict[str, dict[str, Any]]], workers: int, per_worker: int) -> None:
    for name in found[0]:
        real, options = VARIANTS[name]
        parts = {"parts": found[0][name]["parts"]} if real.get("reduce") == "one_phase" else {}
        expected = oracle(workers, per_worker, {**options, **parts})
        assert len(found[0][name]["parts"]) > 1
        for rank in found:
            assert (rank[name]["x"] == expected).all(), name
            assert rank[name]["bounded"]


@functools.cache
def flat(world: int) -> list[dict[str, dict[str, Any]]]:
    return virtually(world, 1)


@pytest.mark.parametrize("world", [1, 3, slow(4), slow(9)])
def test_flat_equals_the_reference_bit_for_bit(world: int) -> None:
    compare(flat(world), world, 1)


@pytest.mark.parametrize(("nodes", "local"), [slow(2, 2), slow(3, 2), slow(1, 3)])
def test_hierarchical_equals_the_reference_with_nodes_as_workers(nodes: int, local: int) -> None:
    compare(virtually(nodes, local, hierarchical=True), nodes, local)


@pytest.mark.parametrize(("nodes", "local"), [(3, 1), (2, 2)])
@pytest.mark.parametrize("names", [REAL, slow([name for name in VARIANTS if name not in REAL])], ids=["chosen", "rest"])
def test_real_ranks_equal_the_reference_bit_for_bit(nodes: int, local: int, names: list[str]) -> None:
    on_nodes = functools.partial(run, hierarchical=local > 1)
    found = run_ranks(on_nodes, nodes * local, names, ranks_per_node=local)
    compare([of_rank[0] for of_rank in found], nodes, local)


def test_coordinates_without_gradient_do_not_move() -> None:
    before = toy.make().embed.weight.detach()
    for name, result in flat(3)[0].items():
        if "weight_decay" not in VARIANTS[name][0]:
            x = toy.part(result["x"], "embed.weight")
            assert torch.equal(x[toy.USED :], before[toy.USED :])
            assert (x[: toy.USED] != before[: toy.USED]).any(1).all()


def counted(rank: int, world: int, options: dict[str, Any]) -> dict[str, Any]:
    """The bytes that this rank sends in each step."""
    ddp = DistributedDataParallel(hsdp.make_even())
    optimizer = SigmaDeltaAdam(ddp.module.parameters(), lr=0.01, **options)
    attachment = attach(ddp, optimizer)
    sent = []
    for step in range(1, STEPS + 1):
        attachment.counter.reset()
        optimizer.zero_grad()
        hsdp.even_loss(ddp, rank, step).backward()
        optimizer.step()
        sent.append(attachment.counter.intra + attachment.counter.inter)
    return {"sent": sent, "padded": sum(u.padded for u in optimizer.units)}


@pytest.mark.parametrize(
    ("options", "nbytes", "phases"),
    [
        ({}, 2 * 4, 2),
        ({"wire": "bf16"}, 2 * 2, 2),
        ({"variance": "shared"}, 4, 2),
        ({"variance": "local", "reduce": "one_phase"}, 0, 1),
    ],
    ids=["default", "bf16", "shared", "local, one phase"],
)
def test_bytes_are_a_bit_each_way_and_the_variance_in_its_steps(
    options: dict[str, Any], nbytes: int, phases: int
) -> None:
    world = 4
    shares = shared_steps(1.1, STEPS)
    for rank in run_ranks(counted, world, options):
        around = (world - 1) / world * rank["padded"]
        for step in range(2, STEPS + 1):  # in the first the map of seen coordinates travels too, and closes
            assert rank["sent"][step - 1] == around * (phases / 8 + (step in shares) * 2 * nbytes)


def sizes(rank: int, world: int) -> list[tuple[int, int]]:
    """Bytes of state and padded elements of each form, once every coordinate has been seen."""
    found = []
    for options, hierarchical, _, _ in SIZES:
        ddp = DistributedDataParallel(hsdp.make_even())
        optimizer = SigmaDeltaAdam(ddp.module.parameters(), lr=0.01, **options)
        attachment = attach(ddp, optimizer, hierarchical=hierarchical)
        hsdp.even_loss(ddp, rank, 1).backward()
        optimizer.step()
        attachment.close()
        found.append((optimizer.state_bytes(), sum(u.padded for u in optimizer.units)))
    return found


def test_state_has_the_size_that_the_page_says() -> None:
    for found in run_ranks(sizes, 4, ranks_per_node=2):
        for (_, hierarchical, each, served), (state, padded) in zip(SIZES, found, strict=True):
            workers, shards = (2, 2) if hierarchical else (4, 1)
            assert state == padded * (each + served / workers) / shards


def sharded(rank: int, world: int, options: dict[str, Any]) -> dict[str, Any]:
    """The same training under FSDP2 and under DDP with nodes as workers."""
    mesh = hsdp.make_mesh(2, 2)
    found = {}
    for way in ("hsdp", "ddp"):
        made = (
            hsdp.hsdp("even", mesh, "SigmaDeltaAdam", options)
            if way == "hsdp"
            else hsdp.ddp("even", "SigmaDeltaAdam", options)
        )
        model, optimizer, _ = made
        hsdp.train(model, optimizer, hsdp.even_loss, rank, range(1, STEPS + 1))
        found[way] = hsdp.full(model).numpy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"lr": 0.01, "weight_decay": 0.1}, slow({"lr": 0.01, "reduce": "one_phase"})])
def test_fsdp_equals_ddp_with_nodes_as_workers(options: dict[str, Any]) -> None:
    for rank in run_ranks(sharded, 4, options, ranks_per_node=2):
        assert (rank["hsdp"] == rank["ddp"]).all()


def quantized(rank: int, world: int) -> dict[str, np.ndarray]:
    """Birder with this quantizer, flat and with nodes as workers, u of ranks or of nodes."""
    found = {}
    for name, options, how in (
        ("flat", {}, {}),
        ("one phase", {"reduce": "one_phase"}, {}),
        ("nodes", {}, {"hierarchical": True}),
        ("nodes, u", {"intra": "u"}, {"hierarchical": True}),
    ):
        model = toy.make()
        ddp = DistributedDataParallel(model)
        optimizer = Birder(model.parameters(), lr=0.01, bits="sigma_delta", **options)
        attachment = attach(ddp, optimizer, unit_mb=0.0008, **how)
        toy.train(ddp, optimizer, rank, range(1, STEPS + 1))
        attachment.close()
        found[name] = toy.flat(model).numpy()
    return found


@pytest.mark.slow
def test_birder_has_the_same_quantizer() -> None:
    first, *others = run_ranks(quantized, 4, ranks_per_node=2)
    for rank in others:
        assert all((rank[name] == first[name]).all() for name in first)
    assert len({x.tobytes() for x in first.values()}) == len(first)
    moved = np.abs(first["flat"] - toy.flat(toy.make()).numpy())
    assert moved.max() <= 0.01 * STEPS + 1e-5  # +-lr in every step


def resumed(rank: int, world: int, folder: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """24 steps in one go, and the same with a stop after 13, on an optimizer that begins anew: of each form."""
    found = []
    for options in ({}, {"errors": "int8"}, {"errors": "int8", "reduce": "one_phase"}):
        whole, optimizer = ddp_of(options)
        toy.train(whole, optimizer, rank, range(1, 14))
        state = {"model": whole.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, Path(folder) / f"{rank}.pt")
        toy.train(whole, optimizer, rank, range(14, 25))
        again, other = ddp_of(options)
        kept = torch.load(Path(folder) / f"{rank}.pt")
        again.module.load_state_dict(kept["model"])
        other.load_state_dict(kept["optimizer"])
        toy.train(again, other, rank, range(14, 25))
        found.append((toy.flat(whole.module).numpy(), toy.flat(again.module).numpy()))
    return found


def ddp_of(options: dict[str, Any]) -> tuple[DistributedDataParallel, SigmaDeltaAdam]:
    ddp = DistributedDataParallel(toy.make())
    optimizer = SigmaDeltaAdam(ddp.module.parameters(), lr=0.01, **options)
    attach(ddp, optimizer, unit_mb=0.002)
    return ddp, optimizer


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    for rank in run_ranks(resumed, 2, str(tmp_path)):
        for whole, again in rank:
            assert (whole == again).all()


RESEARCH: list[dict[str, Any]] = [{}, {"order": 2}, {"dead_zone": 0.3}, {"values": "log8"}, {"values": "factored"}]
RESEARCH += [{"dense": "vectors"}, {"dense": "embeddings"}]


def researched(rank: int, world: int) -> list[list[np.ndarray]]:
    """The parameters of each virtual rank: of the method itself, and of each idea."""
    makes = [functools.partial(SigmaDeltaAdam, lr=0.01)] + [
        functools.partial(SigmaDeltaResearch, lr=0.01, **options) for options in RESEARCH
    ]
    found = []
    for make in makes:
        made = begun(make, rank, 3, unit_mb=0.002)
        made.train(range(1, STEPS + 1))
        found.append([model.numpy() for model in made.models()])
    return found


def test_what_research_adds_to_the_method_is_the_idea_alone() -> None:
    method, *ideas = run_ranks(researched, 1)[0]
    assert all((x == y).all() for x, y in zip(method, ideas[0], strict=True)), "without an idea it is the method"
    for options, idea in zip(RESEARCH[1:], ideas[1:], strict=True):
        assert all((x == idea[0]).all() and np.isfinite(x).all() for x in idea), options
        assert (idea[0] != method[0]).any(), options
