"""64 ranks as 8 nodes x 8 ranks, as threads of one process; topologies; what a pipeline does with errors."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import spawn_threads_and_init_comms

from birder import Birder, OneBitAdam, Topology
from birder.comm import Hierarchical, Mean, ShardMean, ThreadPipeline, TwoPhase, run
from tests.helpers import reference

NODES, LOCAL, STEPS, SIZE = 8, 8, 5, 3001


def gradient(rank: int, step: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(1000 * step + rank)) + 0.3


def run_threads(make, hierarchical: bool) -> list[tuple]:
    """STEPS steps on 64 threads; (parameters, bytes sent inside nodes, between nodes) of each rank."""
    results: list = [None] * (NODES * LOCAL)

    @spawn_threads_and_init_comms(world_size=NODES * LOCAL)
    def ranks(self) -> None:
        rank = dist.get_rank()
        topology = Topology(NODES, LOCAL)
        kind = Hierarchical if hierarchical else TwoPhase
        comm = kind(dist.group.WORLD, topology)
        p = torch.nn.Parameter(torch.zeros(SIZE))
        optimizer = make([p])
        optimizer.bind(comm)
        for step in range(1, STEPS + 1):
            if step == STEPS:
                comm.counter.reset()
            p.grad = gradient(rank, step)
            optimizer.step()
        results[rank] = (p.detach(), comm.counter.intra, comm.counter.inter)

    ranks(None)
    return results


def oracle(workers: int, per_worker: int) -> torch.Tensor:
    p = torch.zeros(SIZE)
    o = reference.Birder([p], workers, 0.1)
    for step in range(1, STEPS + 1):
        grads = []
        for w in range(workers):
            mean = gradient(w * per_worker, step)
            for r in range(w * per_worker + 1, (w + 1) * per_worker):
                mean = mean + gradient(r, step)
            grads.append([mean / per_worker])
        o.step(grads)
    return p


@pytest.mark.parametrize(("hierarchical", "workers"), [(False, 64), (True, 8)])
def test_sixty_four_ranks_equal_the_reference(hierarchical, workers):
    results = run_threads(lambda p: Birder(p, lr=0.1), hierarchical)
    expected = oracle(workers, 64 // workers)
    for x, _, _ in results:
        assert torch.equal(x, expected)


@pytest.mark.slow
def test_hierarchy_takes_the_ranks_per_node_off_the_network():
    flat = sum(r[2] for r in run_threads(lambda p: Birder(p, lr=0.1), False))
    nodes = sum(r[2] for r in run_threads(lambda p: Birder(p, lr=0.1), True))
    # 56 of 64 chunks leave a node in the flat form, from each of 8 ranks; 7 of 8 in the other, once.
    assert nodes < flat / (LOCAL - 1)


def test_one_bit_adam_agrees_on_sixty_four_ranks():
    results = run_threads(lambda p: OneBitAdam(p, lr=0.1, warmup_steps=1), True)
    # The first step is dense and `bind` alone averages nothing: ranks start from momenta of their own, and agree on
    # the momentum as soon as it is compressed.
    assert len(results) == 64
    assert all(torch.isfinite(x).all() for x, _, _ in results)


def test_a_mean_leaves_the_gradient_of_the_node_alone():
    """A generator may call `mean` after its yield, while the next unit works on what `shard_mean` gave it."""
    results: list = [None] * 4

    @spawn_threads_and_init_comms(world_size=4)
    def ranks(self) -> None:
        rank = dist.get_rank()
        comm = Hierarchical(dist.group.WORLD, Topology(2, 2))
        part = run(comm, ShardMean(gradient(rank, 1)[:3000]))
        before = part.clone()
        run(comm, Mean(gradient(rank, 2)[:2000]))
        other = []
        thread = threading.Thread(target=lambda: other.append(comm.intra._buffer(part)))
        thread.start()
        thread.join()
        # What the other half of a pipeline receives in `shard_mean` does not lie there either.
        apart = other[0].untyped_storage().data_ptr() != part.untyped_storage().data_ptr()
        results[rank] = torch.equal(part, before), apart

    ranks(None)
    assert results == [(True, True)] * 4


@pytest.mark.parametrize(("nodes", "local"), [(0, 1), (1, 0), (-1, 2)])
def test_a_topology_has_nodes_and_ranks(nodes, local):
    with pytest.raises(ValueError, match="at least 1 node"):
        Topology(nodes, local)


def test_topology_from_torchruns_environment(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert Topology.from_env(12) == Topology(3, 4)
    assert Topology(3, 4).same_node(4, 7)
    assert not Topology(3, 4).same_node(3, 4)
    with pytest.raises(ValueError, match="same number of ranks"):
        Topology.from_env(6)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert Topology.from_env(6) == Topology(1, 6)


def test_a_pipeline_keeps_the_order_and_raises_the_first_error():
    pipeline, seen = ThreadPipeline(), []

    def fail() -> None:
        raise OSError("link down")

    for i in range(20):
        pipeline.submit(lambda i=i: seen.append(i))
    pipeline.wait()
    assert seen == list(range(20))
    pipeline.submit(fail)
    pipeline.submit(lambda: seen.append("after"))
    with pytest.raises(OSError, match="link down"):
        pipeline.wait()
    assert seen[-1] == 19  # what follows an error is not run
    pipeline.submit(lambda: seen.append("again"))
    pipeline.wait()
    assert seen[-1] == "again"
    pipeline.close()


def test_a_pipeline_is_sound_once_all_is_done_and_while_nothing_has_failed():
    """Else the process group of a closed attachment is not another one's: what is under way would meet its messages."""
    pipeline, gate = ThreadPipeline(), threading.Event()

    def fail() -> None:
        raise OSError("link down")

    pipeline.submit(gate.wait)
    assert not pipeline.sound
    gate.set()
    pipeline.wait()
    assert pipeline.sound
    pipeline.submit(fail)
    with pytest.raises(OSError, match="link down"):
        pipeline.wait()
    assert not pipeline.sound
    pipeline.close()
