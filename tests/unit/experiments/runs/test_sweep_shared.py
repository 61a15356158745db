"""One sweep in several processes: each run is made once, and one that another process left is made here."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from birder import checkpoint
from experiments import sweep
from experiments.config import compose
from experiments.records import privacy, record
from experiments.report import tables
from experiments.runs import start, study
from launch import lock
from tests.helpers.records import run as a_record

GRID = """
exp: digits
seeds: [0, 1, 2]
choose: true
overrides: [cluster=virtual, train.epochs=1]
methods:
  sgdm: {rates: [0.1, 0.2]}
  bertadam: {rates: [0.001, 0.002]}
"""
RUNS = 8  # of 12: the other seeds are run with one rate of two


def leave_record(overrides: list[str], results: Path, name: str) -> None:
    """Of a run that does the better the larger its rate is."""
    typed = [privacy.clean_text(o, Path.cwd()) for o in overrides]
    value = float(next(o for o in typed if o.startswith("optimizer.lr=")).partition("=")[2])
    metric = {"name": "top1", "value": value, "higher_is_better": True, "all": {"top1": value}}
    record.write(a_record("SGDM fp32", metric=metric, id=name, exp="digits", overrides=typed), results)


PROCESS = """
import os, sys, time
from pathlib import Path
from experiments import sweep
from experiments.report import tables
from experiments.runs import start, study
from tests.unit.experiments.runs.test_sweep_shared import leave_record

number = iter(range(100))
def launch(composed, *, group):
    time.sleep(0.3)
    leave_record(composed.overrides, Path(sys.argv[2]), f"p{os.getpid()}-{next(number)}")
start.launch, tables.write, study.POLL_S = launch, lambda *_: None, 0.05
sys.exit(sweep.main([f"sweep={sys.argv[1]}", f"results_dir={sys.argv[2]}"]))
"""


@pytest.mark.slow
def test_processes_share_the_runs(tmp_path: Path) -> None:
    """Three at once run each row once, and none ends before all rows are recorded."""
    (tmp_path / "mine.yaml").write_text(GRID)
    results = tmp_path / "results"
    command = [sys.executable, "-c", PROCESS, str(tmp_path / "mine.yaml"), str(results)]
    processes = [subprocess.Popen(command, text=True, stdout=subprocess.PIPE) for _ in range(3)]
    said = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    made = Counter(tuple(r.overrides) for r in record.read_all(results))
    assert len(made) == RUNS
    assert set(made.values()) == {1}
    assert all("wandb.group=sweep-mine" in overrides for overrides in made)  # one group in W&B
    assert {o for overrides in made for o in overrides if "seed=" not in o} >= {
        "optimizer.lr=0.2",
        "optimizer.lr=0.002",
    }
    for text in said:
        for number in (3, 4, 5, 6):  # of the larger rate of SGDM, and of the smaller one, which is not the best
            last = re.findall(rf"\[{number}/12\] .*: (.*)", text)[-1]
            assert last in (("recorded", "") if "0.2" in _title(text, number) else (study.NOT_BEST,))


def _title(text: str, number: int) -> str:
    return re.findall(rf"\[{number}/12\] (.*):", text)[-1]


@pytest.mark.parametrize("ends", ["recorded", "dies"])
def test_a_run_of_another_process_is_waited_for(
    ends: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What comes of it counts; where nothing comes of it, the run is made here."""
    (tmp_path / "mine.yaml").write_text(GRID)
    results = tmp_path / "results"
    ran: list[list[str]] = []

    def launch(composed: Any, *, group: str | None) -> None:
        ran.append(composed.overrides)
        leave_record(composed.overrides, results, f"r{len(ran)}")

    command = [f"sweep={tmp_path / 'mine.yaml'}", f"results_dir={results}", "--methods", "sgdm"]
    rows = sweep.sweeps.rows(sweep.sweeps.load(str(tmp_path / "mine.yaml")), ["sgdm"])
    given = [f"results_dir={results}"]
    other = study.Study("digits", str(results))
    holding = lock.attempted(other.lock_of(study.SweepQueue(rows, other, given).name(rows[0].overrides)))
    assert holding.__enter__()
    waits = 0

    def wait(seconds: float) -> None:
        nonlocal waits
        waits += 1
        if waits == 2:
            if ends == "recorded":
                leave_record([*rows[0].overrides, *given], results, "theirs")
            holding.__exit__(None, None, None)

    monkeypatch.setattr(start, "launch", launch)
    monkeypatch.setattr(tables, "write", lambda *_: None)
    monkeypatch.setattr(study.time, "sleep", wait)
    assert sweep.main(command) == 0
    assert waits == 2
    said = capsys.readouterr().out
    assert said.count("another process runs it") == 1
    if ends == "dies":  # after the other rate, before the seeds that wait for both
        assert ["optimizer.lr=0.1" in overrides for overrides in ran] == [False, True, False, False]
    assert len(ran) == (4 if ends == "dies" else 3)
    assert len(record.read_all(results)) == 4


def test_who_waits_for_a_run_of_another_process_says_so_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = iter([False, False, False, True])
    one = study.Study("digits", str(tmp_path))
    monkeypatch.setattr(one, "make", lambda *_: next(looks))
    monkeypatch.setattr(study, "POLL_S", 0)
    one.run("seed 0", compose.compose(["+exp=digits", "scale=quick"]))
    assert capsys.readouterr().out.count(study.ELSEWHERE) == 1
    assert list(looks) == []


def test_a_run_that_ends_elsewhere_between_two_looks_is_said_to_be_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its record is found only once its lock is held: the last word on it is not that another process runs it."""
    (tmp_path / "mine.yaml").write_text(GRID)
    results = tmp_path / "results"
    monkeypatch.setattr(
        start, "launch", lambda composed, **_: leave_record(composed.overrides, results, f"r{len(ran(results))}")
    )
    monkeypatch.setattr(tables, "write", lambda *_: None)
    rows = sweep.sweeps.rows(sweep.sweeps.load(str(tmp_path / "mine.yaml")), ["sgdm"])
    made = study.Study.make

    def ends_elsewhere(self: study.Study, name: Any, *rest: Any) -> bool:
        if study.asked([*rows[0].overrides, f"results_dir={results}"]) == name and not seen:
            seen.append(name)
            return False
        if name in seen:
            leave_record([*rows[0].overrides, f"results_dir={results}"], results, "theirs")
        return made(self, name, *rest)

    seen: list[Any] = []
    monkeypatch.setattr(study.Study, "make", ends_elsewhere)
    monkeypatch.setattr(study, "POLL_S", 0)
    assert sweep.main([f"sweep={tmp_path / 'mine.yaml'}", f"results_dir={results}", "--methods", "sgdm"]) == 0
    of_first = re.findall(r"\[1/6\] .*: (.*)", capsys.readouterr().out)
    assert of_first == [study.ELSEWHERE, "recorded"]


def ran(results: Path) -> list[record.ResultRecord]:
    return list(record.read_all(results)) if results.is_dir() else []


def test_a_run_is_known_however_it_is_typed_and_kept() -> None:
    """In another order, twice, logged elsewhere, with numbers in another form: the same; trained otherwise: not."""
    one = study.asked(["+exp=digits", "optimizer=sgdm", "optimizer.lr=0.1", "train.epochs=1", "wandb=disabled"])
    assert one == study.asked(
        ["optimizer=sgdm", "+exp=digits", "train.epochs=4", "++optimizer.lr=0.1", "train.epochs=1"]
    )
    assert one == study.asked(
        [
            "+exp=digits",
            "results_dir=elsewhere",
            "train.epochs=1",
            "optimizer=sgdm",
            "wandb.project=x",
            "optimizer.lr=0.1",
        ]
    )
    assert one == study.asked(["+exp=digits", "optimizer=sgdm", "optimizer.lr=1.0e-01", "train.epochs=1"])
    assert one != study.asked(["+exp=digits", "optimizer=sgdm", "optimizer.lr=0.1", "train.epochs=2"])
    assert one != study.asked(["+exp=digits", "optimizer=sgdm", "optimizer.lr=0.1", "train.epochs=1", "data.path=x"])
    assert one != study.asked(["+exp=digits", "optimizer=sgdm", "optimizer.lr=0.1", "train.epochs=1", "wandbx=y"])


def test_hosts_count_by_their_number(tmp_path: Path) -> None:
    """A run on two hosts is not the record of one on four; records name no host."""
    typed = ["+exp=digits", "optimizer.lr=0.1", "cluster=ssh"]
    made = a_record("SGDM fp32", exp="digits", nodes=2, overrides=[*typed, "cluster.hosts=\u2026"])
    record.write(made, tmp_path)
    known = study.Study("digits", str(tmp_path))
    two = ("a,b", '"a,b"', "[a,root@b:22]", "c,d")
    assert all(known.done(study.asked([*typed, f"cluster.hosts={hosts}"])) for hosts in two)
    assert known.done(study.asked([*typed, "cluster.hosts=c,d", "cluster.nodes=2"]))
    assert not known.done(study.asked([*typed, "cluster.hosts=a,b,c,d"]))


@pytest.mark.parametrize("place", ["~/data", "/home/j\u00fcrgen/data", "/set(1)"])
def test_a_path_that_needs_quotes_or_a_home_is_known_again(place: str, tmp_path: Path) -> None:
    """Records hold it as Hydra reads it, and the user types it as the shell takes it."""
    (tmp_path / "mine.yaml").write_text(GRID)
    first = sweep.sweeps.rows(sweep.sweeps.load(str(tmp_path / "mine.yaml")), ["sgdm"])[0]
    typed = [*first.overrides, f"data.path={place}"]
    leave_record(compose.readable(typed), tmp_path, "there")
    queue = study.SweepQueue([first], study.Study("digits", str(tmp_path)), [f"data.path={place}"])
    assert queue.standing(first) == study.RECORDED


def test_a_path_is_the_same_with_and_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/some/home")
    here, there = compose.readable(["data.path=~/data"]), compose.readable(["data.path=/some/home/data"])
    assert study.asked(here) == study.asked(there) == study.asked(["data.path=\u2026/data"])


def test_published_runs_count_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(GRID)
    results, published = tmp_path / "results", tmp_path / "published"
    command = [f"sweep={tmp_path / 'mine.yaml'}", f"results_dir={results}", "--methods", "sgdm", "--dry-run"]
    rows = sweep.sweeps.rows(sweep.sweeps.load(str(tmp_path / "mine.yaml")), ["sgdm"])
    for number, row in enumerate(r for r in rows if "seed=0" in r.overrides):
        leave_record([*row.overrides, f"results_dir={results}"], published, f"r{number}")
    monkeypatch.setattr(sweep, "PUBLISHED", published)
    assert sweep.main(command) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "4 runs to do at most, 0 recorded"
    assert sweep.main([*command, "--published"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "2 runs to do, 2 recorded"
    assert said.count(study.NOT_BEST) == 2  # chosen by the published runs
    assert not results.exists()


def test_recorded_runs_of_other_defaults_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They count, so that a study continues; who has changed a value in a file of conf would take them for its runs."""
    (tmp_path / "mine.yaml").write_text(GRID)
    row = sweep.sweeps.rows(sweep.sweeps.load(str(tmp_path / "mine.yaml")), ["sgdm"])[0]
    made = record.from_spec(compose.make_spec(compose.compose([*row.overrides, f"output_dir={tmp_path}"])))
    for times in (1, 2):  # the second was made when the default was another one
        made.config["train"]["batch_per_rank"] *= times
        record.write(made, tmp_path)
        study.SweepQueue([row], study.Study("digits", str(tmp_path))).list()
        said = capsys.readouterr()
        assert "0 runs to do, 1 recorded" in said.out
        assert ("another default: train.batch_per_rank was" in said.err) is (times == 2)


def test_two_folders_of_one_name_are_not_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Records keep a folder's last name alone, and so tell apart by its files which one a run has read."""
    typed = ["+exp=digits", "workload=ptb", "optimizer=sgdm"]
    places = [tmp_path / folder / "text" for folder in ("a", "b")]
    for place, text in zip(places, ("one text", "another text"), strict=True):
        place.mkdir(parents=True)
        for split in ("train", "valid"):
            (place / f"{split}.txt").write_text(text)

    def known(place: Path) -> bool:
        given = [*typed, f"data.path={place}"]
        config = compose.resolve(compose.compose(given))
        return study.Study("digits", str(tmp_path), config=config).done(study.asked(given)) is not None

    spec = compose.make_spec(compose.compose([*typed, f"data.path={places[0]}", f"output_dir={tmp_path}"]))
    made = record.from_spec(spec)
    record.write(made, tmp_path)
    assert known(places[0])
    assert not known(places[1])
    assert "1 record of other files or weights under the same names: not counted" in capsys.readouterr().out
    del made.config["data"]["files"]  # one that is older
    record.write(made, tmp_path)
    assert known(places[0])
    assert known(places[1])


def test_two_checkpoints_of_one_name_are_not_one_run(tmp_path: Path) -> None:
    """Fine-tuning after two pre-trainings: the second one would show the first one's accuracy."""
    places = [tmp_path / run / "pretrain" for run in ("adam", "birder")]
    for number, place in enumerate(places):
        kept = place / "checkpoints" / "step-00000001"
        checkpoint.save(kept.parent, 1, {"parameters": {"w": torch.full((3,), float(number))}}, {}, 1)

    def typed(place: Path) -> list[str]:
        return ["+exp=digits", "workload=bert_squad", "optimizer=sgdm", f"workload.weights={place}"]

    def known(place: Path) -> bool:
        config = compose.resolve(compose.compose(typed(place)))
        return study.Study("digits", str(tmp_path), config=config).done(study.asked(typed(place))) is not None

    made = record.from_spec(compose.make_spec(compose.compose([*typed(places[0]), f"output_dir={tmp_path}"])))
    record.write(made, tmp_path)
    assert known(places[0])
    assert not known(places[1])
    elsewhere = tmp_path / "copied" / "pretrain"
    shutil.copytree(places[0], elsewhere)
    assert known(elsewhere)


def test_a_run_in_torchruns_world_is_not_one_in_the_experiments(tmp_path: Path) -> None:
    """It has no override that says how many ranks there were."""
    typed = ["+exp=digits", "optimizer=sgdm", "optimizer.lr=0.1"]
    record.write(a_record("SGDM fp32", exp="digits", cluster="torchrun", nodes=1, overrides=typed), tmp_path)
    known = study.Study("digits", str(tmp_path))
    assert not known.done(study.asked(typed))
    ranks = record.read_all(tmp_path)[0].ranks_per_node
    assert known.done(study.asked([*typed, "cluster.nodes=1", f"cluster.ranks_per_node={ranks}"]))
