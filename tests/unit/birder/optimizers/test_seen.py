"""What ranks tell each other about coordinates that have had a gradient: birder/optimizers/seen.py."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from birder.optimizers import seen

BLOCK = seen.BLOCK


class Peer:
    """One of the ranks, which are threads: `union` and what it sent."""

    def __init__(
        self, rank: int, ranks: int, table: list[Tensor | None], barrier: threading.Barrier, shards: int
    ) -> None:
        self.rank, self.ranks, self.table, self.barrier = rank, ranks, table, barrier
        self.shard = rank % shards
        self.sent: list[int] = []

    def union(self, flags: Tensor) -> Tensor:
        self.sent.append(flags.numel())
        self.table[self.rank] = flags.clone()
        self.barrier.wait()
        whole = torch.stack([t for t in self.table if t is not None]).any(0)
        self.barrier.wait()
        return whole


def unite(bs: list[Tensor], actives: list[Tensor], numels: list[int], shards: int = 1) -> list[Peer]:
    """Each rank unites a unit of which it keeps `b`, one shard or the whole, and `active`, in place."""
    ranks, padded = len(bs), len(actives[0])
    table: list[Tensor | None] = [None] * ranks
    barrier = threading.Barrier(ranks, timeout=30)
    peers = [Peer(rank, ranks, table, barrier, shards) for rank in range(ranks)]
    params = [torch.empty(n) for n in numels]
    failed: list[BaseException] = []

    def run(rank: int) -> None:
        state = {"b": bs[rank], "active": actives[rank]}
        unit = SimpleNamespace(
            state=state, padded=padded, params=params, device=torch.device("cpu"), zeros=lambda: torch.zeros(padded)
        )
        try:
            seen.unite_seen(peers[rank], [unit])  # type: ignore[arg-type, list-item]
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
