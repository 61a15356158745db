"""The paper's table: cells, text and check from made-up records, and a small replay on two emulated nodes."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest

from birder.predict.timeline import parse
from experiments import replay
from experiments.cells import engine, suite, timelines
from experiments.cells.suite import Measurement, Place, Suite, SuiteModel
from experiments.cells.timelines import nic_bytes
from experiments.records import record
from experiments.records.record import ResultRecord
from experiments.report import replay_page, replay_words, replayed, tables
from launch.emulated import launcher as emulated
from launch.emulated import sandbox
from tests.helpers.commands import refused
from tests.helpers.records import blank

PAPER, BENCH = suite.load("paper"), suite.load("bench")
AT = Place("resnet50_b32", "tf32", 8, "9.4")
MS = {"fp32": 100.0, "bf16": 60.0, "onebit_adam": 55.0, "birder": 50.0, "birder_hierarchical": 40.0, "none": 35.0}


def entry(cell: Measurement, ms: float, **changes: Any) -> ResultRecord:
    """A record of `cell` whose step takes `ms` on the cluster."""
    method, elements = PAPER.methods[cell.method], 798_657
    dilation = PAPER.dilation(cell, method.fraction, 28.0)
    link = {"kind": "emulated", "shaped": True, "measured": True, "mbit_per_s": 28.0, "set_mbit_per_s": 30.0}
    plan = {**cell._asdict(), "fraction": method.fraction, "elements": elements, "gpus": 8}
    wall = ms * dilation
    known: dict[str, Any] = {
        "config": {"paper": plan, "optimizer": method.optimizer},
        "exp": "paper",
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
    return blank(**{"id": PAPER.id(cell), **known, **changes})


def grid(
    model: str = "resnet50_b32", links: tuple[str, ...] = ("9.4",), nodes: tuple[int, ...] = (1, 2, 8)
) -> list[Any]:
    found = []
    for c in chosen(model, ["tf32"], links, nodes):
        found.append(entry(c, MS[c.method] if c.nodes > 1 else 34.0))
    return found


def chosen(model: str, rates: Any, links: Any, nodes: Any, methods: Any = tuple(MS)) -> list[Measurement]:
    """The rows' cells, without those of the check alone."""
    cells = PAPER.cells(PAPER.places([model], rates, links, nodes), methods)
    return [c for c in cells if c.method in methods]


def collect(records: list[ResultRecord]) -> replayed.Results:
    return replayed.collect(PAPER, records)


def save(folder: Path, records: list[ResultRecord]) -> Path:
    for r in records:
        record.write(r, folder)
    return folder


def test_every_place_of_the_table_is_measured_once() -> None:
    models = [name for name, model in PAPER.models.items() if model.default]
    assert models == ["resnet50_b32", "resnet50_b128", "bert_base_b12"]
    for nodes in (1, 2, 4, 8):
        places = PAPER.places(models, nodes=[nodes])
        cells = PAPER.cells(places, PAPER.rows)
        assert len({PAPER.id(c) for c in cells}) == len(cells) == (36 if nodes == 1 else 69)
        assert {PAPER.cell(p, w) for p in places for w in PAPER.rows} <= set(cells)
        # Those that share a model and a method follow each other: they are set up once.
        keys = [(PAPER.architecture(c.model), c.method) for c in cells]
        assert len(list(dict.fromkeys(keys))) == sum(a != b for a, b in zip(keys, [None, *keys], strict=False))
        assert PAPER.worlds(cells) == {(nodes > 1, nodes): cells}
    for p in PAPER.places():
        PAPER.timeline(p.model, p.rate)


def test_dilation_is_the_wished_rate_over_the_measured_one_for_the_share_that_is_sent() -> None:
    cell = PAPER.cell(AT, "fp32")
    assert PAPER.dilation(cell, PAPER.fraction(cell), 28.35) == pytest.approx(9400 / 28.35 / 48)
    slower = PAPER.cell(AT._replace(link="7.2"), "birder_hierarchical")
    assert PAPER.dilation(slower, PAPER.fraction(slower), 28.35) == pytest.approx(7200 / 28.35 / 8)


def test_times_are_divided_by_their_own_dilation_and_speedups_by_each_other() -> None:
    results = collect(grid())
    assert results.ms(AT, "fp32") == pytest.approx(100.0)
    assert results.ms(AT, "none") == pytest.approx(35.0)
    assert results.compared(AT, "birder_hierarchical").value == pytest.approx(2.5)
    assert results.compared(AT, "birder_hierarchical", "bf16").value == pytest.approx(1.5)
    assert results.ms(AT._replace(nodes=4), "fp32") is None
    assert results.settings() == [("resnet50_b32", "tf32", "9.4")]


def test_the_page_says_what_it_is_and_guesses_nothing(tmp_path: Path) -> None:
    save(tmp_path, [*grid(), entry(Measurement("resnet50_b32", "tf32", 2, "9.4", "fp32_serial"), 100.0)])
    for path in tables.save(replay_page.render(PAPER, tmp_path)):
        assert path.is_file()
    page = replay_page.paths(PAPER, tmp_path)[0].read_text()
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
    tables.save(replay_page.render(PAPER, tmp_path))
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


def test_other_tables_leave_these_records_and_this_page_alone(tmp_path: Path) -> None:
    save(tmp_path, grid())
    tables.save(replay_page.render(PAPER, tmp_path))
    assert tables.check(tmp_path) == []
    assert tables.write(tmp_path) == []
    assert replay_page.paths(PAPER, tmp_path)[0].is_file()
    assert replay_page.paths(PAPER, tmp_path)[1].is_file()


def test_a_newer_record_wins_and_failures_do_not_count() -> None:
    (cell,) = chosen("resnet50_b32", ["tf32"], ["9.4"], [8], ["fp32"])
    old, new = entry(cell, 100.0), entry(cell, 90.0, time="2026-01-02T00:00:00Z")
    broken = entry(cell, 1.0, time="2026-01-03T00:00:00Z", status="failed", reason="rank 1 died")
    results = collect([new, broken, old])
    assert results.ms(AT, "fp32") == pytest.approx(90.0)


def test_records_of_what_a_suite_has_no_more_are_left_out() -> None:
    smaller = PAPER.model_copy(update={"nodes": (1, 2), "links": {"9.4": PAPER.links["9.4"]}})
    every = grid(links=("9.4", "7.2"))
    kept = replayed.collect(smaller, every)
    assert kept == replayed.collect(smaller, grid(nodes=(1, 2)))
    assert len(collect(every).records) > len(kept.records) > 0
    assert "64 GPUs |" not in replay_page.markdown(kept)


def test_verdict_names_what_is_nearest_when_nothing_reproduces_it() -> None:
    (said,) = replay_words.reproduced(collect(grid("bert_base_b12")))
    assert (
        "reproduced within 15 % by no assumption; nearest is batch 12, TF32, 9.4 Gbit/s, against fp32 (2.50x)" in said
    )
    assert "6.3x" in said


def test_arithmetic_of_the_check_by_hand() -> None:
    t = timelines.load("resnet50_b32_tf32")
    wire = 2 * 7 / 8 * 4 * t.elements * 8 / 9.4e6
    delay = t.intra_node.all_reduce_ms * 25 * 2**20 / (4 * t.elements)
    assert replay_words.expected(t, 8, 9.4, overlap=False) == pytest.approx(t.step_ms + delay + wire)
    # The link decides: it works from the first bucket on, and the last one is late by no more than its own bytes.
    overlapped = replay_words.expected(t, 8, 9.4)
    assert t.forward_ms + wire < overlapped < t.forward_ms + wire + 0.5 * t.step_ms
    # On a fast link computing decides, and the last bucket's bytes.
    assert t.step_ms + delay < replay_words.expected(t, 8, 1000.0) < t.step_ms + delay + wire * 9.4 / 1000


def test_the_check_names_what_is_off() -> None:
    t = timelines.load("resnet50_b32_tf32")
    cells = [Measurement("resnet50_b32", "tf32", n, "9.4", "fp32") for n in (2, 8)]
    good, bad = (replay_words.expected(t, c.nodes, 9.4) for c in cells)
    half = Measurement("resnet50_b32", "tf32", 8, "9.4", "bf16")
    slow = entry(half, replay_words.expected(t, 8, 9.4, "bf16") * 0.92)
    slow = dataclasses.replace(slow, link={**slow.link, "off_by": 0.07})
    results = collect([entry(cells[0], good * 1.04), entry(cells[1], bad * 1.2), slow])
    said = replay_words.check_table(results).footnotes[0].text
    assert "1 of 3 step times of fp32 and bf16 DDP are within 5% of arithmetic" in said
    assert "the largest difference is 20.0% (resnet50_b32, TF32, 8 nodes, 9.4 Gbit/s, fp32, with overlap)" in said
    assert "8 nodes, 9.4 Gbit/s, bf16, with overlap (-8.0%); resnet50_b32, TF32, 8 nodes, 9.4 Gbit/s, fp32" in said
    assert "In 1 of these 2 rows the link had been measured 7.0% to 7.0% off what its set rate gives." in said


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
    refused(replay.main, ["suite=paper", *arguments], words, capsys)


@pytest.mark.parametrize("arguments", [["suite=paper"], ["suite=bench", "--kernels-only"]])
def test_a_folder_that_cannot_be_read_is_refused_before_anything_is_measured(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(emulated, "why_not", lambda: None)
    monkeypatch.setattr(replay, "launch", lambda *_: pytest.fail("measured"))
    (tmp_path / "records").mkdir()
    (tmp_path / "records/x.json").write_text('{"half')
    refused(replay.main, [*arguments, "--results", str(tmp_path)], "is not a readable record", capsys)
    (tmp_path / "file").touch()
    refused(replay.main, [*arguments, "--results", str(tmp_path / "file")], "set results_dir=FOLDER", capsys)


def test_a_rate_that_the_last_nodes_cannot_have_is_refused_before_the_first_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(emulated, "why_not", lambda: None)
    monkeypatch.setattr(replay, "cores", lambda: 2)
    monkeypatch.setattr(replay, "launch", lambda *_: pytest.fail("measured"))
    asked = ["suite=paper", "mbit=1200", f"results_dir={tmp_path}/r", f"output_dir={tmp_path}/o"]
    refused(replay.main, asked, "--mbit=1200 is more than this machine (2 cores) can carry for 8 nodes", capsys)
    assert list(tmp_path.iterdir()) == []


def test_without_a_sandbox_the_table_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(emulated, "why_not", lambda: "network namespaces need Linux")
    assert replay.main(["suite=paper", "--results", str(tmp_path / "r"), "--output", str(tmp_path / "o")]) == 2
    error = capsys.readouterr().err
    assert error == (
        "error: the table needs links of a set rate, and this machine has none to give: network namespaces need Linux\n"
    )
    assert list(tmp_path.iterdir()) == []


OF_BENCH = ("powersgd1", "birder_one_phase")
"""Methods of the benchmark that run with the paper's: a hook of torch's, whole tensors, an exchange in one phase."""


def tiny(folder: Path) -> Suite:
    """The suite with a made-up model of four tensors and nothing else, and some methods of the benchmark as well."""
    shapes = [[2**9, 2**9], [2**12], [2**9, 2**9], [2**10, 2**9]]
    gradients = [[f"p{i}", s, at] for i, (s, at) in enumerate(zip(shapes, (16.0, 16.0, 12.0, 8.0), strict=True))]
    inside = {"reduce_scatter_ms": 0.1, "all_reduce_ms": 0.2, "all_gather_ms": 0.01, "reason": "none"}
    content = {"name": "tiny_b4_tf32", "model": "tiny", "gpu": "-", "precision": "tf32", "batch_per_gpu": 4}
    content |= {"gpus_per_node": 8, "forward_ms": 4.0, "step_ms": 16.0, "gradients": gradients, "intra_node": inside}
    path = timelines.write(parse({**content, "source": "a test"}, "test"), folder / "tiny_b4_tf32.json")
    methods = PAPER.methods | {name: BENCH.methods[name] for name in OF_BENCH}
    return PAPER.model_copy(
        update={"models": {"tiny_b4": SuiteModel(title="tiny", timeline=str(path))}, "methods": methods}
    )


@pytest.mark.slow
@pytest.mark.xdist_group("sandbox")
@pytest.mark.skipif(sandbox.probe()[0] is None, reason=f"no emulated network here: {sandbox.probe()[1]}")
@pytest.mark.long
def test_two_emulated_nodes_send_what_sixteen_gpus_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All methods, two steps each. Times have lower bounds only: the machine may be busy."""
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    made = tiny(tmp_path)
    _, options = replay.parse(["suite=paper", f"results={tmp_path}/r", f"output={tmp_path}/o", "steps=2"])
    cells = made.cells(made.places(rates=["tf32"], links=["9.4"], nodes=[2]), made.rows)
    replay.launch(made, options, True, 2, cells, "a test")
    found = {r.config["paper"]["method"]: r for r in record.read_all(tmp_path / "r")}
    assert set(found) == set(made.methods)
    t = timelines.load(tmp_path / "tiny_b4_tf32.json")
    for name, r in found.items():
        method = made.methods[name]
        assert r.status == "completed"
        assert (r.exp, r.group, r.nodes, r.method) == ("paper", None, 2, method.label)
        assert r.link["kind"] == "emulated"
        assert r.link["shaped"]
        assert r.link["measured"]
        assert r.link["set_mbit_per_s"] == PAPER.mbit
        assert len(r.timing["steps_ms"]) == 2
        assert r.turns["world"] == found["fp32"].turns["world"]
        assert (r.turns["ms"], r.turns["steps"], r.turns["held"]) == (
            pytest.approx(r.timing["steps_ms"], abs=1e-3),
            [1, 1],
            "all",
        )
        assert r.turns["busy"]["cores"] > 0
        assert r.link["dilation"] == pytest.approx(
            9400 * r.config["paper"]["fraction"] / engine.carried(r.link, PAPER.mbit), rel=1e-4
        )
        assert r.timing["min_ms"] == min(r.timing["steps_ms"]) <= max(r.timing["steps_ms"]) == r.timing["max_ms"]
        assert r.timing["median_ms"] >= 0.99 * r.link["dilation"] * t.step_ms
        assert r.config["paper"]["elements"] < t.elements
        if name in OF_BENCH:  # their bytes: tests/distributed/test_bench.py
            assert r.bytes_per_step["nic_tx"] > r.bytes_per_step["payload_inter"] > 0
            continue
        expected = nic_bytes(method.traffic, r.config["paper"]["elements"], 2, 8)
        sent = r.bytes_per_step["payload_inter"]
        assert sent == pytest.approx(expected, rel=0.1)
        if expected:
            # Headers and the exchange between cells besides the payload, which is small here.
            assert expected <= 1.02 * r.bytes_per_step["nic_tx"] < 1.3 * expected + 20_000
    slowest = found["fp32_serial"]
    wire = slowest.bytes_per_step["payload_inter"] * 8 / (slowest.link["mbit_per_s"] * 1e3)
    assert slowest.timing["median_ms"] >= 0.8 * (slowest.link["dilation"] * t.step_ms + wire)
