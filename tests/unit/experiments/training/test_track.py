"""Progress, curve and W&B: rank 0 only, correct across a resume, and never the death of a run."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import yaml

from experiments.config import compose
from experiments.config.schema import Config, Wandb
from experiments.records.record import ROOT
from experiments.tracking import wandb_run
from experiments.tracking.tracked import TrackedRun
from experiments.training import track
from experiments.training.track import CurveFile, Tracker
from launch.errors import UserError
from launch.spec import RunSpec
from tests.helpers import wandb_file


def make_spec(run_dir: Path, mode: str = "disabled") -> RunSpec:
    config = {"seed": 0, "wandb": {"mode": mode, "project": "birder", "entity": None, "group": None}}
    return RunSpec("run-1", "g", "digits", "run.py", [], config, str(run_dir))


@pytest.fixture
def no_wandb_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without key, netrc or wandb settings."""
    for name in [n for n in os.environ if n.startswith("WANDB_")] + ["CI", "NETRC"]:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def test_curve_holds_every_row(tmp_path: Path) -> None:
    with Tracker(make_spec(tmp_path), True, total=3) as tracker:
        tracker.log(1, loss=2.5, seconds=0.5)
        tracker.log(2, loss=2.25, seconds=1.0)
        tracker.log(3, loss=2.0, seconds=1.5, metric=90.0)
    text = (tmp_path / "curve.csv").read_text()
    assert text == "step,seconds,loss,metric\n1,0.500,2.5,\n2,1.000,2.25,\n3,1.500,2,90\n"


def test_resume_drops_rows_beyond_the_resumed_step_and_a_torn_row(tmp_path: Path) -> None:
    head = "step,seconds,loss,metric\n1,1.000,5,\n2,2.000,4,80\n"
    (tmp_path / "curve.csv").write_text(head + "3,3.000,3,\n4,4.000,2.")
    with Tracker(make_spec(tmp_path), True, total=4, start=2) as tracker:
        tracker.log(3, loss=3.0)
    lines = (tmp_path / "curve.csv").read_text().splitlines(keepends=True)
    assert "".join(lines[:3]) == head
    assert len(lines) == 4
    step, seconds, loss, metric = lines[3].strip().split(",")
    assert (step, loss, metric) == ("3", "3", "")
    assert 2.0 <= float(seconds) < 60  # the clock goes on where it stopped


def test_a_torn_row_of_a_step_before_the_checkpoint_is_dropped_too(tmp_path: Path) -> None:
    (tmp_path / "curve.csv").write_text("step,seconds,loss,metric\n1,1.000,5,\n2,2.0")
    CurveFile(tmp_path / "curve.csv", start=5).close()
    assert (tmp_path / "curve.csv").read_text() == "step,seconds,loss,metric\n1,1.000,5,\n"


def test_a_new_run_starts_a_new_curve(tmp_path: Path) -> None:
    (tmp_path / "curve.csv").write_text("step,seconds,loss,metric\n1,1.000,5,\n")
    Tracker(make_spec(tmp_path), True, total=1).close()
    assert (tmp_path / "curve.csv").read_text() == "step,seconds,loss,metric\n"


def test_long_runs_keep_every_metric_and_a_bounded_number_of_losses(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(track, "CURVE_ROWS", 10)
    with Tracker(make_spec(tmp_path), True, total=101) as tracker:
        for step in range(1, 102):
            tracker.log(step, loss=1.0, metric=7.0 if step == 50 else None)
    rows = pd.read_csv(tmp_path / "curve.csv")
    assert rows["step"].tolist() == [11, 22, 33, 44, 50, 55, 66, 77, 88, 99, 101]
    assert rows["metric"].dropna().tolist() == [7.0]


def test_a_tensor_is_read_only_when_it_is_written_or_shown(tmp_path: Path, monkeypatch: Any) -> None:
    """float() of a loss on a GPU waits for it: not at every step."""
    monkeypatch.setattr(track, "CURVE_ROWS", 5)
    reads = []

    class Loss:
        def __float__(self) -> float:
            reads.append(1)
            return 1.0

    with Tracker(make_spec(tmp_path), True, total=50) as tracker:
        for step in range(1, 51):
            tracker.log(step, loss=Loss())
    assert 5 <= len(reads) <= 8


def test_other_ranks_do_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Tracker(make_spec(tmp_path / "run", "offline"), False, total=3) as tracker:
        tracker.log(1, loss=1.0)
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_lines_instead_of_a_bar_where_there_is_no_terminal(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr(track, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    with Tracker(make_spec(tmp_path), True, total=9, sample="images") as tracker:
        for step in range(1, 10):
            tracker.log(step, loss=1.5, samples_per_s=123.4)
    told, *lines = capsys.readouterr().out.splitlines()
    assert told == "W&B: nothing is recorded (wandb=disabled)"
    assert lines[0] == "step 1/9  loss 1.5  123.4 images/s"
    assert lines[1] == "step 4/9  loss 1.5  123.4 images/s  time left 0:00:20"
    assert lines[-1].startswith("step 9/9")
    assert len(lines) == 4


def test_progress_reads_as_people_write_it(tmp_path: Path, capsys: Any) -> None:
    with Tracker(make_spec(tmp_path), True, total=1, sample="images", metric="top1") as tracker:
        tracker.log(1, loss=1.5, samples_per_s=31854.2, metric=93.25)
    assert capsys.readouterr().out.splitlines()[-1] == "step 1/1  loss 1.5  top1 93.25  31,850 images/s"


def test_progress_bar_on_a_terminal(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with Tracker(make_spec(tmp_path), True, total=4, sample="images") as tracker:
        for step in range(1, 5):
            tracker.log(step, loss=0.125, samples_per_s=50.0)
    out = capsys.readouterr().out
    assert "4/4" in out
    assert "loss 0.125  50 images/s" in out


def test_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curve = CurveFile(tmp_path / "curve.csv")

    class Full:
        def write(self, _: str) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(curve, "_file", Full())
    with pytest.raises(UserError, match=r"could not write the curve .*No space left"):
        curve.add(1, 0.0, 1.0, None)


@pytest.mark.parametrize("wrong", ["wandb.mode=loud", "tracker=loud"])
def test_an_unknown_tracker_or_mode_is_refused_before_anything_starts(wrong: str) -> None:
    with pytest.raises(UserError, match=r"must be one of .*, not 'loud'"):
        compose.resolve(compose.compose(["+exp=digits", wrong]))


@pytest.mark.usefixtures("no_wandb_account")
def test_mode_follows_what_the_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def choose(wanted: str) -> str:
        return wandb_run.choose_mode(wanted)[0]

    assert [choose(m) for m in ("auto", "offline", "disabled")] == ["offline", "offline", "disabled"]
    assert wandb_run.choose_mode("auto") == ("offline", "")
    assert choose("online") == "offline"  # without a key it would ask for one and wait
    assert "no key" in wandb_run.choose_mode("online")[1]

    monkeypatch.setenv("CI", "true")
    assert choose("auto") == "disabled"
    assert "CI" in wandb_run.choose_mode("auto")[1]
    for name in ("offline", "dryrun"):
        monkeypatch.setenv("WANDB_MODE", name)
        assert choose("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert choose("auto") == "offline"
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.delenv("WANDB_MODE")

    netrc = tmp_path / "home" / ".netrc"
    netrc.write_text("machine api.wandb.ai login user password secret\n")
    netrc.chmod(0o600)
    assert [choose(m) for m in ("auto", "online")] == ["online", "online"]
    netrc.write_text("this is no netrc")
    assert choose("auto") == "disabled"
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert choose("auto") == "online"

    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert [choose(m) for m in ("auto", "online", "offline")] == ["disabled"] * 3
    assert "not installed" in wandb_run.choose_mode("online")[1]


@pytest.mark.usefixtures("no_wandb_account")
@pytest.mark.parametrize("named_by", ["environment", "settings"])
def test_a_key_of_ones_own_server_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named_by: str) -> None:
    """`wandb login --host` writes the server into W&B's settings, and its key under host and port."""
    monkeypatch.chdir(tmp_path)
    netrc, settings = tmp_path / "home" / ".netrc", tmp_path / "home" / ".config" / "wandb" / "settings"
    netrc.write_text("machine wandb.example:8080 login user password secret\n")
    netrc.chmod(0o600)
    assert wandb_run.choose_mode("online")[0] == "offline"
    if named_by == "environment":
        monkeypatch.setenv("WANDB_BASE_URL", "http://wandb.example:8080")
    else:
        settings.parent.mkdir(parents=True)
        settings.write_text("[default]\nbase_url = http://wandb.example:8080\n")
    assert [wandb_run.choose_mode(m) for m in ("online", "auto")] == [("online", "")] * 2
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text("no settings")
    assert wandb_run.choose_mode("online")[0] == ("online" if named_by == "environment" else "offline")


@pytest.mark.usefixtures("no_wandb_account")
def test_wandb_offline_that_was_typed_in_this_folder_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in any script that names no mode."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    (tmp_path / "wandb").mkdir()
    for mode in ("offline", "disabled"):
        (tmp_path / "wandb" / "settings").write_text(f"[default]\nmode = {mode}\n")
        assert wandb_run.choose_mode("auto")[0] == mode
        assert wandb_run.choose_mode("online")[0] == "online"
    monkeypatch.setenv("WANDB_MODE", "online")
    assert wandb_run.choose_mode("auto")[0] == "online"


@pytest.mark.slow
@pytest.mark.usefixtures("no_wandb_account")
def test_a_server_that_does_not_answer_costs_nothing_but_the_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that accepts connections and never answers is the slowest: the run waits INIT_S for it, no longer."""
    pytest.importorskip("wandb")
    init = wandb_run._init

    def waiting(about: wandb_run.About, mode: str) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wandb_run, "INIT_S", 1.0 if mode == "online" else wandb_run.INIT_S)
            return init(about, mode)

    monkeypatch.setattr(wandb_run, "_init", waiting)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        with Tracker(make_spec(tmp_path, "online"), True, total=1) as tracker:
            tracker.log(1, loss=0.5)
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    (place,) = [i for i, line in enumerate(lines) if line.startswith("W&B")]
    assert lines[place].endswith("recorded offline; to send it:")
    told = lines[place + 1]  # the command alone, to be copied
    assert told.startswith("  ")
    assert "wandb sync " in told
    assert Path(told.rpartition(" ")[2]).is_dir()
    assert [line for line in shown.err.splitlines() if line.startswith(("warning", "Traceback"))] == []
    run = wandb_file.read(Path(told.rpartition(" ")[2]))
    assert (run.history[0]["loss"], run.job, run.exit_code) == (0.5, "train", 0)


def fake_wandb(monkeypatch: pytest.MonkeyPatch, run: Any) -> dict[str, Any]:
    """Puts a stand-in for the package wandb in place, whose `init` returns `run` or raises it."""
    seen: dict[str, Any] = {}

    def init(**options: Any) -> Any:
        seen.update(options)
        if isinstance(run, Exception):
            raise run
        return run

    package = SimpleNamespace(init=init, Settings=lambda **k: k, teardown=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.setattr(wandb_run, "choose_mode", lambda mode: (mode, ""))
    return seen


def fake_run(**methods: Any) -> SimpleNamespace:
    """A stand-in for a run of the package wandb."""
    nothing = {"log": lambda *_, **__: None, "finish": lambda **_: None, "resumed": False}
    return SimpleNamespace(
        summary={}, dir=str(ROOT / "files"), url="https://wandb.example/run", **{**nothing, **methods}
    )


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_failure_of_wandb_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the server\nis gone")

    run = fake_run()
    if broken != "init":
        setattr(run, broken, fail)
    fake_wandb(monkeypatch, RuntimeError("the server\nis gone") if broken == "init" else run)
    with Tracker(make_spec(tmp_path, "online"), True, total=3) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, loss=1.0)
    error = capsys.readouterr().err
    assert error.startswith("warning: W&B: the server is gone; ")
    assert error.count("\n") == 1
    assert len((tmp_path / "curve.csv").read_text().splitlines()) == 4


@pytest.mark.usefixtures("no_wandb_account")
def test_after_a_failure_of_wandb_the_next_run_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a study, all of whose comparisons are made in one process."""
    pytest.importorskip("wandb")
    for name in ("first", "second"):
        with Tracker(make_spec(tmp_path / name, "offline"), True, total=1) as tracker:
            if name == "first":
                monkeypatch.setattr(tracker._run, "_log", lambda *_: 1 / 0)
            tracker.log(1, loss=0.5)
        assert [v for v in os.environ if v.startswith("WANDB_")] == []
        (folder,) = (tmp_path / name).glob("wandb/offline-run-*")
        run = wandb_file.read(folder)
        assert (run.exit_code, [row["loss"] for row in run.history]) == (0, [0.5] * (name == "second"))
    assert capsys.readouterr().err.count("\n") == 1


def test_a_rank_tells_the_user_of_a_tracker_that_fails(tmp_path: Path) -> None:
    """Its stderr is its log, which nobody reads."""
    make_spec(tmp_path, "offline").save()
    code = (
        "import sys; from experiments.tracking import tracked; from experiments.training import worker\n"
        "from launch.spec import RunSpec\n"
        "worker._redirect_output(worker._Rank(RunSpec.load(sys.argv[1])))\n"
        "tracked.warn('W&B', 'the server is gone')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "0", "GROUP_RANK": "0"}
    command = [sys.executable, "-c", code, str(tmp_path / "spec.yaml")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "warning: W&B: the server is gone\n", "")


def test_a_disk_that_is_full_at_the_end_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """W&B's own process drops what it cannot write, and raises nothing."""
    fake_wandb(monkeypatch, fake_run())
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    Tracker(make_spec(tmp_path, "offline"), True, total=1).close()
    (line,) = capsys.readouterr().err.splitlines()
    assert "disk is full" in line


def test_wandb_is_told_what_the_run_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, dict[str, float]]] = []
    ended: list[int] = []
    run = fake_run(
        log=lambda values, step: sent.append((step, values)),
        finish=lambda exit_code: ended.append(exit_code),
    )
    seen = fake_wandb(monkeypatch, run)
    tracker = Tracker(make_spec(tmp_path, "online"), True, total=2)
    tracker.log(1, loss=1.0, lr=0.1, seconds=2.0)
    tracker.close({"top1": 9.0})
    tracker.close()
    tracker.log(2, loss=1.0)
    assert sent == [(1, {"loss": 1.0, "lr": 0.1, "seconds": 2.0})]
    assert run.summary == {"top1": 9.0}
    assert ended == [0]
    assert (seen["project"], seen["group"], seen["id"], seen["mode"]) == ("birder", "g", "run-1", "online")
    assert seen["dir"] == str(tmp_path)


def test_a_project_that_the_environment_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in any script that names none; what is typed wins."""
    seen = fake_wandb(monkeypatch, fake_run())
    for named, typed, project in (("theirs", None, "theirs"), ("", None, "birder"), ("theirs", "typed", "typed")):
        monkeypatch.setenv("WANDB_PROJECT", named)
        spec = make_spec(tmp_path, "offline")
        spec.config["wandb"]["project"] = typed
        Tracker(spec, True, total=1).close()
        assert seen["project"] == project
    assert compose.resolve(compose.compose(["+exp=digits"]))["wandb"]["project"] is None


def test_runs_offline_are_different_ones_whatever_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one comparison would else be sent into one run."""
    seen = fake_wandb(monkeypatch, fake_run())
    monkeypatch.setenv("WANDB_RUN_ID", "theirs")  # which counts where no id is given
    ids = set()
    for _ in range(2):
        Tracker(make_spec(tmp_path, "offline"), True, total=1).close()
        ids.add(seen["id"])
    assert len(ids) == 2
    assert None not in ids


def test_a_crash_reaches_wandb_as_a_failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    run = fake_run(finish=lambda exit_code: ended.append(exit_code))
    fake_wandb(monkeypatch, run)

    def crash() -> None:
        with Tracker(make_spec(tmp_path, "online"), True, total=2):
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        crash()
    assert ended == [1]


@pytest.mark.usefixtures("no_wandb_account")
def test_offline_wandb_is_silent_and_writes_below_the_run_only(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    make_spec(run_dir, "auto").save()
    code = (
        "import sys; from launch.spec import RunSpec; from experiments.training.track import Tracker\n"
        "with Tracker(RunSpec.load(sys.argv[1]), True, total=1) as t: t.log(1, loss=0.5)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(elsewhere)}
    command = [sys.executable, "-c", code, str(run_dir / "spec.yaml")]
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    _, told, progress = done.stdout.splitlines()
    assert progress == "step 1/1  loss 0.5"
    (folder,) = run_dir.glob("wandb/offline-run-*")
    assert told.endswith(f"wandb sync {folder}")
    assert list(run_dir.glob("wandb/offline-run-*/*.wandb"))
    assert list(elsewhere.rglob("*")) == []
    assert list((tmp_path / "home").rglob("*")) == []


ENDED = """
import os, sys, threading
from experiments.training import worker
from experiments.training.track import Tracker
from launch.spec import RunSpec
spec = RunSpec.load(sys.argv[1])
me = worker._Rank(spec)
me.begin()
worker._end_on_sigterm(me)
with Tracker(spec, True, total=9, start=int(sys.argv[2])) as tracker:
    for step in (int(sys.argv[2]) + 1, int(sys.argv[2]) + 2):
        tracker.log(step, loss=1 / step)
    if sys.argv[3] == "lost":
        me.end_alone(RuntimeError("rank 1 is lost"), [])
    if sys.argv[3] == "waits":
        print("waits", flush=True)
        threading.Event().wait()  # as in a collective: no handler of Python's runs
"""


def ended(run_dir: Path, start: int, how: str, status: int) -> None:
    """A rank that has taken two steps and is ended so."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "0", "GROUP_RANK": "0"}
    command = [sys.executable, "-c", ENDED, str(run_dir / "spec.yaml"), str(start), how]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        if how == "waits":
            assert "waits\n" in rank.stdout
            rank.terminate()
        rank.stdout.read()
        assert rank.wait(60) == status


@pytest.mark.usefixtures("no_wandb_account")
def test_wandb_has_all_of_a_run_that_is_ended_and_of_one_that_is_resumed(tmp_path: Path) -> None:
    """SIGTERM (Ctrl-C at the launcher), a lost peer: the run has failed, and no step is missing. Offline W&B takes a resumed
    run for another one, which therefore gets the steps of before."""
    pytest.importorskip("wandb")
    make_spec(tmp_path, "offline").save()
    for start, how, status in ((0, "waits", 143), (2, "lost", 1), (4, "well", 0)):
        earlier = set(tmp_path.rglob("offline-run-*"))
        ended(tmp_path, start, how, status)
        (folder,) = set(tmp_path.rglob("offline-run-*")) - earlier
        run = wandb_file.read(folder)
        assert run.exit_code == status
        assert [(row["_step"], row["loss"]) for row in run.history] == [
            (step, pytest.approx(1 / step, abs=1e-5)) for step in range(1, start + 3)
        ]


@pytest.mark.parametrize("known", [False, True])
def test_wandb_gets_the_steps_of_before_unless_the_server_has_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """A first start without a network was recorded offline: the run that is resumed is then new to the server."""
    (tmp_path / "curve.csv").write_text("step,seconds,loss,metric\n1,1.000,5,\n2,2.000,4,80\n")
    sent: list[int] = []
    fake_wandb(monkeypatch, fake_run(log=lambda values, step: sent.append(step), resumed=known))
    with Tracker(make_spec(tmp_path, "online"), True, total=3, start=2) as tracker:
        tracker.log(3, loss=3.0)
    assert sent == ([3] if known else [1, 2, 3])


def test_a_tracker_that_begins_slowly_is_no_time_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]

    def slow(about: object) -> TrackedRun:
        clock[0] += 30
        return TrackedRun()

    monkeypatch.setattr(track.tracking, "start", slow)
    monkeypatch.setattr(track.time, "monotonic", lambda: clock[0])
    with Tracker(make_spec(tmp_path), True, total=1) as tracker:
        clock[0] += 1
        tracker.log(1, loss=1.0)
    assert pd.read_csv(tmp_path / "curve.csv")["seconds"].tolist() == [1.0]


def test_tensorboard_has_each_step_at_once(tmp_path: Path) -> None:
    """So that a run that is killed and resumed has no gap."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    spec = make_spec(tmp_path)
    spec.config["tracker"] = "tensorboard"
    with Tracker(spec, True, total=2) as tracker:
        tracker.log(1, loss=0.5)
        found = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
        found.Reload()
        assert [(e.step, e.value) for e in found.Scalars("loss")] == [(1, 0.5)]


@pytest.mark.parametrize("start", [0, 2])
def test_tensorboard_drops_steps_beyond_those_that_a_restart_continues(tmp_path: Path, start: int) -> None:
    """A run that is started again without a checkpoint starts from step 1, in the same folder."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    spec = make_spec(tmp_path)
    spec.config["tracker"] = "tensorboard"
    first = Tracker(spec, True, total=4)
    for step in (1, 2, 3):
        first.log(step, loss=1.0)
    (old,) = (tmp_path / "tensorboard").iterdir()
    old.rename(old.with_name(old.name.replace("tfevents.", "tfevents.0")))  # of an earlier second
    with Tracker(spec, True, total=4, start=start) as tracker:
        tracker.log(start + 1, loss=2.0)
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [
        *((s, 1.0) for s in range(1, start + 1)),
        (start + 1, 2.0),
    ]


def test_tensorboard_has_the_curve_and_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    spec = make_spec(tmp_path, "offline")
    spec.config["tracker"] = "tensorboard"
    with Tracker(spec, True, total=2) as tracker:
        for step in (1, 2):
            tracker.log(step, loss=1.0 / step)
        tracker.close({"top1": 9.0})
    assert f"tensorboard --logdir {tmp_path / 'tensorboard'}" in capsys.readouterr().out
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [(1, 1.0), (2, 0.5)]
    assert [e.value for e in found.Scalars("summary/top1")] == [9.0]
    (config,) = found.Tensors("config/text_summary")
    assert b"project: birder" in config.tensor_proto.string_val[0]
    assert not (tmp_path / "wandb").exists()


def test_without_a_tracker_one_line_says_that_nothing_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for tracker, why in {"none": "tracker=none", "tensorboard": "not installed", "wandb": "not installed"}.items():
        spec = make_spec(tmp_path / tracker, "offline")
        spec.config["tracker"] = tracker
        Tracker(spec, True, total=1).close()
        (line,) = capsys.readouterr().out.splitlines()
        assert f"nothing is recorded ({why}" in line
        assert [p.name for p in (tmp_path / tracker).iterdir()] == ["curve.csv"]
    assert set(typing.get_args(Config.model_fields["tracker"].annotation)) == {"none", "tensorboard", "wandb"}


def test_every_wandb_file_names_its_mode() -> None:
    files = {path.stem: yaml.safe_load(path.read_text())["wandb"] for path in (ROOT / "conf" / "wandb").glob("*.yaml")}
    assert {name: section["mode"] for name, section in files.items()} == {
        m: m for m in typing.get_args(Wandb.model_fields["mode"].annotation)
    }
    assert all(set(section) == {"mode", "project", "entity", "group"} for section in files.values())
