"""Sweeps: the grids of the CSER paper, what is run of them, and what is not run again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from birder import overall_ratio
from experiments import sweep
from experiments.config import compose, sweeps
from experiments.records import privacy, record
from experiments.report import tables
from experiments.runs import start
from experiments.runs.study import Study, SweepQueue, asked, score
from launch.errors import UserError
from launch.failure import RunFailed
from tests.helpers.commands import refused
from tests.helpers.records import run as a_record
from tests.helpers.tiers import slow_unless


def ratio(optimizer: str, o: dict[str, float]) -> float:
    """R_C of a setting."""
    if optimizer in ("cser", "csea", "cser_pl"):
        return overall_ratio(o.get("gradient_ratio"), int(o["model_ratio"]), int(o.get("reset_every", 1)))
    return o["ratio"] * o.get("sync_every", 1)


def settings(name: str) -> list[tuple[str, dict[str, float]]]:
    found = sweeps.load(name)
    return [
        (optimizer, dict(zip(method.keys, values, strict=True)))
        for optimizer, method in found.methods.items()
        for values in method.settings
        if values
    ]


def test_the_grid_on_cifar100_is_the_papers() -> None:
    """Powers of 2 from 2 to 1024; CSER sends equally much in updates and in resets; five runs at four rates."""
    found = settings("cser_cifar100")
    assert len(found) == len({(name, *sorted(o.items())) for name, o in found}) == 34 + 10 + 15 + 12 + 10
    for optimizer, o in found:
        if optimizer == "cser":
            assert o["reset_every"] == o["gradient_ratio"] / o["model_ratio"]
            assert ratio(optimizer, o) in {2.0**k for k in range(1, 11)}
    for optimizer in ("cser", "csea", "ef_sgd"):
        assert {ratio(n, o) for n, o in found if n == optimizer} == {2.0**k for k in range(1, 11)}
    grid = sweeps.load("cser_cifar100")
    assert grid.rates == [0.05, 0.1, 0.5, 1.0]
    assert len(grid.seeds) == 5
    assert len(sweeps.rows(grid)) == 82 * 4 * 5


def test_the_grid_on_imagenet_is_the_papers() -> None:
    found = settings("cser_imagenet")
    for optimizer in ("cser", "csea", "cser_pl", "qsparse", "ef_sgd"):
        assert [ratio(n, o) for n, o in found if n == optimizer] == [32, 256, 1024]
    rates = {(n, ratio(n, o)): o["lr"] for n, o in found}
    assert {key for key, lr in rates.items() if lr == 0.05} == {("cser", 32), ("csea", 32)}
    assert set(rates.values()) == {0.05, 0.025}


@pytest.mark.parametrize("name", slow_unless({"cser_cifar100", "squad_seeds"}.__contains__, sweeps.names()))
def test_every_method_of_every_sweep_is_a_valid_run(name: str) -> None:
    each = {
        tuple(o for o in r.overrides if not o.startswith(("optimizer.", "seed="))): r
        for r in sweeps.rows(sweeps.load(name))
    }
    for row in each.values():
        resolved = compose.resolve(compose.compose([*row.overrides, "scale=quick"]))
        assert resolved["exp"] == sweeps.load(name).exp


def test_a_rate_that_is_typed_twice_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["sweep=cser_imagenet", "scale=quick", "--methods", "cser", "--seeds", "0,0", "--rates", "0.1,1e-1,0.2"]
    assert sweep.main([*typed, "--dry-run"]) == 0
    assert "6 runs to do" in capsys.readouterr().out  # 3 settings


def test_a_part_of_a_grid() -> None:
    grid = sweeps.load("cser_cifar100")
    (only,) = sweeps.rows(grid, ["sgdm_nesterov"], [0.1], [3])
    assert only.overrides == ("+exp=cser_cifar100", "optimizer=sgdm_nesterov", "optimizer.lr=0.1", "seed=3")
    first = sweeps.rows(grid, ["cser"], None, [0])[0]
    assert first.title == "cser, gradient_ratio=4, model_ratio=2, reset_every=2, lr=0.05, seed=0"
    with pytest.raises(UserError, match="no 'lion'; there are: sgdm_nesterov, cser, "):
        sweeps.rows(grid, ["lion"])


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Overrides of the runs that were started; each leaves a record, the second one breaks."""
    ran: list[list[str]] = []

    def launch(composed: Any, *, group: str | None) -> None:
        ran.append(composed.overrides)
        if len(ran) == 2:
            raise RunFailed("rank 0: killed")
        typed = [privacy.clean_text(o, Path.cwd()) for o in composed.overrides]
        made = a_record("Birder", 1.0, id=f"r{len(ran)}", exp="cser_imagenet", overrides=typed)
        record.write(made, tmp_path)

    monkeypatch.setattr(start, "launch", launch)
    monkeypatch.setattr(tables, "write", lambda *_: None)
    return ran


def test_what_is_recorded_is_not_run_again(
    started: list[list[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = ["sweep=cser_imagenet", f"results_dir={tmp_path}", "scale=quick", "--methods", "cser"]
    assert sweep.main([*command, "--dry-run"]) == 0
    assert "3 runs to do, 0 recorded" in capsys.readouterr().out
    assert sweep.main(command) == 1  # the second failed
    assert "1 of 3 runs failed: the same command tries them again" in capsys.readouterr().err
    assert [o[2] for o in started] == [f"optimizer.gradient_ratio={r}" for r in (64, 512, 2048)]
    assert sweep.main(command) == 0
    assert len(started) == 4
    assert started[3][2] == "optimizer.gradient_ratio=512"
    # A study is gone on with on a CPU that wants other kernels.
    assert sweep.main([*command, "train.precision=bf16", "train.bf16_matmul=fp32", "--dry-run"]) == 0
    assert "3 runs to do, 0 recorded" in capsys.readouterr().out
    assert sweep.main([*command, "train.precision=bf16"]) == 0
    assert sweep.main([*command, "train.precision=bf16", "train.bf16_matmul=fp32", "--dry-run"]) == 0
    assert "0 runs to do, 3 recorded" in capsys.readouterr().out


CHOOSING = """
exp: digits
seeds: [3, 1]
choose: true
rates: [0.1, 0.2]
overrides: [cluster=virtual, train.epochs=1]
methods:
  sgdm: {}
  birder: {rates: [0.5], keys: [bits, beta2], settings: [[weyl, 0.999], [independent, null]]}
"""


def test_a_run_that_was_changed_midway_is_not_the_one_that_is_asked_for(tmp_path: Path) -> None:
    """With another number of ranks it is: what it was changed in is no option of the method."""
    for place, key in enumerate(("optimizer.lr", "cluster.nodes")):
        r = a_record("Birder", 1.0, id=f"r{place}", exp="digits", overrides=[f"seed={place}"])
        record.write(dataclasses.replace(r, config={**r.config, "resume_changed": [[key, 1, 2]]}), tmp_path)
    study = Study("digits", str(tmp_path))
    assert [study.done(asked([f"seed={place}"])) is None for place in range(2)] == [True, False]


def test_a_run_that_has_ended_well_is_not_hidden_by_a_later_failure(tmp_path: Path) -> None:
    for place, status in enumerate(("failed", "completed", "failed")):
        about = {"id": f"r{place}", "time": f"2026-01-0{place + 1}T00:00:00Z", "status": status, "reason": "killed"}
        record.write(a_record("Birder", 1.0, exp="digits", overrides=["seed=1"], **about), tmp_path)
    there = Study("digits", str(tmp_path)).done(asked(["seed=1"]))
    assert there is not None
    assert there.id == "r1"


@pytest.mark.parametrize(("higher", "best"), [(True, 180.0), (False, 150.0)])
def test_the_better_of_two_rates_is_the_one_with_the_lower_perplexity(higher: bool, best: float) -> None:
    found = [
        a_record("Birder", metric={"name": "x", "value": value, "higher_is_better": higher}) for value in (150.0, 180.0)
    ]
    assert max(found, key=lambda r: score(r) or 0.0).metric["value"] == best
    kept = [
        dataclasses.replace(r, metric={**r.metric, "value": 0.0, "all": {"held_out": r.metric["value"]}}) for r in found
    ]
    assert max(kept, key=lambda r: score(r) or 0.0).metric["all"]["held_out"] == best


def test_words_and_nothing_are_values_and_methods_have_rates_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(CHOOSING)
    rows = sweeps.rows(sweeps.load(str(tmp_path / "mine.yaml")))
    assert [row.title for row in rows] == [
        *("sgdm, lr=0.1, seed=3", "sgdm, lr=0.2, seed=3", "sgdm, lr=0.1, seed=1", "sgdm, lr=0.2, seed=1"),
        *("birder, bits=weyl, beta2=0.999, lr=0.5, seed=3", "birder, bits=weyl, beta2=0.999, lr=0.5, seed=1"),
        *(
            "birder, bits=independent, beta2=null, lr=0.5, seed=3",
            "birder, bits=independent, beta2=null, lr=0.5, seed=1",
        ),
    ]
    assert all(row.overrides[:3] == ("+exp=digits", "cluster=virtual", "train.epochs=1") for row in rows)
    resolved = compose.resolve(compose.compose(rows[-1].overrides))
    assert (resolved["optimizer"]["beta2"], resolved["optimizer"]["lr"]) == (None, 0.5)


@pytest.mark.parametrize(
    ("optimizer", "key", "value"),
    [
        ("cser", "nesterov", True),
        ("cser", "nesterov", False),
        ("onebit_adam", "warmup_steps", 1234567),
        ("sgdm", "lr", 0.00123456789),
    ],
)
def test_a_value_of_a_grid_is_the_one_that_is_run(optimizer: str, key: str, value: object, tmp_path: Path) -> None:
    grid = {"keys": [key], "settings": [[value]]} if key != "lr" else {"rates": [value]}
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps({"exp": "digits", "seeds": [0], "methods": {optimizer: grid}}))
    (row,) = sweeps.rows(sweeps.load(str(path)))
    composed = compose.compose(row.overrides)
    compose.check(composed)
    found = compose.resolve(composed)["optimizer"][key]
    assert (type(found), found) == (type(value), value)


def test_other_seeds_are_run_with_the_best_rate_of_the_first_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is held out decides, not the test data; a rate that ended in no number is never the best."""
    (tmp_path / "mine.yaml").write_text(CHOOSING)
    ran: list[tuple[str, ...]] = []
    lost = {"optimizer.lr=0.5"}

    def launch(composed: Any, *, group: str | None) -> None:
        typed = [privacy.clean_text(o, Path.cwd()) for o in composed.overrides]
        rate = next(o for o in typed if o.startswith("optimizer.lr="))
        ran.append((rate, next(o for o in typed if o.startswith("seed="))))
        known: dict[str, Any] = {"id": f"r{len(ran)}", "exp": "digits", "overrides": typed}
        if rate in lost:
            reason = "rank 0 on node 0: RuntimeError: the loss is nan at step 3: lower optimizer.lr"
            record.write(a_record("Birder", status="failed", reason=reason, **known), tmp_path)
            raise RunFailed(reason)
        held_out = {"optimizer.lr=0.1": 70.0, "optimizer.lr=0.2": 80.0}[rate]
        metric = {"name": "top1", "value": -held_out, "higher_is_better": True, "all": {"held_out": held_out}}
        record.write(a_record("SGDM fp32", metric=metric, **known), tmp_path)

    monkeypatch.setattr(start, "launch", launch)
    monkeypatch.setattr(tables, "write", lambda *_: None)
    command = [f"sweep={tmp_path / 'mine.yaml'}", f"results_dir={tmp_path}"]
    assert sweep.main([*command, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "7 runs to do at most, 0 recorded" in said  # of two rates one goes on
    assert said.count("to run if its learning rate does best") == 4
    assert sweep.main(command) == 0
    assert ran == [
        *(("optimizer.lr=0.1", "seed=3"), ("optimizer.lr=0.2", "seed=3"), ("optimizer.lr=0.2", "seed=1")),
        *(("optimizer.lr=0.5", "seed=3"), ("optimizer.lr=0.5", "seed=3")),
    ]
    assert "sgdm, lr=0.1, seed=1: its learning rate is not the best" in capsys.readouterr().out
    assert sweep.main(command) == 0
    assert len(ran) == 5
    # One of the rates is not recorded any more: nothing is chosen until it is.
    (tmp_path / "records" / "r1.json").unlink()
    assert sweep.main([*command, "--seeds", "1", "--methods", "sgdm"]) == 0
    assert "sgdm, lr=0.1, seed=1: its learning rates are not all recorded" in capsys.readouterr().out
    assert len(ran) == 5


def test_a_sweep_ends_with_its_accuracies_and_an_interrupted_one_says_how_it_continues(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(CHOOSING)
    ran: list[float] = []

    def launch(composed: Any, *, group: str | None) -> None:
        if len(ran) == 1:
            ran.append(0.0)
            raise KeyboardInterrupt
        rate = float(compose.resolve(composed)["optimizer"]["lr"])
        ran.append(rate)
        typed = [privacy.clean_text(o, Path.cwd()) for o in composed.overrides]
        metric = {"name": "top1", "value": 100 * rate, "target": None, "higher_is_better": True}
        known: dict[str, Any] = {"id": f"r{len(ran)}", "exp": "digits", "seed": 3, "overrides": typed}
        data = {"name": "digits", "synthetic": False}
        made = a_record("SGDM fp32", 1.0, metric=metric, data=data, config={"optimizer.lr": rate}, **known)
        record.write(made, tmp_path)

    monkeypatch.setattr(start, "launch", launch)
    monkeypatch.setattr(tables, "write", lambda *_: None)
    command = [f"sweep={tmp_path / 'mine.yaml'}", f"results_dir={tmp_path}", "--methods", "sgdm", "--seeds", "3"]
    assert sweep.main(command) == 130
    assert "type the same command" in capsys.readouterr().out
    assert sweep.main(command) == 0
    assert ran == [0.1, 0.0, 0.2]
    grid = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in line.split("│")[1:4]] for line in grid] == [
        ["SGDM fp32", "0.1", "10.00"],
        ["SGDM fp32", "0.2", "20.00"],
    ]


def test_two_seeds_choose_by_their_mean_and_entries_have_names_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = CHOOSING.replace("[3, 1]", "[3, 1, 2]").replace("choose: true", "choose: true\nchoose_seeds: 2")
    text += "  bf16: {optimizer: sgdm, overrides: [optimizer.wire=bf16]}\n"
    (tmp_path / "other.yaml").write_text(text.replace("epochs=1", "epochs=1, ++workload.held_out=100"))
    assert sweep.main([f"sweep={tmp_path / 'other.yaml'}", f"results_dir={tmp_path}", "--dry-run"]) == 2
    assert "parity.choose_seeds=2" in capsys.readouterr().err  # tables would choose by one, and take another rate
    (tmp_path / "mine.yaml").write_text(
        text.replace("epochs=1", "epochs=1, ++workload.held_out=100, parity.choose_seeds=2")
    )
    rows = sweeps.rows(sweeps.load(str(tmp_path / "mine.yaml")), ["bf16"])
    assert [row.title for row in rows] == [
        f"sgdm, wire=bf16, lr={lr}, seed={seed}"
        for lr, seed in ((0.1, 3), (0.1, 1), (0.2, 3), (0.2, 1), (0.1, 2), (0.2, 2))
    ]
    for row, held_out in zip(rows[:4], (90.0, 50.0, 71.0, 72.0), strict=True):  # the first seed alone would choose 0.1
        metric = {"name": "top1", "value": 0.0, "higher_is_better": True, "all": {"held_out": held_out}}
        typed = [*row.overrides, f"results_dir={tmp_path}"]
        name = "".join(row.overrides[-2:]).replace(".", "").replace("=", "")
        record.write(a_record("SGDM bf16", metric=metric, id=name, exp="digits", overrides=typed), tmp_path)
    command = [f"sweep={tmp_path / 'mine.yaml'}", f"results_dir={tmp_path}", "--dry-run", "--methods", "bf16"]
    assert sweep.main(command) == 0
    said = capsys.readouterr().out
    assert "lr=0.2, seed=2: to run" in said
    assert "1 runs to do, 4 recorded" in said


def test_a_run_that_is_not_waited_for_is_found_under_way_by_the_same_command(tmp_path: Path) -> None:
    """Until its job has ended nothing is recorded: without a lasting name it would be submitted once more."""
    (tmp_path / "mine.yaml").write_text(CHOOSING)
    rows = sweeps.rows(sweeps.load(str(tmp_path / "mine.yaml")), ["sgdm"], [0.4], [1])
    given = ["cluster=slurm", "cluster.wait=false", f"results_dir={tmp_path}", f"output_dir={tmp_path}"]
    ids = []
    for _ in range(2):
        grid = SweepQueue(rows, Study("digits", str(tmp_path)), given, waits=False)
        spec = compose.make_spec(grid.composed(rows[0].overrides))
        spec.save()
        ids.append(spec.id)
        assert grid.name(rows[0].overrides) == asked(spec.overrides)
    assert ids[0] == ids[1]  # by which launch/slurm finds a job that has not ended


def test_further_seeds_of_one_given_rate_wait_for_no_choice(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(CHOOSING)
    chooses = sweeps.load(str(tmp_path / "mine.yaml"))
    (alone,) = sweeps.rows(chooses, ["sgdm"], [0.4], [1])
    assert (alone.title, alone.candidates) == ("sgdm, lr=0.4, seed=1", ())
    first, other = sweeps.rows(chooses, ["sgdm"], [0.4], [3, 1])
    assert other.candidates == ((first.overrides,),)  # not run where the first one's loss diverged


def test_a_rate_chosen_in_shorter_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are runs of their own: every seed, the first too, is run in full with the best rate; one rate is not chosen."""
    (tmp_path / "mine.yaml").write_text(
        CHOOSING.replace("choose: true", "choose: true\nchoose_at: [train.max_steps=5]")
    )
    rows = sweeps.rows(sweeps.load(str(tmp_path / "mine.yaml")))
    assert [row.title for row in rows if "optimizer=sgdm" in row.overrides] == [
        *("sgdm, lr=0.1, seed=3, train.max_steps=5", "sgdm, lr=0.2, seed=3, train.max_steps=5"),
        *("sgdm, lr=0.1, seed=3", "sgdm, lr=0.1, seed=1", "sgdm, lr=0.2, seed=3", "sgdm, lr=0.2, seed=1"),
    ]
    assert [row.place for row in rows[:6]] == [0, 0, 0, 0, 1, 1]
    assert {row.candidates for row in rows[2:6]} == {tuple((row.overrides,) for row in rows[:2])}
    assert not any(row.candidates or "steps" in row.overrides[-1] for row in rows[6:])  # Birder's one rate
    for row, held_out in zip(rows[:2], (70.0, 80.0), strict=True):
        metric = {"name": "top1", "value": 0.0, "higher_is_better": True, "all": {"held_out": held_out}}
        typed = [*row.overrides, f"results_dir={tmp_path}"]
        record.write(
            a_record("SGDM fp32", metric=metric, id=f"r{row.title[9:12]}", exp="digits", overrides=typed), tmp_path
        )
    command = [f"sweep={tmp_path / 'mine.yaml'}", f"results_dir={tmp_path}", "--dry-run", "--methods", "sgdm"]
    assert sweep.main(command) == 0
    said = capsys.readouterr().out
    assert "2 runs to do, 2 recorded" in said
    assert "sgdm, lr=0.1, seed=3: its learning rate is not the best" in said
    assert "sgdm, lr=0.2, seed=3: to run" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "say which sweep: sweep=NAME, one of cser_cifar100, cser_imagenet"),
        (["sweep=cser"], "no sweep 'cser'; there are: cser_images, cser_cifar100"),
        (["sweep=cser_imagenet", "--methods", "lion"], "no 'lion'"),
        (["sweep=cser_imagenet", "--methods", ""], "nothing is left to run"),
        (["sweep=cser_imagenet", "--seeds", "x"], "--seeds=x: give numbers"),
        (["sweep=cser_imagenet", "--seeds", "0.5"], "--seeds=0.5: give whole numbers"),
        (["sweep=cser_imagenet", "--seeds", "nan"], "--seeds=nan: give numbers"),
        (["sweep=cser_imagenet", "--rates", "0.1,inf"], "--rates=0.1,inf: give numbers"),
        (["sweep=cser_imagenet", "seed=3"], "seed=3 is the sweep's own: use --methods, --rates and --seeds"),
        (["sweep=digits_workers", "run_name=mine", "--dry-run"], "run_name=mine is of one run"),
        (["sweep=cser_imagenet", "optimizer.model_ratio=4"], "optimizer.model_ratio=4 is the sweep's own"),
        (["sweep=cser_imagenet", "scale=quick", "train.epoch=3"], "did you mean train.epochs"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(sweep.main, arguments, words, capsys)


def test_a_results_folder_that_cannot_be_made_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a full disk; the file that is locked lies in it too."""
    monkeypatch.setattr(Path, "mkdir", Mock(side_effect=OSError(28, "No space left on device")))
    given = ["sweep=digits_workers", f"results_dir={tmp_path}/none"]
    refused(sweep.main, given, "No space left on device; set results_dir=FOLDER", capsys)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("exp: digits\nseeds: []\nmethods: {}", "seeds: "),
        ("exp: digits\nseeds: [0]\nmethods: {sgdm: {keys: [lr], settings: [[1, 2]]}}", "has 2 values for the 1 keys"),
        ("exp: digits\nseeds: [0]\nmethods: {}\nspeed: 1", "speed: "),
        ("exp: digits\nseeds: [0]\nmethods: {}\nchoose_at: [train.epochs=1]", "say choose: true"),
        ("exp: digits\nseeds: [0]\nmethods: {}\nchoose: true\nchoose_seeds: 2", "choose_seeds: 2 of 1 seeds"),
        ("exp: [", "is not a readable sweep"),
        ("exp: digits # caf\xe9", "is not a readable sweep: unacceptable character"),
    ],
)
def test_mistakes_in_a_sweep(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(UserError) as error:
        sweeps.load(str(path))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_sweep_asks_for_the_scale_where_auto_would_be_the_papers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With GPUs and data `auto` is paper, for which a study's other settings are not."""
    monkeypatch.setattr("launch.probe.visible_gpus", lambda: ["0"])
    given = ["sweep=ptb_seeds", f"data.path={tmp_path}", f"results_dir={tmp_path}", "--dry-run"]
    assert sweep.main(given) == 2
    assert "scale=quick" in capsys.readouterr().err
    assert sweep.main([*given, "scale=quick"]) == 2
    assert "ptb.train.txt" in capsys.readouterr().err
