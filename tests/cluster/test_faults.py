"""Faults of a run with real ranks, started as a user starts it: what it says, how long it takes, what it leaves.

On emulated nodes where the system allows them, else as processes on loopback.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from birder import checkpoint
from experiments.records import record
from experiments.training import heartbeat
from launch import process
from launch.emulated import launcher as emulated
from tests.helpers import ROOT
from tests.helpers.waiting import until
from tests.unit.launch.test_launch import assert_all_gone

NODES = 3
STEPS, EVERY = 200, 40
SILENCE_S = 10.0
"""Seconds instead of the default 30: the tests wait for it."""
LIMIT_S = 60.0
"""What the default settings promise."""
SOON_S = 240.0
"""Less than `cluster.collective_timeout_s`, after which a run ends in any case; ample for a busy machine."""

# Not in the group "sandbox": one worker would run both, and take twice as long as all others.
pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("faults"), pytest.mark.timeout(900)]

WHY_NOT = emulated.why_not()
CLUSTER = "emulated" if WHY_NOT is None else "local"
needs_network = pytest.mark.skipif(CLUSTER == "local", reason=f"no emulated network: {WHY_NOT}")


def default(key: str) -> Any:
    return yaml.safe_load((ROOT / f"conf/cluster/{CLUSTER}.yaml").read_text())["cluster"][key]


class Run:
    """One run of experiments/run.py, and what can be done to it."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.dir = folder / "outputs/digits/faulty"
        self.results = folder / "results"
        command = [sys.executable, str(ROOT / "experiments/run.py"), "+exp=digits", f"cluster={CLUSTER}"]
        command += [f"cluster.nodes={NODES}", "cluster.ranks_per_node=1", "run_name=faulty", "wandb=disabled"]
        command += [
            f"output_dir={folder}/outputs",
            f"results_dir={self.results}",
            f"cluster.heartbeat_timeout_s={SILENCE_S}",
        ]
        # Steps for longer than any of these tests takes, unless told otherwise.
        command += ["scale=quick", "train.batch_per_rank=8", "train.epochs=100000", "train.max_steps=40000"]
        command += ["train.eval_every=1000000"]
        command += ["train.threads=1", "cluster.dilation=20"] if CLUSTER == "emulated" else ["train.threads=1"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.launcher = subprocess.Popen([*command, *overrides], env=env, cwd=ROOT, **pipes)
        self.all: list[int] = []

    def wait_for(self, what: Callable[[], bool]) -> None:
        came = until(lambda: what() or (self.launcher.poll() is not None and "ended"), self.logs)
        assert came != "ended", (*self.launcher.communicate(), self.logs())
        self.all = process.descendants(self.launcher.pid)
        assert len(self.all) >= 2 * NODES  # agents and ranks

    def wait_until_training(self) -> None:
        curve = self.dir / "curve.csv"
        self.wait_for(lambda: curve.exists() and len(curve.read_text().splitlines()) > 1)
        time.sleep(0.5)

    def wait_for_checkpoint(self) -> None:
        self.wait_for(lambda: self.checkpoint() > 0)

    def checkpoint(self) -> int:
        """Step of the newest complete checkpoint."""
        return (checkpoint.latest(self.dir / "checkpoints") or (0, None))[0]

    def pid(self, rank: int) -> int:
        """Process id of a rank, as this process sees it."""
        found = self.find(rank)
        assert found is not None, f"no process of rank {rank}"
        return found

    def find(self, rank: int) -> int | None:
        """The same; None before it has its program and environment."""
        for pid in self.all:
            environment = process.of_proc(pid, "environ").split(b"\0")
            if f"RANK={rank}".encode() in environment and b"worker.py" in process.of_proc(pid, "cmdline"):
                return pid
        return None

    def link(self, line: str) -> None:
        """Changes the emulated network: "cut 2", "mend 2". Waits until that is done, or the run has ended."""
        with open(self.dir / "control", "a") as control:
            control.write(line + "\n")
        done = self.dir / "control.done"
        until(lambda: self.launcher.poll() is not None or (done.exists() and f"{line}\n" in done.read_text()), line)

    def end(self) -> tuple[int, str]:
        """Exit status and the last line of standard error. Asserts that nothing is left running."""
        _, err = self.launcher.communicate()
        print(err, self.logs())
        self.assert_nothing_left()
        return self.launcher.returncode, (err.splitlines() or [""])[-1]

    def assert_nothing_left(self) -> None:
        assert_all_gone(self.all)
        left = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(self.dir).encode() in path.read_bytes():  # agents and ranks, restarted ones too
                    left.append(path)
        assert left == []

    def logs(self) -> str:
        files = sorted((self.dir / "logs").glob("*.log"))
        return "\n".join(f"--- {f.name}\n" + f.read_text(errors="replace")[-1500:] for f in files)

    def close(self) -> None:
        if self.launcher.poll() is None:
            self.launcher.kill()
            self.launcher.communicate()
            self.assert_nothing_left()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs = []

    def start(*overrides: str) -> Run:
        runs.append(Run(tmp_path, *overrides))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def content(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint: parameters and every rank's optimizer and random state."""
    return {f"{f.name}/{k}": t for f in sorted(folder.glob("*.safetensors")) for k, t in load_file(f).items()}


FINITE = (f"train.max_steps={STEPS}", f"checkpoint.every={EVERY}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    run = Run(tmp_path_factory.mktemp("undisturbed"), *FINITE)
    try:
        run.wait_until_training()
        assert run.end()[0] == 0
    finally:
        run.close()
    return content(run.dir / f"checkpoints/step-{STEPS:08d}")


def assert_same_end(run: Run, undisturbed: dict[str, Tensor]) -> None:
    code, last = run.end()
    assert (code, last) == (0, "")
    assert run.checkpoint() == STEPS
    found = content(run.dir / f"checkpoints/step-{STEPS:08d}")
    assert found.keys() == undisturbed.keys()
    assert [k for k in found if not torch.equal(found[k], undisturbed[k])] == []
    assert [r.status for r in record.read_all(run.results)] == ["completed"]


def assert_ends_in_time(run: Run, message: str, since: float) -> None:
    code, last = run.end()
    took = time.monotonic() - since
    assert code == 1
    assert re.match(f"error: {message}", last)
    assert took < SOON_S < default("collective_timeout_s")
    (failed,) = record.read_all(run.results)
    assert failed.status == "failed"
    assert f"error: {failed.reason}" == last


def test_killed_rank(start: Callable[..., Run]) -> None:
    run = start()
    run.wait_until_training()
    began = time.monotonic()
    os.kill(run.pid(1), signal.SIGKILL)
    assert_ends_in_time(run, r"rank 1 on node \d was killed", began)


def test_stopped_rank(start: Callable[..., Run]) -> None:
    run = start()
    run.wait_until_training()
    began = time.monotonic()
    os.kill(run.pid(2), signal.SIGSTOP)
    message = r"rank 2 on node \d stopped answering"
    assert_ends_in_time(run, message, began)


def test_rank_stopped_while_it_loads(start: Callable[..., Run]) -> None:
    """Before ranks have met nobody asks it: the launcher itself looks."""
    run = start()
    found: list[int] = []

    def appeared() -> bool:
        run.all = process.descendants(run.launcher.pid)
        found[:] = [pid for pid in run.all if b"worker.py" in process.of_proc(pid, "cmdline")]
        return len(found) == 2 * NODES and run.find(1) is not None  # each agent names the program too

    run.wait_for(appeared)
    began = time.monotonic()
    os.kill(run.pid(1), signal.SIGSTOP)
    assert_ends_in_time(run, r"rank 1 on node \d: Stopped: its process has been stopped for", began)


@needs_network
def test_link_cut_for_good(start: Callable[..., Run]) -> None:
    run = start()
    run.wait_until_training()
    began = time.monotonic()
    run.link("cut 1")
    message = r"node 1 \(rank \d\) cannot be reached by the others"
    assert_ends_in_time(run, message, began)


def test_killed_launcher(start: Callable[..., Run]) -> None:
    run = start()
    run.wait_until_training()
    run.launcher.kill()
    run.launcher.communicate()
    run.assert_nothing_left()


@needs_network
def test_link_cut_for_three_seconds(start: Callable[..., Run], undisturbed: dict[str, Tensor]) -> None:
    run = start(*FINITE)
    run.wait_for_checkpoint()
    run.link("cut 2")
    reached = run.checkpoint()
    time.sleep(2)
    assert run.checkpoint() == reached
    run.link("mend 2")
    assert_same_end(run, undisturbed)


@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP])
def test_restart(what: signal.Signals, start: Callable[..., Run], undisturbed: dict[str, Tensor]) -> None:
    """Torchrun gives a stopped process 30 s before it kills it, whatever it is asked."""
    run = start(*FINITE, "cluster.max_restarts=1")
    run.wait_for_checkpoint()
    os.kill(run.pid(1), what)
    assert_same_end(run, undisturbed)


def test_default_limits() -> None:
    """Arithmetic behind the promise: silence, two turns of the watch, one look around, the launcher's grace."""
    grace_s = 2 * 5.0
    assert (
        default("heartbeat_timeout_s") + 2 * (heartbeat.PING_S + heartbeat.PROBE_S) + heartbeat.PROBE_S + grace_s
        < LIMIT_S
    )
