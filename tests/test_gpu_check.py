"""`make gpu-check`: the whole of it rehearsed on the CPU, and what it says where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import gpu_check

ROOT = Path(__file__).parent.parent


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "gpus", lambda: 0)
    assert gpu_check.main(["--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "needs a CUDA GPU and finds none" in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--parts", "kernels,speed"], "--parts knows no 'speed'"), (["--minutes", "0"], "--minutes must be positive")],
)
def test_bad_input_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_rehearsal_runs_every_part(tmp_path: Path) -> None:
    # Less than a minute on an idle machine; the limit is for one that is not.
    command = [sys.executable, "experiments/gpu_check.py", "--rehearse", "--minutes", "4.7", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = tmp_path.iterdir()
    report = (folder / "report.md").read_text()
    assert "says anything about a GPU" in report
    for name in gpu_check.LIMITS:
        if name != "nccl":
            found, complete = gpu_check.rows(folder, name)
            assert found, name
            assert complete, name
            assert f"## {name}" in report
    methods, _ = gpu_check.rows(folder, "methods")
    assert {row["method"] for row in methods if row.get("equal")} >= {"Birder", "OneBitAdam", "CSER", "SLAMB"}


def test_what_is_found_before_a_part_is_cut_off_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def cut(name: str, folder: Path, rehearse: bool, limit: float) -> None:
        lines = [{"ok": True, "step_ms": 1.5}, {"ok": False, "error": "x"}]
        if name == "kernels":
            lines = [{"ok": True}, {"done": True}]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"ok": tr')

    monkeypatch.setattr(gpu_check, "run_part", cut)
    assert gpu_check.main(["--rehearse", "--parts", "kernels,hooks", "--out", str(tmp_path)]) == 1
    report = next(tmp_path.iterdir()) / "report.md"
    assert "1 results, 0 not as they must be; complete" in report.read_text()
    assert "2 results, 1 not as they must be; cut off by its time limit" in report.read_text()


def test_a_part_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    gpu_check.end(process)
    assert process.poll() is not None
