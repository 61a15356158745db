"""Runs on emulated nodes: nothing is left of those that end early, causes are named, bytes are what arithmetic says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.records import record
from launch.emulated.launcher import network, sandbox
from launch.errors import UserError
from launch.failure import RunFailed
from tests.cluster.test_emulated import RUN, made, read
from tests.cluster.test_network import interfaces, mounts, needs_sandbox
from tests.helpers import emulated_run
from tests.helpers.stub_run import make_spec
from tests.unit.launch.test_launch import assert_all_gone, wait_for_ranks

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("sandbox")]


def start(what: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(RUN), "launch", what, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def running(launcher: subprocess.Popen[str], folder: Path) -> dict[int, int]:
    """Process ids inside -> outside of a run whose ranks train."""
    wait_for_ranks(folder)
    (unshare,) = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return {**sandbox.processes(int(unshare)), 0: int(unshare)}


def assert_nothing_left(processes: dict[int, int], outside: tuple[str, str]) -> None:
    assert len(processes) >= 4  # unshare, the first process inside, two ranks
    assert_all_gone(list(processes.values()))
    assert (interfaces(), mounts()) == outside


@needs_sandbox
@pytest.mark.parametrize(
    ("sig", "code", "said"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "ended by SIGTERM"), (signal.SIGKILL, -9, "")],
)
def test_ended_launcher_leaves_nothing(sig: signal.Signals, code: int, said: str, tmp_path: Path) -> None:
    outside = interfaces(), mounts()
    launcher = start("sleep", tmp_path)
    processes = running(launcher, tmp_path)
    launcher.send_signal(sig)
    if sig == signal.SIGKILL:
        launcher.wait()
        assert_nothing_left(processes, outside)
    _, err = launcher.communicate()
    assert_nothing_left(processes, outside)
    assert launcher.returncode == code
    assert err.startswith(said)
    assert err.count("\n") == bool(said)


@needs_sandbox
def test_killed_rank_is_named(tmp_path: Path) -> None:
    """Process ids in a sandbox are its own: the launcher outside must not take others for its ranks."""
    outside = interfaces(), mounts()
    launcher = start("sleep", tmp_path)
    processes = running(launcher, tmp_path)
    os.kill(processes[read(tmp_path, "ranks/rank1.json")["pid"]], signal.SIGKILL)
    _, err = launcher.communicate()
    # Without torchrun between, a rank's own process is the node's agent.
    assert (launcher.returncode, err) == (1, "error: node 1: its torchrun agent was ended by SIGKILL\n")
    assert_nothing_left(processes, outside)


@needs_sandbox
def test_killed_sandbox_is_told(tmp_path: Path) -> None:
    outside = interfaces(), mounts()
    launcher = start("sleep", tmp_path)
    processes = running(launcher, tmp_path)
    os.kill(processes[1], signal.SIGKILL)
    _, err = launcher.communicate()
    assert launcher.returncode == 1
    assert "\nerror: the sandbox of the emulated nodes ended" in f"\n{err}"  # a path may stand on a line of its own
    assert_nothing_left(processes, outside)


@needs_sandbox
def test_failing_rank_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outside = interfaces(), mounts()
    with pytest.raises(RunFailed, match="rank 1 on node 1: ValueError: a broken thing"):
        emulated_run.launcher().launch(make_spec(tmp_path, "rank 1 fails"))
    assert capfd.readouterr().err.count("Traceback") == 1
    assert (interfaces(), mounts()) == outside
    (failed,) = record.read_all(tmp_path / "results")
    assert failed.link["kind"] == "emulated"
    assert failed.link["measured"]


@needs_sandbox
def test_a_link_that_is_off_is_said_and_recorded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    emulated_run.launcher(link_gbps=400, dilation=1, max_total_gbps=1e6).launch(make_spec(tmp_path))
    link = read(tmp_path, "link.json")
    assert link["off_by"] > 0.1
    assert link["set_mbit_per_s"] == 400_000
    assert capfd.readouterr().out.count(link["note"]) == 1


@needs_sandbox
def test_bad_input_found_by_ranks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the data folder is empty"):
        emulated_run.launcher().launch(make_spec(tmp_path, "bad input"))
    assert not (tmp_path / "run").exists()


@needs_sandbox
def test_gloo_sends_through_the_link_what_arithmetic_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun, its rendezvous and gloo in three nodes: addresses, environment, bytes of one all-reduce."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SECRET_API_KEY", "do-not-write-me")
    nodes, elements = 3, 1_500_000
    spec = make_spec(tmp_path)
    spec.config["elements"] = elements
    spec.config["cluster"]["nodes"] = nodes
    launcher = made(nodes=nodes, dilation=50)
    launcher.worker = RUN
    outside = interfaces(), mounts()
    launcher.launch(spec)
    assert (interfaces(), mounts()) == outside
    assert "do-not-write-me" not in (tmp_path / "run/plan.json").read_text()
    for rank in range(nodes):
        sent, received = read(tmp_path, f"bytes{rank}.json")
        payload = 2 * (nodes - 1) / nodes * 4 * elements
        assert sent == pytest.approx(payload, rel=0.05)
        assert received == pytest.approx(payload, rel=0.05)
        env = read(tmp_path, f"env{rank}.json")
        assert (env["BIRDER_NODE"], env["GROUP_RANK"], env["BIRDER_NIC"]) == (str(rank), str(rank), "eth0")
        assert env["MASTER_ADDR"].startswith("10.77.")
    link = read(tmp_path, "link.json")
    assert (link["kind"], link["shaped"], link["measured"], link["set_mbit_per_s"]) == ("emulated", True, True, 200.0)
    assert (link["link_gbps"], link["dilation"]) == (10.0, 50.0)
    assert link["off_by"] == pytest.approx(abs(link["mbit_per_s"] / (200 * network.GOODPUT) - 1), abs=1e-3)
