"""PyTorch's own hooks as rows: what they do to the gradient, the bytes they are said to send, what does not go together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import birder
from birder.comm import Topology
from birder.comm.groups import borrow
from experiments.config import compose
from experiments.records import labels
from experiments.training.torch_hooks import attach_hook, low_rank_numbers
from experiments.workloads.base import Shard
from launch.errors import UserError
from tests.helpers import toy
from tests.helpers.ranks import fresh_world, run_ranks
from tests.helpers.runs import digits, train

SHAPES = [(64, 32, 3, 3), (64,), (40, 64), (40,), (3, 40), (1,)]


def powersgd_bytes(shapes: Iterable[Sequence[int]], rank: int, ranks: int) -> int:
    """Bytes that each of `ranks` ranks sends in a step of PowerSGD, whatever the buckets."""
    return 2 * (ranks - 1) * 4 * sum(low_rank_numbers(shapes, rank)) // ranks


class Plain(torch.nn.Module):
    """Parameters of SHAPES; the gradient of each is a fixed matrix of rank one times a number that differs by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.all = torch.nn.ParameterList(torch.zeros(s) for s in SHAPES)
        self.values = []
        g = torch.Generator().manual_seed(5)
        for p in self.all:
            rows, columns = p.shape[0], p[0].numel()
            value = torch.outer(torch.randn(rows, generator=g), torch.randn(columns, generator=g))
            self.values.append(value.view(p.shape))

    def forward(self, scale: float) -> torch.Tensor:
        return sum((scale * v * p).sum() for p, v in zip(self.all, self.values, strict=True))


def _steps(rank: int, world: int, name: str, rank_of_p: int, steps: int = 4) -> dict[str, Any]:
    """Gradients, counted and really reduced numbers of each step. Rank r scales its gradient by r + 1."""
    model = Plain()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
    optimizer = birder.SGDM(model.parameters(), lr=0.0)
    attachment = attach_hook(ddp, optimizer, name, rank=rank_of_p, topology=Topology(world, 1))
    original = dist.all_reduce
    seen: list[int] = []

    def all_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        seen.append(tensor.numel() * tensor.element_size())
        return original(tensor, *args, **options)

    dist.all_reduce = all_reduce
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        attachment.counter.reset()
        seen.clear()
        ddp(float(rank + 1)).backward()
        grads = [p.grad.clone() for p in model.parameters()]
        found.append((attachment.counter.inter, attachment.counter.collectives, list(seen), grads))
        optimizer.step()
    dist.all_reduce = original
    before = attachment.counter.total
    with attachment.paused():
        ddp(1.0).backward()
    exact = [v * (world + 1) / 2 for v in model.values]
    off = [max(float((g - e).abs().max() / e.abs().max()) for g, e in zip(f[3], exact, strict=True)) for f in found]
    paused = attachment.counter.total == before
    attachment.close()
    return {"steps": [f[:3] for f in found], "off": off, "paused": paused, "state": attachment.state_bytes()}


@pytest.mark.parametrize(("name", "limit"), [("bf16", 0.01), ("fp16", 0.002)])
def test_half_hooks_average_and_send_two_bytes_an_element(name: str, limit: float) -> None:
    elements = sum(torch.Size(s).numel() for s in SHAPES)
    for found in run_ranks(_steps, 3, name, 1, ranks_per_node=1):
        assert 1e-4 < max(found["off"]) < limit  # half a unit in the last place of fp16 is 5e-4
        for counted, collectives, reduced, _ in [(*s, None) for s in found["steps"]]:
            assert sum(reduced) == 2 * elements
            assert counted == pytest.approx(2 * 2 / 3 * 2 * elements, abs=collectives)
            assert collectives == len(reduced)
        assert found["paused"]
        assert found["state"] == 0


@pytest.mark.parametrize("rank_of_p", [1, 4])
def test_powersgd_sends_p_q_and_vectors_from_the_third_step_on(rank_of_p: int) -> None:
    elements = sum(torch.Size(s).numel() for s in SHAPES)
    # By hand: 64 x 288 and 40 x 64 are compressed; 3 x 40 is at rank 1 ((3+40) 2 < 120), not at rank 3 = min(3, 40, 4).
    p, q = rank_of_p * (64 + 40), rank_of_p * (288 + 64)
    plain = 64 + 40 + 1
    if rank_of_p == 1:
        p, q = p + 3, q + 40
    else:
        plain += 120
    assert low_rank_numbers(SHAPES, rank_of_p) == (plain, p, q)
    results = run_ranks(_steps, 2, "powersgd", rank_of_p, ranks_per_node=1)
    for found in results:
        for number, (counted, collectives, reduced) in enumerate(found["steps"]):
            dense = number < 2
            assert sum(reduced) == 4 * (elements if dense else plain + p + q)
            assert collectives == len(reduced)
            assert counted == pytest.approx(sum(reduced), abs=collectives)  # 2 ranks: 2 (n-1)/n = 1
        assert found["steps"][2][0] == pytest.approx(powersgd_bytes(SHAPES, rank_of_p, 2), abs=9)
        # Gradients of rank one are what PowerSGD carries without loss.
        assert max(found["off"]) < 1e-3
        # Per bucket: the error, as long as the bucket, P and Q.
        assert found["state"] == 4 * (elements + p + q)
    assert results[0]["off"] == results[1]["off"]


def _refused(rank: int, world: int) -> list[str]:
    said = []
    model = toy.make()
    ddp = DistributedDataParallel(model)
    for optimizer, name, low in (
        (birder.Birder(model.parameters()), "bf16", 1),
        (birder.SGDM(model.parameters()), "int8", 1),
        (birder.SGDM(model.parameters()), "powersgd", 0),
    ):
        try:
            attach_hook(ddp, optimizer, name, rank=low)
        except ValueError as e:
            said.append(str(e))
    return said


def test_what_the_hooks_cannot_do_is_refused() -> None:
    (said,) = run_ranks(_refused, 1)
    assert len(said) == 3
    assert "its own messages" in said[0]
    assert "bf16, fp16, powersgd" in said[1]
    assert "at least 1" in said[2]


def resolved(*overrides: str) -> dict[str, Any]:
    return compose.resolve(compose.compose(["+exp=digits", "scale=quick", *overrides]))


@pytest.mark.parametrize(
    ("overrides", "label", "wire", "compressed"),
    [
        (["comm.hook=bf16"], "PyTorch bf16 hook", "bf16", False),
        (["comm.hook=fp16"], "PyTorch fp16 hook", "fp16", False),
        (["comm.hook=powersgd"], "PowerSGD rank 4", "lowrank", True),
        (["comm.hook=powersgd", "comm.powersgd_rank=1"], "PowerSGD rank 1", "lowrank", True),
        (["comm.hook=fp8"], "fp8 all-reduce", "fp8", True),
        (["comm.hook=int4", "comm.error_feedback=true"], "4-bit all-reduce with error feedback", "int4", True),
    ],
)
def test_rows_have_names(overrides: list[str], label: str, wire: str, compressed: bool) -> None:
    config = resolved("optimizer=sgdm", *overrides)
    assert (labels.method(config), labels.wire(config)) == (label, wire)
    assert labels.is_compressed(labels.wire(config)) is compressed


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["optimizer=birder", "comm.hook=bf16"], "Birder sends its own messages"),
        (["optimizer=onebit_adam", "comm.hook=powersgd"], "OneBitAdam sends its own messages"),
        (["optimizer=sgdm", "optimizer.wire=bf16", "comm.hook=bf16"], "leave optimizer.wire=fp32"),
        (["optimizer=sgdm", "comm.hook=fp16", "comm.enabled=false"], "comm.enabled=false"),
        (["optimizer=sgdm", "comm.hook=fp16", "comm.topology=hierarchical"], "comm.topology=flat"),
        (["optimizer=sgdm", "comm.hook=fp16", "comm.overlap=false"], "comm.overlap=true"),
        (["optimizer=sgdm", "comm.hook=fp32"], "comm.hook must be one of bf16, fp16, powersgd, int4, fp8, or null"),
        (["optimizer=sgdm", "comm.powersgd_rank=0"], "comm.powersgd_rank must be a whole number, 1 or more"),
        (["optimizer=sgdm", "comm.hook=powersgd", "train.timing_warmup=1"], "train.timing_warmup=2 or more"),
        (["optimizer=sgdm", "comm.hook=powersgd", "train.precision=fp16"], "train.precision=bf16"),
        (["optimizer=sgdm", "comm.hook=powersgd", "checkpoint.every=5"], "checkpoint.every=0"),
        (["optimizer=sgdm", "comm.hook=int4", "comm.error_feedback=true", "checkpoint.every=5"], "checkpoint.every=0"),
        (["optimizer=sgdm", "comm.hook=bf16", "comm.error_feedback=true"], "comm.error_feedback=false"),
    ],
)
def test_bad_combinations_are_one_line(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError) as raised:
        resolved(*overrides)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def _scaled(rank: int, world: int, name: str, kept: bool) -> dict[str, Any]:
    model = Plain()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
    optimizer = birder.SGDM(model.parameters(), lr=0.0)
    attachment = attach_hook(ddp, optimizer, name, error_feedback=kept, topology=Topology(world, 1))
    off, sent = [], []
    for _ in range(3):
        optimizer.zero_grad()
        attachment.counter.reset()
        ddp(float(rank + 1)).backward()
        exact = torch.cat([v.flatten() for v in model.values]) * (world + 1) / 2
        off.append(float((torch.cat([p.grad.flatten() for p in model.all]) - exact).norm() / exact.norm()))
        sent.append((attachment.counter.inter, attachment.counter.collectives))
        optimizer.step()
    before = attachment.counter.total
    with attachment.paused():
        ddp(1.0).backward()
    found = {"off": off, "sent": sent, "paused": attachment.counter.total == before, "state": attachment.state_bytes()}
    attachment.scaled._own = borrow(attachment.link.group, torch.device("cpu"))  # as on NCCL
    attachment.close()
    return {**found, "given back": attachment.scaled._own is None}


@pytest.mark.parametrize(
    ("name", "kept", "bits", "limit"), [("int4", False, 4, 0.2), ("int4", True, 4, 0.3), ("fp8", False, 8, 0.13)]
)
def test_codes_with_scales_average_and_send_a_fraction(name: str, kept: bool, bits: int, limit: float) -> None:
    elements = sum(torch.Size(s).numel() for s in SHAPES)
    for found in run_ranks(_scaled, 3, name, kept, ranks_per_node=1):
        assert 1e-3 < max(found["off"]) < limit
        for sent, collectives in found["sent"]:
            buckets = collectives // 2
            least = 2 * 2 / 3 * elements * (bits / 8 + 2 / 256)
            assert (
                least <= sent <= least + buckets * 2 * 2 * 256 * (bits / 8 + 2 / 256)
            )  # buckets end with part of a block
            assert sent < 1.1 * bits / 16 * (2 * 2 / 3 * 2 * elements)  # of what bf16 takes
        assert found["paused"]
        assert found["given back"]
        assert found["state"] == 4 * elements * kept


def test_a_run_with_a_hook_has_a_record_like_any_other(tmp_path: Path) -> None:
    hook = ["optimizer=sgdm", "comm.hook=powersgd", "comm.powersgd_rank=2"]
    spec = digits(tmp_path, "cluster.nodes=2", "train.max_steps=6", *hook)
    fresh_world(train, 2, spec, grouped=False, ranks_per_node=1)
    (path,) = (tmp_path / "results" / "records").glob("*.json")
    record = json.loads(path.read_text())
    assert record["status"] == "completed"
    assert (record["method"], record["wire"]) == ("PowerSGD rank 2", "lowrank")
    # Compressed in every timed step: far below the 4 bytes an element of a dense one.
    workload = compose.workload(spec.config)
    workload.prepare(Shard())
    model = workload.build_model()
    shapes = [tuple(p.shape) for p in model.parameters()]
    sent = record["bytes_per_step"]["payload_inter"]
    assert sent == pytest.approx(powersgd_bytes(shapes, 2, 2), abs=3 * record["collectives_per_step"])
    assert record["state_bytes_per_rank"] > 2 * 4 * sum(p.numel() for p in model.parameters())
