"""FSDP2's order on CUDA's streams, checked by a model of them (tests/helpers/fake_cuda.py): no GPU is needed.

torch's own code of FSDP2 runs, on streams of the model, with gloo between the ranks.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import birder
from birder import kernels
from birder.comm import Pipeline, StreamPipeline
from birder.hooks import fsdp
from birder.kernels import reference
from tests.helpers import toy
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.hsdp import make_mesh, shard
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import slow

CPU = torch.device("cpu")
PRECISION = {
    "fp32": {},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "bf16, reduced in fp32": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
}
METHODS: dict[str, dict[str, Any]] = {
    "Birder": {"lr": 0.01},
    "OneBitAdam": {"lr": 0.01, "warmup_steps": 1},
    "AdamW": {"lr": 0.01},
}
CASES = [(method, "bf16") for method in METHODS]
MORE = [("Birder", policy) for policy in PRECISION if policy != "bf16"]
STEPS = 3


def train(method: str, policy: str, rank: int, world: int, told: bool) -> tuple[list[str], int]:
    """Faults and the number of streams. told: whether the allocator hears of streams that use memory of others."""
    mesh, fake = make_mesh(2, world // 2), FakeCuda()
    with fake.streams_of_cpu(), fake:
        fsdp.pipeline_for = lambda device, group: Pipeline() if group is None else StreamPipeline(CPU, fake)
        fsdp.used_here = fake.record_stream if told else lambda tensor: None
        model = shard(toy.make(), mesh, **PRECISION[policy])
        optimizer = getattr(birder, method)(model.parameters(), **METHODS[method])
        attachment = birder.attach(model, optimizer, mesh=mesh, unit_mb=600 * 4 / 2**20)
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            toy.loss(model, rank, step).backward()
            optimizer.step()
            fake.collect()
        attachment.close()
    return fake.faults, len(fake.streams)


Cases = list[tuple[str, str]]


def all_of(rank: int, world: int, cases: Cases) -> dict[tuple[str, str, bool], tuple[list[str], int]]:
    kernels.backend = lambda device: reference  # the model sees what is done in plain torch
    return {(*case, told): train(*case, rank, world, told) for case in cases for told in (True, False)}


@functools.cache
def found(more: bool) -> list[dict[tuple[str, str, bool], tuple[list[str], int]]]:
    return run_ranks(all_of, 4, MORE if more else CASES, ranks_per_node=2)


@pytest.mark.slow
@pytest.mark.parametrize("more", [False, slow(True)])
def test_every_read_comes_after_its_write(more: bool) -> None:
    for of_rank in found(more):
        for (method, policy, told), (faults, streams) in of_rank.items():
            if told:
                assert faults == [], (method, policy)
                assert streams == (5 if method == "AdamW" else 7)  # main and FSDP's four, and the pipeline's two


@pytest.mark.slow
@pytest.mark.parametrize("more", [False, True])
def test_a_buffer_given_away_while_it_is_read_is_found(more: bool) -> None:
    """A gradient that FSDP casts on its all-reduce stream after the hook, in memory of its reduce-scatter stream."""
    for of_rank in found(more):
        faulty = {(method, policy) for (method, policy, told), (faults, _) in of_rank.items() if faults and not told}
        assert faulty == (set() if more else set(CASES))  # of the others nothing is cast there
        if not more:
            assert "may be given memory" in of_rank["Birder", "bf16", False][0][0]
