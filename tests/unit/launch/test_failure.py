"""What ranks leave of their end, and what the launcher reads of it: written and read in one place."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch import failure, link_file


def test_what_a_rank_leaves_is_what_the_launcher_reads(tmp_path: Path) -> None:
    failure.RankFiles(tmp_path, 3, 1).begin()
    assert failure.vanished(tmp_path) == []  # it is this process
    failure.RankFiles(tmp_path, 3, 1).save_error("ValueError", "odd", traceback="Traceback ...")
    cause = failure.explain(tmp_path, [], agent=1, code=1)
    assert (cause.reason, cause.traceback) == ("rank 3 on node 1: ValueError: odd", "Traceback ...")
    failure.RankFiles(tmp_path, 3, 1).save_error("UserError", "set lr=0.1", user_error=True)
    assert failure.explain(tmp_path, [], agent=1, code=2) == failure.Cause("set lr=0.1", user_error=True)
    failure.RankFiles(tmp_path, 3, 1).begin()  # started again: its earlier life is forgotten
    assert not list((tmp_path / "errors").iterdir())


def test_whom_a_rank_missed_is_named(tmp_path: Path) -> None:
    peers = [{"rank": 0, "node": 0, "state": "gone"}, {"rank": 1, "node": 0, "state": "answers"}]
    failure.RankFiles(tmp_path, 0, 0).save("running")
    failure.RankFiles(tmp_path, 1, 0).save_error("RuntimeError", "Connection closed by peer", peers=peers)
    cause = failure.explain(tmp_path, [], agent=0, code=1)
    assert cause.reason == "rank 0 on node 0 was killed, for example for lack of memory"


@pytest.mark.parametrize(
    ("code", "how"),
    [(-9, "was killed, for example for lack of memory,"), (-6, "was ended by SIGABRT"), (7, "ended with status 7")],
)
def test_how_a_rank_ended_that_left_nothing_is_read_from_torchruns_report(tmp_path: Path, code: int, how: str) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs/node1.log"
    log.write_text(
        f"Root Cause (first observed failure):\n  rank      : 3 (local_rank: 1)\n  exitcode  : {code} (pid: 7)\n"
    )
    cause = failure.explain(tmp_path, [], agent=1, code=1)
    assert cause.reason == f"rank 3 on node 1 {how} before it could say why; see {log}"
    # Logs are those of all starts of a run.
    failure.forget_earlier(tmp_path)
    with open(log, "a") as file:
        file.write("RendezvousTimeoutError\n")
    cause = failure.explain(tmp_path, [], agent=1, code=1)
    assert cause.reason.startswith("node 1: torchrun ended with status 1 before")
    assert cause.traceback == "RendezvousTimeoutError"


def test_a_full_disk_does_not_hide_why_a_rank_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(failure, "write_json", full)
    failure.RankFiles(tmp_path, 0, 0).begin()
    failure.RankFiles(tmp_path, 0, 0).save_error("ValueError", "odd")
    assert not any((tmp_path / "errors").glob("*.json"))


def test_ranks_that_a_full_disk_has_silenced_were_not_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither they nor torchrun could write why they ended."""
    gone = [{"rank": 0, "node": 0, "pid": 7, "pid_space": "", "state": "running"}]
    assert "was killed" in failure.explain(tmp_path, gone, 0, 1).reason
    assert "was killed" in failure.explain(tmp_path / "removed meanwhile", gone, 0, 1).reason
    monkeypatch.setattr(failure.shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    assert failure.explain(tmp_path, gone, 0, 1).reason.endswith(
        "no space left on device; free space or set output_dir=FOLDER on another disk"
    )


def test_the_link_of_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert link_file.read(tmp_path) == {}
    link_file.write(tmp_path, link_file.of(kind="network", mbit_per_s=940.0))
    assert link_file.read(tmp_path) == {**link_file.UNKNOWN, "kind": "network", "mbit_per_s": 940.0}
    (tmp_path / link_file.FILE).write_text("{")
    assert link_file.read(tmp_path) == {}
