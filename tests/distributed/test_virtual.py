"""Virtual workers against real ranks: the same parameters, bit for bit, and the same bytes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import birder
from birder import Topology, VirtualRanks, attach
from birder.comm import Requests, Union
from birder.comm.runtime import OwnTurn, lockstep
from birder.comm.virtual import SEGMENT, communicators, ring_sum
from experiments import compare
from experiments.config import compose
from experiments.records import labels, record
from experiments.report import speedup
from launch.errors import UserError
from launch.virtual import VirtualLauncher
from tests.helpers import toy
from tests.helpers.ranks import fresh_world, run_ranks
from tests.helpers.runs import train
from tests.helpers.tiers import slow
from tests.helpers.virtual import begun
from tests.unit.birder.comm import test_topology as topology_tests

STEPS = 8
EVALUATED = 1e-6
"""Relative: ranks evaluate a part each, in matrix products of other shapes, which round otherwise."""
SHAPES = {2: 1, 4: 2, 8: 2}
"""Ranks per node for each number of ranks."""
CASES: dict[str, tuple[str, dict, bool]] = {
    "Birder": ("Birder", {"lr": 0.01}, False),
    "Birder clipped": ("Birder", {"lr": 0.01, "max_grad_norm": 0.5, "bits": "weyl"}, False),
    "Birder one-phase": ("Birder", {"lr": 0.01, "reduce": "one_phase"}, False),
    "Birder hierarchical": ("Birder", {"lr": 0.01}, True),
    "Birder one-phase hierarchical": ("Birder", {"lr": 0.01, "reduce": "one_phase"}, True),
    "Sigma-delta Adam": ("SigmaDeltaAdam", {"lr": 0.01, "share_growth": 1.5}, False),
    "Sigma-delta Adam hierarchical": ("SigmaDeltaAdam", {"lr": 0.01, "wire": "bf16", "max_grad_norm": 0.5}, True),
    "1-bit Adam": ("OneBitAdam", {"lr": 0.01, "warmup_steps": 4}, False),
    "1-bit Adam hierarchical": ("OneBitAdam", {"lr": 0.01, "warmup_steps": 4}, True),
    "SGDM": ("SGDM", {"lr": 0.1, "momentum": 0.9, "max_grad_norm": 0.5}, False),
    # Dense rounds and syncs in the first three steps, then intervals of 1, 2 and 4.
    "0/1 Adam": (
        "ZeroOneAdam",
        {"lr": 0.01, "warmup_steps": 3, "kappa": 1, "local_doubling": 1, "local_limit": 4, "max_grad_norm": 0.5},
        False,
    ),
    "CSER": ("CSER", {"lr": 0.1, "gradient_ratio": 2, "model_ratio": 2, "reset_every": 3, "block": 8}, False),
    "1-bit LAMB": ("OneBitLAMB", {"lr": 0.01, "warmup_steps": 4, "eps": 1e-4}, False),
    "SLAMB": ("SLAMB", {"lr": 0.01, "sync_every": 3, "dense_below": 40, "fraction": 0.25}, False),
}

FEW = ("Birder", "Sigma-delta Adam hierarchical", "1-bit Adam hierarchical", "SGDM", "0/1 Adam", "CSER")
FEW += ("1-bit LAMB", "SLAMB")
"""What `make test` runs, and what 8 ranks run: each exchange."""
TWO = ("Birder", "SGDM", "CSER")
"""What 2 ranks run: every method does so in test_golden.py, on a model without statistics and dropout."""


class Net(toy.Net):
    """With batch statistics, which are rank 0's, dropout, which differs between ranks, and a weight whose memory has another
    order, as channels-last ones have."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.data = self.first.weight.data.t().contiguous().t()
        self.norm = torch.nn.BatchNorm1d(37)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = F.dropout(self.norm(self.first(self.embed(rows))), 0.2, self.training)
        return self.second(torch.tanh(hidden)) * self.scale


def make() -> tuple[Net, DistributedDataParallel]:
    torch.manual_seed(3)
    model = Net()
    # Several buckets, which DDP rebuilds in another order after the first step.
    return model, DistributedDataParallel(model, bucket_cap_mb=0.0005, gradient_as_bucket_view=True)


def backward(ddp: DistributedDataParallel, rank: int, step: int) -> float:
    """Two micro-batches."""
    with ddp.no_sync():
        (toy.loss(ddp, rank, step) / 2).backward()
    loss = toy.loss(ddp, rank, 1000 + step) / 2
    loss.backward()
    return loss.item()


def real(rank: int, world: int, names: list[str]) -> dict[str, dict]:
    """Cases on real ranks."""
    results = {}
    for name in names:
        method, options, hierarchical = CASES[name]
        model, ddp = make()
        optimizer = getattr(birder, method)(model.parameters(), **options)
        attachment = attach(ddp, optimizer, hierarchical=hierarchical, unit_mb=0.0008)
        torch.manual_seed(100 + rank)
        losses = []
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            losses.append(backward(ddp, rank, step))
            optimizer.step()
        with optimizer.averaged():
            mean = toy.flat(model).numpy()
        counter = attachment.counter
        sent = (counter.intra, counter.inter, counter.collectives)
        statistics = model.norm.running_mean.numpy()
        results[name] = {
            "x": toy.flat(model).numpy(),
            "mean": mean,
            "losses": losses,
            "sent": sent,
            "buffers": statistics,
            "state": optimizer.state_bytes(),
        }
        attachment.close()
    return results


def virtual(rank: int, world: int, topology: Topology, names: list[str]) -> dict[str, dict]:
    """Cases in one process."""
    results = {}
    for name in names:
        method, options, hierarchical = CASES[name]
        model, ddp = make()
        n = topology.world_size
        optimizers = [getattr(birder, method)(model.parameters(), **options) for _ in range(n)]
        seeds = [100 + i for i in range(n)]
        ranks = VirtualRanks(ddp, optimizers, topology=topology, hierarchical=hierarchical, unit_mb=0.0008, seeds=seeds)
        losses: list[list[float]] = [[] for _ in range(n)]
        for step in range(1, STEPS + 1):
            for i in range(n):
                with ranks.turn(i):
                    losses[i].append(backward(ddp, i, step))
            ranks.step()
        xs, places = [], set()
        for i in range(n):
            with ranks.turn(i):
                xs.append(toy.flat(model).numpy().copy())
                places.add(model.scale.data_ptr())
        sent = ranks.counter.intra, ranks.counter.inter, ranks.counter.collectives
        with ranks.averaged():
            mean = toy.flat(model).numpy().copy()
        statistics = model.norm.running_mean.numpy()
        results[name] = {"x": xs, "mean": mean, "losses": losses, "sent": sent, "buffers": statistics}
        results[name] |= {"state": ranks.state_bytes(), "copies": len(places)}
    return results


@functools.cache
def both(world: int, few: bool) -> tuple[list[dict[str, dict]], dict[str, dict]]:
    names, local = [name for name in (TWO if world == 2 else CASES) if (name in FEW) == few], SHAPES[world]
    theirs = run_ranks(real, world, names, ranks_per_node=local)
    return theirs, run_ranks(virtual, 1, Topology(world // local, local), names)[0]


@pytest.mark.parametrize(
    ("world", "name"),
    [(4, name) if name in FEW else slow(4, name) for name in CASES]
    + [slow(world, name) for world, names in ((2, TWO), (8, FEW)) for name in names],
)
@pytest.mark.long
def test_virtual_ranks_equal_real_ones_bit_for_bit(world: int, name: str) -> None:
    theirs, ours = both(world, name in FEW)
    found = ours[name]
    for rank, results in enumerate(theirs):
        expected = results[name]
        assert expected["losses"] == found["losses"][rank]
        assert (expected["x"] == found["x"][rank]).all()
        assert (expected["mean"] == found["mean"]).all()
    assert (theirs[0][name]["buffers"] == found["buffers"]).all()
    sent = [results[name]["sent"] for results in theirs]
    assert (sum(s[0] for s in sent), sum(s[1] for s in sent), sent[0][2]) == found["sent"]
    assert sum(results[name]["state"] for results in theirs) == found["state"]
    # Ranks of a method that sends everything are equal: one copy of the parameters stands for all.
    assert found["copies"] == (1 if name == "SGDM" else world)


def overflowing(rank: int, world: int, virtual_ranks: int) -> list[Tensor]:
    """Rank 1's loss is not finite in step 2. The optimizer does not hold `scale`, whose gradient is not finite in step 3."""

    def make(params: Any) -> birder.BucketOptimizer:
        return birder.SparseLoCo(list(params)[:-1], lr=0.01, sync_every=3, chunk=32, top_k=8)

    ranks = begun(make, rank, virtual_ranks, overlap=False)
    ranks.model.scale.register_hook(lambda g: g * torch.where(turned[0] == 3, torch.inf, 1.0))
    turned = [torch.zeros(())]
    for step in range(1, 5):
        turned[0] = torch.tensor(step)
        ranks.step(step, broken=[1] if step == 2 else [])
    return ranks.models()


def test_gradients_that_are_not_finite_are_marked_as_on_real_ranks() -> None:
    ours = run_ranks(overflowing, 1, 2)[0]
    for expected, found in zip(run_ranks(overflowing, 2, 0), ours, strict=True):
        torch.testing.assert_close(found, expected[0], rtol=0, atol=0)


def transposed(rank: int, world: int, virtual_ranks: int) -> Tensor:
    """A matrix that lies transposed in memory, and is multiplied."""
    torch.manual_seed(3)
    model = torch.nn.Linear(90, 37, bias=False)
    model.weight.data = model.weight.data.t().contiguous().t()
    ddp = DistributedDataParallel(model)
    optimizers = [birder.Muon(model.parameters(), lr=0.1) for _ in range(virtual_ranks or 1)]
    ranks: Any = optimizers[0]
    if virtual_ranks:
        ranks = VirtualRanks(ddp, optimizers, topology=Topology(virtual_ranks, 1))
    else:
        attach(ddp, optimizers[0])
    for step in range(3):
        for turn in range(virtual_ranks) if virtual_ranks else [rank]:
            x = torch.randn(8, 90, generator=torch.Generator().manual_seed(10 * step + turn))
            with ranks.turn(turn) if virtual_ranks else contextlib.nullcontext():
                ddp(x).square().sum().backward()
        ranks.step()
        optimizers[0].zero_grad()
    return model.weight.detach().clone()


def test_gradients_lie_in_memory_as_on_real_ranks() -> None:
    expected = run_ranks(transposed, 2, 0)[0]
    torch.testing.assert_close(run_ranks(transposed, 1, 2)[0], expected, rtol=0, atol=0)


def ring(rank: int, world: int, sizes: list[int]) -> list:
    results = []
    for size in sizes:
        x = torch.randn(size, generator=torch.Generator().manual_seed(rank))
        torch.distributed.all_reduce(x)
        results.append(x.numpy())
    return results


@pytest.mark.parametrize("world", [3, 4])
def test_the_order_of_a_dense_sum_is_that_of_gloos_ring(world: int) -> None:
    # Fewer elements than ranks, chunks that end in the middle, more than one segment for each chunk.
    sizes = [1, world, 1003, 3 * world * SEGMENT // 4 + 5]
    for found in run_ranks(ring, world, sizes):
        for size, x in zip(sizes, found, strict=True):
            rows = [torch.randn(size, generator=torch.Generator().manual_seed(r)) for r in range(world)]
            assert torch.equal(ring_sum(torch.stack(rows)), torch.from_numpy(x))


FLAG = torch.ones(1, dtype=torch.bool)


def test_ranks_that_wait_for_each_other_end_in_an_error() -> None:
    def life(rank: int) -> Requests[None]:
        for _ in range(rank):
            yield Union(FLAG)

    with pytest.raises(RuntimeError, match="wait for each other"):
        lockstep(communicators(Topology(3, 1), False), [life(r) for r in range(3)], lambda rank: None)


def test_an_error_of_one_rank_ends_the_others() -> None:
    ended = []

    def life(rank: int) -> Requests[None]:
        if rank == 1:
            raise ArithmeticError("rank 1")
        yield Union(FLAG)
        ended.append(rank)

    with pytest.raises(ArithmeticError, match="rank 1"):
        lockstep(communicators(Topology(3, 1), False), [life(r) for r in range(3)], lambda rank: None)
    assert not ended


def misused(rank: int, world: int) -> dict[str, str]:
    """By what a script does wrong, what is said."""
    found = {}

    def tried(
        name: str, one: dict, two: dict, turns: tuple[int, ...] = (0, 1), later: float = 0.01, **how: Any
    ) -> None:
        model, ddp = make()
        try:
            optimizers = [birder.Birder(model.parameters(), **options) for options in (one, two)]
            ranks = VirtualRanks(ddp, optimizers, topology=Topology(2, 1), **how)
            optimizers[0].param_groups[0]["lr"] = later
            for i in turns:
                with ranks.turn(i):
                    backward(ddp, i, 1)
            ranks.step()
            found[name] = ""
        except (ValueError, RuntimeError) as error:
            found[name] = str(error)

    usual = {"lr": 0.01}
    tried("right", usual, usual, seeds=[1, 2])
    tried("again from 0", usual, usual, turns=(0, 0, 1))
    tried("lr", usual, {"lr": 0.02})
    tried("seed", usual, {**usual, "seed": 1})
    tried("a schedule of one", usual, usual, later=0.005)
    tried("seeds", usual, usual, seeds=[1])
    tried("a flag", usual, usual, overlap="no")
    tried("one rank's turn", usual, usual, turns=(0,))
    tried("another order", usual, usual, turns=(1, 0))
    tried("no such rank", usual, usual, turns=(0, -1))
    model, _ = make()
    model.second.requires_grad_(False)
    ranks = VirtualRanks(
        DistributedDataParallel(model), [birder.SGDM(model.parameters()) for _ in range(2)], topology=Topology(2, 1)
    )
    model.second.requires_grad_(True)
    before = model.second.weight.detach().clone()
    for i in range(2):
        with ranks.turn(i):
            backward(ranks.model, i, 1)
    with pytest.raises(RuntimeError, match=r"second\.weight has a gradient but was frozen") as error:
        ranks.step()
    assert torch.equal(model.second.weight, before)
    found["unfrozen"] = str(error.value)
    return found


def twice(rank: int, world: int) -> float:
    """How far two synchronised passes of a turn are from one pass through their sum, where each rank has its own batches."""
    models = []
    for passes in (1, 2):
        model = toy.make()
        optimizers = [birder.SGDM(model.parameters(), lr=0.1) for _ in range(3)]
        ranks = VirtualRanks(DistributedDataParallel(model), optimizers, topology=Topology(3, 1))
        for turn in range(3):
            with ranks.turn(turn):
                losses = (toy.loss(ranks.model, turn, step) for step in (1, 2))
                for loss in losses if passes == 2 else [next(losses) + next(losses)]:
                    loss.backward()
        ranks.step()
        models.append(toy.flat(model))
    return float((models[0] - models[1]).abs().max())


def test_two_passes_of_a_turn_are_averaged_once() -> None:
    assert run_ranks(twice, 1)[0] < 1e-6


def gaps(rank: int, world: int) -> float:
    """How far virtual ranks are from torch's step by the mean gradient, where a weight is a part of a transposed tensor."""
    torch.manual_seed(3)
    model = nn.Linear(24, 20, bias=False)
    model.weight = nn.Parameter(torch.randn(24, 37).t()[:20])
    alone, x = copy.deepcopy(model), torch.randn(2, 7, 24)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    optimizers = [birder.SGDM(model.parameters(), lr=0.1) for _ in range(2)]
    ranks = VirtualRanks(DistributedDataParallel(model), optimizers, topology=Topology(2, 1))
    for _ in range(2):
        optimizer.zero_grad()
        alone(x).square().mean().backward()
        optimizer.step()
        for turn in range(2):
            with ranks.turn(turn):
                ranks.model(x[turn]).square().mean().backward()
        ranks.step()
    return float((model.weight - alone.weight).abs().max())


def test_a_weight_with_gaps_in_its_memory_gets_its_own_gradient() -> None:
    """DDP took its elements for others'."""
    assert run_ranks(gaps, 1)[0] < 1e-6  # means in another order


def test_virtual_ranks_that_real_ones_would_refuse_are_refused() -> None:
    (said,) = run_ranks(misused, 1)
    words = {
        "right": "^$",
        "again from 0": "^$",
        "lr": r"ranks \[1\] differ",
        "seed": r"ranks \[1\] differ",
        "a schedule of one": r"ranks \[1\] differ",
        "seeds": "2 ranks need as many seeds, got 1",
        "a flag": "overlap must be True or False",
        "one rank's turn": r"turns of \[0\]",
        "another order": r"turns of \[0\]",
        "no such rank": r"in \[0, 2\), got -1",
        "unfrozen": "VirtualRanks again",
    }
    assert {name: bool(re.search(words[name], text)) for name, text in said.items()} == dict.fromkeys(words, True)


def spec(folder: Path, name: str, *overrides: str):
    given = ["train.max_steps=6", "train.timing_warmup=1", "train.threads=1", "wandb=disabled", "train.eval_every=3"]
    folders = [f"results_dir={folder}/{name}", f"output_dir={folder}/outputs", f"run_name={name}"]
    return compose.make_spec(compose.compose([*overrides, *given, *folders]))


@pytest.mark.parametrize(
    "task",
    [
        slow("+exp=digits optimizer=birder train.batch_per_rank=8"),
        # Rank-local state (of the LSTM), dropout, clipping, accumulation.
        "+exp=ptb scale=quick optimizer=onebit_adam optimizer.warmup_steps=3 train.batch_per_rank=2 train.accumulate=2 "
        "workload.dropout=0.2 workload.preset=tiny comm.topology=hierarchical data.path=TEXT",
    ],
    ids=["digits", "text"],
)
def test_a_run_on_virtual_workers_is_the_run_on_real_ones(task: str, tmp_path: Path) -> None:
    for split, count in (("train", 4000), ("valid", 1200)):
        words = " ".join(f"w{(i * i + i // 7) % 23}" for i in range(count)) + "\n"
        (tmp_path / f"{split}.txt").write_text(words)
    given = task.replace("TEXT", str(tmp_path)).split()
    shape = ["cluster.nodes=2", "cluster.ranks_per_node=2"]
    specs = [spec(tmp_path, kind, *given, f"cluster={kind}", *shape) for kind in ("local", "virtual")]
    fresh_world(train, 4, specs[0], ranks_per_node=2, grouped=False)
    fresh_world(train, 1, specs[1], grouped=False)
    theirs, ours = (record.read_all(tmp_path / kind)[0] for kind in ("local", "virtual"))
    assert ours.metric["name"] == theirs.metric["name"]
    assert math.isclose(ours.metric["value"], theirs.metric["value"], rel_tol=EVALUATED)
    for key in ("payload_intra", "payload_inter"):
        assert ours.bytes_per_step[key] == theirs.bytes_per_step[key]
    assert ours.collectives_per_step == theirs.collectives_per_step
    assert ours.state_bytes_per_rank == theirs.state_bytes_per_rank
    assert (ours.nodes, ours.ranks_per_node, ours.cluster) == (2, 2, "virtual")
    # No time is taken, and none is shown.
    assert ours.timing == {"steps": 0}
    assert ours.link["kind"] == "none"
    assert speedup.build([dataclasses.replace(r, group="g") for r in (ours, ours)]) == []
    curves = [(tmp_path / r.cluster / str(r.curve)).read_text().splitlines() for r in (theirs, ours)]
    columns = curves[0][0].split(",")
    for theirs_row, ours_row in zip(*curves, strict=True):
        mine, other = (dict(zip(columns, row.split(","), strict=True)) for row in (ours_row, theirs_row))
        assert mine["loss"] == other["loss"]


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("train.precision=fp16", "loss scaling"),
        ("comm.enabled=false", "comm.enabled"),
        ("comm.topology=hsdp", "shards no model"),
        ("checkpoint.every=5", "checkpoints"),
        ("+profile=step", "profile"),
    ],
)
def test_what_virtual_workers_cannot_do_is_said(override: str, word: str) -> None:
    with pytest.raises(UserError, match=word):
        compose.resolve(compose.compose(["+exp=digits", "cluster=virtual", "optimizer=sgdm", override]))


def test_a_comparison_has_no_bound() -> None:
    chosen = compare.variants(compose.compose(["+exp=digits", "cluster=virtual"]), None)
    assert [labels.method(compose.resolve(c)) for c in chosen] == ["SGDM fp32", "SGDM bf16", "1-bit Adam", "Birder"]


def test_one_process_is_started(tmp_path: Path) -> None:
    made = compose.launcher(compose.resolve(compose.compose(["+exp=digits", "cluster=virtual", "cluster.nodes=64"])))
    assert isinstance(made, VirtualLauncher)
    assert made.shape() == "64 x 1 virtual ranks in one process"
    command = made.command(spec(tmp_path, "x", "+exp=digits"), 0)
    assert [command[command.index(f) + 1] for f in ("--nnodes", "--nproc-per-node")] == ["1", "1"]


@pytest.mark.parametrize(("hierarchical", "workers"), [(False, 64), (True, 8)])
def test_sixty_four_virtual_ranks_equal_the_reference(hierarchical: bool, workers: int) -> None:
    """`Birder` with communicators alone, against the one-process reference."""
    made = communicators(Topology(8, 8), hierarchical)
    params = [torch.nn.Parameter(torch.zeros(topology_tests.SIZE)) for _ in range(64)]

    def life(rank: int) -> Requests[None]:
        optimizer = birder.Birder([params[rank]], lr=0.1)
        optimizer.bind(made[rank], OwnTurn())
        for step in range(1, topology_tests.STEPS + 1):
            params[rank].grad = topology_tests.gradient(rank, step)
            yield from optimizer.stepping()

    with torch.no_grad():
        lockstep(made, [life(rank) for rank in range(64)], lambda rank: None)
    expected = topology_tests.oracle(workers, 64 // workers)
    assert all(torch.equal(p, expected) for p in params)
