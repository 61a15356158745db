"""The table of all methods: tuned on held-out images with the first seed, resumed without running anything twice."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from experiments import all_methods, compare
from experiments.all_methods import MethodsRequest
from experiments.config import compose
from experiments.config.compose import Composed
from experiments.records import labels, record
from experiments.records.record import ResultRecord
from experiments.report import methods_table, tables
from experiments.runs import start, study
from launch.failure import RunFailed
from tests.helpers.commands import refused
from tests.helpers.workload_data import fashion_mnist

GOOD = {0.05: 80.0, 0.1: 86.0, 0.3: 83.0}
"""Held-out accuracy by learning rate."""


class Runs:
    """Stands in for start.launch and compare.in_turns: writes the records that runs would leave.

    lost: lr -> how such a run fails.
    """

    def __init__(self, results: Path) -> None:
        self.results = results
        self.data = fashion_mnist(results.parent / "data")
        self.started: list[tuple[str, float, int, bool]] = []
        self.lost: dict[float, str] = {}

    def in_turns(self, chosen: list[Composed], group: str) -> tuple[int, int]:
        for composed in chosen:
            self.launch(composed, group=group)
        return 0, 0

    def launch(self, composed: Composed, *, group: str | None = None) -> None:
        spec = compose.make_spec(composed, group=group)
        config = spec.config
        spec = dataclasses.replace(spec, id=f"{len(list(self.results.glob('records/*'))):03}")
        assert config["wandb"]["group"] == "methods"  # one group in W&B, whatever the part
        lr, timed = float(config["optimizer"]["lr"]), config.get("evaluate") is False
        self.started.append((labels.method(config), lr, config["seed"], timed))
        if lr in self.lost and not timed:
            record.write(record.failed(spec, self.lost[lr]), self.results)
            raise RunFailed(self.lost[lr])
        held_out = GOOD.get(lr, 70.0)
        top1 = held_out - 1 + config["seed"]
        metric = {"name": "top1", "value": top1, "target": None, "higher_is_better": True}
        known: dict[str, Any] = {
            "data": {"name": "Fashion-MNIST", "synthetic": False},
            "timing": {"steps": 96, "median_ms": 50.0 if config["comm"]["enabled"] else 20.0, "mean_ms": 55.0},
            "bytes_per_step": {
                "payload_intra": 0,
                "payload_inter": 20_000 if "1bit" in labels.wire(config) else 636_000,
            },
            "metric": {} if timed else {**metric, "all": {"top1": top1, "held_out": held_out}},
            "rounds_per_step": 1.0,
            "collectives_per_step": 2.0,
            "state_bytes_per_rank": 424_000,
            "device": "cpu",
        }
        if timed:
            wobble = 0.01 * len(self.started)
            each = [known["timing"]["median_ms"] * pace for pace in (1.0, 1.2 + wobble, 0.9, 1.0, 1.1 - wobble)]
            known["turns"] = {"world": group, "ms": each, "steps": [10] * 5, "held": "all"}
        record.write(record.from_spec(spec, **known), self.results)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    made = Runs(tmp_path / "results")
    monkeypatch.setattr(start, "launch", made.launch)
    monkeypatch.setattr(compare, "in_turns", made.in_turns)
    return made


def arguments(runs: Runs, *more: str) -> list[str]:
    where = [f"data.path={runs.data}", f"results_dir={runs.results}", "workload.held_out=1"]
    return [*where, f"output_dir={runs.results.parent}/outputs", "wandb=disabled", "scale=quick", *more]


def test_every_row_composes_and_has_three_rates() -> None:
    base = compose.compose([f"+exp={methods_table.EXP}"])
    plan = MethodsRequest(["scale=quick"], (0,), all_methods.PARTS)
    rows = all_methods.variants(base, None)
    made = [compose.resolve(plan.compose(row)) for row in rows]
    names = [labels.method(m) for m in made]
    assert len(set(names)) == len(names)
    assert {
        "SGDM fp32",
        "PyTorch bf16 hook",
        "PowerSGD rank 4",
        "1-bit Adam",
        "Birder",
        "0/1 Adam",
        "1-bit LAMB",
    } <= set(names)
    assert {"CSER", "CSEA", "CSER-PL", "local SGD", "QSparse-local-SGD", "EF-SGD", "SLAMB", "LAMB fp32"} <= set(names)
    assert [len(row.rates) for row in rows] == [0 if name == "no communication" else 3 for name in names]
    for row in rows[:1] + rows[-1:]:
        timed = compose.resolve(plan.compose(row, *all_methods.TIMING))
        assert [timed["timing"][key] for key in ("mode", "rounds", "steps")] == ["interleaved", 10, 10]
        assert (timed["cluster"]["name"], timed["evaluate"], timed["train"]["max_steps"]) == ("emulated", False, 99)
    # What is tuned is no part of a run: a wider budget must not make other runs of those there are.
    assert all("tune" not in m for m in made)


@pytest.mark.slow
def test_the_rate_is_chosen_on_held_out_images_and_nothing_runs_twice(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(runs, "--methods", "local_sgd,csea")
    assert all_methods.main(given) == 0
    trained = [r for r in runs.started if not r[3]]
    each = [(lr, 0) for lr in GOOD] + [(0.1, 1), (0.1, 2)]
    assert trained == [(m, lr, s, False) for m in ("CSEA", "local SGD") for lr, s in each]
    assert [r[0] for r in runs.started if r[3]] == ["CSEA", "local SGD"]
    assert "86.00 ± 1.00" in capsys.readouterr().out  # 85, 86 and 87

    before = len(runs.started)
    assert all_methods.main(given) == 0
    assert len(runs.started) == before
    # One record lost: that run alone is done again.
    lost = next(r for r in record.read_all(runs.results) if r.seed == 2 and r.method == "local SGD")
    (runs.results / "records" / f"{lost.id}.json").unlink()
    assert all_methods.main([*given, "--dry-run"]) == 0
    assert "1 runs to do" in capsys.readouterr().out
    assert all_methods.main(given) == 0
    assert runs.started[before:] == [("local SGD", 0.1, 2, False)]
    # One time lost: all take their turns again, for only then they can be compared.
    before = len(runs.started)
    lost = next(r for r in record.read_all(runs.results) if methods_table.is_timing(r) and r.method == "CSEA")
    (runs.results / "records" / f"{lost.id}.json").unlink()
    assert all_methods.main(given) == 0
    assert [(m, timed) for m, _, _, timed in runs.started[before:]] == [("CSEA", True), ("local SGD", True)]
    latest = {r.method: r for r in record.read_all(runs.results) if methods_table.is_timing(r)}
    assert len({r.turns["world"] for r in latest.values()}) == 1


@pytest.mark.slow
def test_a_diverged_run_counts_and_another_failure_is_tried_again(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.lost = {
        0.1: "rank 0 on node 0: RuntimeError: the loss is nan at step 7: lower optimizer.lr",
        0.05: "rank 1 was killed",
    }
    given = arguments(runs, "--methods", "local_sgd", "--seeds", "0,1")
    assert all_methods.main(given) == 1
    assert [r[1:3] for r in runs.started] == [(0.05, 0), (0.1, 0), (0.3, 0), (0.3, 1), (0.05, 0)]
    assert "1 runs failed" in capsys.readouterr().err
    runs.started.clear()
    runs.lost = {}
    assert all_methods.main(given) == 0
    assert [r[1:3] for r in runs.started] == [(0.05, 0)]  # worse than 0.3; 0.1 is not tried again
    page = (runs.results / "tables" / "methods.md").read_text()
    assert "0.05, 0.1 (failed), 0.3" in page
    assert "- local SGD, lr 0.1, seed 0, failed: rank 0 on node 0: RuntimeError: the loss is nan at step 7" in page


def test_times_that_later_code_has_measured_stand_beside_older_accuracies(runs: Runs) -> None:
    """Its configuration may have keys that the trained runs' had not: they ran with what is the default now."""
    assert all_methods.main(arguments(runs, "--methods", "local_sgd", "--seeds", "0")) == 0

    def timed(section: str, key: str, value: Any) -> list[ResultRecord]:
        records = []
        for r in record.read_all(runs.results):
            config = json.loads(json.dumps(r.config))
            if methods_table.is_timing(r):
                config[section][key] = value
            records.append(dataclasses.replace(r, config=config))
        (table,) = methods_table.build(records)
        return table.timed

    assert [r.method for r in timed("optimizer", "younger_key", None)] == ["local SGD"]
    assert timed("optimizer", "reset_every", 7) == []
    trained = next(r for r in record.read_all(runs.results) if not methods_table.is_timing(r))
    assert not methods_table.same_setting(trained, dataclasses.replace(trained, method="local SGD top-k"))


def test_a_method_that_has_lost_its_time_is_a_failure(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def first_alone(chosen: list[Composed], group: str) -> tuple[int, int]:
        return runs.in_turns(chosen[:1], group)

    given = arguments(runs, "--methods", "local_sgd,csea", "--only", "time")
    monkeypatch.setattr(compare, "in_turns", first_alone)
    assert all_methods.main(given) == 1
    assert "1 runs failed" in capsys.readouterr().err
    monkeypatch.setattr(compare, "in_turns", runs.in_turns)
    assert all_methods.main(given) == 0


def test_bad_input_is_one_line(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, words in (
        (["scale=quick"], "needs real data"),
        (arguments(runs, "--methods", "lion"), "has no 'lion'"),
        (arguments(runs, "--methods", ","), "--methods is empty"),
        (arguments(runs, "--only", "tea"), "--only=tea"),
        (arguments(runs, "--seeds", "a"), "--seeds=a"),
        (arguments(runs, "optimizer.lr=1"), "--methods and --seeds"),
        (arguments(runs, "++seed=1"), "--methods and --seeds"),
        (arguments(runs, "run_name=mine"), "run_name=mine is of one run"),
        (arguments(runs, "data.path=/no/such/folder"), "no folder"),
    ):
        refused(all_methods.main, wrong, words, capsys)
    assert runs.started == []


@pytest.mark.slow
def test_the_table_of_a_few_methods(runs: Runs) -> None:
    assert all_methods.main(arguments(runs, "--methods", "sgdm,onebit_adam", "--seeds", "0,2")) == 0
    page = (runs.results / "tables" / "methods.md").read_text()
    rows = {
        line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:-2]]
        for line in page[: page.index("## Time and bytes")].splitlines()
        if line.startswith("| ")
    }
    assert rows["SGDM fp32"] == [
        *("86.00 ± 1.41", "2", "86.00", "0.1", "0.05, 0.1, 0.3", "636 kB", "1", "1.00", "2.00", "424 kB"),
        *("50.0 (—–—)", "1.00x"),
    ]
    assert rows["1-bit Adam"][3:7] == ["0.001 §", "0.001, 0.002, 0.003", "20.0 kB", "1/31.8"]
    assert rows["no communication"][-2] == "20.0 (—–—)"
    assert rows["no communication"][-1].startswith("2.50x [")
    assert "Timing was interleaved in one world, 5 rounds in shuffled order" in page
    assert list(rows)[-1] == "no communication"
    assert "chosen by the accuracy on a held-out part of the training set" in page
    assert "![top1 against bytes](../plots/methods_quick_4x1_bytes.png)" in page
    assert (runs.results / "plots" / "methods_quick_4x1_bytes.png").is_file()
    assert "**Step times: short runs, 4 nodes emulated on one machine" in page
    assert tables.check(runs.results) == []
    first = {p: p.read_bytes() for p in (runs.results / "tables").iterdir()}
    tables.write(runs.results)
    assert first == {p: p.read_bytes() for p in (runs.results / "tables").iterdir()}


@pytest.mark.slow
def test_a_method_without_a_good_rate_is_a_row_that_failed(runs: Runs) -> None:
    assert all_methods.main(arguments(runs, "--methods", "sgdm_nesterov")) == 0
    runs.lost = dict.fromkeys(GOOD, "rank 0 on node 0: RuntimeError: the loss is inf at step 9: lower optimizer.lr")
    assert all_methods.main(arguments(runs, "--methods", "local_sgd")) == 0
    page = (runs.results / "tables" / "methods.md").read_text()
    line = next(line for line in page.splitlines() if line.startswith("| local SGD"))
    assert "| failed | — | — | — | 0.05 (failed), 0.1 (failed), 0.3 (failed) |" in line


def test_records_of_other_settings_are_other_runs(runs: Runs) -> None:
    assert all_methods.main(arguments(runs, "--methods", "local_sgd", "--only", "tune")) == 0
    one = record.read_all(runs.results)[0].overrides
    same = study.asked(one)
    for kept in ("output_dir=elsewhere", "wandb=disabled", "tracker=none", "train.bf16_matmul=fp32"):
        assert study.asked([*one, kept]) == same
    others = (
        "optimizer.reset_every=4",
        "train.max_steps=7",
        "cluster.nodes=2",
        "workload.held_out=9",
        "data.path=other",
    )
    for other in others:
        assert study.asked([*one, other]) != same
    # What only changes how long products take is another time, but no other training.
    timed = [*one, *all_methods.TIMING]
    assert study.asked([*timed, "train.bf16_matmul=fp32"]) != study.asked(timed)
    assert study.asked([*timed, "evaluate=False"]) == study.asked(timed)
    assert study.asked([*timed, "evaluate=False", "train.bf16_matmul=fp32"]) != study.asked(timed)
