"""Processes below an agent that are stopped: found, named by rank, killed; others are left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch import failure, process, supervise
from launch.supervise import StoppedWatch
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


def look_for(watch: StoppedWatch, agent: subprocess.Popen, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        watch.look([agent.pid])
        time.sleep(0.02)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "LOOK_S", 0.05)
    monkeypatch.setattr(supervise, "LATER_S", 0.0)


def test_a_stopped_rank_is_killed_and_named(tmp_path: Path, agent: subprocess.Popen, quick: None) -> None:
    os.kill(ranks_of(agent)[1], signal.SIGSTOP)
    watch = StoppedWatch(tmp_path, 0.5)
    look_for(watch, agent, 0.2)
    assert len(ranks_of(agent)) == 2  # not yet
    look_for(watch, agent, 1.0)
    assert [json.loads(p.read_text())["rank"] for p in (tmp_path / "errors").iterdir()] == [1]
    assert len(ranks_of(agent)) == 1
    cause = failure.explain(tmp_path, [], 0, 1)
    assert cause.reason.startswith("rank 1 on node 1: Stopped: its process has been stopped for ")
    assert not cause.user_error


def test_one_that_goes_on_in_time_is_left_alone(tmp_path: Path, agent: subprocess.Popen, quick: None) -> None:
    watch = StoppedWatch(tmp_path, 1.0)
    for _ in range(4):
        os.kill(ranks_of(agent)[0], signal.SIGSTOP)
        look_for(watch, agent, 0.4)
        os.kill(ranks_of(agent)[0], signal.SIGCONT)
        look_for(watch, agent, 0.15)
    assert len(ranks_of(agent)) == 2
    assert not (tmp_path / "errors").exists()


def test_time_in_which_nobody_looked_is_not_counted(tmp_path: Path, agent: subprocess.Popen, quick: None) -> None:
    watch = StoppedWatch(tmp_path, 0.5)
    os.kill(ranks_of(agent)[0], signal.SIGSTOP)
    watch.look([agent.pid])
    time.sleep(1.0)
    watch.look([agent.pid])
    assert len(ranks_of(agent)) == 2


def test_ranks_that_have_met_find_it_first_and_the_limit_of_a_minute_is_kept() -> None:
    from experiments.training import heartbeat

    first = 2 * (heartbeat.PING_S + heartbeat.PROBE_S) + heartbeat.PROBE_S
    assert first < supervise.LATER_S
    assert 30 + supervise.LATER_S + 2 * supervise.LOOK_S < 60
