"""torchrun's agents of one machine: started, watched until all have ended or one has failed, and then ended together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch import failure, process
from launch.failure import Cause, RankFiles
from launch.process import descendants, has_own_proc, is_stopped, of_proc

LATER_S = 12.0
"""Longer than `heartbeat_timeout_s`, so that ranks that have met find it first and say what each of them sees."""
LOOK_S = 5.0
"""All processes of the machine are looked through: not more often."""


class StoppedWatch:
    """Kills processes below some torchrun agents that have been stopped (SIGSTOP, for example) for `heartbeat_timeout_s` +
    LATER_S. A rank is killed on its own account: `errors/rank<r>.json` says why.

    Once ranks have met, each is watched by another one (experiments/training/heartbeat.py), on whatever machine. Before that
    nobody asks them, and the process that started a node's torchrun looks itself. Linux only; elsewhere the others wait for
    `cluster.collective_timeout_s`.
    """

    def __init__(self, run_dir: Path, heartbeat_timeout_s: float) -> None:
        self.run_dir = run_dir
        self.limit_s = heartbeat_timeout_s + LATER_S
        self._stopped: dict[int, float] = {}  # process id -> seconds
        self._looked = time.monotonic()

    def look(self, agents: Sequence[int]) -> None:
        """To be called often. agents: process ids."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        # If this process was stopped itself, or the machine slept, nobody can be blamed for that time.
        passed, self._looked = min(now - self._looked, 2 * LOOK_S), now
        if not has_own_proc():
            return
        found = [pid for pid in (*agents, *descendants(*agents)) if is_stopped(pid)]
        self._stopped = {pid: self._stopped.get(pid, 0.0) + passed for pid in found}
        for pid, seconds in self._stopped.items():
            if seconds >= self.limit_s:
                self._end(pid, seconds)

    def _end(self, pid: int, seconds: float) -> None:
        with contextlib.suppress(OSError):
            entries = of_proc(pid, "environ").decode(errors="replace").split("\0")
            environment = {name: value for name, _, value in (entry.partition("=") for entry in entries)}
            if (rank := environment.get("RANK")) is not None:
                node = int(environment.get("BIRDER_NODE", environment.get("GROUP_RANK", 0)))
                message = f"its process has been stopped for {seconds:.0f} s"
                RankFiles(self.run_dir, int(rank), node).save_error("Stopped", message)
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Agent:
    """How one node's agent is started. The environment is the whole one."""

    command: list[str]
    environment: dict[str, str]


def supervise(
    agents: Sequence[Agent],
    run_dir: Path,
    *,
    terminal: int,
    heartbeat_timeout_s: float,
    each_poll: Callable[[Sequence[subprocess.Popen]], None] = lambda running: None,
) -> Cause | None:
    """Runs agent k with its output in `<run_dir>/logs/node<k>.log`. None when all ended well, else the first cause.

    terminal:  file descriptor of the user's terminal, which ranks find as their standard input.
    heartbeat_timeout_s: how long a rank may be stopped (`StoppedWatch`).
    each_poll: called about ten times a second with the agents' processes.

    Whatever happens, a signal included, none of them and of their ranks runs when this returns or raises.
    """
    running: list[subprocess.Popen] = []
    watch = StoppedWatch(run_dir, heartbeat_timeout_s)

    def poll() -> None:
        watch.look([p.pid for p in running])
        each_poll(running)

    try:
        with process.stop_signals():
            for node, agent in enumerate(agents):
                log = run_dir / "logs" / f"node{node}.log"
                running.append(process.start(agent.command, agent.environment, log, stdin=terminal))
            failed = process.wait_for_first_failure(running, each_poll=poll)
            # Read before anything is ended on purpose: whoever is gone now went by itself.
            killed = failure.vanished(run_dir) if failed is not None else []
    finally:
        with process.undisturbed():
            process.end(running, others=lambda: failure.pids(run_dir))
    return None if failed is None else failure.explain(run_dir, killed, failed, running[failed].returncode)
