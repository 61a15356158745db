"""The first process of the sandbox of an emulated run: `python launch/emulated/inside.py PLAN`.

PLAN is JSON: {run_dir, nodes, mbit_per_s, link, agents: [{command, environment}]}; `environment` of an agent is added to
this process's own. Builds and measures the network, writes <run_dir>/link.json, runs the agents, one on each node, and
leaves <run_dir>/outcome.json: {cause}, null or the fields of `launch.failure.Cause`. mbit_per_s null: links have no set rate
until somebody asks for one.

While it runs, it obeys lines appended to <run_dir>/control; each is repeated in <run_dir>/control.done, followed by
": why not" where it failed:

    cut K, mend K    pull the cable of node K and put it back
    rate R           sets all links to R Mbit/s
    check R          ... measures what they carry, which nobody else may use meanwhile, and writes it to <run_dir>/link.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository, not from this file's own folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from launch import link_file as links
from launch import process
from launch.emulated import measure, network, sandbox
from launch.failure import Cause
from launch.files import Tail, write_json
from launch.process import Stopped
from launch.supervise import Agent, supervise

CONTROL, CONTROL_DONE, OUTCOME = "control", "control.done", "outcome.json"


class Control:
    """Obeys the lines of a run's control file."""

    def __init__(self, run_dir: Path, nodes: int, link: dict[str, Any]) -> None:
        self.run_dir = run_dir
        self.nodes = nodes
        self.link = link  # what is known of the links
        self.asked, self.partial = Tail(run_dir / CONTROL), ""

    def poll(self) -> None:
        """Does what has been asked for since the last call."""
        *lines, self.partial = (self.partial + self.asked.rest()).split("\n")
        for line in lines:
            with open(self.run_dir / CONTROL_DONE, "a") as done:
                done.write(line + self._obey(line) + "\n")

    def _obey(self, line: str) -> str:
        word, _, value = line.partition(" ")
        try:
            if word in ("cut", "mend") and value.isdigit() and int(value) < self.nodes:
                network.set_cable(int(value), "down" if word == "cut" else "up")
            elif word in ("rate", "check") and (mbit := _rate(value)) is not None:
                self._shape(mbit, word == "check")
            else:
                return ": unknown"
        except network.NetworkError as error:
            return f": {error}"
        return ""

    def _shape(self, mbit_per_s: float, measured: bool) -> None:
        for node in range(self.nodes):
            network.shape(node, mbit_per_s)
        if measured:
            self.link = {**self.link, "set_mbit_per_s": mbit_per_s, **measure.check(self.nodes, mbit_per_s)}
            links.write(self.run_dir, self.link)


def run(plan: dict[str, Any]) -> Cause | None:
    """Runs a plan to its end. None when all ranks ended well."""
    run_dir, nodes, rate = Path(plan["run_dir"]), plan["nodes"], plan["mbit_per_s"]
    try:
        network.build(nodes, rate)
        link = {**plan["link"], **(measure.check(nodes, rate) if rate is not None else {})}
    except network.NetworkError as error:
        return Cause(f"the emulated network could not be built: {error}")
    links.write(run_dir, link)
    if link["note"]:
        with contextlib.suppress(OSError):
            os.write(0, f"{link['note']}\n".encode())
    agents = [
        Agent([*network.enter(k), *agent["command"]], {**os.environ, **agent["environment"]})
        for k, agent in enumerate(plan["agents"])
    ]
    control = Control(run_dir, nodes, link)

    def each_poll(running: Sequence[subprocess.Popen]) -> None:
        sandbox.collect_orphans([p.pid for p in running])
        control.poll()

    return supervise(agents, run_dir, terminal=0, heartbeat_timeout_s=plan["heartbeat_timeout_s"], each_poll=each_poll)


def _rate(text: str) -> float | None:
    """A rate in Mbit/s above 0; None where `text` is none."""
    with contextlib.suppress(ValueError):
        if math.isfinite(value := float(text)) and value > 0:
            return value
    return None


def main(plan_path: str) -> int:
    """The command line."""
    plan = json.loads(Path(plan_path).read_text())
    try:
        with process.stop_signals():
            cause = run(plan)
            outcome = {"cause": None if cause is None else dataclasses.asdict(cause)}
            write_json(Path(plan["run_dir"]) / OUTCOME, outcome)
    except Stopped as error:
        return error.code
    except KeyboardInterrupt:
        return 130
    return 0 if cause is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
