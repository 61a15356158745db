"""How busy a machine is with what is not ours."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import psutil
import pytest

from experiments.training import machine
from experiments.training.machine import Reading

IDLE = Reading("a", 2, 100.0, 10.0, 50.0, 0.0, 1.5, 8 << 30)


def later(r: Reading, own: float, busy: float, steal: float = 0.0) -> Reading:
    """10 s later, so much CPU time later."""
    return dataclasses.replace(
        r, now_s=r.now_s + 10, own_s=r.own_s + own, busy_s=r.busy_s + busy, steal_s=r.steal_s + steal
    )


def test_others_are_what_is_not_ours() -> None:
    # Two ranks on one machine, 9 s of work each, of 18 s that were worked on its cores: nobody else.
    found = machine.busy([IDLE, IDLE], [later(IDLE, 9.0, 18.0), later(IDLE, 9.0, 18.0)])
    assert found == {"others": 0.0, "steal": 0.0, "load": 1.5, "cores": 2}
    assert not machine.is_busy(found)
    # The same work next to a program that keeps half a core busy.
    found = machine.busy([IDLE, IDLE], [later(IDLE, 7.0, 19.0), later(IDLE, 7.0, 19.0)])
    assert found["others"] == pytest.approx(0.25)
    assert machine.is_busy(found)


def test_the_worst_machine_counts_and_so_does_what_the_hypervisor_keeps() -> None:
    other = dataclasses.replace(IDLE, machine="b")
    found = machine.busy([IDLE, other], [later(IDLE, 9.0, 9.0), later(other, 9.0, 9.0, steal=4.0)])
    assert (found["others"], found["steal"]) == (0.0, 0.2)
    assert machine.is_busy(found)
    assert not machine.is_busy(None)


def test_a_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")  # of its agent the first rank speaks
    first = machine.read()
    agent = psutil.Process(psutil.Process().ppid()).cpu_times()
    monkeypatch.setenv("LOCAL_RANK", "0")
    second = machine.read()
    assert second.own_s - first.own_s >= agent.user + agent.system
    assert second.busy_s >= first.busy_s > 0
    assert second.cores >= 1
    assert second.free > 0
    assert machine.ranks_here([first, second, dataclasses.replace(first, machine="other")], 0) == 2


def test_processes_that_load_a_ranks_data_are_its_own() -> None:
    """Else a table would call a machine busy for the run's own work."""
    before = machine.read()
    loop = "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", loop], stdout=subprocess.PIPE) as loader:
        assert loader.stdout is not None
        loader.stdout.readline()
        running = machine.read().own_s - before.own_s
        loader.kill()
    assert running > 0.3
    assert machine.read().own_s - before.own_s > 0.3  # and when it has ended
