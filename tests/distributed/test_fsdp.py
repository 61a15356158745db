"""HSDP against DDP with hierarchical communication: the same parameters, the bytes and the state that were promised."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from birder import attach
from birder.comm import AcrossHolders, run
from tests.helpers import toy
from tests.helpers.hsdp import PROBLEMS, ddp, even_loss, full, hsdp, make_even, make_mesh, shard, train
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import slow

STEPS = 7
SMALL = 0.001
"""unit_mb: three units of the toy model, and with UNIT_EACH one for each parameter."""
UNIT_EACH = 1e-6

BITWISE = [
    ("Birder", {"lr": 0.01, "weight_decay": 0.1}),
    ("Birder", {"lr": 0.01, "reduce": "one_phase", "idle": "hold", "seed": 2**40 + 3}),
]


def both(rank: int, world: int, shards: int, problem: str, methods: list, unit_mb: float) -> list[tuple[Any, Any]]:
    """Parameters after STEPS steps under HSDP and under DDP, for each method."""
    mesh = make_mesh(world // shards, shards)
    loss, found = PROBLEMS[problem][1], []
    for method, options in methods:
        ends = []
        for model, optimizer, attachment in (
            hsdp(problem, mesh, method, options, unit_mb=unit_mb),
            ddp(problem, method, options, unit_mb=unit_mb),
        ):
            train(model, optimizer, loss, rank, range(1, STEPS + 1))
            ends.append(full(model).numpy())
            attachment.close()
        found.append(tuple(ends))
    return found


@pytest.mark.parametrize(("replicas", "shards"), [(2, 2), slow(4, 2), slow(3, 2), slow(2, 3)])
def test_birder_equals_hierarchical_ddp_bit_for_bit(replicas: int, shards: int) -> None:
    """On a model whose tensors divide by nothing, with empty shards, and rows without gradient."""
    results = run_ranks(both, replicas * shards, shards, "toy", BITWISE, SMALL, ranks_per_node=shards)
    start = toy.flat(toy.make()).numpy()
    for k in range(len(BITWISE)):
        for sharded, whole in (result[k] for result in results):
            assert (sharded == results[0][k][0]).all()
            assert (sharded == whole).all()
            assert (sharded != start).mean() > 0.7


EPS = 1e-5
CLOSE = [
    ("SGDM", {"lr": 0.1}),
    ("AdamW", {"lr": 0.01, "eps": EPS}),
    ("AdamW", {"lr": 0.01, "eps": EPS, "max_grad_norm": 0.05}),
    ("BertAdam", {"lr": 0.01, "eps": EPS, "tensor_clip": 0.02}),
    ("LAMB", {"lr": 0.01, "eps": EPS}),
    ("OneBitAdam", {"lr": 0.01, "eps": EPS, "warmup_steps": 3}),
    ("OneBitLAMB", {"lr": 0.01, "eps": EPS, "warmup_steps": 3, "coeff_beta": 0.5, "weight_decay": 0.01}),
]
MEAN, WORST = 1e-7, 1e-5
"""Means and norms are added up in another order, 6e-8 of a gradient or norm. Of a coordinate whose gradient is near 0 Adam
divides that by as little; hence the larger eps, and the larger limit for the worst of 100,000."""


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "methods"), [(2, CLOSE), slow(4, [m for m in CLOSE if m[0] == "OneBitAdam"])])
def test_other_methods_equal_ddp_up_to_rounding(replicas: int, methods: list) -> None:
    """1-bit Adam's scales are those of units: with one for each parameter, cut alike, they are the same numbers."""
    results = run_ranks(both, replicas * 2, 2, "even", methods, UNIT_EACH, ranks_per_node=2)
    start = full(make_even()).numpy()
    for k, (method, _) in enumerate(methods):
        for sharded, whole in (result[k] for result in results):
            assert (sharded == results[0][k][0]).all(), method
            moved = np.abs(whole - start).max()
            assert moved > 1e-3, method
            off = np.abs(sharded - whole)
            assert off.mean() < MEAN, method
            assert off.max() < WORST, method


def uneven(rank: int, world: int, methods: list) -> list[Any]:
    """Methods with norms on shards that are uneven or empty: HSDP of 1 x world against DDP, without any compression."""
    mesh, found = make_mesh(1, world), []
    for method, options in methods:
        ends = []
        for model, optimizer, _ in (hsdp("toy", mesh, method, options), ddp("toy", method, options)):
            train(model, optimizer, toy.loss, rank, range(1, 4))
            ends.append(full(model).numpy())
        found.append(float(np.abs(ends[0] - ends[1]).max()))
    return found


def test_norms_of_uneven_and_empty_shards_are_those_of_whole_tensors() -> None:
    methods = [
        *(m for m in CLOSE if m[0] in ("LAMB", "BertAdam")),
        ("AdamW", {"lr": 0.01, "eps": EPS, "max_grad_norm": 0.05}),
        ("OneBitLAMB", {"lr": 0.01, "eps": EPS, "warmup_steps": 9}),  # the warm-up alone: LAMB with other bounds
    ]
    for found in run_ranks(uneven, 3, methods):
        assert max(found) < WORST, found


def counted(rank: int, world: int) -> dict[str, Any]:
    mesh = make_mesh(world // 2, 2)
    out: dict[str, Any] = {}
    for name, (model, optimizer, attachment) in {
        "hsdp": hsdp("even", mesh, "Birder", {"lr": 0.01}),
        "ddp": ddp("even", "Birder", {"lr": 0.01}),
    }.items():
        train(model, optimizer, even_loss, rank, range(1, 3))
        attachment.counter.reset()
        train(model, optimizer, even_loss, rank, range(3, 4))
        out[name] = (attachment.counter.intra, attachment.counter.inter, optimizer.state_bytes())
        out["fed"] = attachment.overlap
    return out


def warned(rank: int, world: int) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model, optimizer, _ = hsdp("toy", make_mesh(1, world), "AdamW", {"lr": 0.01})
        train(model, optimizer, toy.loss, rank, range(1, 3))
    return [str(w.message) for w in found if issubclass(w.category, FutureWarning | DeprecationWarning)]


def test_a_step_warns_of_no_old_names_of_torch() -> None:
    assert run_ranks(warned, 2) == [[], []]


@pytest.mark.parametrize("replicas", [2, slow(4)])
def test_bytes_and_state_are_what_the_page_promises(replicas: int) -> None:
    d, s = sum(p.numel() for p in make_even().parameters()), 2
    for result in run_ranks(counted, s * replicas, ranks_per_node=s):
        # Between n nodes: of d/s coordinates one bit to each server, of its share, and of the own share one bit back to each.
        assert result["hsdp"][1] == result["ddp"][1] == 2 * (replicas - 1) * (d // s // replicas) // 8
        # Inside: two layers gathered for forward and again for backward, the gradient reduce-scattered.
        assert result["hsdp"][0] == 3 * (s - 1) * 4 * d // s
        assert result["hsdp"][2] == result["ddp"][2] == 8 * d // s


def accumulated(rank: int, world: int) -> list[Any]:
    """Two micro-batches: without synchronisation at first; and the same taken in `step`, gradients summed in shards."""
    mesh, ends = make_mesh(2, 2), []
    for overlap in (True, False):
        model, optimizer, _ = hsdp("even", mesh, "Birder", {"lr": 0.01}, overlap=overlap)
        for step in range(1, 6):
            optimizer.zero_grad()
            model.set_requires_gradient_sync(not overlap)  # type: ignore[operator]
            even_loss(model, rank, 2 * step).backward()
            model.set_requires_gradient_sync(True)  # type: ignore[operator]
            even_loss(model, rank, 2 * step + 1).backward()
            assert optimizer._feeding is overlap  # messages are on their way before `step`, or are not
            optimizer.step()
        ends.append(full(model).numpy())
    return ends


def test_accumulation() -> None:
    results = run_ranks(accumulated, 4, ranks_per_node=2)
    for early, late in results:
        assert (early == results[0][0]).all()
        assert (late == results[0][1]).all()
        # Summed in another order: a sign drawn at the edge of its probability may fall the other way.
        assert (early == late).mean() > 0.99


def clipped(rank: int, world: int) -> tuple[float, float]:
    """Norms of Birder's first m of this replica: as it is, and as the rule for clipping says."""
    mesh, limit = make_mesh(2, 2), 0.3
    model, optimizer, _ = hsdp("toy", mesh, "Birder", {"lr": 0.01, "max_grad_norm": limit})
    (toy.loss(model, rank, 1) * 5).backward()
    own = sum(p.grad.full_tensor().square().sum().item() for p in model.parameters() if p.grad is not None)  # type: ignore
    everyone = [torch.zeros(1, dtype=torch.float64) for _ in range(world)]
    torch.distributed.all_gather(everyone, torch.tensor([own], dtype=torch.float64))
    mean = float(torch.stack(everyone[::2]).mean())  # the two ranks of a replica know the same
    optimizer.step()
    m = torch.stack([u.state["m"].double().square().sum() for u in optimizer.units]).sum().view(1)
    found = float(run(optimizer.comm, AcrossHolders(m))) ** 0.5 / 0.05
    return found, own**0.5 * min(1.0, limit / mean**0.5)


def test_compressed_steps_clip_by_the_norm_over_all_shards_and_replicas() -> None:
    for found, expected in run_ranks(clipped, 4, ranks_per_node=2):
        assert found == pytest.approx(expected, rel=1e-5)


def mixed(rank: int, world: int) -> Any:
    """bf16 arithmetic; a model that differs between ranks before `attach`, with a buffer; attached after an evaluation."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    import birder

    mesh = make_mesh(2, 1)
    model = toy.make(seed=rank)
    model.register_buffer("table", torch.full((3,), float(rank)))
    shard(model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    optimizer = birder.Birder(model.parameters(), lr=0.01)
    with torch.no_grad():
        toy.loss(model, rank, 1)
    attach(model, optimizer, mesh=mesh)
    train(model, optimizer, toy.loss, rank, range(1, 4))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    return full(model).numpy(), model.table.tolist()


def test_replicas_are_made_equal_and_stay_equal_in_mixed_precision() -> None:
    (x, buffer), (y, other) = run_ranks(mixed, 2, ranks_per_node=1)
    assert (x == y).all()
    assert buffer == other == [0.0, 0.0, 0.0]
