"""Another number of workers: every state of every method, from made-up states in one process; and a real run, 4 -> 2."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import birder
from birder import attach, checkpoint
from birder.checkpoint import elastic
from birder.comm import SingleProcess
from birder.integrations import every_rank
from tests.distributed.test_guards import METHODS
from tests.helpers import ROOT, load, toy
from tests.helpers.ranks import run_ranks, run_script
from tests.helpers.tiers import slow, slow_unless

UNIT_MB = 0.0008
"""Several units of a few hundred elements, none of which divides by the numbers of workers."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, options) for name, options in METHODS.items()}
VARIANTS |= {
    "Birder, u": ("Birder", {"intra": "u"}),
    "Birder, sigma-delta": ("Birder", {"bits": "sigma_delta"}),
    "Lion": ("Lion", {}),
    "SigmaDeltaAdam, one phase": ("SigmaDeltaAdam", {"reduce": "one_phase"}),
    "SigmaDeltaAdam, int8": ("SigmaDeltaAdam", {"errors": "int8"}),
    "SigmaDeltaAdam, one phase int8": ("SigmaDeltaAdam", {"reduce": "one_phase", "errors": "int8"}),
    "SLAMB v1": ("SLAMBv1", {"sync_every": 3}),
    "ZeroOneAdam, deepspeed": ("DeepSpeedZeroOneAdam", {"warmup_steps": 2, "local_doubling": 1}),
    "EFSGD, released": ("EFSGD", {"block": 32, "ratio": 2, "variant": "released", "weight_decay": 0.1}),
    "DiLoCo": ("SparseLoCo", {"sync_every": 3, "message": "dense", "outer_momentum": 0.9}),
    "SparseLoCo, outer": ("SparseLoCo", {"sync_every": 3, "top_k": 4, "chunk": 32, "outer_momentum": 0.9}),
}
SIZES = [
    *(((4, 1), (3, 1)), ((2, 2), (3, 1)), ((2, 3), (1, 3))),
    *(slow((4, 1), (2, 1)), slow((2, 1), (8, 1)), slow((3, 1), (2, 2))),
]
"""(workers, shards) before and after."""


class Place(SingleProcess):
    """A rank of a larger world, as far as an optimizer's state depends on it."""

    def __init__(self, workers: int, shards: int, rank: int) -> None:
        super().__init__()
        self.workers, self.shards, self.world_size, self.rank = workers, shards, workers * shards, rank
        self.worker, self.shard = divmod(rank, shards)


def bound(variant: str, workers: int, shards: int, rank: int) -> birder.BucketOptimizer:
    name, options = VARIANTS[variant]
    optimizer: birder.BucketOptimizer = getattr(birder, name)(toy.make().parameters(), **options)
    # A method that sends nothing of its own has no communicator of the world.
    optimizer.bind(Place(workers, shards, rank) if optimizer.compressed else None, unit_mb=UNIT_MB)
    return optimizer


def made_up(variant: str, workers: int, shards: int) -> list[dict[str, Any]]:
    """A state for every rank: the same on all where the method says so, nothing beyond the unit's elements."""
    states = []
    for rank in range(workers * shards):
        optimizer = bound(variant, workers, shards, rank)
        optimizer.steps = 7
        for unit in optimizer.units:
            for k, (key, tensor) in enumerate(sorted(unit.state.items())):
                common = optimizer.carried[key] == "copy"
                g = torch.Generator().manual_seed(1000 * unit.index + 10 * k + (0 if common else 100_000 * (rank + 1)))
                if tensor.is_floating_point():
                    tensor.copy_(torch.randn(tensor.shape, generator=g, dtype=torch.float64))
                else:
                    tensor.copy_(torch.randint(0, 2, tensor.shape, generator=g))
            if "b" in unit.state:
                unit.state["b"].copy_(unit.state["m"].abs() * 1.5)
            for key, tensor in unit.state.items():
                clear_padding(tensor, unit, optimizer, key)
        states.append(optimizer.state_dict())
    return states


def span(optimizer: birder.BucketOptimizer, unit: Any, key: str, size: int) -> range:
    """Which elements of the unit a tensor of `size` elements holds."""
    comm, shard = optimizer.comm, unit.padded // optimizer.comm.shards
    if optimizer.carried[key] == "copy":
        return range(size)  # of the unit, or of something else, such as its tensors
    if optimizer.carried[key] == "cut":
        return range(comm.shard * shard + comm.worker * size, comm.shard * shard + (comm.worker + 1) * size)
    return range(unit.padded) if size == unit.padded else range(comm.shard * shard, comm.shard * shard + size)


def clear_padding(tensor: Tensor, unit: Any, optimizer: birder.BucketOptimizer, key: str) -> None:
    where = span(optimizer, unit, key, tensor.numel())
    if len(where) == tensor.numel():
        tensor[torch.tensor(where) >= unit.numel] = 0


def elements(
    variant: str, workers: int, shards: int, states: list[dict[str, Any]]
) -> Iterator[tuple[str, Any, list[Any]]]:
    """(rule, key and unit, for each rank {element: value}): what the ranks keep, told element by element."""
    places = [bound(variant, workers, shards, rank) for rank in range(workers * shards)]
    for number, unit in enumerate(places[0].units):
        for key in states[0]["units"][number]:
            rule = places[0].carried[key]
            told = []
            for optimizer, state in zip(places, states, strict=True):
                tensor = state["units"][number][key]
                where = span(optimizer, optimizer.units[number], key, tensor.numel())
                told.append({i: v for i, v in zip(where, tensor.tolist(), strict=False) if i < unit.numel})
            yield rule, (key, number), told


@pytest.mark.parametrize(("before", "after"), SIZES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_state_goes_over_element_by_element(variant: str, before: tuple[int, int], after: tuple[int, int]) -> None:
    first = bound(variant, 1, 1, 0)
    if not {key for unit in first.units for key in unit.state} <= set(first.carried):
        with pytest.raises(ValueError, match="cannot resume with another number of workers"):
            elastic.resize(first, [first.state_dict()])
        return
    states = made_up(variant, *before)
    new = []
    for rank in range(after[0] * after[1]):
        optimizer = bound(variant, *after, rank)
        optimizer.load_state_dict(elastic.resize(optimizer, iter(states)))
        assert optimizer.steps == 7
        new.append(optimizer.state_dict())
    workers = {"mean": before[0]}
    told = {where: ranks for _, where, ranks in elements(variant, *before, states)}
    for rule, where, ranks in elements(variant, *after, new):
        old = told[where]
        for mine in ranks:
            for i, value in mine.items():
                kept = [rank[i] for rank in old if i in rank]
                if rule == "copy":
                    assert value == kept[0]
                elif rule == "cut":
                    assert [value] == kept  # one server had it
                else:
                    assert len(kept) in (workers["mean"], before[0] * before[1])
                    parts = len(kept) if rule == "mean" else after[0]
                    expected = np.float64(sum(kept)) / parts
                    assert value == (np.float32(expected) if isinstance(value, float) else np.round(expected))
        if rule == "cut":  # and one has it now
            assert sorted(i for mine in ranks for i in mine) == sorted(i for mine in old for i in mine)
    if variant.startswith("Birder"):
        assert all((u["m"].abs() <= u["b"]).all() for state in new for u in state["units"])


def test_as_many_ranks_on_other_nodes_are_another_number_of_workers() -> None:
    """Four ranks of their own begin again as two nodes of two: each rank's own state was refused."""
    states = made_up("Birder", 4, 1)
    resized = elastic.resize(bound("Birder", 2, 2, 1), states)

    class Saved(checkpoint.Restored):
        @property
        def same_world(self) -> bool:
            return True

        def of_all(self) -> Iterator[dict[str, Any]]:
            return ({"optimizer": state} for state in states)

    ways = (
        lambda o: elastic.state(o, Saved(7, Path(), {}, {"optimizer": states[1]}, [], 4)),
        lambda o: every_rank.fitting(o, states, True),
    )
    for way in ways:
        optimizer = bound("Birder", 2, 2, 1)
        optimizer.load_state_dict(way(optimizer))
        for unit, flat in zip(optimizer.units, resized["units"], strict=True):
            assert torch.equal(unit.state["m"], flat["m"])
    with pytest.raises(ValueError, match="4 workers x 1 shards, this run has 2 x 2"):  # nobody has asked for it
        optimizer.load_state_dict(every_rank.fitting(optimizer, states, False))


@pytest.mark.parametrize(
    "variant", slow_unless(("Birder", "OneBitAdam", "SigmaDeltaAdam, int8").__contains__, VARIANTS)
)
def test_a_frozen_layer_keeps_what_its_workers_had(variant: str) -> None:
    """A layer's state that is kept while it is frozen goes over as that of a layer that trains."""
    shards, workers = 2, 3
    states = made_up(variant, workers, shards)
    rules = bound(variant, workers, shards, 0).carried
    for rank, state in enumerate(states):
        worker = rank // shards
        kinds = {name: t.dtype for unit in state["units"] for name, t in unit.items()}
        kept = {
            n: torch.tensor([1 + 3.0 * worker if rules[n] in ("mean", "sum") else 5.0]).to(k) for n, k in kinds.items()
        }
        state["aside"] = {2: (4, kept)}
    optimizer = bound(variant, 2, 1, 0)
    optimizer.load_state_dict(elastic.resize(optimizer, iter(states if optimizer.compressed else states[:1])))
    since, kept = optimizer._aside[optimizer.param_groups[0]["params"][2]]
    assert since == 4
    wanted = {"mean": 4.0, "sum": 6.0, "copy": 5.0, "cut": 5.0}  # of 1, 4 and 7
    for name, tensor in kept.items():
        one = wanted[rules[name]] if optimizer.compressed or rules[name] not in ("mean", "sum") else 1.0
        assert tensor.item() == (bool(one) if tensor.dtype == torch.bool else one), name


def test_errors_of_many_workers_keep_their_sign_as_int8() -> None:
    """Their sum wrapped around: what was owed to a coordinate came back with the other sign."""
    states = made_up("SigmaDeltaAdam, one phase int8", 4, 1)
    for state in states:
        for unit in state["units"]:
            unit["owner_error"].fill_(-100)
    optimizer = bound("SigmaDeltaAdam, one phase int8", 1, 1, 0)
    optimizer.load_state_dict(elastic.resize(optimizer, states))
    assert all((unit.state["owner_error"][: unit.numel] == -128).all() for unit in optimizer.units)


def test_parameters_that_one_old_rank_alone_had_changed_count_as_changed() -> None:
    """A clip that moves nothing on rank 0: the next synchronisation would send the other rank's only in part."""
    states = made_up("QSparseLocalSGD", 3, 1)
    for changed in (False, True):
        states[1]["changed"] = changed
        optimizer = bound("QSparseLocalSGD", 2, 1, 1)
        optimizer.load_state_dict(elastic.resize(optimizer, states))
        assert optimizer.watch.changed == changed


def test_states_that_do_not_belong_together_are_refused() -> None:
    states = made_up("OneBitAdam", 4, 1)
    optimizer = bound("OneBitAdam", 2, 1, 0)

    def refused(given: list[dict[str, Any]], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            elastic.resize(optimizer, given)

    refused([], "no state")
    refused(states[:3], "there are 3 states, the old run had 4 ranks")
    refused([states[0], states[2], states[1], states[3]], "saved by rank 2: give them in the order of ranks")
    refused([states[0], states[1] | {"steps": 8}, *states[2:]], "another run or step")
    refused(made_up("Birder", 4, 1), "holds what Birder keeps")
    cut = [state | {"units": state["units"][1:]} for state in states]
    refused(cut, "units, this optimizer has")
    assert [k for k in optimizer.units[0].state if optimizer.units[0].state[k].any()] == []  # nothing was loaded
    with pytest.raises(ValueError, match="resume with the same number of nodes and ranks"):
        optimizer.load_state_dict(states[0])  # the default


# ---- a real run ----------------------------------------------------------------------------------------------------------

REAL = {"Birder": {"lr": 0.01}, "OneBitAdam": {"lr": 0.01, "warmup_steps": 3}, "CSER": METHODS["CSER"] | {"lr": 0.05}}


def steps(rank: int, ddp: torch.nn.Module, optimizer: birder.BucketOptimizer, which: range) -> float:
    total = 0.0
    for step in which:
        optimizer.zero_grad()
        loss = toy.loss(ddp, rank, step)
        loss.backward()
        optimizer.step()
        total += float(loss.detach())
    return total / len(which)


def connected(name: str) -> tuple[Any, Any, birder.BucketOptimizer]:
    model = toy.make()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    optimizer = getattr(birder, name)(model.parameters(), **REAL[name])
    attach(ddp, optimizer, unit_mb=UNIT_MB)
    return model, ddp, optimizer


def four(rank: int, world: int, folder: Path) -> None:
    for name in REAL:
        model, ddp, optimizer = connected(name)
        steps(rank, ddp, optimizer, range(1, 31))
        own = {"optimizer": optimizer.state_dict(), "parameters": {n: p.detach() for n, p in model.named_parameters()}}
        checkpoint.save(folder / name, 30, {}, own)


def two(rank: int, world: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in REAL:
        model, ddp, optimizer = connected(name)
        begin = steps(rank, ddp, optimizer, range(1, 3))
        model, ddp, optimizer = connected(name)
        with pytest.raises(ValueError, match="saved by 4 ranks, this run has 2"):
            checkpoint.restore(folder / name)
        old = checkpoint.restore(folder / name, any_world=True)
        assert old is not None
        assert (old.step, old.world_size) == (30, 4)
        locals_ = [checkpoint.read(old.folder, k)[1] for k in range(4)]
        mean = elastic.mean(part["parameters"] for part in locals_)
        model.load_state_dict(mean)
        optimizer.load_state_dict(elastic.resize(optimizer, (part["optimizer"] for part in locals_)))
        later = steps(rank, ddp, optimizer, range(31, 41))
        with optimizer.averaged():
            found[name] = (begin, later, optimizer.steps, toy.flat(model).numpy())
    return found


@pytest.mark.slow
def test_four_ranks_go_on_as_two(tmp_path: Path) -> None:
    run_ranks(four, 4, tmp_path)
    first, second = run_ranks(two, 2, tmp_path)
    for name in REAL:
        begin, later, done, parameters = first[name]
        assert done == 40
        assert later < begin  # it has not begun again
        assert np.array_equal(parameters, second[name][3])


def test_the_example_ends_well_where_no_step_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a restart behind the last checkpoint: torchrun started it again and again."""
    example = load("examples/elastic.py")
    monkeypatch.setattr(example.dist, "init_process_group", functools.partial(alone, tmp_path, itertools.count()))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(int("WORLD" in name)))
    example.main(tmp_path / "checkpoints", 50)
    assert "step 50: loss" in capsys.readouterr().out
    example.main(tmp_path / "checkpoints", 50)
    assert capsys.readouterr().out == "step 50 of 1 ranks, now 1\n"


def test_the_example_asks_for_a_number_of_steps(tmp_path: Path) -> None:
    (said,) = run_script(ROOT / "examples/elastic.py", 1, str(tmp_path), "x")
    assert "x is not a number of steps" in said


def alone(folder: Path, number: Iterator[int], backend: str) -> None:
    store = dist.FileStore(str(folder / f"store{next(number)}"), 1)
    dist.distributed_c10d.init_process_group(backend, store=store, rank=0, world_size=1)
