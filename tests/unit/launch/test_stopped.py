"""Processes below an agent that are stopped: found, named by rank, killed; others are left alone."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch import failure, process, supervise
from launch.supervise import StoppedWatch
from tests.helpers import ROOT
from tests.helpers.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

RANKS = "BIRDER_NODE=0 RANK=0 sleep 600 & BIRDER_NODE=1 RANK=1 sleep 600 & wait"


@pytest.fixture
def agent() -> Iterator[subprocess.Popen]:
    """A shell that stands for torchrun, with two ranks."""
    shell = subprocess.Popen(["sh", "-c", RANKS], start_new_session=True)
    until(lambda: len(ranks_of(shell)) == 2, "two ranks", every_s=0.01)
    yield shell
    os.killpg(shell.pid, signal.SIGKILL)
    shell.wait()


def ranks_of(shell: subprocess.Popen) -> list[int]:
    """Rank 0's process id and rank 1's, once they are what they shall be."""
    found = {}
    for pid in process.descendants(shell.pid):
        if process.of_proc(pid, "cmdline").startswith(b"sleep"):
            found[int(process.of_proc(pid, "environ").split(b"\0RANK=")[-1].split(b"\0")[0])] = pid
    return [found[r] for r in sorted(found)]


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch, agent: subprocess.Popen) -> Callable[..., None]:
    """Has a watch look once a second, on a clock that nothing else moves; `unseen_s`: after so many more seconds."""
    clock = itertools.count()
    monkeypatch.setattr(supervise, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(supervise, "LOOK_S", 1.0)
    monkeypatch.setattr(supervise, "LATER_S", 0.0)

    def look(watch: StoppedWatch, times: int, unseen_s: int = 0) -> None:
        for _ in itertools.islice(clock, unseen_s):
            pass
        for _ in range(times):
            watch.look([agent.pid])

    return look


def signalled(rank: int, sent: signal.Signals) -> None:
    """Once the process of that id is stopped, or goes on."""
    os.kill(rank, sent)
    until(lambda: process.is_stopped(rank) == (sent == signal.SIGSTOP), "the signal")


def test_a_stopped_rank_is_killed_and_named(tmp_path: Path, agent: subprocess.Popen, look: Callable[..., None]) -> None:
    signalled(ranks_of(agent)[1], signal.SIGSTOP)
    watch = StoppedWatch(tmp_path, 10.0)
    look(watch, 9)
    assert len(ranks_of(agent)) == 2  # not yet
    look(watch, 2)
    assert [json.loads(p.read_text())["rank"] for p in (tmp_path / "errors").iterdir()] == [1]
    until(lambda: len(ranks_of(agent)) == 1, "it is killed")
    cause = failure.explain(tmp_path, [], 0, 1)
    assert cause.reason.startswith("rank 1 on node 1: Stopped: its process has been stopped for ")
    assert not cause.user_error


def test_one_that_goes_on_in_time_is_left_alone(
    tmp_path: Path, agent: subprocess.Popen, look: Callable[..., None]
) -> None:
    watch, first = StoppedWatch(tmp_path, 10.0), ranks_of(agent)[0]
    for _ in range(4):
        signalled(first, signal.SIGSTOP)
        look(watch, 8)
        signalled(first, signal.SIGCONT)
        look(watch, 1)
    assert len(ranks_of(agent)) == 2
    assert not (tmp_path / "errors").exists()


def test_time_in_which_nobody_looked_is_not_counted(
    tmp_path: Path, agent: subprocess.Popen, look: Callable[..., None]
) -> None:
    watch = StoppedWatch(tmp_path, 10.0)
    signalled(ranks_of(agent)[0], signal.SIGSTOP)
    look(watch, 1)
    look(watch, 1, unseen_s=100)
    assert len(ranks_of(agent)) == 2
    assert not (tmp_path / "errors").exists()


def test_ranks_that_have_met_find_it_first_and_the_limit_of_a_minute_is_kept() -> None:
    from experiments.training import heartbeat

    first = 2 * (heartbeat.PING_S + heartbeat.PROBE_S) + heartbeat.PROBE_S
    assert first < supervise.LATER_S
    assert 30 + supervise.LATER_S + 2 * supervise.LOOK_S < 60


FORKS = """
import os, signal
from launch import process
pending = [signal.SIGINT]
os.register_at_fork(after_in_parent=lambda: pending and signal.raise_signal(pending.pop()))
try:
    process.attached(["sleep", "60"])
except KeyboardInterrupt:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        print("heard, and nothing left")
"""


def test_ctrl_c_while_a_process_is_started_is_heard() -> None:
    """What Python's own functions around a fork raise is dropped, KeyboardInterrupt too."""
    done = subprocess.run([sys.executable, "-c", FORKS], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert (done.stdout, done.stderr) == ("heard, and nothing left\n", "")


NOHUP = """
import os, signal
from launch import process
try:
    with process.stop_signals():
        with process.deferred():
            os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        print("outlives its terminal", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
except process.Stopped as stopped:
    print(stopped)
"""


def test_under_nohup_a_launcher_outlives_its_terminal() -> None:
    """SIGHUP, which comes when the user logs out, is ignored there."""
    command = ["nohup", sys.executable, "-c", NOHUP]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=50)
    assert (done.stdout, done.stderr) == ("outlives its terminal\nended by SIGTERM\n", "")
