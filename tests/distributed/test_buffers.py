"""The buffers of an exchange: the same ones in every step, so that a step of 1-bit methods allocates nothing.

One world of ranks for all cases of a topology.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import birder
from birder.comm import Pipeline
from tests.helpers.ranks import fresh_world

WIDTH = 1024  # a unit of 2^20 elements: 128 KiB of bits
TRIFLE = 4096  # bytes: scales, scalars, the sums of a few tiles


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("Birder", {}, {}),
    ("Birder", {"reduce": "one_phase"}, {}),
    ("SigmaDeltaAdam", {"share_growth": 9.0}, {}),
    ("OneBitAdam", {"warmup_steps": 2}, {}),
    ("Birder", {}, {"hierarchical": True}),
    ("Birder", {"reduce": "one_phase"}, {"hierarchical": True}),
    ("SigmaDeltaAdam", {"share_growth": 9.0, "errors": "int8"}, {"hierarchical": True}),
    ("OneBitAdam", {"warmup_steps": 2}, {"hierarchical": True}),
]


def places(name: str, options: dict, how: dict) -> list[dict[str, tuple]]:
    """Where each unit's buffers lie, with type and size, after each of four steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    ddp = DistributedDataParallel(model)
    optimizer = getattr(birder, name)(model.parameters(), lr=1e-3, **options)
    attachment = birder.attach(ddp, optimizer, **how)
    after = []
    for _ in range(4):
        optimizer.zero_grad()
        ddp(torch.randn(2, 64)).square().sum().backward()
        optimizer.step()
        buffers = {f"{u.index} {n}": t for u in optimizer.units for n, t in u.buffers.items()}
        after.append({n: (t.data_ptr(), t.dtype, t.numel()) for n, t in buffers.items()})
        bits = optimizer.units[0].result
        if bits is not None and bits.dtype == torch.uint8:  # what the exchange left lies in one of them
            assert bits.data_ptr() in {t.data_ptr() for t in optimizer.units[0].buffers.values()}
    attachment.close()
    return after


def allocations(name: str, options: dict, how: dict) -> list[int]:
    """The sizes in bytes of all tensors that were allocated in a step, but for trifles."""
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    ddp = DistributedDataParallel(model)
    optimizer = getattr(birder, name)(model.parameters(), lr=1e-3, **options)
    attachment = birder.attach(ddp, optimizer, overlap=False, **how)
    optimizer.pipeline = Pipeline()  # on this thread, which is the one that is watched
    made: list[int] = []
    for step in range(5):
        optimizer.zero_grad()
        ddp(torch.randn(2, WIDTH)).square().sum().backward()
        if step < 4:
            optimizer.step()
            continue
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as watch:
            optimizer.step()
        events = watch.profiler.kineto_results.events()  # type: ignore[union-attr]
        made = [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > TRIFLE]
    attachment.close()
    return made


def watched(rank: int, world: int, hierarchical: bool) -> dict[int, tuple[list[dict[str, tuple]], list[int]]]:
    cases = {i: case for i, case in enumerate(CASES) if bool(case[2]) == hierarchical}
    return {i: (places(*case), allocations(*case)) for i, case in cases.items()}


@functools.cache
def found(hierarchical: bool) -> list[dict[int, tuple[list[dict[str, tuple]], list[int]]]]:
    world, local = (4, 2) if hierarchical else (3, 1)
    return fresh_world(watched, world, hierarchical, ranks_per_node=local)


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{n}, {o}, {h}" for n, o, h in CASES])
def test_every_step_finds_the_same_buffers(case: int) -> None:
    name, _, how = CASES[case]
    elements = 64 * 64 + 64
    for after in (rank[case][0] for rank in found(bool(how))):
        assert after[0] == after[1] == after[2] == after[3]
        sizes = {n.split()[1]: (dtype, numel) for n, (_, dtype, numel) in after[0].items()}
        shards, workers = (2, 2) if how else (1, 3)
        padded = -(-elements // (32 * shards * workers)) * 32 * shards * workers
        scale = 4 if name == "OneBitAdam" else 0  # behind the bits of each chunk
        chunk = padded // 8 // shards // workers + scale
        assert sizes["result"] == (torch.uint8, shards * workers * chunk)
        assert sizes["bits"] == sizes["rows"] == (torch.uint8, workers * chunk)
        assert sizes["chunk"] == (torch.uint8, chunk)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{n}, {o}, {h}" for n, o, h in CASES])
def test_a_step_after_the_first_allocates_nothing(case: int) -> None:
    pytest.importorskip("numba", reason="without numba the kernels run unfused, in torch")
    for rank in found(bool(CASES[case][2])):
        assert rank[case][1] == []


def dense(rank: int, world: int) -> list[int]:
    return allocations("LAMB", {}, {})


def test_an_allocation_would_be_seen() -> None:
    """The control: a dense optimizer's kernel-free arithmetic allocates, and the watch sees it."""
    (made,) = fresh_world(dense, 1)
    assert made != []
