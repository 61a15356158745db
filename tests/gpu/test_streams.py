"""The order of a step on CUDA's streams, checked by a model of them on the CPU: tests/helpers/fake_cuda.py."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import birder
from birder import kernels
from birder.comm import ByteCounter, Collectives, Communicator, StreamPipeline, Union, collectives
from birder.kernels import reference
from tests.helpers.fake_cuda import FakeCuda, Stream

CPU = torch.device("cpu")
METHODS = {
    "Birder": {},
    "Birder one-phase": {"reduce": "one_phase"},
    "OneBitAdam": {"warmup_steps": 1},
    "OneBitLAMB": {"warmup_steps": 2},
    "ZeroOneAdam": {"warmup_steps": 2, "local_doubling": 1, "local_limit": 2},
    "CSER": {"gradient_ratio": 2, "reset_every": 2, "block": 8},
    "QSparseLocalSGD": {"sync_every": 2, "block": 8},
    "EFSGD": {"ratio": 2, "block": 8},
    "SLAMB": {"sync_every": 3, "dense_below": 10},
}


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Kernels in plain torch, all of whose operations the model sees."""
    monkeypatch.setattr(kernels, "backend", lambda device: reference)


class FakeNccl:
    """What `birder.comm.collectives` asks of torch.distributed, as NCCL does it: on its own stream, in order.

    All ranks send what this one sends.
    """

    ReduceOp = dist.ReduceOp

    def __init__(self, fake: FakeCuda) -> None:
        self.fake, self.own = fake, fake.Stream()

    def _queue(self, reads, writes, fill, async_op):
        self.own.wait_stream(self.fake.current)
        with self.fake.stream(self.own):
            fill()
        if not async_op:
            self.fake.current.wait_stream(self.own)
        held = reads, writes  # as a Work does until it is waited for
        return SimpleNamespace(held=held, wait=lambda: self.fake.current.wait_stream(self.own))

    def all_to_all_single(self, out, rows, group=None, async_op=False):
        return self._queue(rows, out, lambda: out.copy_(rows), async_op)

    def all_gather_into_tensor(self, out, part, group=None, async_op=False):
        return self._queue(part, out, lambda: out.view(-1, part.numel()).copy_(part.clone()), async_op)

    def reduce_scatter_tensor(self, out, flat, group=None, async_op=False):
        return self._queue(flat, out, lambda: out.copy_(flat[: out.numel()]), async_op)

    def all_reduce(self, flat, op=None, group=None, async_op=False):
        return self._queue(flat, flat, lambda: flat.mul_(1), async_op)


def nccl_link(size: int) -> Collectives:
    """A link of `size` ranks on NCCL, of which this is number 1."""
    link = Collectives.__new__(Collectives)
    link.group, link.counter, link.size, link.rank = None, ByteCounter(), size, 1 % size
    link.ranks, link.near, link._received = list(range(size)), [True] * size, {}
    link._backends = {"cpu": "nccl"}
    return link


def communicator(kind: str):
    """On NCCL: 4 workers, or 2 nodes of 2 ranks."""
    return Communicator(nccl_link(4)) if kind == "flat" else Communicator(nccl_link(4), nccl_link(2), nccl_link(2))


def step(optimizer, fake: FakeCuda) -> None:
    """Gradients arrive bucket by bucket on the main stream, then the update."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p in params:
        p.grad = torch.randn(p.shape)
    if optimizer.plan(optimizer.steps + 1).own:
        for p in reversed(params):
            optimizer.feed([p], [p.grad])
    optimizer.step()
    fake.collect()


def run(name: str, fake: FakeCuda, pipeline=None, steps: int = 4, comm=None) -> FakeCuda:
    params = [torch.nn.Parameter(torch.randn(40, 7)) for _ in range(6)]
    optimizer = getattr(birder, name.split()[0])(params, lr=0.01, **METHODS[name])
    with fake:
        optimizer.bind(comm, pipeline or StreamPipeline(CPU, fake), unit_mb=600 * 4 / 2**20)
        assert len(optimizer.units) > 2
        for _ in range(steps):
            step(optimizer, fake)
    return fake


@pytest.mark.parametrize("name", METHODS)
def test_every_read_comes_after_its_write(name):
    fake = run(name, FakeCuda())
    assert fake.faults == []
    assert fake.launches > 100
    assert len(fake.streams) == 3


@pytest.mark.parametrize("kind", ["flat", "hierarchical"])
@pytest.mark.parametrize("name", METHODS)
def test_so_it_does_with_collectives_on_a_stream_of_their_own(name, kind, monkeypatch):
    fake = FakeCuda()
    pipeline = StreamPipeline(CPU, fake)
    monkeypatch.setattr(collectives, "dist", FakeNccl(fake))
    run(name, fake, pipeline, comm=communicator(kind))
    assert fake.faults == []


def test_the_second_half_of_a_unit_leaves_the_first_stream_to_the_next_unit():
    fake = FakeCuda()
    pipeline = StreamPipeline(CPU, fake)
    seen = []

    def task(k):
        seen.append((k, "encode", fake.current.number))
        yield Union(torch.zeros(1, dtype=torch.bool))
        seen.append((k, "rest", fake.current.number))

    pipeline.submit(functools.partial(task, 0))
    pipeline.submit(lambda: seen.append((1, "whole", fake.current.number)))
    first, second = fake.streams[1:]
    assert seen == [(0, "encode", first.number), (0, "rest", second.number), (1, "whole", second.number)]
    assert (first.priority, second.priority) == (-1, -1)
    # What the first stream does next need not wait for the second.
    first_knows = first.clock.get(second.number, 0)
    assert first_knows == 0


def without(waiting: str):
    """A pipeline of which one order is missing: its streams' `wait_stream` does nothing where `waiting` calls it."""

    class Broken(StreamPipeline):
        def submit(self, task, unit=None, whole=False):
            with missing() if waiting == "submit" else nothing():
                super().submit(task, unit, whole)

        def wait(self):
            with missing() if waiting == "wait" else nothing():
                super().wait()

        def _hold(self, started):
            if waiting != "hold":
                super()._hold(started)

    return Broken


class missing:
    def __enter__(self):
        self.kept, Stream.wait_stream = Stream.wait_stream, lambda self, other: None

    def __exit__(self, *_):
        Stream.wait_stream = self.kept


class nothing(missing):
    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


@pytest.mark.parametrize(("broken", "says"), [("submit", "reads"), ("wait", "reads")])
def test_a_missing_order_is_found(broken, says):
    fake = FakeCuda()
    run("Birder", fake, without(broken)(CPU, fake), steps=2)
    assert fake.faults
    assert any(says in fault for fault in fake.faults)


def test_memory_given_away_too_early_is_found():
    def task():
        made = torch.ones(1000)
        yield Union(torch.zeros(1, dtype=torch.bool))
        made.add_(1)  # on the second stream; free on the host before that stream is there

    for broken, found in (("hold", True), ("nothing", False)):
        fake = FakeCuda()
        with fake:
            pipeline = without(broken)(CPU, fake)
            pipeline.submit(task)
            pipeline.submit(task)  # whose memory may be the first one's
            pipeline.wait()
        assert bool(fake.faults) is found, fake.faults


def test_what_happens_on_one_stream_needs_no_wait():
    fake = FakeCuda()
    with fake:
        x = torch.zeros(4)
        x.add_(1)
        other = fake.Stream()
        with fake.stream(other):
            y = torch.ones(4)
        y.add_(1)
    assert len(fake.faults) == 1
    assert "on stream 0 writes what aten::ones.default on stream 1 writes" in fake.faults[0].replace(
        "aten.ones.default", "aten::ones.default"
    )
