"""`make gpu-check`: the whole of it rehearsed on the CPU, and what it says where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from birder.kernels import reference
from experiments import gpu_check
from experiments.bench import gpu_kernels, gpu_methods, gpu_parts, hooks
from experiments.bench import kernels as bench_kernels
from tests.helpers import ROOT
from tests.helpers.commands import refused
from tests.helpers.kernel_cases import cases


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "gpus", lambda: 0)
    refused(gpu_check.main, ["--out", str(tmp_path)], "needs a CUDA GPU and finds none", capsys)
    assert list(tmp_path.iterdir()) == []


def test_nothing_that_could_be_checked_is_no_success(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "gpus", lambda: 1)
    for more in ([], ["--rehearse"]):
        refused(gpu_check.main, ["--parts", "nccl", "--out", str(tmp_path), *more], "needs at least two GPUs", capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--parts", "kernels,speed"], "--parts knows no 'speed'"),
        (["--minutes", "0"], "--minutes must be positive"),
        (["--minutes", "nan"], "--minutes must be positive"),
        (["--minutes", "0.05"], "give 1 or more"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(gpu_check.main, arguments, words, capsys)


def test_a_file_in_the_place_of_the_reports_folder_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    refused(gpu_check.main, ["--rehearse", "--out", str(tmp_path / "file")], "cannot write to", capsys)


ELSEWHERE = ("accuracy",)
"""Parts that need more than torch, Triton and a few small packages."""
ABSENT = ("hydra", "omegaconf", "pydantic", "pytest", "wandb")


@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.slow
@pytest.mark.long
def test_a_rehearsal_runs_every_part(tmp_path: Path, bare: bool) -> None:
    """`bare`: as where this project's packages are not installed, as on a GPU's machine without network."""
    stand_ins = tmp_path / "absent"
    for name in ABSENT if bare else ():
        (stand_ins / name).mkdir(parents=True)
        (stand_ins / name / "__init__.py").write_text(
            f"raise ModuleNotFoundError('No module named {name}', name={name!r})"
        )
    parts = [name for name in gpu_check.LIMITS if (name not in ELSEWHERE) is bare]
    # Less than a minute on an idle machine; the limit is for one that is not.
    command = [
        sys.executable,
        "experiments/gpu_check.py",
        "--rehearse",
        "--minutes",
        "4.7",
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(
        [*command, "--parts", ",".join(parts)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(stand_ins)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "out").iterdir()
    report = (folder / "report.md").read_text()
    assert "says anything about a GPU" in report
    for name in parts:
        if name != "nccl":
            found, complete = gpu_check.rows(folder, name)
            assert found, name
            assert complete, name
            assert f"## {name}" in report
    if bare:
        methods, _ = gpu_check.rows(folder, "methods")
        resumed = {row["method"] for row in methods if row.get("resume_equal")}
        assert resumed >= {"Birder", "OneBitAdam", "CSER", "SLAMB"}


def test_without_its_packages_there_are_no_whole_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_parts, "FOR_RUNS", ("torch", "no_such_package"))
    (row,) = gpu_parts.accuracy(False, tmp_path)
    assert not row["ok"]
    assert "no_such_package" in row["error"]
    assert "torch" not in row["error"]


@pytest.mark.slow
def test_after_a_failure_new_ranks_go_on_with_the_next_method() -> None:
    first, second = gpu_methods.measure(1, "gloo", "cpu", steps=4, only=range(2), wrong="Birder")
    assert (first["method"], first["ok"]) == ("Birder", False)
    assert first["error"] == "rank 0: RuntimeError: on purpose"
    assert (second["method"], second["ok"]) == ("Birder one-phase", True)


def test_every_group_of_kernels_has_cases() -> None:
    found = cases(reference, "cuda")
    assert gpu_kernels.groups() == list(found)
    assert set(gpu_kernels.REHEARSED) <= set(found)
    assert min(len(runs) for runs in found.values()) >= 1


@pytest.mark.parametrize(
    ("row", "light"),
    [
        ({"overhead": 0.02, "more_waits": 0}, True),
        ({"overhead": 0.04, "more_waits": 0}, False),
        ({"overhead": 0.02, "more_waits": 1}, False),
        ({"overhead": 0.02, "more_waits": 1, "unseen": True}, True),
        ({"overhead": 0.02, "more_waits": 2, "unseen": True}, False),
        ({"error": "x"}, False),
        ({"overhead": 0.02}, True),
    ],
)
def test_when_a_hook_is_light(row: dict[str, Any], light: bool) -> None:
    assert gpu_parts.hook_is_light(row, judged=True) is light
    assert gpu_parts.hook_is_light({**row, "overhead": 1.0}, judged=False) is (light or row.get("overhead") == 0.04)


def test_a_hook_that_fails_leaves_the_others_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    class Training:
        def __init__(self, options: dict[str, Any], *_: Any) -> None:
            if not options:
                raise RuntimeError("CUDA out of memory")
            self.step = options["ms"]

        def queued(self, *_: Any) -> dict[str, Any]:
            return {"launches": 7, "waits": 1}

        def close(self) -> None:
            pass

    monkeypatch.setattr(hooks, "Training", Training)
    monkeypatch.setattr(hooks, "_step_ms", lambda step, *_: step)
    asked: dict[str, dict[str, Any]] = {"one": {"ms": 2.0}, "two": {}, "three": {"ms": 3.0}}
    cpu = torch.device("cpu")
    rows = list(hooks.measure_model(cpu, "tiny", 4, methods=asked))
    failed = {"model": "tiny", "batch": 4, "method": "two", "error": "RuntimeError: CUDA out of memory"}
    assert rows[1] == failed
    assert (rows[2]["step_ms"], rows[2]["overhead_ms"], rows[2]["overhead"]) == (3.0, 1.0, 0.5)
    counted = list(hooks.count_model(cpu, "tiny", 4, methods=asked))
    assert counted[1] == failed
    assert (counted[2]["launches"], counted[2]["more_waits"]) == (7, 0)
    # Without what all are compared with, nobody else takes its place.
    rows = list(hooks.measure_model(cpu, "tiny", 4, methods={"one": {}, "two": {"ms": 2.0}}))
    assert rows[1]["step_ms"] == 2.0
    assert "overhead" not in rows[1]


def test_a_gpu_is_busy_while_what_is_timed_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the time would be that which the host takes to launch a kernel."""
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("record")

        def synchronize(self) -> None:
            done.append("synchronize")

        def elapsed_time(self, other: Event) -> float:
            return 5.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append("busy"))
    assert bench_kernels._seconds(lambda: done.append("kernel"), torch.device("cuda")) == 0.005
    assert done == ["busy", "record", "kernel", "record", "synchronize"]


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


def test_a_folder_for_the_report_is_that_of_the_callers_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Parts run in the repository's root."""
    given: list[Path] = []
    monkeypatch.setattr(gpu_check, "run_part", lambda name, folder, rehearse, limit: given.append(folder))
    monkeypatch.chdir(tmp_path)
    gpu_check.main(["--rehearse", "--parts", "kernels", "--out", "here"])
    assert given == list((tmp_path / "here").iterdir())


def test_a_part_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    gpu_check.end(process)
    assert process.poll() is not None
