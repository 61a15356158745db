"""Distributed Lion against its one-process reference, bit for bit: votes, ties, nodes, shards; bytes; what does not move."""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from birder import Lion, attach
from tests.distributed.test_elastic import Place
from tests.helpers import reference, toy
from tests.helpers.hsdp import ddp, full, hsdp, make_mesh, train
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import slow

STEPS = 20
OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "seed": 2**40 + 7}


def hook_run(rank: int, world: int, how: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for vote in ("majority", "average"):
        model = toy.make()
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.0005)
        optimizer = Lion(model.parameters(), vote=vote, **OPTIONS)
        attachment = attach(wrapped, optimizer, unit_mb=0.002, **how)  # three units: each costs messages
        toy.train(wrapped, optimizer, rank, range(1, STEPS // 2 + 1))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        toy.train(wrapped, optimizer, rank, range(STEPS // 2 + 1, STEPS + 1))
        x = toy.flat(model).numpy()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        toy.train(wrapped, optimizer, rank, range(STEPS // 2 + 1, STEPS + 1))
        padded = sum(u.padded for u in optimizer.units)
        found[vote] = x, toy.flat(model).numpy(), attachment.counter.total, padded, len(optimizer.units)
        attachment.close()
    return found


@functools.cache
def flat(world: int) -> list[dict[str, Any]]:
    return run_ranks(hook_run, world, {})


@functools.cache
def oracle_run(workers: int, per_worker: int, vote: str) -> np.ndarray:
    torch.set_num_threads(1)
    model = toy.make()
    oracle = reference.Lion(list(model.parameters()), workers, average=vote == "average", **OPTIONS)
    for step in range(1, STEPS + 1):
        oracle.step(reference.worker_gradients(model, toy.loss, workers, per_worker, step))
    return toy.flat(model).numpy()


@pytest.mark.parametrize("world", [1, slow(2), 3, slow(4), slow(6)])
def test_equals_the_reference_bit_for_bit_and_goes_on_from_a_state(world: int) -> None:
    before = toy.part(toy.flat(toy.make()).numpy(), "embed.weight")[toy.USED :]
    for r in flat(world):
        for vote, (x, again, *_) in r.items():
            assert np.array_equal(x, oracle_run(world, 1, vote)), vote
            assert np.array_equal(again, x)
            rows = toy.part(x, "embed.weight")[toy.USED :]  # without gradient: weight decay alone
            assert torch.allclose(rows, before * (1 - 0.001) ** STEPS, rtol=1e-5)


def test_nodes_as_workers_equal_the_reference() -> None:
    for r in run_ranks(hook_run, 4, {"hierarchical": True}, ranks_per_node=2):
        for vote, (x, *_) in r.items():
            assert np.array_equal(x, oracle_run(2, 2, vote)), vote


def test_a_majority_takes_a_bit_each_way_and_an_average_eight_down() -> None:
    steps = STEPS + STEPS // 2
    for r in flat(3):
        for vote, bits in (("majority", 2), ("average", 9)):
            _, _, sent, padded, units = r[vote]
            messages = steps * 2 * padded // 3 * bits // 8
            assert (
                messages <= sent < messages + steps * 2 * (units * 64 + padded // 8 // 4)
            )  # and the map of coordinates seen
        assert r["majority"][2] < r["average"][2] / 3


def on_shards(rank: int, world: int) -> list[tuple[np.ndarray, np.ndarray]]:
    found = []
    for vote in ("majority", "average"):
        ends = []
        options = {"lr": 0.01, "vote": vote}
        made = (
            hsdp("toy", make_mesh(2, 2), "Lion", options, unit_mb=0.002),
            ddp("toy", "Lion", options, unit_mb=0.002),
        )
        for model, optimizer, attachment in made:
            train(model, optimizer, toy.loss, rank, range(1, 11))
            ends.append(full(model).numpy())
            attachment.close()
        found.append((ends[0], ends[1]))
    return found


@pytest.mark.slow
def test_on_shards_it_is_what_it_is_with_nodes_as_workers() -> None:
    for ends in run_ranks(on_shards, 4, ranks_per_node=2):
        for sharded, whole in ends:
            assert np.array_equal(sharded, whole)


def test_a_single_worker_is_lion() -> None:
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(100))
    x, m = p.detach().clone(), torch.zeros(100)
    optimizer = Lion([p], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    for _ in range(10):
        g = torch.randn(100)
        p.grad = g.clone()
        optimizer.step()
        x = x - 0.01 * (torch.sign(0.9 * m + 0.1 * g) + 0.1 * x)
        m = 0.99 * m + 0.01 * g
    assert torch.allclose(p.detach(), x, atol=1e-6)


def test_an_average_is_of_as_many_workers_as_a_byte_can_count() -> None:
    for workers in (255, 256):
        optimizer = Lion([torch.nn.Parameter(torch.zeros(1))], vote="average")
        with pytest.raises(ValueError, match="vote must be") if workers > 255 else contextlib.nullcontext():
            optimizer.bind(Place(workers, 1, 0))
