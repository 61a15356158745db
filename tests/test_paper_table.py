"""The paper's table: cells, text and check from made-up records, and a small replay on two emulated nodes."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest

from experiments import paper_table
from experiments.cells import paper, timelines
from experiments.cells.paper import Cell
from experiments.cells.replay import nic_bytes
from experiments.records import record
from experiments.records.record import ResultRecord
from experiments.report import paper_check, paper_report, tables
from launch.emulated import launcher as emulated
from launch.emulated import sandbox
from tests.records import blank

MS = {"fp32": 100.0, "bf16": 60.0, "onebit_adam": 55.0, "birder": 50.0, "birder_hierarchical": 40.0, "none": 35.0}


def entry(cell: Cell, ms: float, **changes: Any) -> ResultRecord:
    """A record of `cell` whose step takes `ms` on the cluster."""
    method, elements = paper.METHODS[cell.method], 798_657
    dilation = paper.dilation(cell, 28.0)
    link = {"kind": "emulated", "shaped": True, "measured": True, "mbit_per_s": 28.0, "set_mbit_per_s": 30.0}
    plan = {**dataclasses.asdict(cell), "fraction": method.fraction, "elements": elements, "gpus": 8}
    wall = ms * dilation
    known: dict[str, Any] = {
        "config": {"paper": plan, "optimizer": method.optimizer},
        "exp": paper.EXP,
        "method": method.label,
        "wire": method.wire,
        "cluster": "emulated",
        "nodes": cell.nodes,
        "link": {**record.LINK, **link, "link_gbps": float(cell.link or 0) or None, "dilation": dilation},
        "timing": {
            "steps": 2,
            "median_ms": wall,
            "p10_ms": wall,
            "p90_ms": wall,
            "split": {"encode_ms": 0.02 * wall, "update_ms": 0.01 * wall},
        },
        "bytes_per_step": {**record.BYTES, "nic_tx": nic_bytes(method.traffic, elements, cell.nodes, 8)},
    }
    return blank(**{"id": cell.id, **known, **changes})


def grid(
    model: str = "resnet50_b32", links: tuple[str, ...] = ("9.4",), nodes: tuple[int, ...] = (1, 2, 8)
) -> list[Any]:
    found = []
    for n in nodes:
        for c in paper.cells(n, [model], ["tf32"], links, paper.ROWS):
            found.append(entry(c, MS[c.method] if n > 1 else 34.0))
    return found


def save(folder: Path, records: list[ResultRecord]) -> Path:
    for r in records:
        record.write(r, folder)
    return folder


def test_every_place_of_the_table_is_measured_once() -> None:
    everything = (list(paper.DEFAULT_MODELS), list(paper.RATES), list(paper.LINKS), [*paper.ROWS, "fp32_serial"])
    for nodes in paper.NODES:
        cells = paper.cells(nodes, *everything)
        assert len({c.id for c in cells}) == len(cells) == (36 if nodes == 1 else 69)
        places = {paper.cell(m, r, nodes, at, w) for m in everything[0] for r in everything[1] for at in everything[2]
                  for w in paper.ROWS}  # fmt: skip
        assert places <= set(cells)
        # Those that share a model and a method follow each other: they are set up once.
        keys = [(paper.architecture_of(c.model), c.method) for c in cells]
        assert len(list(dict.fromkeys(keys))) == sum(a != b for a, b in zip(keys, [None, *keys], strict=False))
    for c in paper.cells(8, *everything):
        timelines.load(c.timeline)


def test_dilation_is_the_wished_rate_over_the_measured_one_for_the_share_that_is_sent() -> None:
    cell = paper.cell("resnet50_b32", "tf32", 8, "9.4", "fp32")
    assert paper.dilation(cell, 28.35) == pytest.approx(9400 / 28.35 / 48)
    slower = paper.cell("resnet50_b32", "tf32", 8, "7.2", "birder_hierarchical")
    assert paper.dilation(slower, 28.35) == pytest.approx(7200 / 28.35 / 8)


def test_times_are_divided_by_their_own_dilation_and_speedups_by_each_other() -> None:
    results = paper_report.collect(grid())
    at = ("resnet50_b32", "tf32", 8, "9.4")
    assert results.ms(*at, "fp32") == pytest.approx(100.0)
    assert results.ms(*at, "none") == pytest.approx(35.0)
    assert results.speedup(*at, "birder_hierarchical") == pytest.approx(2.5)
    assert results.speedup(*at, "birder_hierarchical", "bf16") == pytest.approx(1.5)
    assert results.ms("resnet50_b32", "tf32", 4, "9.4", "fp32") is None
    assert results.settings() == [("resnet50_b32", "tf32", "9.4")]


def test_the_page_says_what_it_is_and_guesses_nothing(tmp_path: Path) -> None:
    save(tmp_path, [*grid(), entry(Cell("resnet50_b32", "tf32", 2, "9.4", "fp32_serial"), 100.0)])
    for path in paper_report.write(tmp_path):
        assert path.is_file()
    page = (tmp_path / paper_report.TABLE).read_text()
    first = page[: page.index("## In short")]
    for word in ("Replayed and emulated, not measured on GPUs", "30.0 Mbit/s", "times slower", "1/48, 1/32, 1/16, 1/8"):
        assert word in first
    row = next(line for line in page.splitlines() if line.startswith("| Birder, hierarchical | 34.0"))
    cells = [c.strip() for c in row.strip("|").split("|")]
    assert cells == ["Birder, hierarchical", "34.0", "40.0", "—", "40.0", "2.50x", "—", "2.50x", "1.50x", "—", "1.50x"]
    assert "reproduced within 15 % by batch 32, TF32, 9.4 Gbit/s, against fp32 (2.50x)." in page
    assert "Less: batch 32, TF32, 9.4 Gbit/s, against bf16 (1.50x)." in page
    assert "938 images/s in TF32" in page
    assert "bert" not in page.lower().replace("bert_squad", "")
    assert page.count("7.2 Gbit/s") == 0
    for link in re.findall(r"\.\./records/([^)]+)\.json", page):
        assert (tmp_path / "records" / f"{link}.json").is_file()
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    paper_report.write(tmp_path)
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


def test_other_tables_leave_these_records_and_this_page_alone(tmp_path: Path) -> None:
    save(tmp_path, grid())
    paper_report.write(tmp_path)
    assert tables.check(tmp_path) == []
    assert tables.write(tmp_path) == []
    assert (tmp_path / paper_report.TABLE).is_file()
    assert (tmp_path / paper_report.PLOT).is_file()


def test_a_newer_record_wins_and_failures_do_not_count() -> None:
    (cell,) = (c for c in paper.cells(8, ["resnet50_b32"], ["tf32"], ["9.4"], ["fp32"]))
    old, new = entry(cell, 100.0), entry(cell, 90.0, time="2026-01-02T00:00:00Z")
    broken = entry(cell, 1.0, time="2026-01-03T00:00:00Z", status="failed", reason="rank 1 died")
    results = paper_report.collect([new, broken, old])
    assert results.ms("resnet50_b32", "tf32", 8, "9.4", "fp32") == pytest.approx(90.0)


def test_verdict_names_what_is_nearest_when_nothing_reproduces_it() -> None:
    (said,) = paper_report.verdicts(paper_report.collect(grid("bert_base_b12")))
    assert (
        "reproduced within 15 % by no assumption; nearest is batch 12, TF32, 9.4 Gbit/s, against fp32 (2.50x)" in said
    )
    assert "6.3x" in said


def test_arithmetic_of_the_check_by_hand() -> None:
    t = timelines.load("resnet50_b32_tf32")
    wire = 2 * 7 / 8 * 4 * t.elements * 8 / 9.4e6
    delay = t.intra_node.all_reduce_ms * 25 * 2**20 / (4 * t.elements)
    assert paper_check.without_overlap(t, 8, 9.4) == pytest.approx(t.step_ms + delay + wire)
    # The link decides: it works from the first bucket on, and the last one is late by no more than its own bytes.
    overlapped = paper_check.with_overlap(t, 8, 9.4)
    assert t.forward_ms + wire < overlapped < t.forward_ms + wire + 0.5 * t.step_ms
    # On a fast link computing decides, and the last bucket's bytes.
    assert t.step_ms + delay < paper_check.with_overlap(t, 8, 1000.0) < t.step_ms + delay + wire * 9.4 / 1000


def test_the_check_names_what_is_off() -> None:
    t = timelines.load("resnet50_b32_tf32")
    cells = [Cell("resnet50_b32", "tf32", n, "9.4", "fp32") for n in (2, 8)]
    good, bad = (paper_check.with_overlap(t, c.nodes, 9.4) for c in cells)
    results = paper_report.collect([entry(cells[0], good * 1.04), entry(cells[1], bad * 1.2)])
    said = paper_check.sentence(results)
    assert "1 of 2 step times of fp32 DDP are within 10% of arithmetic" in said
    assert "Not within: resnet50_b32, TF32, 8 nodes, 9.4 Gbit/s, with overlap." in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--models", "vgg"], "--models knows no 'vgg'"),
        (["--nodes", "3"], "--nodes knows no '3'; there are: 1, 2, 4, 8"),
        (["--methods", ""], "--methods is empty"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--tables-only", "--results", "nowhere"], "no record of the paper's table"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert paper_table.main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_without_a_sandbox_the_table_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(emulated, "why_not", lambda: "network namespaces need Linux")
    assert paper_table.main(["--results", str(tmp_path / "r"), "--output", str(tmp_path / "o")]) == 2
    error = capsys.readouterr().err
    assert error == (
        "error: the table needs links of a set rate, and this machine has none to give: network namespaces need Linux\n"
    )
    assert list(tmp_path.iterdir()) == []


def tiny(folder: Path) -> str:
    """A made-up model of four tensors; the name of its timeline without the rate."""
    sizes = [2**18, 2**12, 2**18, 2**19]
    gradients = [[f"p{i}", [s], at] for i, (s, at) in enumerate(zip(sizes, (16.0, 16.0, 12.0, 8.0), strict=True))]
    inside = {"reduce_scatter_ms": 0.1, "all_reduce_ms": 0.2, "all_gather_ms": 0.01, "reason": "none"}
    content = {"name": "tiny_b4_tf32", "model": "tiny", "gpu": "-", "precision": "tf32", "batch_per_gpu": 4}
    content |= {"gpus_per_node": 8, "forward_ms": 4.0, "step_ms": 16.0, "gradients": gradients, "intra_node": inside}
    timelines.write(timelines.parse({**content, "source": "a test"}, "test"), folder / "tiny_b4_tf32.json")
    return str(folder / "tiny_b4")


@pytest.mark.skipif(sandbox.probe()[0] is None, reason=f"no emulated network here: {sandbox.probe()[1]}")
def test_two_emulated_nodes_send_what_sixteen_gpus_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All methods, once each. Times have lower bounds only: the machine may be busy."""
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    model = tiny(tmp_path)
    options = paper_table.parse(["--results", str(tmp_path / "r"), "--output", str(tmp_path / "o"), "--steps", "1"])
    cells = paper.cells(2, [model], ["tf32"], ["9.4"], [*paper.ROWS, "fp32_serial"])
    paper_table.make_launcher(2, options.mbit).launch(paper_table.make_spec(options, 2, cells, "a test"))
    found = {r.config["paper"]["method"]: r for r in record.read_all(tmp_path / "r")}
    assert set(found) == set(paper.METHODS)
    t = timelines.load(f"{model}_tf32")
    for name, r in found.items():
        method = paper.METHODS[name]
        assert r.status == "completed"
        assert (r.exp, r.group, r.nodes, r.method) == (paper.EXP, None, 2, method.label)
        assert r.link["kind"] == "emulated"
        assert r.link["shaped"]
        assert r.link["measured"]
        assert r.link["set_mbit_per_s"] == paper.MBIT
        assert r.timing["median_ms"] >= 0.99 * r.link["dilation"] * t.step_ms
        expected = nic_bytes(method.traffic, r.config["paper"]["elements"], 2, 8)
        sent = r.bytes_per_step["payload_inter"]
        assert sent == pytest.approx(expected, rel=0.1)
        if expected:
            # Headers and the exchange between cells beside the payload, which is small here.
            assert expected <= 1.02 * r.bytes_per_step["nic_tx"] < 1.3 * expected + 20_000
    slowest = found["fp32_serial"]
    wire = slowest.bytes_per_step["payload_inter"] * 8 / (slowest.link["mbit_per_s"] * 1e3)
    assert slowest.timing["median_ms"] >= 0.8 * (slowest.link["dilation"] * t.step_ms + wire)
