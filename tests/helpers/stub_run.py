"""A run without torch: what launchers are tested with.

`python tests/helpers/stub_run.py SPEC` is a worker (torchrun starts it); `... launch WHAT DIR` launches 2 nodes of
1 rank whose training is the line WHAT, in the run directory DIR/run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from experiments.records import record
from experiments.runs import command
from experiments.training import worker
from launch import probe
from launch.errors import UserError
from launch.failure import RunFailed
from launch.local import LocalLauncher
from launch.process import Stopped
from launch.spec import RunSpec

if TYPE_CHECKING:
    import pytest


def train(spec: RunSpec) -> None:
    """Does what `spec.config["stub"]` says."""
    rank, stub = int(os.environ["RANK"]), spec.config["stub"]
    print(f"rank {rank} says hello, terminal: {sys.stdout.isatty()}", flush=True)
    (spec.path / f"env{rank}.json").write_text(json.dumps(dict(os.environ)))
    if stub == "ok":
        return
    if stub == "rank 1 fails":
        if rank == 1:
            raise ValueError("a broken thing")
        time.sleep(0.2)
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
    if stub == "recorded, then sleep":
        if rank == 0:
            record.write(record.from_spec(spec), spec.config["results_dir"])
        time.sleep(600)
    if stub == "bad input":
        raise UserError("the data folder is empty")
    time.sleep(600)


def with_gpus(monkeypatch: pytest.MonkeyPatch, listed: str) -> None:
    """This machine has GPUs, and those are visible that CUDA_VISIBLE_DEVICES lists."""
    monkeypatch.setattr(probe, "any_gpu", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)


def make_spec(folder: Path, stub: str = "ok") -> RunSpec:
    """The least that a launcher and a record need."""
    config = {
        "stub": stub,
        "seed": 0,
        "results_dir": str(folder / "results"),
        "cluster": {"nodes": 2, "ranks_per_node": 1, "name": "local"},
        "optimizer": {"_target_": "birder.SGDM"},
        "workload": {"_target_": "experiments.workloads.stub.Stub"},
        "scale": {"name": "quick"},
    }
    return RunSpec("stub-1", None, "stub", "a command", [], config, str(folder / "run"))


def launch(stub: str, folder: Path) -> int:
    launcher = LocalLauncher(nodes=2, ranks_per_node=1, name="local")
    launcher.worker = Path(__file__).resolve()
    launcher.on_failure = record.write_failed
    try:
        launcher.launch(make_spec(folder, stub))
    except (UserError, RunFailed, KeyboardInterrupt, Stopped) as error:
        return command.report(error)
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        sys.exit(launch(sys.argv[2], Path(sys.argv[3])))
    worker.main(sys.argv[1], train)
