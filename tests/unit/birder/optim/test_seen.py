"""What ranks tell each other about coordinates that have had a gradient: birder/optim/seen.py."""

from __future__ import annotations

import copy
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.common_distributed import spawn_threads_and_init_comms

import birder
from birder import Topology
from birder.comm import Communicator, Hierarchical, TwoPhase
from birder.comm import run as perform
from birder.comm.collectives import Operation
from birder.optim import seen

BLOCK = seen.BLOCK


class Peer:
    """One of the ranks, which are threads: `union` and what it sent."""

    def __init__(
        self, rank: int, ranks: int, table: list[Tensor | None], barrier: threading.Barrier, shards: int
    ) -> None:
        self.rank, self.ranks, self.table, self.barrier = rank, ranks, table, barrier
        self.shard, self.shards = rank % shards, shards
        self.sent: list[int] = []

    shard_of = Communicator.shard_of

    def union(self, flags: Tensor) -> Operation[Tensor]:
        self.sent.append(flags.numel())
        self.table[self.rank] = flags.clone()
        self.barrier.wait()
        whole = torch.stack([t for t in self.table if t is not None]).any(0)
        self.barrier.wait()
        return whole
        yield  # an operation, which asks nobody else


def unite(bs: list[Tensor], actives: list[Tensor], numels: list[int], shards: int = 1) -> list[Peer]:
    """Each rank unites a unit of which it keeps `b`, one shard or the whole, and `active`, in place."""
    ranks, padded = len(bs), len(actives[0])
    table: list[Tensor | None] = [None] * ranks
    barrier = threading.Barrier(ranks)
    peers = [Peer(rank, ranks, table, barrier, shards) for rank in range(ranks)]
    params = [torch.empty(n) for n in numels]
    failed: list[BaseException] = []

    def run(rank: int) -> None:
        state = {"b": bs[rank], "active": actives[rank]}
        unit = SimpleNamespace(
            index=0,
            state=state,
            padded=padded,
            params=params,
            device=torch.device("cpu"),
            zeros=lambda dtype=torch.float32: torch.zeros(padded, dtype=dtype),
            views=lambda flat: flat[: sum(numels)].split(numels),
        )
        method: Any = object.__new__(seen.SeenMap)
        method.comm, method.units, method.seen_by, method._few = peers[rank], [unit], "b", {}
        try:
            perform(peers[rank], method.after_units(1))  # type: ignore[arg-type]
        except BaseException as error:
            failed.append(error)
            barrier.abort()
        peers[rank].dropped = "active" not in state  # type: ignore[attr-defined]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return peers


@pytest.mark.parametrize("padded", [96, BLOCK, 5 * BLOCK + 96, 6 * BLOCK])
@pytest.mark.parametrize("shards", [1, 2])
def test_every_rank_ends_with_what_any_rank_has_seen(padded: int, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen, "PART", 2)  # several unions for one unit
    draw = torch.Generator().manual_seed(padded + shards)
    known = torch.rand(padded, generator=draw) < 0.1
    kept = padded // shards
    wholes = [torch.rand(padded, generator=draw) * (torch.rand(padded, generator=draw) < 0.001) for _ in range(4)]
    wholes[1][-1] = 1.0  # in the last block, which is short
    bs = [whole[rank % shards * kept : (rank % shards + 1) * kept].clone() for rank, whole in enumerate(wholes)]
    expected = known.clone()
    for rank, b in enumerate(bs):
        begin = rank % shards * kept
        expected[begin : begin + kept] |= b > 0
    actives = [known.clone() for _ in bs]
    peers = unite(bs, actives, [padded], shards)
    assert all(torch.equal(active, expected) for active in actives)
    assert not any(peer.dropped for peer in peers)  # type: ignore[attr-defined]
    news = (expected & ~known).nonzero().view(-1) // BLOCK
    assert peers[0].sent[0] == -(-padded // BLOCK)
    assert sum(peers[0].sent[1:]) == BLOCK * len(news.unique())  # only blocks with news travel


def test_a_unit_that_is_seen_whole_has_no_map() -> None:
    b = torch.ones(2 * BLOCK + 64)
    b[-10:] = 0.0  # padding
    active = torch.zeros(len(b), dtype=torch.bool)
    (peer,) = unite([b], [active], [BLOCK, BLOCK + 54])
    assert peer.dropped  # type: ignore[attr-defined]


def test_nothing_new_is_one_union_of_flags() -> None:
    b = torch.zeros(3 * BLOCK)
    peers = unite([b, b], [torch.zeros(3 * BLOCK, dtype=torch.bool) for _ in range(2)], [3 * BLOCK])
    assert [peer.sent for peer in peers] == [[3], [3]]


# ---- few unseen --------------------------------------------------------------------------------------------------------

ROWS, WIDTH, STEPS = 96, 32, 16
RARE = 9
"""Rows at the end which no batch holds at first."""


def gradient(rank: int, step: int) -> Tensor:
    """Most rows at once; of the rare ones one in each step from 4 to 11, on one rank, and half of it; the last row never."""
    g = torch.zeros(ROWS, WIDTH)
    g[torch.randint(ROWS - RARE, (200,), generator=torch.Generator().manual_seed(100 * step + rank))] = 1.0
    if 4 <= step < 12 and rank == step % 4:
        g[ROWS - RARE + step - 4, : WIDTH // (1 + step % 2)] = 1.0
    return g


def trained(share: int, hierarchical: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[int]]:
    """Of each of 4 ranks, the parameters and the map after every step; the steps in which a unit had few unseen."""
    monkeypatch.setattr(seen, "SHARE", share)
    results: list[Any] = [None] * 4
    few = []

    @spawn_threads_and_init_comms(world_size=4)
    def ranks(self: Any) -> None:
        rank, topology = dist.get_rank(), Topology(2, 2)
        p = torch.nn.Parameter(torch.zeros(ROWS, WIDTH))
        optimizer = birder.Birder([p], lr=0.1)
        optimizer.bind((Hierarchical if hierarchical else TwoPhase)(dist.group.WORLD, topology))
        history = []
        for step in range(1, STEPS + 1):
            p.grad = gradient(rank, step)
            optimizer.step()
            whole = torch.ones(ROWS, WIDTH, dtype=torch.bool)
            active = optimizer.units[0].state.get("active")
            history.append(
                (p.detach().clone(), whole if active is None else optimizer.units[0].view(active, 0).clone())
            )
            if rank == 0 and optimizer._few:
                few.append(step)
        results[rank] = history

    ranks(None)
    return results, few


@pytest.mark.parametrize("hierarchical", [False, True])
def test_few_unseen_coordinates_join_in_the_same_steps_as_many(hierarchical: bool, monkeypatch) -> None:
    with_flags, never = trained(10**9, hierarchical, monkeypatch)
    with_bits, few = trained(5, hierarchical, monkeypatch)
    assert not never
    assert few[0] < 4
    assert few[-1] == STEPS  # the last row is never seen
    for rank in range(4):
        for (x, known), (y, expected) in zip(with_bits[rank], with_flags[rank], strict=True):
            assert torch.equal(known, expected)
            assert torch.equal(x, y)
    assert not with_bits[0][-1][1][-1].any()
    assert with_bits[0][-1][1][-2].any()


def test_a_unit_whose_few_are_seen_has_no_map() -> None:
    p = torch.nn.Parameter(torch.zeros(64, 64))
    optimizer = birder.Birder([p], lr=0.1)
    maps = []
    for step in range(1, 5):
        p.grad = torch.ones(64, 64)
        p.grad[0, 0] = float(step > 2)
        optimizer.step()
        maps.append("active" in optimizer.units[0].state)
    assert maps == [True, True, True, False]  # the host learns of it a step later
    assert p[0, 0] != 0


def test_what_a_loaded_state_has_not_seen_joins_again() -> None:
    """The state is of a time when more was unseen than when the host last looked."""
    p = torch.nn.Parameter(torch.zeros(64, 64))
    optimizer = birder.Birder([p], lr=0.1)

    def step(first: float) -> None:
        p.grad = torch.ones(64, 64)
        p.grad[0, :3], p.grad[0, 3] = first, 0.0
        optimizer.step()

    step(0.0)
    saved = copy.deepcopy(optimizer.state_dict())
    for _ in range(3):
        step(1.0)
    assert len(optimizer._few[0].places) == 1
    before = p.detach().clone()
    optimizer.load_state_dict(saved)
    step(1.0)
    moved = (p.detach() != before)[0]
    assert moved[:3].all()
    assert not moved[3]
