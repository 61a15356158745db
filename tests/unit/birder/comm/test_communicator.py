"""The moves of a 1-bit all-reduce: what arrives does not depend on whose messages arrive first."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from birder import Topology
from birder.comm.collectives import FEW, Operation
from birder.comm.virtual import communicators

RANKS = 4


def performed(operations: list[Operation[Tensor]], order: tuple[int, ...]) -> list[Tensor]:
    """What each rank's operation gives, when in every collective the ranks post and receive in this order."""
    results: dict[int, Tensor] = {}
    received: dict[int, Tensor | None] = dict.fromkeys(order)
    while received:
        waits = {}
        for rank, got in received.items():
            try:
                waits[rank] = operations[rank].send(got).start(None)  # type: ignore[arg-type]
            except StopIteration as end:
                results[rank] = end.value
        received = {rank: wait() for rank, wait in waits.items()}
    return [results[rank] for rank in range(RANKS)]


@pytest.mark.parametrize("given", [False, True], ids=["new tensor", "out"])
def test_a_part_that_is_still_being_sent_is_not_overwritten(given: bool) -> None:
    """gather: 2 nodes of 2 ranks, each rank with the chunk that it serves; all get all, in element order."""
    whole = torch.arange(8, dtype=torch.uint8)
    for order in itertools.permutations(range(RANKS)):
        comms = communicators(Topology(2, 2), hierarchical=True)
        chunks = [whole[comm.chunk_of(whole.numel())].clone() for comm in comms]
        outs = [torch.full_like(whole, 255) if given else None for _ in comms]
        gathers = [comm.gather(chunk, out) for comm, chunk, out in zip(comms, chunks, outs, strict=True)]
        for found in performed(gathers, order):
            assert found.tolist() == whole.tolist(), order


@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize("count", [1, 8 * FEW, 8 * FEW + 1, 24 * FEW + 5])
def test_a_union_is_that_of_all_ranks_however_many_flags_there_are(count: int, hierarchical: bool) -> None:
    """Beyond FEW bytes each rank, or each node, unites a part."""
    flags = [torch.arange(count) % 7 == rank for rank in range(RANKS)]
    comms = communicators(Topology(2, 2), hierarchical)
    unions = [comm.union(mine) for comm, mine in zip(comms, flags, strict=True)]
    for found in performed(unions, tuple(range(RANKS))):
        assert torch.equal(found, torch.stack(flags).any(0))
