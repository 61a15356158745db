"""Room that is used again: what it hands out, and that a step of the 1-bit methods allocates nothing but trifles."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import birder
from birder.comm import Pipeline
from birder.room import Room
from tests.ranks import run_ranks

WIDTH = 1024  # a unit of 2^20 elements: 128 KiB of bits
TRIFLE = 4096  # bytes: scales, scalars, the sums of a few tiles


def test_requests_find_the_same_buffers_after_a_rewind() -> None:
    room = Room()
    first = [room.empty(32, dtype=torch.uint8), room.empty((4, 3), dtype=torch.float32)]
    assert [(t.dtype, t.shape) for t in first] == [(torch.uint8, (32,)), (torch.float32, (4, 3))]
    assert first[0].data_ptr() != first[1].data_ptr()
    room.rewind()
    again = [room.empty((2, 4), dtype=torch.float32), room.empty(0, dtype=torch.float64)]
    assert again[0].data_ptr() == first[0].data_ptr()
    assert again[1].numel() == 0
    assert room.nbytes == 32 + 48
    room.rewind()
    assert room.empty(33, dtype=torch.uint8).shape == (33,)  # too large for what is kept: replaced
    assert room.nbytes == 33 + 48


def allocations(rank: int, world: int, name: str, options: dict, how: dict) -> list[int]:
    """The sizes in bytes of all tensors that were allocated in a step, but for trifles."""
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    ddp = DistributedDataParallel(model)
    optimizer = getattr(birder, name)(model.parameters(), lr=1e-3, **options)
    birder.attach(ddp, optimizer, overlap=False, **how)
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
    return made


CASES = [
    ("Birder", {}, {}),
    ("Birder", {"reduce": "one_phase"}, {}),
    ("OneBitAdam", {"warmup_steps": 2}, {}),
    ("Birder", {}, {"hierarchical": True}),
    ("Birder", {"reduce": "one_phase"}, {"hierarchical": True}),
    ("OneBitAdam", {"warmup_steps": 2}, {"hierarchical": True}),
]


@pytest.mark.parametrize(("name", "options", "how"), CASES)
def test_a_step_after_the_first_allocates_nothing(name: str, options: dict, how: dict) -> None:
    pytest.importorskip("numba", reason="without numba the kernels run unfused, in torch")
    world, local = (4, 2) if how else (3, 1)
    for made in run_ranks(allocations, world, name, options, how, ranks_per_node=local):
        assert made == []


def test_an_allocation_would_be_seen() -> None:
    """The control: a dense optimizer's kernel-free arithmetic allocates, and the watch sees it."""
    (made,) = run_ranks(allocations, 1, "LAMB", {}, {})
    assert made != []
