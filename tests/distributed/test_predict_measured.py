"""What measures: recording in a script of one's own, links, kernels; the three lines under torchrun, two ranks on gloo."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import birder
from birder import predict
from birder.comm import Topology
from birder.predict.advice import Advice, _measured_cluster, _running
from birder.predict.costs import BYTES
from birder.predict.recording import assemble, topology_of
from birder.predict.simulation import Layout
from birder.predict.timeline import problem, read, write
from tests.helpers import ROOT
from tests.helpers.ranks import run_ranks


class Uneven(nn.Module):
    """Three layers, of which one is frozen and one gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(50, 300), nn.Linear(300, 20)
        self.frozen, self.unused = nn.Linear(3, 3).requires_grad_(False), nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def recorded(rank: int, size: int) -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Uneven(), find_unused_parameters=True)
    optimizer = torch.optim.Adam([p for p in ddp.parameters() if p.requires_grad])
    x = torch.randn(6, 50)
    calls = []

    def step() -> None:
        calls.append(1)
        optimizer.zero_grad()
        with ddp.no_sync():
            ddp(x).sum().backward()
        ddp(x).sum().backward()
        optimizer.step()

    t = predict.record(ddp, step, steps=3)
    assert len(calls) == 6
    assert [g.name for g in t.gradients] == ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert t.batch_per_gpu == 6
    assert t.frozen == (9, 3)
    assert problem(t) is None
    ready = {g.name: g.ready_ms for g in t.gradients}
    assert ready["first.weight"] >= ready["second.weight"] >= t.forward_ms
    assert t.wall_ms is not None
    assert t.update_ms is not None
    assert t.wall_ms >= t.step_ms + t.update_ms * 0.5
    assert "2 parameters got no gradient" in t.note
    everyone: list[object] = [None] * size
    dist.all_gather_object(everyone, t)
    assert all(other == t for other in everyone)
    with pytest.raises(ValueError, match="gave no parameter a gradient"):
        predict.record(ddp, lambda: ddp(x), steps=1)
    with pytest.raises(TypeError, match="wrap it first"):
        predict.record(ddp.module, step)  # type: ignore[arg-type]
    handles = [*ddp._forward_hooks, *ddp._forward_pre_hooks]
    assert not handles  # nothing stays behind


def linked(rank: int, size: int) -> None:
    found = predict.measure_link(topology=Topology(2, 2), sizes=(4096, 65536))
    assert found.between is not None
    assert found.inside is not None
    assert found.between.gbps > 0
    assert {(where, name) for where, name, _, _ in found.times} == {
        (w, c) for w in ("between", "inside") for c in ("all_reduce", "all_to_all", "all_gather")
    }
    everyone: list[object] = [None] * size
    dist.all_gather_object(everyone, found.between)
    assert all(other == found.between for other in everyone)
    with pytest.raises(ValueError, match="the topology has 2 ranks, the process group 4"):
        predict.measure_link(topology=Topology(2, 1))
    odd = predict.measure_link(topology=Topology(4, 1), sizes=(4096,))
    assert odd.inside is None
    groups = len(dist.distributed_c10d._world.pg_map)
    for _ in range(2):  # torch keeps a group to the end of the process: those of the first time serve again
        predict.measure_link(topology=Topology(2, 2), sizes=(4096,))
    assert len(dist.distributed_c10d._world.pg_map) == groups


def of_a_part(rank: int, size: int) -> None:
    """Two models on two ranks each, on two nodes of two: side by side on a node, then one rank on each."""
    for first, nodes in ((lambda r: r // 2 * 2, 1), (lambda r: r % 2, 2)):
        mine = [[r for r in range(size) if first(r) == first(k)] for k in range(size)]
        made = {tuple(ranks): dist.new_group(ranks) for ranks in dict.fromkeys(map(tuple, mine))}
        ddp = DistributedDataParallel(nn.Linear(4, 4), process_group=made[tuple(mine[rank])])
        assert topology_of(ddp.process_group) == Topology(nodes, 2 // nodes)
        assert predict.record(ddp, lambda: ddp(torch.ones(1, 4)).sum().backward(), 1).gpus_per_node == 2 // nodes  # noqa: B023
        found = predict.measure_link(ddp.process_group, sizes=(4096,))
        assert (found.inside is None, found.between is None) == (nodes == 2, nodes == 1)


def test_a_group_of_some_ranks_is_on_the_nodes_of_these() -> None:
    run_ranks(of_a_part, 4, ranks_per_node=2)


def test_a_step_of_ones_own_is_recorded() -> None:
    run_ranks(recorded, 2)


def test_links_inside_and_between_are_told_apart() -> None:
    run_ranks(linked, 4)


def test_a_recorded_timeline_is_a_file_like_any_other(tmp_path: Path) -> None:
    times = {"a": 3.0, "<forward>": 1.0, "<update>": 3.0, "<updated>": 4.0, "<end>": 5.0}
    about = {"name": "x", "model": "x", "gpu": "cpu", "precision": "fp32", "batch_per_gpu": 1, "gpus_per_node": 1}
    t = assemble(times, {"a": (4,)}, command="here", **about)
    assert (t.update_ms, t.wall_ms, t.step_ms) == (1.0, 5.0, 3.0)
    for made in (t, replace(t, frozen=(9, 3), frozen_bytes=48)):
        assert read(write(made, tmp_path / "x.json")) == made
    with pytest.raises(ValueError, match="did not call the model's forward"):
        assemble({"a": 3.0, "<end>": 4.0}, {"a": (4,)}, command="here", **about)


def advice_of(wall_ms: float | None, now: str | None) -> Advice:
    t = read(ROOT / "results/timelines/bert_base_b12_tf32.json")
    cluster = predict.Cluster(4, 8, predict.Link(10.0, 20.0))
    links = predict.Links(None, None, ())
    return Advice(replace(t, wall_ms=wall_ms), links, predict.Costs.of_gpu(t.gpu), cluster, Layout(), now)


def test_an_advice_is_set_right_by_the_step_that_runs_now() -> None:
    plain = advice_of(None, "fp32")
    expected = plain.here["fp32"].ms
    assert (plain.beyond_ms, "measured now" in str(plain)) == (0.0, False)
    late = advice_of(expected + 12.5, "fp32")
    assert late.here["fp32"].ms == pytest.approx(expected + 12.5)
    assert late.here["none"].ms == plain.here["none"].ms
    assert late.at(nodes=8)["birder"].ms == pytest.approx(plain.at(nodes=8)["birder"].ms + 12.5)
    assert (late.crossover(8)["birder"] or 0.0) < (plain.crossover(8)["birder"] or 0.0)
    assert "simulated for it (DDP fp32): " in str(late)
    assert str(late).endswith("The other 12.5 ms are added to every method that communicates.")
    early = advice_of(expected - 12.5, "fp32")
    assert early.here["fp32"].ms == expected
    assert str(early).endswith("Intervals reach 12.5 ms lower.")
    unknown = advice_of(expected + 12.5, None)  # a hook of one's own
    assert unknown.here["fp32"].ms == expected
    assert "measured now" in str(unknown)
    assert "simulated for it" not in str(unknown)


def test_gpus_that_were_measured_are_the_cluster_that_is_asked_about_elsewhere() -> None:
    between, inside = predict.Link(25.0, 20.0), predict.Link(1000.0, 5.0)
    links = predict.Links(between, inside)
    asked = predict.Cluster.of_gpus(4, 8, between, inside)
    assert _measured_cluster(Topology(4, 8), links, gpu=True) == asked
    on_cpus = _measured_cluster(Topology(4, 8), links, gpu=False)
    assert on_cpus == predict.Cluster(4, 8, between, inside, ring=False)


def test_a_rate_that_would_change_nothing_is_refused() -> None:
    advice = advice_of(None, "fp32")
    alone = replace(advice, cluster=replace(advice.cluster, nodes=1))  # measured on one machine
    for asked in ({"link_gbps": 10.0}, {"latency_us": 5.0}):
        with pytest.raises(ValueError, match="one node has no link"):
            alone.at(**asked)
        with pytest.raises(ValueError, match="one node has no link"):
            advice.at(nodes=1, **asked)
        assert alone.at(nodes=2, **asked)["bf16"].ms > alone.here["bf16"].ms
    assert advice.at(nodes=1)["bf16"].ms == alone.here["bf16"].ms


def hooked(rank: int, size: int) -> None:
    expected = [
        (None, "fp32"),
        (default_hooks.allreduce_hook, "fp32"),
        (default_hooks.bf16_compress_hook, "bf16"),
        (lambda state, bucket: default_hooks.allreduce_hook(state, bucket), None),  # one's own
    ]
    for hook, method in expected:
        ddp = DistributedDataParallel(nn.Linear(8, 8))
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        assert _running(ddp) == method
    assert _running(DistributedDataParallel(nn.Linear(8, 8).double())) is None
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    birder.attach(ddp, birder.Birder(ddp.parameters(), lr=1e-3))
    assert _running(ddp) is None


def test_it_knows_how_gradients_are_averaged_now() -> None:
    run_ranks(hooked, 1)


def test_kernels_are_measured_and_cover_every_kernel_of_every_method() -> None:
    costs = predict.measure_kernels("cpu", elements=2**14, rounds=2)
    assert all(rate > 0 for rate in costs.ns_per_byte.values())
    for method in predict.METHODS.values():
        for round_ in method.rounds:
            for kernel in (*round_.encode, *round_.serve, *round_.decode, *method.update):
                assert kernel in BYTES
                assert costs.ms(kernel, 1000, 4) > 0


def test_all_names_of_the_library_are_there() -> None:
    for name in birder.__all__:
        assert getattr(birder, name).__name__ == name
    for name in (name for names in predict._LATER.values() for name in names):
        assert getattr(predict, name) is not None
    assert set(birder.__all__) <= set(dir(birder))
    with pytest.raises(AttributeError, match="no attribute 'Magic'"):
        birder.Magic  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'magic'"):
        predict.magic  # noqa: B018


METHODS_OF_THE_EXAMPLE = ("fp32", "bf16", "powersgd1", "birder", "birder_one_phase", "onebit_adam", "none")


@pytest.mark.slow
def test_three_lines_under_torchrun() -> None:
    """The script of examples/: two ranks on gloo, a transformer of its own; then each method is switched on and measured."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "examples/predict.py", "--steps", "2", "--measure"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "1 x 2 ranks" in done.stdout
    assert "16 x 8 ranks, 10 Gbit/s between nodes" in done.stdout
    assert re.search(r"measured now, with the communication there is: [\d.]+ ms", done.stdout)
    switched = done.stdout.partition("switched on")[2].splitlines()[1:]
    assert [row.split()[0] for row in switched] == [*METHODS_OF_THE_EXAMPLE]
    for row in switched:
        expected, low, _, high, found, difference = row.split()[1:]
        assert float(low) <= float(expected) <= float(high)
        assert float(difference.rstrip("%")) == pytest.approx(100 * (float(expected) / float(found) - 1), abs=0.2)
    assert re.search(r"^(do not compress|not decided|.* is [\d.]+x as fast as bf16)", done.stdout, re.M)
