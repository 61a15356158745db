"""What went wrong: read from the files that workers leave in a run directory.

ranks/rank<r>.json:  {rank, node, pid, pid_space, state}, state running | done | failed | terminated.
errors/rank<r>.json: {rank, node, time, type, message, traceback, user_error, peers}; peers, where others were missed:
                     [{rank, node, state}], state answers | silent | gone | unreachable (experiments/training/heartbeat.py);
                     written by the rank itself, or by who ended it (`RankFiles`).
logs/node<k>.log:    what torchrun says on node k; logs/rank<r>.log: what rank r says.

A rank that torchrun starts again takes the place of its earlier life in both folders.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.errors import UserError
from launch.files import read_json, read_log, write_json
from launch.process import alive, pid_space

# What ranks report when a peer has gone: a consequence, never the cause.
_CONNECTION = re.compile(
    r"connection (closed|reset|refused|was)|broken pipe|gloo/transport|recvvalue failed|socket (timeout|closed)"
    r"|timed out|wait timeout|timeout waiting|remote process|by peer|failed to connect|nccl (error|communicator)",
    re.IGNORECASE,
)
_CONNECTION_TYPES = {
    "PeerLost",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "ConnectionError",
    "BrokenPipeError",
}


TORCHRUN = "logs/torchrun"
"""Where in a run directory torchrun keeps its files."""
_AGAIN = "---- started again ----\n"
"""In logs, which all starts of a run share: what is above is of an earlier one."""
FULL = 1 << 16
"""Bytes. On a disk with less than that, neither ranks nor torchrun can say what went wrong."""


class RunFailed(Exception):
    """A run that started did not end well. The message is one line that names the rank and the node."""


class Diverged(RuntimeError):
    """The loss is NaN or inf. The program did nothing wrong, so one line is said and no traceback is shown."""


@dataclass(frozen=True)
class Cause:
    """Why a run failed. `traceback` is for the user's eyes, once; empty where there is none."""

    reason: str
    traceback: str = ""
    user_error: bool = False


class RankFiles:
    """What a rank says of itself in the files of a run directory."""

    def __init__(self, run_dir: Path, rank: int, node: int) -> None:
        self.dir, self.rank, self.node = run_dir, rank, node

    def begin(self) -> None:
        """This process takes the place of the rank's earlier life, if there was one."""
        with contextlib.suppress(OSError):
            (self.dir / "errors" / f"rank{self.rank}.json").unlink()
        self.save("running")

    def save(self, state: str) -> None:
        """What has become of the rank, which is this process."""
        self._write("ranks", pid=os.getpid(), pid_space=pid_space(), state=state)

    def save_error(
        self,
        kind: str,
        message: str,
        traceback: str = "",
        user_error: bool = False,
        peers: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Why the rank ends. kind: the type of an exception; peers: whom the rank found missing."""
        why = {"type": kind, "message": message, "traceback": traceback, "user_error": user_error, "peers": list(peers)}
        self._write("errors", time=time.time(), **why)

    def _write(self, folder: str, **content: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk: the exit status must tell
            (self.dir / folder).mkdir(parents=True, exist_ok=True)
            write_json(self.dir / folder / f"rank{self.rank}.json", {"rank": self.rank, "node": self.node, **content})


def forget_earlier(run_dir: Path) -> None:
    """Removes the rank and error files of an earlier run in the same directory (a resumed one), and ends its logs."""
    for folder in ("ranks", "errors"):
        shutil.rmtree(run_dir / folder, ignore_errors=True)
    for log in (*run_dir.glob("logs/node*.log"), *run_dir.glob("logs/rank*.log")):
        with contextlib.suppress(OSError), open(log, "a") as file:
            file.write(_AGAIN)
    remove_left(run_dir)


def remove_left(run_dir: Path) -> None:
    """Removes what only processes of a run use, once none is left: torchrun's folders, unfinished checkpoints."""
    for left in (run_dir / TORCHRUN, *run_dir.glob("checkpoints/step-*.tmp")):
        shutil.rmtree(left, ignore_errors=True)


def remove_unused(run_dir: Path) -> None:
    """Removes the directory of a run that ended before it had anything to keep."""
    if not any((run_dir / kept).exists() for kept in ("checkpoints", "curve.csv")):
        shutil.rmtree(run_dir, ignore_errors=True)
        with contextlib.suppress(OSError):
            run_dir.parent.rmdir()  # the experiment's folder, if nothing else is in it


def pids(run_dir: Path) -> list[int]:
    """Process ids of all ranks that have reported, of those that this process sees under the same ids."""
    return [int(r["pid"]) for r in _visible_ranks(run_dir)]


def vanished(run_dir: Path) -> list[dict[str, Any]]:
    """Rank files of processes that are gone without having said why: killed from outside.

    Ranks of other machines, whose process ids mean nothing here, are left out.
    """
    said = {e["rank"] for e in _read(run_dir / "errors")}
    ranks = _visible_ranks(run_dir)
    return [r for r in ranks if r["state"] == "running" and r["rank"] not in said and not alive(int(r["pid"]))]


def explain(run_dir: Path, killed: list[dict[str, Any]], agent: int, code: int, lost: str = "") -> Cause:
    """The first cause of a failed run.

    killed: `vanished` at the moment of the failure, before anything was ended on purpose.
    agent, code: the node whose torchrun ended first, and its exit status.
    lost: which node cannot be asked any more, in one line; empty where all could.
    """
    errors = sorted(_read(run_dir / "errors"), key=lambda e: e["time"])
    causes = [e for e in errors if not is_consequence(e["type"], e["message"])]
    wrong_input = [e for e in causes if e["user_error"]]
    if wrong_input:
        return Cause(wrong_input[0]["message"], user_error=True)
    if lost and not causes:
        return Cause(lost)
    if code < 0 and not causes:
        return Cause(f"node {agent}: its torchrun agent was ended by {_signal_name(-code)}")
    if not causes and _is_full(run_dir):
        return Cause(f"{run_dir}: no space left on device; free space or set output_dir=FOLDER on another disk")
    killed = killed or _killed_in_logs(run_dir, errors)
    if killed and not causes:
        first = killed[0]
        how = _how_killed(run_dir, first)
        where = "" if len(killed) == 1 else f" (and {len(killed) - 1} more)"
        tail = _tail(run_dir / "logs" / f"rank{first['rank']}.log")
        return Cause(f"rank {first['rank']} on node {first['node']}{where} was {how}", tail)
    if not causes and (missed := _most_missed(run_dir, errors)):
        return Cause(missed)
    if causes or errors:
        first = (causes or errors)[0]
        message = " ".join(str(first["message"]).split())
        message = message if len(message) <= 300 else message[:299] + "…"
        return Cause(f"rank {first['rank']} on node {first['node']}: {first['type']}: {message}", first["traceback"])
    log = run_dir / "logs" / f"node{agent}.log"
    if unheard := _ended_unheard(log, agent):
        return Cause(f"{unheard} before it could say why; see {log}", _tail(log))
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


def ranks(run_dir: Path) -> list[dict[str, Any]]:
    """The rank files of a run."""
    return _read(run_dir / "ranks")


def _read(folder: Path) -> list[dict[str, Any]]:
    return [found for path in sorted(folder.glob("rank*.json")) if (found := read_json(path)) is not None]


def _visible_ranks(run_dir: Path) -> list[dict[str, Any]]:
    here = pid_space()
    return [r for r in ranks(run_dir) if r["pid_space"] == here]


def is_consequence(kind: str, message: str) -> bool:
    """Whether an exception of type `kind` is what a rank meets when another one is lost."""
    return kind in _CONNECTION_TYPES or (
        kind in ("RuntimeError", "OSError", "UserError", "CheckpointException")
        and _CONNECTION.search(message) is not None
    )


def _is_full(run_dir: Path) -> bool:
    try:
        return shutil.disk_usage(run_dir).free < FULL
    except OSError:  # the folder is gone
        return False


def _most_missed(run_dir: Path, errors: list[dict[str, Any]]) -> str | None:
    """Whom most of those who looked around found missing, in one line; None when nobody missed anybody."""
    excused = {e["rank"] for e in errors}  # they have said themselves why they left
    excused |= {r["rank"] for r in ranks(run_dir) if r["state"] != "running"}
    found: Counter[tuple[int, str]] = Counter()  # (how sure the finding is, what it says)
    for error in errors:
        peers, node = error.get("peers", []), error["node"]
        others = sorted({p["node"] for p in peers} - {node})
        cut = sorted({p["node"] for p in peers if p["state"] == "unreachable"})
        if cut == others and len(cut) > 1:  # it is this node itself that nobody reaches
            found[1, _unreachable(run_dir, node, [error["rank"]])] += 1
        elif cut and cut == others:
            first, second = sorted([node, *cut])
            found[1, f"nodes {first} and {second} cannot reach each other: a link is down or a machine is gone"] += 1
        else:
            for lost in cut:
                found[1, _unreachable(run_dir, lost, [p["rank"] for p in peers if p["node"] == lost])] += 1
        for p in peers:
            who = f"rank {p['rank']} on node {p['node']}"
            if p["state"] == "silent":
                found[0, f"{who} stopped answering: its process is stopped or hangs"] += 1
            elif p["state"] == "gone" and p["rank"] not in excused:
                found[2, f"{who} was killed, for example for lack of memory"] += 1
    return max(found, key=lambda f: (found[f], f[0]))[1] if found else None


def _unreachable(run_dir: Path, node: int, known: list[int]) -> str:
    there = sorted({*known, *(r["rank"] for r in ranks(run_dir) if r["node"] == node)})
    named = f"rank{'s' * (len(there) > 1)} {', '.join(map(str, there))}"
    return f"node {node} ({named}) cannot be reached by the others: its link is down or the machine is gone"


def _killed_in_logs(run_dir: Path, errors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rank files of processes that, as their torchrun says, a signal has ended."""
    said = {e["rank"] for e in errors}
    silent = [r for r in ranks(run_dir) if r["state"] == "running" and r["rank"] not in said]
    return [r for r in silent if _signal_in_log(run_dir, r) is not None]


def _how_killed(run_dir: Path, rank: dict[str, Any]) -> str:
    """What torchrun saw of it: "ended by SIGABRT", or, if it was SIGKILL or saw nothing, "killed"."""
    name = _signal_in_log(run_dir, rank)
    return f"ended by {name}" if name not in (None, "SIGKILL") else "killed, for example for lack of memory"


def _signal_in_log(run_dir: Path, rank: dict[str, Any]) -> str | None:
    """The signal that ended a rank, as its node's torchrun reports it."""
    text = _of_this_start(run_dir / "logs" / f"node{rank['node']}.log")
    match = re.search(rf"Signal (\d+) \(SIG\w+\) received by PID {rank['pid']}\b", text)
    return _signal_name(int(match[1])) if match else None


def _ended_unheard(log: Path, node: int) -> str:
    """Who of a node ended first and how, as its torchrun reports it; "" where it does not."""
    found = re.findall(r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: (-?\d+)", _of_this_start(log))
    if not found:
        return ""
    rank, code = found[-1][0], int(found[-1][1])  # of several the last: torchrun may have restarted its ranks
    how = "killed, for example for lack of memory," if code == -signal.SIGKILL else ""
    how = how or (f"ended by {_signal_name(-code)}" if code < 0 else f"ended with status {code}")
    return f"rank {rank} on node {node} {'was ' * (code < 0)}{how}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(path: Path) -> str:
    return "\n".join(_of_this_start(path).splitlines()[-20:])


def _of_this_start(log: Path) -> str:
    return read_log(log).rpartition(_AGAIN)[2]
