"""What went wrong: read from the files that workers leave in a run directory.

ranks/rank<r>.json:  {rank, node, pid, attempt, state}, state running | done | failed | terminated.
errors/rank<r>.json: {rank, node, attempt, time, type, message, traceback, user_error}.
logs/node<k>.log:    what torchrun says on node k; logs/rank<r>.log: what rank r says.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.errors import UserError
from experiments.spec import RunSpec
from launch.process import alive

# What ranks report when a peer has gone: a consequence, never the cause.
_CONNECTION = re.compile(
    r"connection (closed|reset|refused|was)|broken pipe|gloo/transport|recvvalue failed|socket (timeout|closed)"
    r"|timed out|wait timeout|timeout waiting|remote process|by peer|failed to connect|nccl (error|communicator)",
    re.IGNORECASE,
)
_CONNECTION_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionError", "BrokenPipeError"}


class RunFailed(Exception):
    """A run that started did not end well. The message is one line that names the rank and the node."""


@dataclass(frozen=True)
class Cause:
    """Why a run failed. `traceback` is for the user's eyes, once; empty where there is none."""

    reason: str
    traceback: str = ""
    user_error: bool = False


def forget_earlier(run_dir: Path) -> None:
    """Removes the rank and error files of an earlier run in the same directory (a resumed one)."""
    for folder in ("ranks", "errors"):
        shutil.rmtree(run_dir / folder, ignore_errors=True)


def remove_unused(run_dir: Path) -> None:
    """Removes the directory of a run that ended before it had anything to keep."""
    if not any((run_dir / kept).exists() for kept in ("checkpoints", "curve.csv")):
        shutil.rmtree(run_dir, ignore_errors=True)
        with contextlib.suppress(OSError):
            run_dir.parent.rmdir()  # the experiment's folder, if nothing else is in it


def pids(run_dir: Path) -> list[int]:
    """Process ids of all ranks that have reported."""
    return [int(r["pid"]) for r in _read(run_dir / "ranks")]


def vanished(run_dir: Path) -> list[dict[str, Any]]:
    """Rank files of processes that are gone without having said why: killed from outside."""
    said = {e["rank"] for e in _latest(run_dir / "errors", run_dir)}
    ranks = _latest(run_dir / "ranks", run_dir)
    return [r for r in ranks if r["state"] == "running" and r["rank"] not in said and not alive(int(r["pid"]))]


def explain(run_dir: Path, killed: list[dict[str, Any]], agent: int, code: int, lost: str = "") -> Cause:
    """The first cause of a failed run.

    killed: `vanished` at the moment of the failure, before anything was ended on purpose.
    agent, code: the node whose torchrun ended first, and its exit status.
    lost: which node cannot be asked any more, in one line; empty where all could.
    """
    errors = sorted(_latest(run_dir / "errors", run_dir), key=lambda e: e["time"])
    causes = [e for e in errors if not _is_consequence(e)]
    wrong_input = [e for e in causes if e["user_error"]]
    if wrong_input:
        return Cause(wrong_input[0]["message"], user_error=True)
    if lost and not causes:
        return Cause(lost)
    if code < 0 and not causes:
        return Cause(f"node {agent}: its torchrun agent was ended by {_signal_name(-code)}")
    if killed and not causes:
        first = killed[0]
        how = _how_killed(run_dir, first)
        where = "" if len(killed) == 1 else f" (and {len(killed) - 1} more)"
        tail = _tail(run_dir / "logs" / f"rank{first['rank']}.log")
        return Cause(f"rank {first['rank']} on node {first['node']}{where} was {how}", tail)
    if causes or errors:
        first = (causes or errors)[0]
        message = " ".join(str(first["message"]).split())
        message = message if len(message) <= 300 else message[:299] + "…"
        return Cause(f"rank {first['rank']} on node {first['node']}: {first['type']}: {message}", first["traceback"])
    log = run_dir / "logs" / f"node{agent}.log"
    return Cause(
        f"node {agent}: torchrun ended with status {code} before its ranks could say why; see {log}", _tail(log)
    )


def report(cause: Cause) -> None:
    """Raises `cause` as UserError or RunFailed, having printed its traceback."""
    if cause.user_error:
        raise UserError(cause.reason)
    if cause.traceback:
        print(cause.traceback.rstrip(), file=sys.stderr, flush=True)
    raise RunFailed(cause.reason)


def write_record(spec: RunSpec, reason: str) -> None:
    """Records that `spec` failed. A record that cannot be written is told in one line and hides nothing."""
    from experiments import record

    try:
        record.write(record.failed(spec, reason), spec.config["results_dir"])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)


def _read(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted(folder.glob("rank*.json")):
        with contextlib.suppress(OSError, ValueError):
            found.append(json.loads(path.read_text()))
    return found


def _latest(folder: Path, run_dir: Path) -> list[dict[str, Any]]:
    """Files of the latest attempt: errors that a restart has overcome explain nothing."""
    attempt = max((int(r["attempt"]) for r in _read(run_dir / "ranks")), default=0)
    return [f for f in _read(folder) if int(f["attempt"]) == attempt]


def _is_consequence(error: dict[str, Any]) -> bool:
    return error["type"] in _CONNECTION_TYPES or (
        error["type"] in ("RuntimeError", "OSError", "UserError", "CheckpointException")
        and _CONNECTION.search(error["message"]) is not None
    )


def _how_killed(run_dir: Path, rank: dict[str, Any]) -> str:
    """What torchrun saw of it: "killed by SIGKILL (...)" or, if it saw nothing, "killed"."""
    with contextlib.suppress(OSError):
        text = (run_dir / "logs" / f"node{rank['node']}.log").read_text(errors="replace")
        match = re.search(rf"Signal (\d+) \(SIG\w+\) received by PID {rank['pid']}\b", text)
        if match and (name := _signal_name(int(match[1]))) != "SIGKILL":
            return f"ended by {name}"
    return "killed, for example for lack of memory"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(path: Path, lines: int = 20) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
