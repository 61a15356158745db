"""No step waits on the host for the GPU; on a GPU that is not there (tests/helpers/fake_gpu.py)."""

from __future__ import annotations

import importlib.util
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import birder
from birder import kernels
from birder.comm import StreamPipeline, collectives
from birder.comm import run as perform
from birder.comm.late import sent
from birder.hooks.attachment import mark_overflow
from birder.optim.seen import Few
from tests.gpu.test_streams import METHODS, communicator
from tests.helpers.fake_gpu import GPU, AskedFor, FakeGpu, Streams
from tests.helpers.tiers import slow, slow_unless

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


class Nccl:
    """Collectives of fake tensors: nothing happens, nobody waits."""

    ReduceOp = dist.ReduceOp

    def __getattr__(self, name):
        return lambda *args, **options: SimpleNamespace(wait=lambda: None)


MORE = {
    "Birder hold": {"idle": "hold"},
    "Birder u": {"intra": "u"},
    "SigmaDeltaAdam": {},
    "Lion": {},
    "EfficientAdam": {},
    "Lion average": {"vote": "average"},
    "SigmaDeltaAdam local": {"variance": "local", "errors": "int8"},
    "SigmaDeltaAdam one-phase": {"reduce": "one_phase"},
    "ZeroOneAdam deepspeed": {"warmup_steps": 2, "local_doubling": 1, "local_limit": 2, "variant": "deepspeed"},
    "SLAMB v1": {"sync_every": 3, "dense_below": 10, "form": "v1"},
    "SLAMB v2": {"sync_every": 3, "dense_below": 10, "form": "v2"},
    "SparseLoCo": {"sync_every": 2},
    "SparseLoCo dense": {"sync_every": 2, "message": "dense", "outer_momentum": 0.9},
    "SparseLoCo int4": {"sync_every": 2, "message": "int4", "outer_momentum": 0.9},
    "EF21SGDM": {"ratio": 2, "block": 8},
    "AdamW": {},
    "BertAdam": {},
    "LAMB": {},
    "SGDM": {},
}
EVERY = {**METHODS, **MORE}
NODES = ("Birder", "Birder u", "OneBitAdam", "CSER", "SigmaDeltaAdam", "SparseLoCo")
"""What `make test` runs with nodes as workers too: each exchange."""

WAITS_UNTIL_SEEN = 2
"""Of Birder in a step in which a coordinate gets its first gradient, while many are unseen; 1 where none does.

How much is sent then follows from what the ranks have just told each other, and the update from that: a host that did
not wait would make the coordinate move a step later than the equations do. No wait once few are left, or none.
"""


def padded(monkeypatch: pytest.MonkeyPatch, kind: str) -> FakeGpu:
    """Steps of a model whose embedding has a row without gradient for ever, once the host has seen that they are few."""
    gpu = FakeGpu()
    monkeypatch.setattr(collectives, "dist", Nccl())
    with gpu.running(monkeypatch):
        p = torch.nn.Parameter(torch.randn(400, 64, device=GPU))
        optimizer = birder.Birder([p], lr=0.01)
        optimizer.bind(communicator(kind), StreamPipeline(GPU, Streams()))
        for step in range(1, 7):
            gpu.step = step
            p.grad = torch.randn_like(p)
            if step == 3:
                optimizer._few[0] = Few(torch.arange(64, device=GPU))
                gpu.waits.clear()
            optimizer.feed([p], [p.grad])
            optimizer.step()
        assert "active" in optimizer.units[0].state
    return gpu


def answered(value: Any) -> Any:
    """An operation of a communicator that asks nobody."""
    return value
    yield


def run(
    name: str,
    kind: str,
    monkeypatch,
    steps: int = 6,
    tensors: int = 6,
    *,
    feed: bool = True,
    seen: bool = True,
    elements: int = 600,
    **options: Any,
) -> tuple[FakeGpu, list[int]]:
    """Some steps of a method with 4 ranks; returns what was noted after the second, and launches of each step.

    elements: of a unit. feed: gradients arrive one by one, as in backward. seen: Birder has seen every coordinate.
    """
    gpu, launches = FakeGpu(), []
    monkeypatch.setattr(collectives, "dist", Nccl())
    with gpu.running(monkeypatch):
        params = [torch.nn.Parameter(torch.randn(40, 7, device=GPU)) for _ in range(tensors)]
        optimizer = getattr(birder, name.split()[0])(params, lr=0.01, **EVERY[name], **options)
        optimizer.bind(communicator(kind), StreamPipeline(GPU, Streams()), unit_mb=elements * 4 / 2**20)
        assert (len(optimizer.units) > 2) is (elements == 600)
        if asking(name):  # what these collectives receive means nothing, and here is taken for flags
            no = SimpleNamespace(tolist=lambda: gpu.wait("flags") or [False, False])
            monkeypatch.setattr(optimizer.comm, "union", lambda flags: answered(no))
        for step in range(1, steps + 1):
            gpu.step = step
            for p in params:
                p.grad = torch.randn_like(p)
            if step == 3:
                gpu.waits.clear()
                for unit in optimizer.units if seen else ():
                    unit.state.pop("active", None)
            gpu.launches.clear()
            if feed and optimizer.plan(optimizer.steps + 1).own:
                for p in reversed(params):
                    optimizer.feed([p], [p.grad])
            optimizer.step()
            launches.append(gpu.launches.total())
    return gpu, launches


@pytest.mark.parametrize(
    ("kind", "name"),
    [("flat", name) for name in EVERY]
    + [("hierarchical", name) if name in NODES else slow("hierarchical", name) for name in EVERY],
)
def test_no_step_waits_on_the_host(kind, name, monkeypatch):
    """But a synchronisation after local steps, once: what is sent follows from whether any rank's parameters were changed."""
    gpu, launches = run(name, kind, monkeypatch)
    assert len(gpu.waits) == asking(name)
    assert all("watch.py" in wait and "Union(found)" in wait for wait in gpu.waits)
    assert min(launches) > 0


def asking(name: str, first: int = 3, last: int = 6) -> int:
    """Steps in which ranks ask each other whether parameters were changed since the last synchronisation."""
    method = getattr(birder, name.split()[0])([torch.nn.Parameter(torch.zeros(1))], lr=0.01, **EVERY[name])
    if not isinstance(method, (birder.ZeroOneAdam, birder.QSparseLocalSGD, birder.SparseLoCo)):
        return 0
    local = [method.plan(step) is birder.Plan.SKIP for step in range(first - 1, last + 1)]
    return sum(before and not now for before, now in itertools.pairwise(local))


@pytest.mark.parametrize("name", ["Birder", "OneBitAdam", "CSER", "SLAMB", "LAMB"])
def test_nor_with_clipping(name, monkeypatch):
    gpu, _ = run(name, "flat", monkeypatch, feed=False, max_grad_norm=1.0)
    assert gpu.waits == []


@pytest.mark.parametrize(
    "name",
    slow_unless(
        ("Birder", "OneBitAdam", "CSER").__contains__,
        ["Birder", "Birder one-phase", "Birder hold", "OneBitAdam", "ZeroOneAdam", "CSER", "QSparseLocalSGD", "EFSGD"],
    ),
)
def test_launches_do_not_grow_with_the_tensors_of_a_unit(name, monkeypatch):
    few, many = (run(name, "flat", monkeypatch, tensors=n, feed=False, elements=2**20)[1][2:] for n in (20, 40))
    assert few == many


@pytest.mark.parametrize("reduce", ["two_phase", "one_phase"])
def test_birder_is_a_few_kernels_for_each_unit_and_nothing_else(reduce, monkeypatch):
    """Random numbers are drawn inside of them: torch's integer arithmetic would be some 130 launches for each draw."""
    gpu, _ = run("Birder", "flat", monkeypatch, feed=False, reduce=reduce, elements=2**20)
    served = {"_copied": 1} if reduce == "two_phase" else {"_owned": 1, "_assemble": 1}
    expected = {"_take": 1, "_encode": 1, **served, "_apply": 1}
    assert {k.removeprefix("triton."): n for k, n in gpu.launches.items() if k.startswith("triton.")} == expected
    assert gpu.launches.total() <= len(expected) + 1


def test_parameters_in_other_orders_of_memory_are_left_to_no_other_code(monkeypatch):
    gpu = FakeGpu()
    with gpu.running(monkeypatch):
        orders = (torch.contiguous_format, torch.channels_last)
        tensors = [torch.randn(8, 3, 4, 4, device=GPU).contiguous(memory_format=order) for order in orders]
        tensors.append(torch.randn(16, 40, device=GPU).t())
        flat, offsets = torch.empty(2048, device=GPU), [0, 384, 768]
        bits = torch.empty(256, dtype=torch.uint8, device=GPU)
        gpu.reset()
        kernels.take(flat, tensors, offsets, factor=None, screen=True)
        kernels.apply_bits(tensors, offsets, bits, lr=0.1, decay=0.0, active=None)
    assert gpu.launches == {"triton._take": 2, "triton._apply": 2}  # one in order, one for all others


@pytest.mark.parametrize("tensors", [6, slow(12)])
@pytest.mark.parametrize("name", ["Birder", "Birder u"])
def test_birder_waits_while_coordinates_are_unseen(name, tensors, monkeypatch):
    gpu, _ = run(name, "hierarchical", monkeypatch, steps=6, tensors=tensors, seen=False)
    assert len(gpu.waits) == 4 * WAITS_UNTIL_SEEN
    assert all("seen.py" in wait for wait in gpu.waits)


@pytest.mark.parametrize("kind", ["flat", "hierarchical"])
def test_birder_waits_no_more_for_a_row_that_never_has_a_gradient(kind, monkeypatch):
    assert padded(monkeypatch, kind).waits == []


def test_agreement_on_an_overflow_waits_for_nothing(monkeypatch):
    gpu = FakeGpu()
    monkeypatch.setattr(collectives, "dist", Nccl())
    with gpu.running(monkeypatch):
        perform(communicator("flat"), mark_overflow([torch.randn(10, 10, device=GPU) for _ in range(3)], GPU))
    assert gpu.waits == []


@pytest.mark.parametrize(
    "waiting",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: int(x.argmax()),
        lambda x: x.sum().tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu", non_blocking=False),
        lambda x: torch.zeros(8).copy_(x),
        lambda x: x.copy_(torch.zeros(8)),
        lambda x: torch.zeros(8).to(x.device),
        lambda x: torch.tensor([1.0, 2.0], device=x.device),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: AskedFor(x.sum()).read(),
    ],
    ids=lambda _: "",
)
def test_what_waits_is_counted(waiting, monkeypatch):
    gpu = FakeGpu()
    with gpu.running(monkeypatch):
        waiting(torch.randn(8, device=GPU))
    assert gpu.waits


def test_what_does_not_wait_is_not_counted(monkeypatch):
    gpu = FakeGpu()
    with gpu.running(monkeypatch):
        x = torch.randn(8, device=GPU)
        x.mul_(2.0).add_(torch.ones(8, device=GPU))
        torch.nonzero_static(x > 0, size=3)
        x.index_select(0, sent(torch.arange(3), GPU))
        asked = AskedFor(x.sum())
        gpu.step += 1
        asked.read()
    assert gpu.waits == []
    assert gpu.launches.total() > 4
