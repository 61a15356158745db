"""Renamed keys: old command lines, files, run directories and records go on working, with one warning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.config import compose, same_run
from experiments.records import old_keys, record
from experiments.records.record import PUBLISHED
from experiments.runs import study
from launch.spec import RunSpec
from tests.helpers.records import run

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "_warned", set())


OLD = ("turns.mode=runs", "turns.rounds_anew=4", "train.bf16_products=fp32", "train.precision=bf16")
OLD += ("comm.bucket_mb=3", "cluster.silence_s=7", "cluster.timeout_s=9", "resume_with=changed", "resume_rule=mean")
NOW = ("timing.mode=sequential", "timing.rounds_when_rebuilding=4", "train.bf16_matmul=fp32", "train.precision=bf16")
NOW += ("comm.bucket_cap_mb=3", "cluster.heartbeat_timeout_s=7", "cluster.collective_timeout_s=9")
NOW += ("resume_allow_config_change=true", "resume_resize=average")


def test_an_old_command_line_means_what_it_meant_and_is_warned_of_once(capsys: Captured) -> None:
    old = compose.compose(["+exp=digits", *OLD])
    assert old.overrides == ["+exp=digits", *NOW]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: ")
    for before, after in zip(OLD, NOW, strict=True):
        assert before == after or f"{before} is now {after}" in line
    assert compose.resolve(old) == compose.resolve(compose.compose(["+exp=digits", *NOW]))
    compose.compose(["+exp=digits", *OLD])
    assert capsys.readouterr().err == ""


def test_every_old_key_has_a_new_one_that_exists() -> None:
    resolved = compose.resolve(compose.compose(["+exp=digits"]))
    flat = same_run.flatten(resolved)
    for old, (new, values) in old_keys.RENAMED.items():
        assert old not in flat
        assert new in flat or any(key.startswith(f"{new}.") for key in flat)
        for value in values:
            name, now = old_keys.renamed(old, value)
            compose.resolve(compose.compose(["+exp=digits", f"{name}={str(now).lower()}"]))


def test_a_file_with_old_keys_and_the_command_line_over_it(tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "more" / "exp"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(
        "# @package _global_\nexp: mine\nturns: {mode: runs, rounds: 3}\ncluster: {silence_s: 5}\n"
    )
    asked = [f"hydra.searchpath=[hparams://conf,file://{tmp_path}/more]", "+exp=mine"]
    found = compose.resolve(compose.compose(asked))
    assert (found["timing"]["mode"], found["timing"]["rounds"], found["timing"]["steps"]) == ("sequential", 3, 2)
    assert found["cluster"]["heartbeat_timeout_s"] == 5
    assert "turns" not in found
    assert "turns.rounds is now timing.rounds" in capsys.readouterr().err
    assert compose.resolve(compose.compose([*asked, "timing.rounds=8"]))["timing"]["rounds"] == 8


def test_a_run_directory_from_before_is_gone_on_with(tmp_path: Path) -> None:
    given = ["+exp=digits", "run_name=a", "resume=auto", f"output_dir={tmp_path}"]
    spec = compose.make_spec(compose.compose(given))
    config = dict(spec.config)
    config["turns"] = config.pop("timing")
    config["train"] = {k: v for k, v in config["train"].items() if k != "bf16_matmul"} | {"bf16_products": "native"}
    config |= {
        "resume_with": "changed",
        "resume_rule": "same",
        "resume_changed": [["train.bf16_products", "native", "fp32"]],
    }
    del config["resume_allow_config_change"], config["resume_resize"]
    RunSpec(**{**vars(spec), "id": "first", "config": config}).save()
    (spec.path / "checkpoints" / "step-00000001").mkdir(parents=True)
    again = compose.make_spec(compose.compose(given))
    assert again.id == "first"
    assert again.config["resume_changed"] == [["train.bf16_matmul", "native", "fp32"]]


def test_records_are_read_under_the_names_of_now(tmp_path: Path) -> None:
    typed = ["+exp=digits", "turns.mode=runs", "seed=1"]
    made = run("Birder", 10.0, overrides=typed)
    made.config["train"]["bf16_products"] = "native"
    made.config["turns"] = {"mode": "turns", "rounds_anew": 5}
    path = record.write(made, tmp_path)
    before = path.read_bytes()
    found = record.read(path)
    assert found.config["train"]["bf16_matmul"] == "native"
    assert found.config["timing"] == {"mode": "interleaved", "rounds_when_rebuilding": 5}
    assert study.asked(found.overrides) == study.asked(["+exp=digits", "timing.mode=sequential", "seed=1"])
    assert study.asked(typed) == study.asked(found.overrides)
    assert path.read_bytes() == before


def test_published_records_hold_no_old_key_once_read() -> None:
    paths = sorted((PUBLISHED / "records").glob("*.json"))[::50]
    assert any(old_keys.names(json.loads(path.read_text())["config"]) for path in paths)
    for path in paths:
        assert old_keys.names(record.read(path).config) == []
