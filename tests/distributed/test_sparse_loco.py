"""SparseLoCo against its one-process reference; resume; bytes; options. The first method on the contract as it stands."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from birder import SparseLoCo, attach
from tests.helpers import toy
from tests.helpers.ranks import run_ranks
from tests.helpers.reference_sparse_loco import SparseLoCo as Reference
from tests.helpers.tiers import slow

STEPS, LR = 14, 0.02
BASE: dict[str, Any] = {"sync_every": 3, "top_k": 7, "chunk": 64, "weight_decay": 0.01}
CASES: dict[str, dict[str, Any]] = {
    "paper": {},
    "outer momentum": {"outer_momentum": 0.9, "outer_lr": 0.7},
    "every step": {"sync_every": 1, "top_k": 3, "chunk": 96, "error_decay": 1.0},
    "bf16": {"wire": "bf16"},
    "DiLoCo": {"message": "dense", "outer_momentum": 0.9, "outer_lr": 0.7, "error_decay": 0.0},
    "DiLoCo int4": {"message": "int4", "outer_momentum": 0.9, "outer_lr": 0.7, "error_decay": 0.0},
}


def reference_run(workers: int, options: dict[str, Any], steps: int = STEPS) -> tuple[Reference, list]:
    """The oracle, and every worker's model after the last step."""
    wire = {"wire": {"bf16": torch.bfloat16}[options["wire"]]} if "wire" in options else {}
    model = toy.make()
    params = list(model.parameters())
    oracle = Reference(params, workers, lr=LR, **(BASE | options | wire))
    for step in range(1, steps + 1):
        grads = []
        for worker in range(workers):
            with torch.no_grad():
                for p, x in zip(params, oracle.x[worker], strict=True):
                    p.copy_(x.view_as(p))
            model.zero_grad()
            toy.loss(model, worker, step).backward()
            grads.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in params])
        oracle.step(grads)
    return oracle, [torch.cat(x).numpy() for x in oracle.x]


def hook_run(rank: int, world: int, options: dict[str, Any], how: dict[str, Any], resume_at: int = 0) -> dict:
    def build() -> tuple:
        model = toy.make()
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
        optimizer = SparseLoCo(model.parameters(), lr=LR, **(BASE | options))
        return model, ddp, optimizer, attach(ddp, optimizer, unit_mb=0.002, **how)

    model, ddp, optimizer, attachment = build()
    sent = []
    for step in range(1, STEPS + 1):
        if step == resume_at:
            parameters, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model, ddp, optimizer, attachment = build()
            model.load_state_dict(parameters)
            optimizer.load_state_dict(state)
        attachment.counter.reset()
        optimizer.zero_grad()
        toy.loss(ddp, rank, step).backward()
        optimizer.step()
        sent.append(attachment.counter.total)
    kept = [u for u in reversed(optimizer.units) if not how and "error" in u.state]
    errors = [t for u in kept for t in reversed(u.views(u.state["error"]))]
    return {
        "x": toy.flat(model).numpy(),
        "e": torch.cat([e.flatten() for e in errors]).numpy() if errors else None,
        "sent": sent,
        "chunks": sum(u.padded for u in optimizer.units) // optimizer.chunk,
        "elements": sum(u.padded for u in optimizer.units),
        "units": len(optimizer.units),
    }


@pytest.mark.parametrize("world", [1, slow(2), 3, slow(4), slow(8)])
def test_equals_the_reference_bit_for_bit(world: int) -> None:
    oracle, models = reference_run(world, {})
    for rank, r in enumerate(run_ranks(hook_run, world, {}, {})):
        assert r["units"] > 1
        assert (r["x"] == models[rank]).all()
        assert (r["e"] == torch.cat(oracle.e[rank]).numpy()).all()


@pytest.mark.parametrize("name", [name for name in CASES if name != "paper"])
def test_every_form_equals_the_reference(name: str) -> None:
    _, models = reference_run(3, CASES[name])
    for rank, r in enumerate(run_ranks(hook_run, 3, CASES[name], {})):
        assert (r["x"] == models[rank]).all()


def test_resumed_equals_uninterrupted_bit_for_bit() -> None:
    """In the middle of a round, when models differ."""
    options = CASES["outer momentum"]
    whole, resumed = run_ranks(hook_run, 2, options, {}), run_ranks(hook_run, 2, options, {}, 9)
    for a, b in zip(whole, resumed, strict=True):
        assert (a["x"] == b["x"]).all()
        assert (a["e"] == b["e"]).all()


def test_without_overlap_it_is_the_same() -> None:
    _, models = reference_run(2, {})
    for rank, r in enumerate(run_ranks(hook_run, 2, {}, {"overlap": False})):
        assert (r["x"] == models[rank]).all()


@pytest.mark.slow
def test_by_nodes_ranks_agree_after_a_synchronisation() -> None:
    options = {"sync_every": 7}  # the last step is one
    results = run_ranks(hook_run, 4, options, {"hierarchical": True}, ranks_per_node=2)
    assert all((r["x"] == results[0]["x"]).all() for r in results)
    flat = run_ranks(hook_run, 4, options, {})
    assert all((r["x"] == flat[0]["x"]).all() for r in flat)


@pytest.mark.slow
def test_by_nodes_diloco_is_that_of_the_nodes_means() -> None:
    """In 4 bits what is rounded is another thing: there all ranks agree."""
    for message in ("dense", "int4"):
        options = CASES["DiLoCo"] | {"message": message, "sync_every": 7}
        results = run_ranks(hook_run, 4, options, {"hierarchical": True}, ranks_per_node=2)
        assert all((r["x"] == results[0]["x"]).all() for r in results)
        if message == "dense":
            flat = run_ranks(hook_run, 4, options, {})
            assert abs(results[0]["x"] - flat[0]["x"]).max() < 1e-6


def test_blocks_of_int4_may_be_smaller_than_top_k_which_is_not_used() -> None:
    x = torch.nn.Parameter(torch.ones(70))
    optimizer = SparseLoCo([x], message="int4", chunk=32, sync_every=1)
    x.grad = torch.ones(70)
    optimizer.step()
    assert (x < 1).all()
    with pytest.raises(ValueError, match="top_k must be at most chunk = 32"):
        SparseLoCo([x], chunk=32)


def test_int4_keeps_what_rounding_takes_on_workers_and_servers() -> None:
    """One round: what is sent and the mean of what is kept are what all have moved."""
    options = CASES["DiLoCo int4"] | {"error_decay": 1.0, "outer_momentum": 0.0, "outer_lr": 1.0, "sync_every": STEPS}
    exact = run_ranks(hook_run, 3, options | {"message": "dense"}, {})[0]
    results = run_ranks(hook_run, 3, options, {})
    left = sum(r["e"] for r in results) / 3
    assert abs(left).max() > 1e-4
    assert abs(results[0]["x"] - left - exact["x"]).max() < 1e-6


def test_bytes_on_the_wire() -> None:
    """Nothing between synchronisations; then k values of 4 bytes and places of 2 for each chunk, to each of the others, and a
    byte that asks whether parameters were changed."""
    for r in run_ranks(hook_run, 3, {"top_k": 8}, {}):  # whole words: nothing is padded
        for step, sent in enumerate(r["sent"], 1):
            assert sent == (2 * r["chunks"] * 8 * (4 + 2) + 2 if step % 3 == 0 else 0)
    for r in run_ranks(hook_run, 3, CASES["DiLoCo"], {}):
        assert max(r["sent"]) == 2 * 2 * 4 * r["elements"] // 3 + 2
    for r in run_ranks(hook_run, 3, CASES["DiLoCo int4"], {}):  # whole chunks for each server
        assert 0 <= max(r["sent"]) - 2 - 2 * 2 * r["chunks"] * (64 // 2 + 2) // 3 < r["units"] * 4 * (64 // 2 + 2)
    half = run_ranks(hook_run, 3, CASES["bf16"], {})[0]
    assert max(half["sent"]) == 2 * half["chunks"] * 7 * (2 + 2) + 2


def big_run(rank: int, world: int) -> float:
    """Bytes of a round of H = 30 steps with the defaults, as a share of an fp32 all-reduce in every step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 512, bias=False)
    ddp = DistributedDataParallel(model)
    optimizer = SparseLoCo(model.parameters())
    attachment = attach(ddp, optimizer)
    for _ in range(30):
        optimizer.zero_grad()
        ddp(torch.randn(2, 512)).square().mean().backward()
        optimizer.step()
    dense = 30 * 2 * (world - 1) / world * 4 * 512 * 512
    return attachment.counter.total / dense


def test_a_round_sends_a_thousandth_of_what_fp32_sends() -> None:
    """(n-1) 6 k/chunk bytes per element and round, and one, against 30 times 8 (n-1)/n: 1/2560 * n/2."""
    for share in run_ranks(big_run, 2):
        assert share == pytest.approx(6 * 64 / 4096 / (30 * 4) + 1 / (30 * 4 * 512 * 512), rel=1e-9)
        assert share < 1e-3


def test_with_everything_sent_and_one_worker_it_is_adamw() -> None:
    """k = chunk and alpha = 1: each round ends at the worker's own model, up to the rounding of z - (z - x)."""
    ours, theirs = toy.make(), toy.make()
    options = {"sync_every": 2, "top_k": 64, "chunk": 64}
    a = SparseLoCo(ours.parameters(), lr=LR, weight_decay=0.1, **options)
    b = torch.optim.AdamW(theirs.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(1, 9):
        for model, optimizer in ((ours, a), (theirs, b)):
            optimizer.zero_grad()
            toy.loss(model, 0, step).backward()
            optimizer.step()
    assert torch.allclose(toy.flat(ours), toy.flat(theirs), rtol=0, atol=2e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_state_of_other_chunks_is_refused_where_it_has_the_same_length() -> None:
    """The first parameter began at element 96, and now begins at 64: it would get the state of other elements."""
    made = []
    for chunk in (96, 64):
        params = [torch.nn.Parameter(torch.ones(size)) for size in (90, 64)]
        optimizer = SparseLoCo(params, chunk=chunk, top_k=8)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        made.append(optimizer)
    one, two = made
    assert one.units[0].padded == two.units[0].padded
    before = two.units[0].state["m"].clone()
    with pytest.raises(ValueError, match="multiple of 96 elements, in this optimizer of 64: use the options"):
        two.load_state_dict(one.state_dict())
    assert torch.equal(two.units[0].state["m"], before)
