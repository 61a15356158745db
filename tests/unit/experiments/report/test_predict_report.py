"""What is said of predictions: the evaluation is made again from the committed records; published times; the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from birder.predict import DEFAULT, METHODS
from birder.predict.table import MODEL_ERROR
from experiments import predict as entry
from experiments.cells import fit, predicted, published, suite
from experiments.cells.predicted import Machine
from experiments.records.record import PUBLISHED, ROOT, ResultRecord, read_all, write_file
from experiments.report import prediction, prediction_plots, replay_page, replayed, trained
from experiments.report.formats import number
from launch.errors import UserError

RESULTS = PUBLISHED
TARGETS = {"median": 0.03, "p95": 0.08, "worst": 0.15}
FITTED = prediction.load(RESULTS)


@pytest.fixture(scope="module")
def records() -> list[ResultRecord]:
    return read_all(RESULTS)


@pytest.fixture(scope="module")
def outcomes(records: list[ResultRecord]) -> list[prediction.Outcome]:
    return prediction.evaluate(records, prediction.load(RESULTS))


def test_every_replayed_cell_is_predicted_and_its_setup_is_what_ran(records: list[ResultRecord]) -> None:
    found = prediction.cases(records)
    ran = [r for r in records if r.exp in ("paper", "bench") and "kernels" not in r.config[r.exp]]
    assert len(found) == len({r.id for r in ran})
    for of, record in found:
        assert of.timeline.elements == record.config[record.exp]["elements"], of.id


def test_the_evaluation_is_what_the_docs_say(outcomes: list[prediction.Outcome]) -> None:
    """Bounds: what docs/predict.md states, rounded up. The targets were 3 %, 8 % and 15 %: the worst cell misses its own."""
    emulated = [o for o in outcomes if o.case.link == "emulated"]
    whole = prediction.summary(emulated)
    assert whole.cells == 303
    assert whole.median < 0.015 < TARGETS["median"]
    assert whole.p95 < TARGETS["p95"]
    assert whole.worst < 0.5
    steady = prediction.summary([o for o in emulated if o.sends and o.steady])
    assert steady.worst < TARGETS["worst"]
    sending = [o for o in emulated if o.sends]
    assert len(sending) == 243
    # The interval of every prediction rests on this number.
    assert prediction.summary(sending).p95 < MODEL_ERROR + 0.005
    every = prediction.summary(outcomes)
    assert every.cells == 363
    assert every.median < TARGETS["median"]


def test_the_page_is_what_the_records_make(outcomes: list[prediction.Outcome]) -> None:
    page = (RESULTS / "tables" / "predict.md").read_text(encoding="utf-8")
    parts = [prediction.markdown(outcomes), trained.markdown(RESULTS), prediction_plots.published()]
    assert page == "\n\n".join(filter(None, parts)) + "\n"


def test_the_table_of_the_docs_is_that_of_the_page(outcomes: list[prediction.Outcome]) -> None:
    page = (ROOT / "docs" / "predict.md").read_text(encoding="utf-8")
    made = prediction.table(outcomes).markdown().splitlines()[2:]
    assert len(made) == 5
    for row in filter(None, made):
        assert row in page.splitlines(), row


def test_a_machine_is_fitted_without_the_cells_that_it_predicts(records: list[ResultRecord]) -> None:
    """Going on from where the committed fit ended moves little: it is the fit to the other model's cells, and of no others.

    Fits end after a fixed number of rounds, so that some values still move a little: 0.1 in the logarithm of the rate-like
    ones that matter most.
    """
    machines = prediction.load(RESULTS)
    kernels = predicted.kernel_rates(records)
    pairs = [p for p in prediction.cases(records) if p[0].link == "loopback"]
    for model, values in machines["loopback"].items():
        others = [p for p in pairs if p[0].model != model]
        assert 0 < len(others) < len(pairs)
        again = fit.fit(others, "loopback", kernels, Machine("loopback", values, kernels), rounds=2)
        for name in ("rate", "k4", "k8", "fast", "sgdm"):
            assert abs(np.log(again.values[name] / values[name])) < 0.1, name


def test_a_fit_comes_near_to_a_machine_that_is_known(records: list[ResultRecord]) -> None:
    """Cells that a machine has made itself: fitted, half of them are met to 2 %, the scale of a fit's errors."""
    kernels = predicted.kernel_rates(records)
    begin = predicted.start("loopback", kernels)
    truth = Machine("loopback", {**begin.values, "rate": 20.0, "sgdm": 0.15}, kernels)
    made = []
    for of, record in prediction.cases(records):
        if of.link == "loopback" and of.nodes == 2:
            step = predicted.step(of, truth)
            split = {"update_ms": step.update_ms, "encode_ms": step.encode_ms}
            made.append((of, _with_times(record, step.ms, split)))
    found = fit.fit(made, "loopback", kernels, rounds=5)

    def median(machine: Machine) -> float:
        return float(np.median([abs(predicted.step(of, machine).ms / r.timing["median_ms"] - 1) for of, r in made]))

    assert median(found) < fit.SCALE < median(begin)


def _with_times(record: ResultRecord, ms: float, split: dict[str, float]) -> ResultRecord:
    return replace(record, timing={**record.timing, "median_ms": ms, "split": split})


def test_published_all_reduces_come_out_where_the_assumptions_hold() -> None:
    found = {b.what: b for b in published.profiles()}
    assert len(found) == len(published.PROFILES)
    # InfiniBand, 8 nodes: ring and all-reduce by nodes lie on either side of, or within 5 % of, what was measured.
    for batch in (1, 16, 64):
        b = found[f"InfiniBand, 8 x 8, batch {batch}"]
        assert b.by_nodes is not None
        assert b.by_nodes < b.published * 1.05
        assert b.predicted == pytest.approx(b.published, rel=0.05)
    # Two nodes of eight: half as much as a ring, which is why the ring is 72 % off there.
    two = found["InfiniBand, 2 x 8, batch 16"]
    assert two.by_nodes == pytest.approx(two.published, rel=0.1)
    assert published.bert_large(1, 1, 1, 1).elements == pytest.approx(336.2e6, rel=1e-3)


def test_the_papers_speedups_need_a_slow_link_or_fast_computing() -> None:
    compute, rates, found = prediction_plots.claims("bert_base_b12_tf32", "birder_hierarchical", grid=4)
    assert found.shape == (len(rates), len(compute))
    assert np.all(np.diff(found[:, 0]) <= 1e-6)  # a faster link, a smaller speedup
    assert np.all(np.diff(found[0]) <= 1e-6)  # more computing, a smaller speedup
    assert found.max() > 6.3 > found.min()


# ---- the command line ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["timeline=resnet50_b32_tf32", "cluster.nodes=8"], "x as fast as bf16"),
        (["timeline=resnet50_b32_tf32", "cluster=infiniband_100g", "cluster.nodes=2"], "2 x 8 ranks, 100 Gbit/s"),
        (["model=bert_base", "batch=12", "gpu=A100", "cluster.gbps=800", "cluster.latency_us=2"], "do not compress"),
        (["timeline=resnet50_b32_tf32", "methods=fp32,birder", "--crossover"], "below"),
        (["timeline=resnet50_b32_tf32", "gpu_rate=2", "gpu=h100"], "h100: 70%"),
        (["model=tests.helpers.toy_module:make", "batch=4", "steps=2", "methods=fp32,bf16,none"], "on cpu"),
    ],
)
def test_questions_are_answered(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(arguments) == 0
    out = capsys.readouterr().out
    assert words.lower() in out.lower()
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("over", ["gbps", "nodes"])
def test_a_sweep_is_a_table_and_a_plot(over: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sweep.png"
    assert entry.main(["timeline=resnet50_b32_tf32", "--sweep", over, "--out", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([x for x in lines if x.startswith("|")]) == 2 + len(entry.SWEEPS[over])
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
        (["model=hf:gpt-2-medium"], "did you mean gpt2-medium?"),
        (["model=torchvision:resnet51"], "did you mean resnet50"),
        (["model=hf:gpt2", "gpu=h1000"], "no GPU 'h1000' is known; did you mean h100"),
        (["model=hf:gpt2", "gpu=v100", "precision=bf16"], "V100 SXM 32 GB does not compute in bf16"),
        (["model=hf:gpt2", "seq=4096"], "takes 1024 tokens at most, not seq=4096"),
        (["model=resnet50", "batch=0"], "batch must be a whole number, 1 or more, not 0"),
        (["model=params:1x"], "params: must be a number such as 50k or 1.3B, not '1x'"),
        (["model=params:1M layers=9 width=999"], "too few parameters for 9 layers of width 999"),
        (["model=torchvision:resnet18", "checkpointing=true"], "checkpointing=true is for hf: and params:"),
        (["model=resnet50", "methods=birder", "sharding=hsdp"], "birder needs the whole model, or nodes as workers"),
        (["timeline=resnet50_b32_tf32", "cluster.nodes=many"], "must be a whole number"),
        (["timeline=resnet50_b32_tf32", "cluster.nodes=0"], "cluster.nodes must be a whole number, 1 or more, not 0"),
        (["timeline=resnet50_b32_tf32", "methods=magic"], "no method 'magic'"),
        (["timeline=resnet50_b32_tf32", "gpu_rate=2", "gpu=abacus"], "no memory bandwidth known"),
        (["model=tests.helpers.toy_module:nothing"], "no attribute 'nothing'"),
        (["--validate", "moon"], "knows resnet50, bert_squad_base, zero_one_gpt2, not moon"),
        (["--validate", "resnet50", "nodes=3"], "knows 2, 4, 8, not 3"),
        (["--validate", "bandwidth=3"], "knows nodes, gbps, results_dir and experiments, not bandwidth="),
        (["--evaluate", "--results", "nowhere"], "--fit makes it"),
    ],
)
def test_bad_questions_end_with_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(arguments) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_folder_without_a_fit_takes_the_published_one(
    tmp_path: Path, records: list[ResultRecord], outcomes: list[prediction.Outcome]
) -> None:
    cells_alone = [r for r in records if "kernels" not in r.config.get("bench", {})]
    found = prediction.beside(tmp_path, cells_alone)
    assert {name: o.predicted_ms for name, o in found.items()} == {o.case.id: o.predicted_ms for o in outcomes}
    own = {link: {model: {**values, "k8": 9.0} for model, values in of.items()} for link, of in FITTED.items()}
    write_file(tmp_path / prediction.FOLDER / prediction.FILE, prediction.dump(own).encode(), "a fit")
    slower = prediction.beside(tmp_path, cells_alone)
    eight = [name for name, o in found.items() if o.case.nodes == 8 and o.case.method.name == "birder"]
    assert eight
    assert all(slower[name].predicted_ms > found[name].predicted_ms for name in eight)


def test_ranges_are_read_from_records_old_and_new(records: list[ResultRecord]) -> None:
    """Records of cells once called their smallest and largest step p10 and p90."""
    old = next(r for r in records if r.id == "paper-resnet50_b32-tf32-n2-9.4-birder")
    times = {"min_ms" if k == "p10_ms" else "max_ms" if k == "p90_ms" else k: v for k, v in old.timing.items()}
    kernels = predicted.kernel_rates(records)
    (a,), (b,) = (prediction.evaluate([r], FITTED, kernels) for r in (old, replace(old, timing=times)))
    assert (a.low_ms, a.high_ms) == (b.low_ms, b.high_ms) == (a.low_ms, max(a.low_ms, a.high_ms))


def test_a_cell_of_another_setup_is_not_predicted(records: list[ResultRecord]) -> None:
    """A suite that has changed since: the name is the same, the elements are not."""
    known = next(r for r in records if r.id == "paper-resnet50_b32-tf32-n2-9.4-birder")
    about = known.config["paper"]
    assert predicted.case(known) is not None
    for changed in ({**about, "elements": about["elements"] + 1}, {k: v for k, v in about.items() if k != "elements"}):
        assert predicted.case(replace(known, config={**known.config, "paper": changed})) is None


@pytest.mark.parametrize(
    "name", ["paper-resnet50_b32-tf32-n4-9.4-onebit_adam", "bench-bert_base-loopback-n2-onebit_adam"]
)
def test_cells_whose_scales_travelled_alone_are_predicted_so(name: str, records: list[ResultRecord]) -> None:
    """Older records count 4 collectives for each unit; now it is 2."""
    new = next(r for r in records if r.id == name)
    assert new.collectives_per_step is not None
    kinds = [predicted.case(r) for r in (replace(new, collectives_per_step=2 * new.collectives_per_step), new)]
    assert [of.method.rounds[0].small for of in kinds if of is not None] == [2, 0]


@pytest.mark.parametrize("name", ["paper", "bench"])
def test_the_page_of_a_suite_shows_every_cells_prediction(name: str) -> None:
    made = suite.load(name)
    results = replayed.load(made, RESULTS)
    assert set(results.predicted) == set(results.records)
    page = replay_page.markdown(results)
    details = page[page.index("## " + next(s.heading for s in made.report.sections if s.kind == "details")) :]
    for cell, o in results.predicted.items():
        scale = results.records[cell].link["dilation"] if name == "paper" else 1.0
        (line,) = (row for row in details.splitlines() if f"/{o.case.id}.json" in row)
        assert f"| {number(scale * o.predicted_ms)} ({100 * o.error:+.1f} %) |" in line
        assert o.measured_ms == pytest.approx(results.clock(cell))
    assert prediction.table(list(results.predicted.values())).markdown() in page
    shown = replay_page.markdown(replace(results, predicted={}))
    assert "## Check: predicted" not in shown
    assert shown.count("| —") > page.count("| —")


def test_a_folder_without_a_fit_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--fit makes it"):
        prediction.load(tmp_path)


def test_all_and_json_hold_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["model=torchvision:resnet18", "batch=8", "gpu=4090", "cluster.nodes=2"]
    assert entry.main([*asked, "--all"]) == 0
    whole = capsys.readouterr().out
    assert entry.main([*asked, "--json"]) == 0
    held = json.loads(capsys.readouterr().out)
    assert len(held["rows"]) == len(DEFAULT)
    assert all(METHODS[row["method"]].label in whole for row in held["rows"])
    assert held["gpu"] == "rtx-4090"
    assert held["sentences"][0].split(":")[0] in ("Compress", "Do not compress")


def test_an_example_of_the_docs_is_what_its_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Of one: the table and what was assumed. The sentence counts studies, of which there may be more since."""
    listed = yaml.safe_load((ROOT / "conf" / "predict" / "examples.yaml").read_text(encoding="utf-8"))
    (asked,) = (one["ask"] for one in listed["examples"] if one["title"].startswith("ResNet-50"))
    assert entry.main(asked) == 0
    out = capsys.readouterr().out.strip()
    assert out[out.index("\nmethod") :] in entry.EXAMPLES.read_text(encoding="utf-8")
