"""What the contract promises to the next method: messages do not cross, blocks are aligned, a step may go on in the next."""

from __future__ import annotations

import time
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import birder
from birder import BucketOptimizer, Plan, Topology, attach
from birder.comm import (
    AllGather,
    AllToAll,
    Communicator,
    GatherWorkers,
    Hierarchical,
    Mean,
    Request,
    Requests,
    ThreadPipeline,
    Total,
    TwoPhase,
    Union,
)
from birder.comm.requests import asks
from birder.comm.runtime import performing, run
from birder.optim.layout import Unit
from tests.helpers import toy
from tests.helpers.ranks import run_ranks

TASKS = 6
ROW = 64
"""Bytes of every message: all of one size, so that one taken for another is not seen by its length."""


def message(rank: int, task: int, call: int) -> Tensor:
    """What `rank` sends in call number `call` of a task."""
    return torch.full((ROW,), float(100 * rank + 10 * task + call))


EarlyAllToAll = asks(Communicator.scatter, early=True)
"""The task continues at once, next to what is left of the one before it."""


def crossing(rank: int, world: int, call: str, slow: int) -> list[str]:
    """Tasks that ask for an all-to-all, and then communicate once more; on rank `slow` every task begins late.

    call "early": in every second task the second all-to-all too is a part of its beginning, and on rank `slow` it comes
    before that of the task before.
    """
    comm = TwoPhase(dist.group.WORLD, Topology.from_env(world))
    pipeline, wrong = ThreadPipeline(comm), []

    def task(number: int) -> Requests[None]:
        if rank == slow and number:
            time.sleep(0.05)
        first = EarlyAllToAll if call == "early" and number % 2 else AllToAll
        rows = yield first(message(rank, number, 0).repeat(world))
        wanted = torch.stack([message(peer, number, 0) for peer in range(world)])
        if not torch.equal(rows, wanted):
            wrong.append(f"task {number}: the first exchange")
        wanted = torch.stack([message(peer, number, 1) for peer in range(world)])
        if call == "early" and rank == slow and not number % 2:
            time.sleep(0.15)
        if call == "mean":
            got, wanted = (yield Mean(message(rank, number, 1))), wanted.sum(0) / world
        elif call in ("scatter", "early"):
            got = yield AllToAll(message(rank, number, 1).repeat(world))
        elif call == "gather_workers":
            got = yield GatherWorkers(message(rank, number, 1))
        elif call == "total":
            got, wanted = (yield Total(message(rank, number, 1)[0])), wanted[:, 0].sum()
        else:
            mine = torch.arange(ROW * 8) % (number + 2) == rank
            got = yield Union(mine)
            wanted = torch.stack([torch.arange(ROW * 8) % (number + 2) == peer for peer in range(world)]).any(0)
        if not torch.equal(got, wanted):
            wrong.append(f"task {number}: {call}")

    for number in range(TASKS):
        pipeline.submit(lambda number=number: (yield from task(number)))
    pipeline.wait()
    pipeline.close()
    return wrong


@pytest.mark.parametrize("call", ["mean", "scatter", "early", "gather_workers", "total", "union"])
def test_messages_of_two_units_do_not_cross(call: str) -> None:
    """On the slow rank the next unit's all-to-all is posted after this unit's second exchange, on the others before it."""
    assert run_ranks(crossing, 3, call, 1) == [[], [], []]


def gathered(rank: int, world: int, hierarchical: bool) -> list:
    """Gathers of all and of workers, three under way at once, taken in the other order."""
    comm = (Hierarchical if hierarchical else TwoPhase)(dist.group.WORLD, Topology.from_env(world))
    into = torch.empty(world * ROW)
    wanted = [AllGather(message(rank, 1, 0)), GatherWorkers(message(rank, 2, 0)), AllGather(message(rank, 3, 0), into)]
    found: list = []

    def once(request: Request) -> Requests[None]:
        found.append((yield request).view(-1, ROW)[:, 0].tolist())

    begun = [performing(comm, once(request)) for request in wanted]
    for steps in begun:
        next(steps)  # it is on its way
    for steps in reversed(begun):
        for _ in steps:
            pass
    return found


def test_gathers_under_way_at_once() -> None:
    for third, second, first in run_ranks(gathered, 3, False):
        assert first == [10, 110, 210]
        assert second == [20, 120, 220]
        assert third == [30, 130, 230]


def test_gathers_by_nodes_come_in_element_order() -> None:
    """Rank = node * 2 + local rank; shards first, then workers: 0, 2, 1, 3."""
    for rank, (third, second, first) in enumerate(run_ranks(gathered, 4, True, ranks_per_node=2)):
        assert first == [10, 210, 110, 310]
        assert third == [30, 230, 130, 330]
        assert second == [20 + 100 * (rank % 2), 220 + 100 * (rank % 2)]


def gathered_large(rank: int, world: int) -> list[tuple[int, int]]:
    """(time, rank) of each part that came wrong, of 4 MB each: none is on its way as a whole before another one arrives."""
    comm, wrong = Hierarchical(dist.group.WORLD, Topology.from_env(world)), []
    for time_ in range(2):
        parts = run(comm, AllGather(torch.full((1 << 20,), float(rank)))).view(world, -1)
        wrong += [(time_, peer) for part, peer in zip(parts, (0, 2, 1, 3), strict=True) if not (part == peer).all()]
    return wrong


def test_large_parts_do_not_run_over_each_other() -> None:
    assert run_ranks(gathered_large, 4, ranks_per_node=2) == [[], [], [], []]


class Blocks(BucketOptimizer):
    """Asks for blocks of 96 elements."""

    compressed: ClassVar[bool] = True
    wanted: ClassVar[int] = 96

    def __init__(self, params, lr: float = 0.1, **options):
        super().__init__(params, {"lr": lr, "weight_decay": 0.0}, **options)

    @property
    def alignment(self) -> int:
        return self.wanted


class Odd(Blocks):
    wanted: ClassVar[int] = 48


def aligned(rank: int, world: int, hierarchical: bool) -> None:
    optimizer = Blocks(toy.make().parameters())
    comm = (Hierarchical if hierarchical else TwoPhase)(dist.group.WORLD, Topology.from_env(world))
    optimizer.bind(comm, unit_mb=0.001)
    assert len(optimizer.units) > 1
    for unit in optimizer.units:
        assert all(offset % 96 == 0 for offset in unit.offsets)
        assert unit.start % 96 == 0
        assert unit.padded % comm.multiple == 0
        assert unit.padded // comm.shards % 96 == 0


@pytest.mark.parametrize(("world", "hierarchical"), [(1, False), (3, False), (4, True)])
def test_parameters_and_shards_begin_where_the_method_asks(world: int, hierarchical: bool) -> None:
    run_ranks(aligned, world, hierarchical, ranks_per_node=2 if hierarchical else None)


def test_an_alignment_that_cuts_words_of_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="alignment must be a multiple of 32, got 48"):
        Odd(toy.make().parameters()).bind()


class Late(BucketOptimizer):
    """SGD on each rank's own gradient; what `after_update` has averaged replaces the model one step later."""

    compressed: ClassVar[bool] = True
    local_models: ClassVar[bool] = True
    wait_s: ClassVar[float] = 0.0

    def __init__(self, params, lr: float = 0.1, fail_at: int = 0, **options):
        self.fail_at = fail_at
        super().__init__(params, {"lr": lr, "weight_decay": 0.0}, **options)

    def plan(self, step: int) -> Plan:
        return Plan.SKIP

    def init_unit(self, unit: Unit) -> None:
        unit.state["mean"] = unit.zeros()

    def exchange(self, unit: Unit, grad: Tensor, step: int) -> None:
        unit.result = grad

    def update(self, step: int, plan: Plan) -> None:
        for unit in self.units:
            if step > 1:
                torch._foreach_copy_(unit.params, unit.views(unit.state["mean"]))
            torch._foreach_add_(unit.params, unit.views(unit.result), alpha=-unit.group["lr"])

    def after_update(self, step: int) -> Requests[None]:
        if step == self.fail_at:
            raise OSError("the wire was cut")
        sent = [(unit, self.flat_parameters(unit)) for unit in self.units]
        time.sleep(self.wait_s)
        for unit, flat in sent:
            unit.state["mean"].copy_((yield Mean(flat)))


def late_run(rank: int, world: int, overlap: bool, resume_at: int) -> tuple:
    model = toy.make()
    optimizer = Late(model.parameters())
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    attach(ddp, optimizer, overlap=overlap, unit_mb=0.001)
    optimizer.wait_s = 0.02 * rank
    for step in range(1, 7):
        if step == resume_at:
            saved = [p.detach().clone() for p in model.parameters()], optimizer.state_dict()
            model_state, state = saved
            model = toy.make()
            ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
            optimizer = Late(model.parameters())
            attach(ddp, optimizer, overlap=overlap, unit_mb=0.001)
            with torch.no_grad():
                torch._foreach_copy_(list(model.parameters()), model_state)
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        toy.loss(ddp, rank, step).backward()
        optimizer.step()
    with optimizer.averaged():
        mean = toy.flat(model).numpy()
    return toy.flat(model).numpy(), mean


def late_reference(world: int) -> list[Tensor]:
    """The same in one process, x for each worker."""
    models = [toy.make() for _ in range(world)]
    mean: list[Tensor] = []
    for step in range(1, 7):
        for worker, model in enumerate(models):
            model.zero_grad()
            toy.loss(model, worker, step).backward()
            with torch.no_grad():
                for i, p in enumerate(model.parameters()):
                    if step > 1:
                        p.copy_(mean[i])
                    p.add_(p.grad if p.grad is not None else torch.zeros_like(p), alpha=-0.1)
        mean = []
        for several in zip(*(m.parameters() for m in models), strict=True):
            total = several[0].detach().clone()
            for p in several[1:]:
                total += p.detach()
            mean.append(total / world)
    return [toy.flat(model) for model in models]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("resume_at", [0, 4])
def test_what_runs_beside_the_next_step_is_there_for_its_update(overlap: bool, resume_at: int) -> None:
    """Bit for bit, also where a checkpoint is taken while the communication of the last step is still under way."""
    expected = late_reference(3)
    for rank, (x, _) in enumerate(run_ranks(late_run, 3, overlap, resume_at)):
        assert (x == expected[rank].numpy()).all()


def late_failure(rank: int, world: int) -> str:
    model = toy.make()
    ddp = DistributedDataParallel(model)
    optimizer = Late(model.parameters(), fail_at=2)
    attach(ddp, optimizer)
    for step in range(1, 4):
        optimizer.zero_grad()
        toy.loss(ddp, rank, step).backward()
        try:
            optimizer.step()
        except OSError as e:
            return f"{step}: {e}"
    return "nothing was said"


def test_a_failure_beside_the_next_step_is_raised_in_it() -> None:
    assert run_ranks(late_failure, 2) == ["3: the wire was cut"] * 2


def test_the_model_of_the_contract_is_a_linear_layer() -> None:
    """The control: without other ranks a method of the contract trains as torch's SGD does."""
    torch.manual_seed(0)
    ours, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    late, sgd = Late(ours.parameters(), lr=0.1), torch.optim.SGD(theirs.parameters(), lr=0.1)
    for _ in range(3):
        for model, optimizer in ((ours, late), (theirs, sgd)):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
    assert torch.equal(ours.weight, theirs.weight)


PIPELINED = {
    "Birder": {},
    "OneBitLAMB": {"warmup_steps": 1},
    "ZeroOneAdam": {"warmup_steps": 1, "local_doubling": 9},
    "CSER": {"gradient_ratio": 2, "block": 8},
    "SLAMB": {"dense_below": 10},
}


def threads(rank: int, world: int) -> dict[str, list[int]]:
    """On how many threads each unit's exchange ran in the third step."""
    found = {}
    for name, options in PIPELINED.items():
        model = toy.make()
        ddp = DistributedDataParallel(model)
        optimizer = getattr(birder, name)(model.parameters(), lr=1e-3, **options)
        attachment = attach(ddp, optimizer, unit_mb=0.0008)
        toy.train(ddp, optimizer, rank, range(1, 4))
        work = [s for s in optimizer.pipeline.trace.last if s.kind == "work" and s.unit is not None]
        found[name] = [len({s.thread for s in work if s.unit == u.index}) for u in optimizer.units]
        attachment.close()
    return found


def test_every_method_makes_the_next_units_message_while_one_is_on_the_wire() -> None:
    """The first thread leaves a unit once its message is on its way, the second one waits for it."""
    for found in run_ranks(threads, 2):
        assert all(set(counts) == {2} and len(counts) > 1 for counts in found.values())
