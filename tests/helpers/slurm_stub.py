"""A run without torch under SLURM: `python tests/helpers/slurm_stub.py launch WHAT DIR NODES KEY=VALUE ...` launches it.

WHAT as in tests/helpers/stub_run.py, or "resumes": the first life waits until it is ended, the next one finishes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from experiments.records import record
from experiments.runs import command
from experiments.training import worker
from launch.errors import UserError
from launch.failure import RunFailed
from launch.process import Stopped
from launch.slurm.launcher import SlurmLauncher
from launch.spec import RunSpec
from tests.helpers import stub_run


def train(spec: RunSpec) -> None:
    """Does what `spec.config["stub"]` says."""
    if spec.config["stub"] != "resumes":
        return stub_run.train(spec)
    life = os.environ.get("SLURM_RESTART_COUNT", "0")
    (spec.path / f"life{life}-rank{os.environ['RANK']}").write_text(spec.config["resume"])
    if life == "0":
        time.sleep(600)
    return None


def make_spec(folder: Path, stub: str, nodes: int) -> RunSpec:
    spec = stub_run.make_spec(folder, stub)
    cluster = {"nodes": nodes, "ranks_per_node": 1, "name": "slurm"}
    return dataclasses.replace(spec, config={**spec.config, "cluster": cluster, "resume": "never"})


def launch(stub: str, folder: Path, nodes: int, options: dict[str, object]) -> int:
    try:
        launcher = SlurmLauncher(nodes=nodes, ranks_per_node=1, name="slurm", poll_s=0.5, **options)
        launcher.worker = Path(__file__).resolve()
        launcher.on_failure = record.write_failed
        launcher.launch(make_spec(folder, stub, nodes))
    except (UserError, RunFailed, KeyboardInterrupt, Stopped) as error:
        return command.report(error)
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        given = dict(option.split("=", 1) for option in sys.argv[5:])
        sys.exit(launch(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), {k: json.loads(v) for k, v in given.items()}))
    worker.main(sys.argv[1], train)
