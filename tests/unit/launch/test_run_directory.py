"""What stands in a run directory: held by one run at a time, files whole or not there, nothing left when the run ends."""

from __future__ import annotations

import functools
import multiprocessing
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from launch import failure, files, lock
from launch.base import opened
from launch.errors import UserError
from launch.failure import RunFailed
from launch.local import LocalLauncher
from launch.spec import RunSpec
from tests.helpers import ROOT
from tests.helpers.stub_run import make_spec
from tests.helpers.tiers import slow
from tests.helpers.waiting import until
from tests.unit.launch.test_launch import finish, start, wait_for_ranks


def launcher(program: Path) -> LocalLauncher:
    made = LocalLauncher(nodes=2, ranks_per_node=1, name="local")
    made.worker = program
    return made


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of this test's processes."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def test_a_running_run_is_not_started_again(tmp_path: Path, temporary: Path) -> None:
    first = start("sleep", tmp_path)
    wait_for_ranks(tmp_path)
    code, _, err = finish("sleep", tmp_path)
    assert code == 2
    said = (
        rf"error: .*/run: this run is still running \(pid {first.pid} on host {re.escape(platform.node())}\): wait .*\n"
    )
    assert re.fullmatch(said, err)
    assert first.poll() is None
    first.send_signal(signal.SIGTERM)
    first.communicate()
    assert not (tmp_path / "run/run.owner").exists()
    # Neither the record of the failed run nor anything else that is kept names the host.
    records = list((tmp_path / "results/records").glob("*.json"))
    assert len(records) == 1
    assert platform.node() not in records[0].read_text()
    with lock.held(tmp_path / "run"):
        assert lock.is_held(tmp_path / "run")
    assert not lock.is_held(tmp_path / "run")
    assert list(temporary.iterdir()) == []  # torchrun makes folders there, unless told where


def test_of_two_that_begin_at_the_same_moment_one_has_the_folder(tmp_path: Path) -> None:
    """Both found it empty; the first has let go of it already, as with cluster.wait=false."""
    first = make_spec(tmp_path)
    with opened(first):
        pass
    with pytest.raises(UserError, match="another run has just begun here"), opened(replace(first, id="stub-2")):
        pass
    assert RunSpec.load(first.file) == first
    with opened(first):  # resumed
        pass


@pytest.mark.slow
def test_nothing_is_left_by_torchrun_and_unfinished_checkpoints(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "run/checkpoints/step-00000004.tmp").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step-00000002").mkdir()
    ended = start("rank 1 fails", tmp_path)
    _, err = ended.communicate()
    assert "a broken thing" in err
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000002"]
    assert list(temporary.iterdir()) == []
    assert not (tmp_path / "run" / failure.TORCHRUN).exists()


@pytest.mark.slow
def test_a_rank_that_ends_before_it_reports_is_named(tmp_path: Path) -> None:
    """One that is killed: test_launch.py."""
    program = tmp_path / "worker.py"
    program.write_text("import os, time\nos._exit(7) if os.environ['RANK'] == '1' else time.sleep(600)\n")
    said = r"^rank 1 on node [01] ended with status 7 before it could say why; see .*node[01]\.log$"
    with pytest.raises(RunFailed, match=said):
        launcher(program).launch(make_spec(tmp_path))


def _write_for_ever(path: str) -> None:
    spec = RunSpec("id", None, "exp", "x" * 100_000, [], {}, path)
    while True:
        spec.save()


def test_a_spec_is_whole_whenever_its_writer_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    for _ in range(5):
        files.write_whole(file, "id: none")
        writer = multiprocessing.get_context("fork").Process(target=_write_for_ever, args=(str(tmp_path),))
        writer.start()
        until(lambda: file.read_text() != "id: none", "the first spec")
        time.sleep(0.2)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        assert RunSpec.load(file).command == "x" * 100_000


@pytest.mark.xdist_group("sandbox")  # whose tests compare what is mounted before and after
def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], check=False).returncode
    ):
        pytest.skip("mounting a small file system needs root")
    try:
        files.write_whole(disk / "a", "old")
        with pytest.raises(OSError, match="No space left"):
            files.write_whole(disk / "a", "x" * 100_000)
        assert (disk / "a").read_text() == "old"
        assert [p.name for p in disk.iterdir()] == ["a"]
        (disk / "fill").write_bytes(b"x" * (shutil.disk_usage(disk).free))
        with pytest.raises(UserError, match=r"cannot write to .*: No space left on device; set output_dir=FOLDER"):
            launcher(Path(__file__)).launch(make_spec(disk))
        assert sorted(p.name for p in disk.iterdir()) == ["a", "fill"]
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_no_lock_where_the_file_system_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(*args: object, **options: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lock.FileLock, "acquire", none)
    with lock.held(tmp_path):
        pass
    assert "files cannot be locked here" in capsys.readouterr().out


def catches_sigint(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(re.search(r"SigCgt:\s*([0-9a-f]+)", status)[1], 16) >> (signal.SIGINT - 1) & 1)  # type: ignore[index]


def interrupted(command: list[str], after_s: float) -> tuple[int, str] | None:
    """How a program ends that gets Ctrl-C so long after its first line; None where this process was late itself."""
    program = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    # Python itself takes Ctrl-C for KeyboardInterrupt from its own beginning on: some 20 ms before the first line here.
    for caught in (True, False):
        while program.poll() is None and catches_sigint(program.pid) != caught:
            time.sleep(0.001)
    began = time.monotonic()
    time.sleep(after_s)
    late = program.poll() is not None or time.monotonic() - began > after_s + 0.2
    program.send_signal(signal.SIGINT)
    _, err = program.communicate()
    return None if late else (program.returncode, err)


@pytest.mark.parametrize(
    "entry",
    ["run.py +exp=digits", slow("compare.py +exp=digits"), slow("all_methods.py"), "compare.py --paper cser"],
)
def test_ctrl_c_during_imports_shows_no_traceback(entry: str) -> None:
    script, *arguments = entry.split()
    command = [sys.executable, str(ROOT / "experiments" / script), *arguments, "--dry-run"]
    for after_s in (0.0, 0.2):
        ended = until(functools.partial(interrupted, command, after_s))
        assert ended in ((130, "interrupted: every process of the run has ended\n"), (-2, ""))
