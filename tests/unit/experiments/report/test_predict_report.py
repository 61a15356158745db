"""What is said of predictions: those that are recorded, next to the records; published times; the command line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from birder.predict import DEFAULT, METHODS, NVLINK, Cluster, Link, gpus, predict
from birder.predict.costs import LAUNCH_US
from birder.predict.table import MODEL_ERROR
from experiments import predict as entry
from experiments.cells import claimed, suite, timelines
from experiments.records.record import PUBLISHED, ROOT, ResultRecord, read_all
from experiments.report import accuracy_page, answered, prediction, prediction_plots, replay_page, replayed
from experiments.report.formats import number
from launch.errors import UserError
from studies import predicted as study
from studies import validate
from tests.helpers.commands import refused

RESULTS = PUBLISHED
TARGETS = {"median": 0.03, "p95": 0.08, "worst": 0.15}


@pytest.fixture(scope="module")
def records() -> list[ResultRecord]:
    return read_all(RESULTS)


@pytest.fixture(scope="module")
def cells(records: list[ResultRecord]) -> pd.DataFrame:
    return prediction.load(RESULTS, records)


def test_predictions_are_of_the_published_cells_as_they_are(cells: pd.DataFrame, records: list[ResultRecord]) -> None:
    """Every prediction is held against what its record says; a cell that was measured again since has none."""
    ran = {r.id: r for r in records if r.exp in ("paper", "bench") and "kernels" not in r.config[r.exp]}
    for name, cell in cells.iterrows():
        r = ran[str(name)]
        t, dilation = r.timing, float(r.link["dilation"])
        assert cell.measured_ms == pytest.approx(t["median_ms"] / dilation)
        assert cell.low_ms == pytest.approx(t.get("min_ms", t.get("p10_ms")) / dilation)
        assert cell.high_ms == pytest.approx(t.get("max_ms", t.get("p90_ms")) / dilation)
    again = [replace(r, time="2030-01-01T00:00:00Z") if r.id == cells.index[0] else r for r in records]
    assert len(prediction.load(RESULTS, again)) == len(cells) - 1


def test_the_evaluation_is_what_the_docs_say(cells: pd.DataFrame) -> None:
    """Bounds: what docs/predict.md states, rounded up. The targets were 3 %, 8 % and 15 %: the worst cell misses its own."""
    emulated = cells[cells.link == "emulated"]
    median, p95, worst = prediction.quantiles(list(emulated.error))
    assert len(emulated) <= 303
    assert median < 0.015 < TARGETS["median"]
    assert p95 < TARGETS["p95"]
    assert worst < 0.5
    sending = emulated[emulated.sends == 1]
    assert prediction.quantiles(list(sending[sending.steady].error))[2] < TARGETS["worst"]
    # The interval of every prediction rests on this number.
    assert prediction.quantiles(list(sending.error))[1] < MODEL_ERROR + 0.005
    assert prediction.quantiles(list(cells.error))[0] < TARGETS["median"]


def test_the_page_is_what_the_records_make() -> None:
    assert study.page(RESULTS) == (RESULTS / "tables" / "predict.md").read_text(encoding="utf-8")


def test_a_folder_without_predictions_has_none(tmp_path: Path, records: list[ResultRecord]) -> None:
    assert prediction.load(tmp_path, records).empty
    with pytest.raises(UserError, match="holds no prediction"):
        study.page(tmp_path)


def test_published_all_reduces_come_out_where_the_assumptions_hold() -> None:
    found = {b.what: b for b in study.profiles()}
    assert len(found) == len(claimed.PROFILES)
    # InfiniBand, 8 nodes: ring and all-reduce by nodes lie on either side of, or within 5 % of, what was measured.
    for batch in (1, 16, 64):
        b = found[f"InfiniBand, 8 x 8, batch {batch}"]
        assert b.by_nodes is not None
        assert b.by_nodes < b.published * 1.05
        assert b.predicted == pytest.approx(b.published, rel=0.05)
    # Two nodes of eight: half as much as a ring, which is why the ring is 72 % off there.
    two = found["InfiniBand, 2 x 8, batch 16"]
    assert two.by_nodes == pytest.approx(two.published, rel=0.1)
    assert claimed.bert_large(1, 1, 1, 1).elements == pytest.approx(336.2e6, rel=1e-3)


def test_the_papers_speedups_need_a_slow_link_or_fast_computing() -> None:
    compute, rates, found = study.claims("bert_base_b12_tf32", "birder_hierarchical", grid=4)
    assert found.shape == (len(rates), len(compute))
    assert np.all(np.diff(found[:, 0]) <= 1e-6)  # a faster link, a smaller speedup
    assert np.all(np.diff(found[0]) <= 1e-6)  # more computing, a smaller speedup
    assert found.max() > 6.3 > found.min()


# ---- the command line ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["timeline=resnet50_b32_tf32", "cluster.nodes=8"], "x as fast as bf16"),
        (["timeline=resnet50_b32_tf32", "cluster.gbps=3200"], "x 8 ranks, 3200 Gbit/s"),
        (["timeline=resnet50_b32_tf32", "cluster.nodes=1", "cluster.inside_gb_per_s=1800"], "x 8 ranks, 1800 GB/s"),
        (["timeline=resnet50_b32_tf32", "cluster=infiniband_100g", "cluster.nodes=2"], "2 x 8 ranks, 100 Gbit/s"),
        (["model=bert_base", "batch=12", "gpu=A100", "cluster.gbps=800", "cluster.latency_us=2"], "do not compress"),
        (["timeline=resnet50_b32_tf32", "methods=fp32,birder", "--crossover"], "below"),
        (["timeline=resnet50_b32_tf32", "gpu_rate=2", "gpu=h100"], "h100: 70 %"),
        (["model=tests.helpers.toy_module:make", "batch=4", "steps=2", "methods=fp32,bf16,none"], "on cpu"),
        (["timeline=resnet50_b32_tf32", "cluster.gbps=1", "methods=none"], "Not decided: none of the methods that are"),
    ],
)
def test_questions_are_answered(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(arguments) == 0
    out = capsys.readouterr().out
    assert words.lower() in out.lower()
    assert max(map(len, out.splitlines())) <= 80


def test_keys_that_were_not_given_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The tokens of a sample were not, nor the links inside a node."""
    asked = ["model=params:1M layers=2 width=64 vocab=999", "batch=2", "gpu=l4"]
    assert entry.main([*asked, "--json"]) == 0
    model = ["seq=1024", "precision=bf16", "compiled=false", "checkpointing=false", "optimizer=adamw", "accumulation=1"]
    cluster = ["nodes=8", "ranks_per_node=8", "gbps=10.0", "latency_us=20.0", "nics=1", "inside_gb_per_s=24.5"]
    assert json.loads(capsys.readouterr().out)["not_said"] == [*model, *(f"cluster.{each}" for each in cluster)]
    said = "Not said, so taken as: "
    assert entry.main([*asked, "seq=512", "checkpointing=true", "accumulation=2", "cluster=ethernet_1g"]) == 0
    assert f"\n{said}precision=bf16, compiled=false, optimizer=adamw.\n" in capsys.readouterr().out
    assert entry.main(["timeline=resnet50_b32_tf32", "methods=birder", "--crossover"]) == 0
    rates = "accumulation=1, cluster.nodes=8, cluster.ranks_per_node=8, cluster.latency_us=20.0, cluster.nics=1"
    assert f" Gbit/s {said}{rates}, cluster.inside_gb_per_s=230." in " ".join(capsys.readouterr().out.split())


def test_crossovers_say_what_does_not_fit_as_the_main_answer_does(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["model=params:3B layers=32 width=2560 vocab=50k", "gpu=h100", "batch=1", "seq=1024"]
    asked += ["methods=bf16,birder,sigma_delta,zero_one_adam"]
    assert entry.main([*asked, "--json"]) == 0
    needed = {row["method"]: row["memory_gb"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert needed["birder"] < 80 < needed["sigma_delta"] < needed["zero_one_adam"]
    assert entry.main([*asked, "--crossover"]) == 0
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert "fit" not in said["birder"]
    for name in ("sigma_delta", "zero_one_adam"):
        assert said[name].endswith(f"does not fit: {needed[name]:.3g} of 80 GB")
    large = ["model=params:80B layers=80 width=8192 vocab=50k", *asked[1:4]]
    for more in (["--crossover"], []):
        assert entry.main([*large, "methods=birder", *more]) == 0
        out = capsys.readouterr().out
        assert re.search(r"does not fit: 1\d{3}( GB)? of 80 GB", out), out


@pytest.mark.parametrize("more", [["gpu=a10"], ["compiled=true"], ["gpu=a100-40gb"], ["batch=33"]])
def test_a_recorded_timeline_answers_for_nothing_else(more: list[str]) -> None:
    asked = ["model=resnet50", "batch=32", "precision=tf32"]
    assert entry.model_of(entry.ask([*asked, "gpu=a100"])).gpu is None  # recorded
    found = entry.model_of(entry.ask([*asked, *more])).gpu
    assert found is not None
    assert found.name == {"gpu=a10": "a10", "gpu=a100-40gb": "a100-sxm-40gb"}.get(more[0], "a100-sxm-80gb")


def test_a_sweeps_rates_are_those_of_cluster_gbps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["timeline=bert_base_b12_tf32", "methods=bf16,none", "cluster.nics=4", "cluster.oversubscription=2"]
    assert entry.main([*asked, "--sweep", "gbps", "--out", str(tmp_path / "x.png")]) == 0
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("│ 25 "))
    assert entry.main([*asked, "--json", "cluster.gbps=25"]) == 0  # keys and options in any order
    ms = {row["method"]: row["ms"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert [cell.strip() for cell in line.split("│")[2:4]] == [number(ms[name]) for name in ("bf16", "none")]


@pytest.mark.parametrize("sharding", ["ddp", "hsdp"])
def test_a_sweep_says_what_does_not_fit_and_advises_none_of_it(
    sharding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model of which a GPU holds no whole copy, and that sharded over eight of them fits."""
    asked = ["model=hf:llama-3.1-8b", "gpu=h100", "batch=1", "seq=4096", "cluster.nodes=4", f"sharding={sharding}"]
    assert entry.main([*asked, "--sweep", "gbps", "--out", str(tmp_path / "x.png")]) == 0
    out = capsys.readouterr().out
    said, heading = out.split("┏")[0], out.split("┏")[1].split("┡")[0]
    assert "ms" in said
    assert ("nothing is decided" in said) == (sharding == "ddp")
    assert ("more than the 80 GB" in out) == (sharding == "ddp")
    assert heading.count("!") == (len(entry.SHOWN) if sharding == "ddp" else 0)


def test_gpu_rate_scales_what_is_counted_and_keeps_the_gpu_that_was_recorded() -> None:
    toy = ["model=tests.helpers.toy_module:make", "batch=4"]
    one, two = (entry.model_of(entry.ask([*toy, f"gpu_rate={rate}"])).timeline for rate in (1, 2))
    assert one.source == two.source == "the architecture"
    assert (one.gpu, two.gpu) == ("a100-sxm-80gb", "a100-sxm-80gb")
    there = ["timeline=bert_base_b32_tf32_h100", "gpu_rate=2"]
    recorded = timelines.load("bert_base_b32_tf32_h100")
    same, other = (entry.model_of(entry.ask([*there, *more])).timeline for more in ([], ["gpu=l40s"]))
    assert (same.gpu, other.gpu) == (recorded.gpu, "l40s")
    assert same.step_ms == other.step_ms == recorded.step_ms / 2


def test_gpu_rate_is_of_every_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the user's own update, and not of a method's: on a slow GPU compressing seemed to save what its update takes."""
    asked = ["model=tests.helpers.toy_module:make", "batch=4", "cluster.nodes=1", "cluster.ranks_per_node=1"]
    assert entry.main([*asked, "methods=birder", "gpu_rate=0.001", "--json"]) == 0
    held = json.loads(capsys.readouterr().out)
    (birder,) = (row["ms"] for row in held["rows"] if row["method"] == "birder")
    assert birder - held["model"]["compute_ms"] > LAUNCH_US  # a thousand times as long, in ms


def test_a_recorded_timeline_has_the_link_of_its_gpu_inside_a_node() -> None:
    q = entry.ask([])
    recorded = timelines.load("bert_base_b32_tf32_h100").gpu
    assert entry.cluster_of(q, recorded).inside == gpus.find("h100").link
    assert entry.cluster_of(q, "l40s").inside == gpus.find("l40s").link
    assert entry.cluster_of(q, "cpu").inside == NVLINK


def test_a_sweep_over_nodes_begins_where_there_are_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["timeline=resnet50_b32_tf32", "sharding=hsdp", "cluster.nodes=1"]
    assert entry.main([*asked, "--sweep", "nodes", "--out", str(tmp_path / "x.png")]) == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("│")]
    assert [x.split()[1] for x in lines] == [f"{n:g}" for n in entry.SWEEPS["nodes"][1:]]


def test_accuracy_is_read_from_the_table_that_the_records_give() -> None:
    """An answer need not read all records: their verdicts are written with the tables."""
    assert answered.known_verdicts(PUBLISHED) == answered.verdicts(read_all(PUBLISHED))
    assert answered.price(
        "Birder, hierarchical", [[["Birder", "parity"]], [["Birder", "worse"]], [["SLAMB", "worse"]]]
    ) == ("accuracy at parity or better in 1 of 2 studies, worse in 1")


def test_an_accuracy_is_that_of_the_very_method() -> None:
    """Not that of the same method with further options; nodes as workers, and who has made it, do not count."""
    studies = [
        [["Birder", "worse"], ["Birder one-phase, weyl bits (this project's)", "parity"]],
        [["Birder", "parity"], ["Birder one-phase (this project's)", "worse"], ["Sigma-delta Adam, local", "better"]],
    ]
    assert answered.lost(studies) == {
        **dict.fromkeys(("birder", "birder_hierarchical"), 0.0),
        **dict.fromkeys(("birder_one_phase", "birder_one_phase_hierarchical"), 1.0),
        **dict.fromkeys(("sigma_delta_local", "sigma_delta_local_hierarchical"), -1.0),
    }
    assert answered.price("Sigma-delta Adam, one-phase", studies) == "no study of its accuracy is published here"


def test_every_published_verdict_on_a_method_counts_once(records: list[ResultRecord]) -> None:
    """Of each table of accuracies, not of one table for each experiment."""
    every = [t for tables in accuracy_page.studies(records).values() for t in tables]
    for label in ("Birder", "Sigma-delta Adam", "1-bit Adam"):
        verdicts = [
            t.verdict(c)
            for t in {t.slug: t for t in every}.values()
            for c in t.one_of_each
            if c.records[0].method == label and (gap := t.compared(c)) is not None and gap.low is not None
        ]
        counted = [v for study in answered.known_verdicts(RESULTS) for name, v in study if name == label]
        assert sorted(counted) == sorted(verdicts)
        assert f" {len(verdicts)} studies" in answered.price(label, answered.known_verdicts(RESULTS))


def test_what_a_method_costs_leaves_out_what_is_not_there() -> None:
    one = [[["Birder", "not decided"]]]
    assert answered.price("Birder", one) == "accuracy not decided in the one study"
    lost = [*one, [["Birder hierarchical", "worse"]]]
    assert answered.price("Birder", lost) == answered.price("Birder", one)
    assert answered.price("Birder, hierarchical", lost) == "accuracy of 2 studies: worse in 1, not decided in 1"


def test_where_no_study_shows_parity_that_is_said_with_the_method_that_did_best() -> None:
    names = ("birder", "lion", "onebit_adam", "sigma_delta")
    rows = [SimpleNamespace(name=n, method=METHODS[n], ms=float(i)) for i, n in enumerate(names)]
    found: Any = SimpleNamespace(
        best=rows[0], paying=rows, saving=lambda name: (0.25 if name == "sigma_delta" else 0.5,)
    )
    lost = [[["Birder", "worse"], ["1-bit Adam", "not decided"]]]
    assert answered.warning(found, lost) == "Faster, but no published study shows parity."
    kept = [*lost, [["Sigma-delta Adam", "parity"]]]
    assert answered.warning(found, kept) == (
        "Faster, but no published study shows parity. Sigma-delta Adam (this project's; moments in 111 of 100,000 steps) "
        "saves 25 %; accuracy at parity or better in the one study."
    )
    faster = [*kept, [["1-bit Adam", "better"]]]  # of two studies
    assert answered.warning(found, faster) == answered.warning(found, kept)
    as_good = [["Birder", "worse"]], [["Sigma-delta Adam", "parity"], ["1-bit Adam", "better"]]
    assert " 1-bit Adam (compression stage) saves 50 %; " in answered.warning(found, as_good)
    assert answered.warning(found, [*lost, [["Birder", "better"]]]) == ""
    assert answered.warning(SimpleNamespace(best=rows[1], paying=rows), lost) == ""  # type: ignore[arg-type]


@pytest.mark.parametrize("how", [["--all"], ["--sweep", "nodes"]])
@pytest.mark.parametrize("columns", [60, 80, 110])
def test_tables_fit_the_terminal(
    how: list[str], columns: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    more = ["--out", str(tmp_path / "x.png")] if "nodes" in how else []
    assert entry.main(["timeline=resnet50_b32_tf32", *how, *more]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("plot ")]
    assert max(map(len, lines)) <= max(columns, answered.WIDTH)
    assert max(len(line) for line in lines if line[:1] in "┃│") <= columns
    assert not any(
        line.startswith(("not decided", "do not compress")) or " as fast as bf16 (" in line for line in lines
    )


@pytest.mark.slow
def test_worked_examples_are_answered_so_today(tmp_path: Path) -> None:
    assert entry.examples(tmp_path / "page.md").read_text() == entry.EXAMPLES.read_text()


def test_a_sweep_says_of_one_node_what_the_main_answer_says() -> None:
    """Over PCIe compressing pays on one node too; where FSDP leaves nothing to compress, nothing is left to be decided."""
    t, names = timelines.load("resnet50_b32_tf32"), ["fp32", "bf16", "birder", "none"]

    def point(of: list[str], inside: Link) -> str:
        found = [predict(t, Cluster.of_gpus(n, 8, Link(10.0, 20.0), inside), of) for n in (1, 8)]
        return prediction_plots.point(found, "nodes", lambda p, name: True)

    assert point(names, Link(20.0)).startswith("On one node Birder is predicted to be ")
    assert point(names, NVLINK).startswith("On one node compression gains nothing; on 8 nodes Birder is ")
    assert point(["fp32", "bf16", "none"], NVLINK).count("nothing is compared that compresses") == 1


def test_a_sweep_over_nodes_of_one_gpu_has_no_hierarchical_methods(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the main answer; a sweep advised one."""
    asked = ["timeline=resnet50_b32_tf32", "cluster.ranks_per_node=1"]
    assert entry.main([*asked, "--sweep", "gbps", "--out", str(tmp_path / "x.png")]) == 0
    assert "hierarchical" not in capsys.readouterr().out


@pytest.mark.parametrize("over", ["gbps", "nodes"])
def test_a_sweep_is_a_table_and_a_plot(over: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sweep.png"
    assert entry.main(["timeline=resnet50_b32_tf32", "--sweep", over, "--out", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [x.split()[1] for x in lines if x.startswith("│")] == [f"{value:g}" for value in entry.SWEEPS[over]]
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "say timeline=NAME or model=NAME"),
        (["timelin=x"], "no key 'timelin' in the configuration; did you mean timeline?"),
        (["cluster.gpbs=3"], "did you mean cluster.gbps?"),
        (["cluster=moon"], "no cluster 'moon'; there are: ethernet_1g, ethernet_25g, infiniband_100g, paper, wan"),
        (["timeline=resnet50_b32_tf32", "gpu_rate=0"], "gpu_rate must be a number above 0, not 0"),
        (["timeline=resnet50_b32_tf32", "cluster.gbps=fast"], "cluster.gbps must be a number above 0, not 'fast'"),
        (["timeline"], "cannot read the override"),
        (["timeline=nothing"], "no timeline nothing"),
        (["model=resnet51"], "did you mean resnet50"),
        (["model=hf:gpt-2-medium"], "Did you mean gpt2-medium"),
        (["model=hf:"], "no model hf:. Models are not downloaded. There are: gpt2"),
        (["model=torchvision:resnet51"], "did you mean resnet50"),
        (["model=hf:gpt2", "gpu=h1000"], "no GPU 'h1000' is known; did you mean h100"),
        (["model=hf:gpt2", "gpu=v100", "precision=bf16"], "V100 SXM 32 GB does not compute in bf16"),
        (["model=hf:gpt2", "seq=4096"], "takes 1024 tokens at most, not seq=4096"),
        (["model=resnet50", "batch=0"], "batch must be a whole number, 1 or more, not 0"),
        (["model=params:1x"], "params: must be a number such as 50k or 1.3B, not '1x'"),
        (["model=params:1B width=64"], "layers of width 64: give a larger width, or layers"),
        (["model=params:1M layers=9 width=999"], "too few parameters for 9 layers of width 999"),
        (["model=torchvision:resnet18", "checkpointing=true"], "checkpointing=true is for hf: and params:"),
        (["model=resnet50", "methods=birder", "sharding=hsdp"], "birder needs the whole model, or nodes as workers"),
        (["timeline=resnet50_b32_tf32", "cluster.nodes=many"], "must be a whole number"),
        (["timeline=resnet50_b32_tf32", "cluster.nodes=0"], "cluster.nodes must be a whole number, 1 or more, not 0"),
        (["timeline=resnet50_b32_tf32", "methods=magic"], "no method 'magic'"),
        (["timeline=resnet50_b32_tf32", "cluster.nodes=1", "cluster.gbps=1"], "between nodes, and there is one node"),
        (["model=resnet50", "cluster.ranks_per_node=1", "cluster.inside_gb_per_s=9"], "and a node has one rank"),
        (["timeline=resnet50_b32_tf32", "gpu_rate=2", "gpu=abacus"], "no memory bandwidth known"),
        (["timeline=resnet50_b32_tf32", "gpu=h100"], "gpu=h100 asks for something else"),
        (["timeline=resnet50_b32_tf32", "batch=64"], "the recorded timeline resnet50_b32_tf32 has batch=32"),
        (["timeline=resnet50_b32_tf32", "precision=bf16"], "has precision=tf32; leave precision out"),
        (["timeline=resnet50_b32_tf32", "compiled=true"], "compiled=True asks for something else"),
        (["model=tests.helpers.toy_module:make", "steps=2", "seq=9"], "seq=9 asks for something else"),
        (["model=hf:gpt2", "steps=2"], "steps=2 asks for something else"),
        (["model=tests.helpers.toy_module:make", "steps=2", "gpu=h100"], "gpu=h100 is not what is recorded here"),
        (["model=resnet50", "checkpointing=true"], "checkpointing=true is for hf: and params:"),
        (["timeline=resnet50_b32_tf32", "cluster.oversubscription=0.5"], "cluster.oversubscription must be a number"),
        (["model=tests.helpers.toy_module:nothing"], "no attribute 'nothing'"),
        (
            ["model=tests.helpers.toy_module:vector", "steps=2"],
            "cannot be recorded: grad can be implicitly created only",
        ),
        (["model=tests.helpers.toy_module:frozen", "steps=2"], "no parameter that gets a gradient"),
        (["model=tests.helpers.toy_module:broken", "steps=2", "batch=4"], "cannot be recorded: no room for 4 samples"),
        (["model=tests.helpers.toy_module:uneven", "batch=4"], "cannot be counted without running it: no room for 4"),
        (["model=tests.helpers.toy_module:uneven", "steps=2", "batch=4"], "cannot be recorded: no room for 4 samples"),
        (["model=torchvision:resnet18", "seq=5"], "seq=5 is for models of transformers that read tokens"),
        (["model=hf:vit", "seq=5"], "leave seq out"),
        (["model=tests.helpers.toy_module:make", "seq=9"], "leave seq out"),
        (["model=tests.helpers.toy_module:make", "checkpointing=true"], "checkpointing=true is for hf: and params:"),
        (["timeline=resnet50_b32_tf32", "methods=birder", "local_steps=4"], "local_steps=4 is of local SGD and DiLoCo"),
        (["timeline=resnet50_b32_tf32", "sharding=hsdp", "local_steps=4"], "local_steps=4 is of local SGD and DiLoCo"),
        (["timeline=resnet50_b32_tf32", "methods=birder", "run_steps=4"], "run_steps=4 is of Sigma-delta Adam"),
        (
            ["timeline=resnet50_b32_tf32", "local_steps=4", "--sweep", "gbps"],
            "local_steps=4 is of local SGD and DiLoCo",
        ),
        (
            ["timeline=resnet50_b32_tf32", "methods=birder", "run_steps=4", "--sweep", "nodes"],
            "run_steps=4 is of Sigma-delta Adam",
        ),
        (["timeline=resnet50_b32_tf32", "--out", "x.png"], "add --sweep gbps"),
        (["--examples", "model=resnet50"], "leave model=resnet50 out"),
        (["--evaluate"], "python studies/predicted.py"),
        (["--step-times"], "python studies/step_times.py"),
        (["--validate", "resnet50"], "python studies/validate.py"),
    ],
)
def test_bad_questions_end_with_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(entry.main, arguments, words, capsys)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["moon"], "knows resnet50, bert_squad_base, zero_one_gpt2, not moon"),
        (["resnet50", "nodes=3"], "knows 2, 4, 8, not 3"),
        (["bandwidth=3"], "knows nodes, gbps, results_dir and experiments, not bandwidth="),
    ],
)
def test_a_validation_of_what_there_is_not_ends_with_one_line(
    asked: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(validate.main, asked, words, capsys)


def test_the_page_of_a_suite_shows_every_cells_prediction() -> None:
    made = suite.load("paper")
    results = replayed.load(made, RESULTS)
    ids = {r.id: cell for cell, r in results.records.items()}
    assert set(results.predicted.index) <= set(ids)
    page = replay_page.markdown(results)
    details = page[page.index("## " + next(s.heading for s in made.report.sections if s.kind == "details")) :]
    for of, o in results.predicted.iterrows():
        cell = ids[str(of)]
        scale = results.records[cell].link["dilation"]
        (line,) = (row for row in details.splitlines() if f"/{of}.json" in row)
        assert f"| {number(scale * o.predicted_ms)} ({100 * o.error:+.1f} %) |" in line
        assert o.measured_ms == pytest.approx(results.clock(cell))
    assert prediction.table(results.predicted).markdown() in page
    shown = replay_page.markdown(replace(results, predicted=results.predicted[:0]))
    assert "## Check: predicted" not in shown
    assert shown.count("| —") > page.count("| —")


def test_all_and_json_hold_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["model=torchvision:resnet18", "batch=8", "gpu=4090", "cluster.nodes=2"]
    assert entry.main([*asked, "--all"]) == 0
    whole = capsys.readouterr().out
    assert entry.main([*asked, "--json"]) == 0
    held = json.loads(capsys.readouterr().out)
    assert len(held["rows"]) == len(DEFAULT)
    assert all(METHODS[row["method"]].label in whole for row in held["rows"])
    assert held["gpu"] == "rtx-4090"
    assert held["sentences"][0].split(":")[0] in ("Compress", "Do not compress", "Not decided")
    # What a method costs in accuracy among them: programs were not warned.
    assert " ".join(held["sentences"]) == " ".join(whole.partition("\n\n")[0].split())
    assert " studies" in held["sentences"][0]
    assert {row["fits"] for row in held["rows"]} == {True}


def test_an_example_of_the_docs_is_what_its_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Of one: the table and what was assumed. The sentence counts studies, of which there may be more since."""
    listed = yaml.safe_load((ROOT / "conf" / "predict" / "examples.yaml").read_text(encoding="utf-8"))
    (asked,) = (one["ask"] for one in listed["examples"] if one["title"].startswith("ResNet-50"))
    assert entry.main(asked) == 0
    out = capsys.readouterr().out.strip()
    assert out[out.index("\nmethod") :] in entry.EXAMPLES.read_text(encoding="utf-8")
