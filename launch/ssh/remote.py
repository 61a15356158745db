"""The host's side of cluster=ssh, in a process that ssh starts.

`python -m launch.ssh.remote run NODE RUN_DIR COMMAND...`     runs COMMAND (torchrun) as long as standard input is open
`python -m launch.ssh.remote gather RUN_DIR RESULTS_DIR ID`   writes a tar of what a run has left to standard output

`run` first reads one line of JSON, {"files": {name: text}, "environment": {...}, "heartbeat_timeout_s": s}: files for a
run directory that is not the launcher's own, variables that no command line should show, and how long a rank may be stopped.
Standard input ends when the launcher wants the ranks to end, and also when it, its ssh or the connection is no more.

Leaves <run_dir>/agents/node<k>.json: {code, vanished}. code: exit status of COMMAND, null when it was ended from here;
vanished: rank files of this node's processes that were gone without a word before anything was ended on purpose.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from launch import environment, failure, process
from launch.files import write_json
from launch.supervise import StoppedWatch

BEGUN = "---- connected ----"
"""In what ssh says: what is above is the host's greeting."""
KEPT = ("logs", "ranks", "errors", "agents", "curve.csv")
_PR_SET_CHILD_SUBREAPER = 36


def run(node: int, run_dir: Path, command: list[str]) -> int:
    """Runs `command` until it or standard input ends; returns the exit status. Leaves no process behind."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return 1  # the launcher is gone already
    print(BEGUN, file=sys.stderr, flush=True)
    request = json.loads(line)
    # Ranks whose torchrun dies become children of this process, which can then find and end them.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if request["files"]:
        failure.forget_earlier(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
    for name, text in request["files"].items():
        (run_dir / name).write_text(text)
    ranks = int(command[command.index("--nproc-per-node") + 1])
    env = environment.fresh(os.environ, ranks) | request["environment"]
    started: list[subprocess.Popen] = []
    try:
        with process.stop_signals():
            # Rank 0 finds the user's terminal as its standard input (experiments/training/worker.py).
            started.append(process.start(command, env, run_dir / "logs" / f"node{node}.log", stdin=1))
            _wait(started[0], StoppedWatch(run_dir, request["heartbeat_timeout_s"]))
    except process.Stopped:
        pass  # ended by a signal: as if standard input had ended
    finally:
        with process.undisturbed():
            code = started[0].poll() if started else None
            try:
                _report(node, run_dir, code)
            finally:
                # Ranks first: what they have started, such as W&B's writer, is needed until they have ended.
                process.end(
                    started, others=lambda: sorted({*failure.pids(run_dir)} & {*process.descendants(os.getpid())})
                )
                process.end([], others=lambda: process.descendants(os.getpid()))
                shutil.rmtree(run_dir / failure.TORCHRUN, ignore_errors=True)
    return 1 if code is None else code if code >= 0 else 128 - code


def gather(run_dir: Path, results_dir: Path, run_id: str) -> None:
    """Writes a tar of a run's small files: run/... and, where this host has them, results/records and results/curves."""
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as tar:
        for name in KEPT:
            if (run_dir / name).exists():
                tar.add(run_dir / name, f"run/{name}")
        # In an interleaved comparison each method has a record, whose name begins with the run's.
        for folder, kind in (("curves", "csv"), ("records", "json")):
            for path in sorted((results_dir / folder).glob(f"{run_id}*.{kind}")):
                tar.add(path, f"results/{folder}/{path.name}")


def _wait(child: subprocess.Popen, watch: StoppedWatch) -> None:
    """Waits until `child` or standard input ends."""
    while child.poll() is None:
        watch.look([child.pid])
        if select.select([0], [], [], 0.1)[0] and not os.read(0, 4096):
            return


def _report(node: int, run_dir: Path, code: int | None) -> None:
    # The other nodes' processes, whose files a shared folder holds too, have nothing to do with ids on this host.
    vanished = [r for r in failure.vanished(run_dir) if int(r["node"]) == node] if code != 0 else []
    target = run_dir / "agents" / f"node{node}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_json(target, {"code": code, "vanished": vanished})


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "gather":
        gather(Path(rest[0]), Path(rest[1]), rest[2])
    else:
        sys.exit(run(int(rest[0]), Path(rest[1]), rest[2:]))
