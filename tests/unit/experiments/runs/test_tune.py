"""The tuner: the same budget for every method, held-out data decide, nothing runs twice."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from experiments import tune
from experiments.config import compose
from experiments.config.compose import Composed
from experiments.records import record
from experiments.runs import start
from launch.failure import RunFailed
from tests.helpers import wandb_file
from tests.helpers.commands import refused
from tests.helpers.wandb_file import columns, shown_table

BEST = {"birder": 3e-3, "sgdm": 0.2}
"""The learning rate at which the stand-in's held-out accuracy is highest."""


class Runs:
    """Stands in for start.launch: writes the records that runs would leave."""

    def __init__(self, results: Path) -> None:
        self.results, self.started = results, []
        self.lost_above = math.inf

    def launch(self, composed: Composed, *, group: str | None = None) -> None:
        spec = compose.make_spec(composed, group=group)
        config, name = spec.config, composed.choices["optimizer"]
        spec = dataclasses.replace(spec, id=f"{len(self.started):03}")
        lr = float(config["optimizer"]["lr"])
        self.started.append((name, lr, config["train"]["epochs"], config["seed"]))
        if lr > self.lost_above:
            reason = "rank 0 on node 0: RuntimeError: the loss is nan at step 7: lower optimizer.lr"
            record.write(record.failed(spec, reason), self.results)
            raise RunFailed(reason)
        held_out = 90 - 10 * abs(math.log10(lr / BEST[name])) + 0.1 * config["train"]["epochs"]
        # The test set says the opposite: it must decide nothing.
        metric = {"name": "top1", "value": -held_out, "target": None, "higher_is_better": True}
        known = {"data": {"name": "digits", "synthetic": False}, "timing": {"steps": 0}, "device": "cpu"}
        metric["all"] = {"top1": -held_out, "held_out": held_out}
        record.write(record.from_spec(spec, metric=metric, **known), self.results)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    made = Runs(tmp_path / "results")
    monkeypatch.setattr(start, "launch", made.launch)
    return made


def arguments(runs: Runs, *more: str) -> list[str]:
    where = [f"results_dir={runs.results}", f"output_dir={runs.results.parent}/outputs", "wandb=disabled"]
    return ["+exp=digits", "scale=quick", "optimizer=birder,sgdm", "held_out=200", *where, *more]


def test_every_method_has_the_same_trials_and_held_out_data_decide(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune.main(arguments(runs, "budget=4", "seeds=2", "span=10")) == 0
    places = {}
    for name in BEST:
        lr = float(compose.resolve(tune.TuneRequest((name,), ("+exp=digits",)).compose(name))["optimizer"]["lr"])
        short = [r for r in runs.started if r[0] == name and r[2] == 5]
        assert len(short) == 4
        assert all(lr / 10 <= r[1] <= lr * 10 for r in short)
        places[name] = [r[1] / lr for r in short]
        halves = [len([r for r in runs.started if r[0] == name and r[2] == n and r[3] == 0]) for n in (5, 10, 20)]
        assert halves[0] > halves[1] >= halves[2] >= 1  # the worse half does not go on
        chosen = {r[1] for r in runs.started if r[0] == name and r[3] > 0}
        assert len(chosen) == 1
        whole = [r[1] for r in runs.started if r[0] == name and r[2] == 20 and r[3] == 0]
        assert chosen == {min(whole, key=lambda x: abs(math.log10(x / BEST[name])))}
        assert sorted(r[3] for r in runs.started if r[0] == name and r[2] == 20 and r[1] in chosen) == [0, 1]
    # The same places of each method's range, but for rounding to three digits.
    assert places["birder"] == pytest.approx(places["sgdm"], rel=0.01)
    assert all(r.config["workload"]["held_out"] == 200 for r in record.read_all(runs.results))
    assert {r.config["wandb"]["group"] for r in record.read_all(runs.results)} == {"tune-digits"}
    assert "4 trials of each method" in capsys.readouterr().out

    before = list(runs.started)
    assert tune.main(arguments(runs, "budget=4", "seeds=2", "span=10")) == 0
    assert runs.started == before
    # One record is lost: that run alone is made again.
    lost = next(r for r in record.read_all(runs.results) if r.seed == 1 and r.optimizer == "Birder")
    (runs.results / "records" / f"{lost.id}.json").unlink()
    assert tune.main(arguments(runs, "budget=4", "seeds=2", "span=10", "optimizer=birder")) == 0
    assert len(runs.started) == len(before) + 1


def test_a_best_rate_at_the_edge_is_told(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(BEST, "birder", 1e3)
    given = [*arguments(runs, "budget=4", "seeds=0", "rungs=1"), "optimizer=birder"]
    assert tune.main(given) == 0
    assert "is among the largest that were tried" in " ".join(capsys.readouterr().out.split())
    assert len(runs.started) == 4


def test_rates_that_diverge_count_as_trials(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.lost_above = 0.0
    given = [*arguments(runs, "budget=3", "seeds=2"), "optimizer=birder"]
    assert tune.main(given) == 0
    assert len(runs.started) == 3
    assert "ended with a number: widen it with span=" in " ".join(capsys.readouterr().out.split())


def test_a_dry_run_starts_nothing(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(arguments(runs, "--dry-run")) == 0
    assert "at least 16 runs to do" in capsys.readouterr().out
    assert runs.started == []


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["budget=x"], "budget must be a whole number"),
        (["budget=0"], "budget must be a whole number, 1 or more, not 0"),
        (["span=1"], "span must be a number above 1"),
        (["optimizer="], "optimizer=a,b,c"),
        (["optimizer.lr=0.1"], "rates, seeds and lengths"),
        (["++seed=1"], "rates, seeds and lengths"),
        (["cluster=slurm", "cluster.wait=false"], "cluster.wait=false would choose"),
        (["run_name=mine"], "run_name=mine is of one run"),
        (["optimizer=tiger"], "tiger"),
        (["held_out=0"], "held_out must be"),
        (["trian.threads=1"], "train.threads"),
    ],
)
def test_bad_input_is_one_line(runs: Runs, more: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(tune.main, arguments(runs, *more), words, capsys)
    assert runs.started == []


def test_without_a_held_out_part_or_data_nothing_is_tuned(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    given = [a for a in arguments(runs) if not a.startswith("held_out")]
    assert tune.main(given) == 2
    assert "give held_out=N" in capsys.readouterr().err
    assert tune.main(["+exp=cifar100", "scale=quick", "optimizer=sgdm", "held_out=10"]) == 2
    assert "needs real data" in capsys.readouterr().err


@pytest.mark.slow
def test_the_table_is_a_run_in_the_group_of_the_trials(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("wandb")
    given = ["wandb=offline" if a == "wandb=disabled" else a for a in arguments(runs, "budget=2", "seeds=0")]
    assert tune.main(given) == 0
    run = wandb_file.read(runs.results.parent)
    table = run.table("tuned")
    assert (run.group, run.job) == ("tune-digits", "tuning")
    assert columns([table["columns"], *table["data"]]) == columns(shown_table(capsys.readouterr().out))
