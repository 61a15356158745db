"""The Trainer fine-tuning on files of GLUE, 2 ranks: examples/trainer_glue.py with a small random model, made-up files."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import load
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.slow
TRAIN, DEV, STEPS = 64, 17, 6
WORDS = {0: ["dull", "bad", "boring"], 1: ["good", "bright", "charming"]}


def write_files(root: Path) -> None:
    """SST-2 and MRPC as GLUE's archive has them: MRPC with a byte order mark, and quotes that are no quotes."""
    chosen = random.Random(0)

    def sentence(label: int) -> str:
        return f'a {chosen.choice(WORDS[label])} "film, {chosen.choice(WORDS[label])} throughout'

    for split, count in (("train", TRAIN), ("dev", DEV)):
        labels = [k % 2 for k in range(count)]
        sst2 = ["sentence\tlabel", *(f"{sentence(k)}\t{k}" for k in labels)]
        mrpc = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
        mrpc += [f"{k}\t{n}\t{n}\t{sentence(0)}\t{sentence(1 - k)}" for n, k in enumerate(labels)]
        for folder, lines, start in (("SST-2", sst2, ""), ("MRPC", mrpc, "\ufeff")):
            (root / folder).mkdir(parents=True, exist_ok=True)
            (root / folder / f"{split}.tsv").write_text(start + "\n".join(lines) + "\n", encoding="utf-8")


def on_two_ranks(rank: int, world: int, folder: Path) -> dict[str, Any]:
    os.environ["LOCAL_RANK"] = str(rank)
    glue = load("examples/trainer_glue.py")

    def run(name: str, *arguments: str, stop: int | None = None) -> dict[str, Any]:
        settings = ["--data", str(folder / "glue"), "--steps", str(STEPS), "--save-every", "2", "--batch", "4"]
        return glue.run(glue.parse([str(folder / name), *settings, *arguments]), stop)

    found = {"whole": run("whole"), "begun": run("broken", stop=4)}
    if rank == 0:  # a kill in the middle of a checkpoint
        (folder / "broken/checkpoint-5").mkdir()
    found["resumed"] = run("broken")
    found["adamw"] = run("adamw", "--optimizer", "adamw")
    found["mrpc"] = run("mrpc", "--task", "mrpc", "--lr", "0.01")
    return found


def test_the_trainer_on_files_of_glue_resumes_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    write_files(tmp_path / "glue")
    first, second = run_ranks(on_two_ranks, 2, tmp_path)
    assert first == second  # the same parameters and accuracies on both ranks
    assert first["resumed"] == first["whole"]
    parameters = [first[name]["parameters"] for name in ("whole", "begun", "adamw", "mrpc")]
    assert len(set(parameters)) == 4
    assert all(0 <= part["accuracy"] <= 1 for part in first.values())
    assert all(round(part["accuracy"] * DEV, 6).is_integer() for part in first.values())  # of the whole development set


def test_files_that_are_not_glues_are_refused_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    glue = load("examples/trainer_glue.py")
    write_files(tmp_path)
    assert glue.read(tmp_path, "mrpc", "dev")[1] == [k % 2 for k in range(DEV)]
    assert all('"film, ' in text for column in glue.read(tmp_path, "mrpc", "train")[0] for text in column)
    with pytest.raises(SystemExit, match=r"error: no SST-2/dev.tsv in .*: give GLUE's folder with --data"):
        glue.read(tmp_path / "elsewhere", "sst2", "dev")
    (tmp_path / "SST-2/dev.tsv").write_text("index\tsentence\n0\ta test set has no labels\n")
    with pytest.raises(SystemExit, match=r"dev.tsv is not a labelled file of SST-2: it needs the columns sentence"):
        glue.read(tmp_path, "sst2", "dev")


@pytest.mark.parametrize("option", ["--steps", "--save-every", "--batch"])
def test_no_steps_or_rows_are_refused_in_one_line(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--steps 0 trained three epochs of it, under the title of 0 steps."""
    pytest.importorskip("accelerate")
    glue = load("examples/trainer_glue.py")
    for number in ("0", "-5"):
        with pytest.raises(SystemExit):
            glue.parse(["folder", "--data", "glue", f"{option}={number}"])
        assert f"argument {option}: {number} is not a whole number above 0" in capsys.readouterr().err
