"""Spans of a step and what is made of them; collectives per step, as the documentation states them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import birder
from birder.comm import Span, Topology, Trace
from birder.comm.trace import note_wire
from experiments.training import step_profile
from experiments.training.step_profile import KeptSpans
from experiments.training.torch_hooks import attach_hook
from tests.helpers.ranks import fresh_world, run_ranks
from tests.helpers.runs import digits, train


def test_work_without_its_waits_is_encode_and_then_decode() -> None:
    """Unit 3, by hand: encode 0-2, sends at 2; another thread waits 4-7, reduces 7-8, waits 8-9, reads 9-9.5."""
    spans = [
        Span("compute", None, 0.0, 6.0),
        Span("work", 3, 0.0, 2.0, 1),
        Span("work", 3, 4.0, 9.5, 2),
        Span("wait", 3, 4.0, 7.0, 2),
        Span("wire", 3, 2.0, 7.0, 2),
        Span("wait", 3, 8.0, 9.0, 2),
        Span("wire", 3, 8.0, 9.0, 2),
        Span("exposed", None, 6.0, 9.5),
        Span("apply", None, 9.5, 10.0),
    ]
    shown = [(s.kind, s.begin, s.end) for s in step_profile.pieces(spans) if s.kind in ("encode", "decode", "compute")]
    assert shown == [("encode", 0, 2), ("compute", 0, 6), ("decode", 7, 8), ("decode", 9, 9.5)]
    assert step_profile.split(spans) == pytest.approx({"encode": 3.5, "wire": 6.0, "exposed_wire": 3.5})


def test_waits_of_another_thread_take_nothing_away() -> None:
    spans = [Span("work", 0, 0.0, 4.0, 1), Span("wait", 0, 1.0, 3.0, 2), Span("wire", 0, 1.0, 3.0, 2)]
    assert step_profile.split(spans)["encode"] == pytest.approx(4.0)


def test_backward_of_a_dense_method_ends_with_the_wait_for_its_last_bucket() -> None:
    spans = [Span("wire", 0, 2.0, 5.0), Span("wire", 1, 4.0, 9.0), Span("compute", None, 0.0, 9.5)]
    found = step_profile.split(spans)
    assert found == pytest.approx({"encode": 0.0, "wire": 7.0, "exposed_wire": 5.5})
    assert [s.end for s in step_profile.pieces(spans) if s.kind == "compute"] == [4.0]
    # Nothing was sent: there is nothing to split.
    assert step_profile.split([Span("compute", None, 0.0, 9.5), Span("apply", None, 9.5, 9.6)]) == {}


def test_a_trace_that_is_off_keeps_nothing_and_one_step_is_all_that_is_kept() -> None:
    for on in (True, False):
        trace = Trace(on)
        for _ in range(3):
            with trace.work(1):
                note_wire(0.0, 0.0)
            trace.end_step()
        assert [s.kind for s in trace.last] == (["wire", "wait", "work"] if on else [])
    note_wire(0.0, 0.0)  # outside of any work: nobody's


def test_gradients_of_steps_that_are_not_this_optimizers_do_not_pile_up() -> None:
    """DDP averages through a closed attachment, and torch's optimizer steps."""
    trace = Trace()
    for at in range(100_000):
        trace.add("wire", at, 0.0, 1.0)
    trace.end_step()
    assert len(trace.last) < 70_000
    assert trace.last[-1].unit == 99_999


def test_the_step_that_is_shown_is_the_one_nearest_to_the_median() -> None:
    ranks = [KeptSpans(4), KeptSpans(4)]
    for step, (a, b) in enumerate([(1.0, 9.0), (2.0, 1.0), (3.0, 3.1), (0.1, 0.1), (5.0, 5.0)], start=1):
        ranks[0].keep(step, 0.0, a, [])
        ranks[1].keep(step, 0.0, b, [])
    assert len(ranks[0].steps) == 4  # no more are kept
    assert step_profile.typical(ranks) == 2
    assert step_profile.typical([KeptSpans(4)]) is None
    assert step_profile.write([KeptSpans(4)], Path("nowhere"), "") == []


class Layers(torch.nn.Module):
    """`small` vectors of 8 elements next to two matrices of 64 x 64."""

    def __init__(self, small: int) -> None:
        super().__init__()
        self.small = torch.nn.ParameterList(torch.ones(8) for _ in range(small))
        self.large = torch.nn.ParameterList(torch.ones(64, 64) for _ in range(2))

    def forward(self) -> torch.Tensor:
        return sum(p.sum() for p in self.small) + sum((p * p).sum() for p in self.large)  # type: ignore[return-value]


def _collectives(rank: int, world: int, small: int) -> dict[str, tuple[int, int, set[str]]]:
    """For each method: collectives of one step, units (or buckets), and kinds of span, past the first steps."""
    found = {}
    for name in ("two_phase", "one_phase", "onebit", "fp32", "bf16_hook", "powersgd"):
        model = Layers(small)
        optimizer: Any = birder.SGDM(model.parameters(), lr=0.01)
        if name.endswith("phase"):
            optimizer = birder.Birder(model.parameters(), lr=0.01, reduce=name)
        elif name == "onebit":
            optimizer = birder.OneBitAdam(model.parameters(), lr=0.01, warmup_steps=1)
        mb = 64 * 64 * 4 / 2**20 * 1.5  # a matrix and the vectors
        ddp = DistributedDataParallel(model, bucket_cap_mb=mb)
        topology = Topology(world, 1)
        if name in ("bf16_hook", "powersgd"):
            attachment: Any = attach_hook(ddp, optimizer, name.removesuffix("_hook"), rank=1, topology=topology)
        else:
            attachment = birder.attach(ddp, optimizer, topology=topology, unit_mb=mb)
        for _ in range(4):
            attachment.counter.reset()
            buckets = 0
            hook: Any = ddp._comm_hooks[0][1]
            original = hook.on_bucket

            def counting(bucket: Any, original: Any = original) -> Any:
                nonlocal buckets
                buckets += 1
                return original(bucket)

            hook.on_bucket = counting
            optimizer.zero_grad()
            ddp().backward()
            hook.on_bucket = original
            optimizer.step()
        parts = len(optimizer.units) if optimizer.compressed else buckets
        kinds = {s.kind for s in optimizer.pipeline.trace.last}
        found[name] = (attachment.counter.collectives, parts, kinds)
        attachment.close()
    return found


def test_collectives_per_step_do_not_grow_with_the_number_of_small_tensors() -> None:
    """docs/bench.md: two per unit with two phases, scales or not; one with one phase; one per bucket when dense."""
    per_part = {"two_phase": 2, "one_phase": 1, "onebit": 2, "fp32": 1, "bf16_hook": 1, "powersgd": 3}
    few, many = (run_ranks(_collectives, 2, small, ranks_per_node=1)[0] for small in (2, 60))
    for name, each in per_part.items():
        for collectives, parts, kinds in (few[name], many[name]):
            assert parts >= 2, name
            assert collectives == each * parts, name
            assert {"wire", "apply"} <= kinds, name
        assert few[name][1] == many[name][1], name


@pytest.mark.slow
@pytest.mark.parametrize("options", [["optimizer=birder"], ["optimizer=sgdm", "comm.hook=powersgd"]])
def test_a_profiled_run_leaves_a_trace_and_a_picture(tmp_path: Path, options: list[str]) -> None:
    spec = digits(tmp_path, "+profile=step", "cluster.nodes=2", "train.max_steps=9", *options)
    fresh_world(train, 2, spec, grouped=False, ranks_per_node=1)
    (trace,) = (spec.path / "profile").glob("step*.json")
    assert trace.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    for rank in (0, 1):
        mine = [e for e in events if e["pid"] == rank]
        assert {"step", "compute", "encode", "wire", "decode", "apply", "exposed"} <= {e["cat"] for e in mine}
        (whole,) = (e for e in mine if e["cat"] == "step")
        assert all(e["ts"] >= -1 and e["ts"] + e["dur"] <= whole["dur"] + 1 for e in mine)
    (path,) = (tmp_path / "results" / "records").glob("*.json")
    record = json.loads(path.read_text())
    parts = record["timing"]["split"]
    assert {"encode_ms", "wire_ms", "exposed_wire_ms"} <= set(parts)
    assert 0 < parts["exposed_wire_ms"] < record["timing"]["p90_ms"]
