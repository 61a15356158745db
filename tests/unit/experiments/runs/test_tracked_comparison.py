"""A comparison in W&B and TensorBoard: read back, it is what was printed. Its records are made up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from experiments.config import compose
from experiments.records import record
from experiments.report import tables
from experiments.runs.tracked_comparison import TrackedComparison
from experiments.tracking import wandb_run
from experiments.tracking.tracked import TrackedRun
from tests.helpers import wandb_file
from tests.helpers.records import run
from tests.helpers.wandb_file import columns, shown_table

METHODS = {"SGDM fp32": 20.0, "SGDM bf16": 15.0, "Birder": 10.0, "no communication": 8.0}
ROUNDS = 4


def records(group: str, results: Path) -> None:
    """Interleaved runs of a group, made up."""
    for method, ms in METHODS.items():
        turns = {"world": "w", "ms": [ms + k / 10 for k in range(ROUNDS)], "steps": [2] * ROUNDS}
        turns |= {"dilations": [3.0] * ROUNDS}
        turns |= {"seed": 0, "held": "all", "repeated": False, "drift": 0.0, "busy": None}
        record.write(run(method, ms, id=f"{group}-{method}".replace(" ", "_"), group=group, turns=turns), results)


def overrides(folder: Path, *more: str) -> list[str]:
    return ["+exp=digits", "cluster.nodes=2", f"results_dir={folder}/results", f"output_dir={folder}/outputs", *more]


def tracked(folder: Path, *more: str) -> list[list[str]]:
    """Records a comparison as compare.py does. The rows that a terminal shows, headings first."""
    with TrackedComparison([compose.compose(overrides(folder, *more))], "g") as comparison:
        records("an_earlier_one", folder / "results")
        records("g", folder / "results")
        tables.write(folder / "results", "resnet50")
        (printed,) = tables.print_group(folder / "results", "g")
        comparison.record([printed])
        comparison.status = 0
    headings, rows = printed.printed()
    return [headings, *rows]


def test_intervals_stand_in_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    printed = tracked(tmp_path, "wandb=offline")
    run = wandb_file.read(tmp_path)
    table, numbers = run.table("comparison"), run.table("rows")
    assert [table["columns"], *table["data"]] == printed
    rows = {row[0]: dict(zip(numbers["columns"], row, strict=True)) for row in numbers["data"]}
    birder = rows["Birder"]
    assert birder["vs_fp32"] == pytest.approx(2.0)
    assert 1.9 < birder["vs_fp32_low"] <= birder["vs_fp32"] <= birder["vs_fp32_high"] < 2.1
    assert birder["of_bound"] == pytest.approx(0.8)
    assert run.summary["vs_fp32/Birder"] == pytest.approx(2.0)
    rounds = run.table("rounds")
    assert len(rounds["data"]) == len(METHODS) * ROUNDS  # those of this comparison
    assert {row[0] for row in rounds["data"]} == {*METHODS}
    assert {row[-1].partition("-")[0] for row in rounds["data"]} == {"g"}
    assert {name for row in run.history for name in row if name.startswith("step_ms/")} == {
        f"step_ms/{method}" for method in METHODS
    }
    assert [row["step_ms/Birder"] for row in run.history if "step_ms/Birder" in row] == [10.0, 10.1, 10.2, 10.3]


def test_a_paper_comparison_records_the_table_that_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from experiments.report import speedup_table

    with TrackedComparison([compose.compose(overrides(tmp_path, "wandb=offline", "wandb.group=mine"))], "g") as made:
        records("g", tmp_path / "results")
        printed = tables.print_group(tmp_path / "results", "g", view=speedup_table.as_papers)
        made.record(printed)
    run = wandb_file.read(tmp_path)
    headings, rows = printed[0].printed()
    table = run.table("comparison")
    assert (table["columns"], table["data"]) == (headings, rows)
    assert (run.group, run.name) == ("mine", "g")


def test_tensorboard_has_the_same_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    printed = tracked(tmp_path, "tracker=tensorboard")
    (folder,) = (tmp_path / "outputs").rglob("tensorboard")
    assert f"tensorboard --logdir {folder}" in capsys.readouterr().out
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    (text,) = found.Tensors("comparison/text_summary")
    lines = text.tensor_proto.string_val[0].decode().splitlines()
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    assert [rows[0], *rows[2:]] == printed
    assert [e.value for e in found.Scalars("step_ms/Birder")] == pytest.approx([10.0, 10.1, 10.2, 10.3])
    assert found.Tags()["images"]
    assert not list(tmp_path.rglob("*.wandb"))


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_failure_of_wandb_is_one_line_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    wandb = pytest.importorskip("wandb")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((wandb, "init", full) if broken == "init" else (wandb.Run, broken, full)))
    printed = tracked(tmp_path, "wandb=offline")
    shown = capsys.readouterr()
    assert columns(shown_table(shown.out)) == columns(printed)
    (line,) = shown.err.splitlines()
    assert line.startswith("warning: W&B: ")
    assert "No space left on device" in line
    monkeypatch.undo()
    wandb.teardown()


def test_the_tracked_run_ends_as_the_comparison_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(TrackedRun, "finish", lambda self, summary, exit_code: ended.append(exit_code))
    for status in (0, 1, 2):
        with TrackedComparison([compose.compose(overrides(tmp_path))], "g") as comparison:
            comparison.status = status

    def breaks() -> None:
        with TrackedComparison([compose.compose(overrides(tmp_path))], "g") as comparison:
            comparison.status = 0
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk"):
        breaks()
    assert ended == [0, 1, 2, 1]


def test_a_refused_comparison_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    with TrackedComparison([compose.compose(overrides(tmp_path, "wandb=offline"))], "g") as comparison:
        assert comparison.folder.is_dir()
        comparison.status = 2
    assert list(tmp_path.rglob("*")) == [tmp_path / "outputs"]


@pytest.mark.slow
def test_the_next_run_has_places_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that were set for one run are not there for a child process, or the next comparison."""
    pytest.importorskip("wandb")
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    before = dict(os.environ)
    config = compose.resolve(compose.compose(overrides(tmp_path, "wandb=offline")))
    for number in (1, 2):
        run = wandb_run.begin(wandb_run.About(f"r{number}", None, "train", config, tmp_path / str(number)))
        run.table("t", ["a"], [["b"]])
        run.finish({})
        assert wandb_file.read(tmp_path / str(number)).table("t")["data"] == [["b"]]
        assert list((tmp_path / str(number)).rglob("staging/*"))
    assert dict(os.environ) == before
