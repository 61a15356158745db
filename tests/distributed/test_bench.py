"""The benchmark: its plan, peers, page and command line; a small run of every method on two ranks."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import birder
from birder.comm import Topology
from birder.predict.timeline import parse
from experiments import replay
from experiments.bench import hooks as bench_hooks
from experiments.bench import kernels as bench_kernels
from experiments.bench.peers import FusedOneBitAdam
from experiments.cells import suite, timelines
from experiments.cells.suite import Measurement
from experiments.records import record
from experiments.records.record import ResultRecord
from experiments.report import replay_page, replay_words, replayed, tables
from tests.distributed.test_hooks import powersgd_bytes
from tests.helpers.commands import refused
from tests.helpers.ranks import fresh_world, run_ranks
from tests.helpers.records import blank

BENCH = suite.load("bench")
METHODS = BENCH.methods
MS = {"fp32": 100.0, "powersgd1": 41.0, "deepspeed": 80.0, "birder": 42.0, "birder_one_phase": 40.0, "none": 35.0}


def entry(cell: Measurement, ms: float, **changes: Any) -> ResultRecord:
    """A record of `cell` whose step takes `ms` of the cluster's clock."""
    method = METHODS[cell.method]
    dilation, fraction = 4.0, BENCH.fraction(cell) if cell.link in BENCH.links else 1.0
    about = {
        **cell._asdict(),
        "fraction": fraction,
        "elements": 1000,
        "peak": int(1e6 * ms),
    }
    wall = ms * dilation
    split = {"encode_ms": 0.1 * wall, "wire_ms": 0.2 * wall, "exposed_wire_ms": 0.05 * wall, "update_ms": 0.01 * wall}
    known: dict[str, Any] = {
        "config": {"bench": about, "optimizer": method.optimizer},
        "exp": "bench",
        "method": method.label,
        "wire": method.wire,
        "nodes": cell.nodes,
        "link": {**record.LINK, "set_mbit_per_s": 36.0, "dilation": dilation},
        "timing": {"steps": 9, "median_ms": wall, "p10_ms": 0.99 * wall, "p90_ms": 1.01 * wall, "split": split},
        "bytes_per_step": {**record.BYTES, "payload_inter": 1000},
        "state_bytes_per_rank": 8000,
    }
    return blank(**{"id": BENCH.id(cell), **known, **changes})


def grid(link: str, nodes: int, times: dict[str, float], model: str = "resnet50") -> list[ResultRecord]:
    return [entry(Measurement(model, None, nodes, link, name), ms) for name, ms in times.items()]


def verdicts(records: list[ResultRecord]) -> list[str]:
    return replay_words.fastest(replayed.collect(BENCH, records))


def test_every_cell_has_a_name_of_its_own_and_a_timeline() -> None:
    cells = BENCH.cells(BENCH.places(), BENCH.rows)
    assert len({BENCH.id(c) for c in cells}) == len(cells) == 2 * 3 * 2 * 15
    assert BENCH.worlds(cells).keys() == {(shaped, n) for shaped in (True, False) for n in (2, 4, 8)}
    for c in cells:
        assert 0 < BENCH.fraction(c) <= 1
    for name in BENCH.models:
        BENCH.timeline(name, None)
    # Memory over peers is measured with the whole model.
    assert BENCH.fraction(Measurement("bert_base", None, 2, "loopback", "fp32")) == 1


def test_dilation_is_the_wished_rate_over_the_measured_one_for_the_share_that_is_sent() -> None:
    assert BENCH.dilation(Measurement("resnet50", None, 4, "emulated", "birder"), 1 / 8, 34.0) == 9450 / 34 / 8
    assert BENCH.dilation(Measurement("resnet50", None, 4, "loopback", "birder"), 1 / 2, 34.0) == 1 / 2


@pytest.mark.parametrize("model", BENCH.models)
def test_a_selection_of_tensors_stands_for_the_model(model: str) -> None:
    fraction = BENCH.fraction(Measurement(model, None, 4, "emulated", "powersgd4"))
    whole = BENCH.timeline(model, None)
    part = timelines.select(whole, fraction)
    shapes = {g.name: g.shape for g in whole.gradients}
    cut = [g.name for g in part.gradients if g.shape != shapes[g.name]]
    assert all(math.prod(shapes[name]) > timelines.LARGE * whole.elements for name in cut)
    assert all(g.shape[1:] == shapes[g.name][1:] for g in part.gradients)
    assert part.elements == pytest.approx(fraction * whole.elements, rel=0.3)
    for rank in (1, 4):
        sent = [powersgd_bytes([g.shape for g in t.gradients], rank, 2) for t in (part, whole)]
        assert timelines.shares(whole, part, rank) == pytest.approx(sent[0] / sent[1], rel=1e-3)
        assert sent[0] == pytest.approx(fraction * sent[1], rel=0.3)
    # Spread over the whole of backward, to its end.
    times = [g.ready_ms for g in part.gradients]
    assert min(times) < whole.step_ms / 2
    assert max(times) == max(g.ready_ms for g in whole.gradients)
    assert timelines.select(whole, 1.0) is whole


class Two(torch.nn.Module):
    """128 and 64 x 32 elements: no padding on 2 ranks."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.a = torch.nn.Parameter(torch.randn(128, generator=g))
        self.b = torch.nn.Parameter(torch.randn(64, 32, generator=g))

    def forward(self, rank: int, step: int) -> torch.Tensor:
        g = torch.Generator().manual_seed(100 * step + rank)
        x, y = torch.randn(128, generator=g), torch.randn(64, 32, generator=g)
        return ((self.a - x) ** 2).sum() + ((self.b - y) ** 2).sum()


def _momenta(rank: int, world: int) -> list[np.ndarray]:
    found = []
    for cls in (birder.OneBitAdam, FusedOneBitAdam):
        model = Two()
        optimizer = cls(model.parameters(), lr=1e-3, warmup_steps=2, bias_correction=False)
        ddp = DistributedDataParallel(model)
        attachment = birder.attach(ddp, optimizer, topology=Topology(world, 1), overlap=False, unit_mb=1e4)
        for step in range(8):
            optimizer.zero_grad()
            attachment.counter.reset()
            ddp(rank, step).backward()
            optimizer.step()
        (unit,) = optimizer.units
        x = torch.cat([p.detach().flatten() for p in model.parameters()])
        found += [unit.state["m"].numpy(), x.numpy(), np.array(attachment.counter.inter)]
        attachment.close()
    return found


@pytest.mark.slow
def test_the_recreated_collective_computes_what_onebit_adam_does() -> None:
    """Same momentum, parameters and bytes: what differs is how long it takes. Sums are rounded in another order."""
    results = run_ranks(_momenta, 2, ranks_per_node=1)
    for m, x, sent, fused_m, fused_x, fused_sent in results:
        assert np.isclose(m, fused_m, rtol=1e-4).mean() > 0.995
        assert np.isclose(x, fused_x, rtol=1e-4, atol=1e-6).mean() > 0.995
        assert sent == fused_sent
    assert (results[0][3] == results[1][3]).all()


def test_verdicts_say_who_is_fastest_how_far_the_bound_is_and_when_not_to_compress() -> None:
    (said,) = verdicts(grid("emulated", 4, MS))
    assert "4 nodes: Birder one-phase is the fastest compressed method (40.0 ms, 14 % above the bound" in said
    assert "the next is PowerSGD rank 1, 41.0 ms" in said
    (said,) = verdicts(grid("emulated", 4, {**MS, "powersgd1": 39.5}))
    assert "is not decided against PowerSGD rank 1, 39.5 ms" in said
    (said,) = verdicts(grid("emulated", 4, {**MS, "birder": 30.0}))
    assert "is not the fastest compressed method" in said
    assert "that is Birder two-phase, 30.0 ms" in said
    slow = {name: ms if name in ("fp32", "none") else 3 * ms for name, ms in MS.items()}
    _, said = verdicts(grid("loopback", 2, slow))
    assert "2 nodes: do not compress: Birder one-phase" in said
    assert "1.20 times as long as fp32 DDP" in said
    assert verdicts(grid("emulated", 4, {"fp32": 100.0})) == []


def test_the_page_is_made_from_records_alone_and_guesses_nothing(tmp_path: Path) -> None:
    for r in [*grid("emulated", 4, MS), *grid("loopback", 2, MS)]:
        record.write(r, tmp_path)
    kernels = list(bench_kernels.measure(torch.device("cpu"), 4096, rounds=1))
    plan = {"kernels": kernels, "backend": "cpu"}
    record.write(
        entry(Measurement("resnet50", None, 1, "x", "none"), 1.0, id="bench-kernels-cpu", config={"bench": plan}),
        tmp_path,
    )
    for path in tables.save(replay_page.render(BENCH, tmp_path)):
        assert path.is_file()
    page = replay_page.paths(BENCH, tmp_path)[0].read_text()
    assert "Replayed, not measured on GPUs" in page
    assert "36.0 Mbit/s" in page
    row = next(line for line in page.splitlines() if line.startswith("| PowerSGD rank 1 | 41.0"))
    assert [c.strip() for c in row.strip("|").split("|")][1:] == ["41.0", "2.44x", "85 %"]
    memory = page[page.index("## Memory") : page.index("## What a step")]
    assert "| PowerSGD rank 1 | 1.00x | -59.0 MB |" in memory
    assert "| `encode` | 20.125 |" in page
    assert "No GPU was available" in page
    assert "bert_base" not in page
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    tables.save(replay_page.render(BENCH, tmp_path))
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    # Other tables leave these records and this page alone.
    assert tables.check(tmp_path) == []
    assert tables.write(tmp_path) == []


def test_kernels_are_timed_by_their_public_functions() -> None:
    rows = list(bench_kernels.measure(torch.device("cpu"), 2**14 + 8, rounds=2))
    assert {r["kernel"] for r in rows} >= {"encode", "reduce_bits", "apply_bits", "add_momentum", "split_signs"}
    for r in rows:
        assert r["elements"] == 2**14
        assert r["ns_per_element"] > 0
        assert r["gb_per_s"] == pytest.approx(r["bytes_per_element"] / r["ns_per_element"], rel=1e-6)
    encode = next(r for r in rows if r["kernel"] == "encode")
    assert encode["bytes_per_element"] == 5 * 4 + 1 / 8


def tiny(folder: Path) -> str:
    """A made-up model of a few matrices and vectors: the path of its timeline."""
    shapes = [[64], [64, 256], [64], [512, 128], [128], [256, 256], [300, 64]]
    gradients = [[f"p{i}", s, 16.0 - 2.0 * i] for i, s in enumerate(shapes)]
    inside = {"reduce_scatter_ms": 0.1, "all_reduce_ms": 0.2, "all_gather_ms": 0.01, "reason": "none"}
    content = {"name": "tiny", "model": "tiny", "gpu": "-", "precision": "tf32", "batch_per_gpu": 4}
    content |= {"gpus_per_node": 8, "forward_ms": 2.0, "step_ms": 16.0, "gradients": gradients, "intra_node": inside}
    return str(timelines.write(parse({**content, "source": "a test"}, "test"), folder / "tiny.json"))


def _hooks(rank: int, world: int) -> list[dict[str, Any]]:
    with bench_hooks.alone(torch.device("cpu")):
        return list(bench_hooks.measure_model(torch.device("cpu"), "tiny", 4, steps=2))


@pytest.mark.slow
def test_hooks_are_timed_against_ddp_without_one() -> None:
    (rows,) = fresh_world(_hooks, 1, grouped=False)
    assert [r["method"] for r in rows] == list(bench_hooks.METHODS)
    assert rows[0]["overhead_ms"] == 0
    assert all(r["step_ms"] > 0 for r in rows)


def measured(folder: Path, *methods: str) -> dict[str, ResultRecord]:
    asked = ["suite=bench", "models=resnet50", f"methods={','.join(methods)}", "steps=1"]
    _, options = replay.parse([*asked, f"results={folder}/r", f"output={folder}/o"])
    model = BENCH.models["resnet50"].model_copy(update={"timeline": tiny(folder)})
    made = BENCH.model_copy(update={"models": {"resnet50": model}})
    cells = made.cells(made.places(links=["loopback"], nodes=[2]), methods)
    replay.launch(made, options, False, 2, cells, "a test")
    return {r.config["bench"]["method"]: r for r in record.read_all(folder / "r")}


@pytest.mark.slow
def test_all_methods_on_two_ranks_over_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of them also run over emulated links: tests/unit/experiments/cells/test_paper_table.py."""
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    found = measured(tmp_path, *METHODS)
    assert set(found) == set(METHODS)
    t = timelines.load(tmp_path / "tiny.json")
    expected = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1 + 2 / 256, "int4": 0.5 + 2 / 256, "1bit": 1 / 8}
    expected |= {"model": 4 / 500, "none": 0.0}
    for name, r in found.items():
        assert r.status == "completed"
        assert (r.exp, r.group, r.nodes, r.link["kind"], r.link["dilation"]) == ("bench", None, 2, "loopback", 1)
        assert r.timing["median_ms"] >= 0.99 * t.step_ms
        sent = r.bytes_per_step["payload_inter"]
        if r.wire == "lowrank":
            shapes = [g.shape for g in t.gradients]
            assert sent == pytest.approx(powersgd_bytes(shapes, METHODS[name].rank, 2), abs=20)
            assert r.state_bytes_per_rank > 8 * t.elements
        else:
            part = expected[r.wire] * t.elements / (2 if name == "birder_one_phase" else 1)
            assert sent == pytest.approx(part, rel=0.1)
        assert r.config["bench"]["peak"] is None or r.config["bench"]["peak"] >= 0
        if r.wire not in ("none", "model"):  # DiLoCo's are 1/500 of a step's
            assert r.timing["split"]["wire_ms"] > 0
            assert r.timing["split"]["encode_ms"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--models", "vgg"], "--models knows no 'vgg'"),
        (["--nodes", "3"], "--nodes knows no '3'; there are: 2, 4, 8"),
        (["--links", ""], "--links is empty"),
        (["--methods", "zip"], "--methods knows no 'zip'"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--elements", "8"], "--elements must be at least 32"),
        (["--mbit", "0"], "--mbit must be positive"),
        (["--mbit", "nan"], "--mbit must be positive"),
        (["--mbit", "inf"], "--mbit must be positive"),
        (["--tables-only", "--results", "nowhere"], "no record of the benchmark"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(replay.main, ["suite=bench", *arguments], words, capsys)
