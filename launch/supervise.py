"""torchrun's agents of one machine: started, watched until all have ended or one has failed, and then ended together."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch import failure, process
from launch.failure import Cause
from launch.stopped import StoppedWatch


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
    heartbeat_timeout_s: how long a rank may be stopped (launch/stopped.py).
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
