"""The paper's speedup table, replayed: `python experiments/paper_table.py [--models A,B] [--nodes 2,8] [--methods ...]`.

1, 2, 4 and 8 nodes of 8 A100 on emulated links, computation replayed from results/timelines (experiments/replay.py). Every
cell is a record; table and plot are made from all records there are, so that a subset can be measured again alone. Exit
status: 0; 1 a run failed; 2 bad input, or no shaped link on this machine; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository, not from this file's own folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from experiments import compose, paper, paper_report, run, timelines
from experiments.errors import UserError
from experiments.spec import RunSpec
from launch import emulated
from launch.base import Launcher
from launch.emulated import EmulatedLauncher
from launch.failure import RunFailed
from launch.local import LocalLauncher
from launch.process import Stopped

WORKER = Path(__file__).resolve().with_name("paper_worker.py")


def make_spec(options: argparse.Namespace, nodes: int, cells: Sequence[paper.Cell], command: str) -> RunSpec:
    """The run that measures `cells`, all of them on `nodes` nodes."""
    name = "emulated" if nodes > 1 else "local"
    config: dict[str, Any] = {
        "seed": 0,
        "results_dir": options.results,
        "cluster": {"name": name, "nodes": nodes, "ranks_per_node": 1},
        "scale": {"name": "paper"},
        "workload": {"_target_": "experiments.workloads.replay.Replay"},
        "optimizer": {"_target_": "birder.SGDM"},
        "comm": {"enabled": True},
        "paper": {"mbit": options.mbit, "steps": options.steps, "cells": [c.as_dict() for c in cells]},
    }
    run_id = f"{compose.new_stamp()}-{paper.EXP}-{nodes}-{secrets.token_hex(2)}"
    run_dir = Path(options.output) / paper.EXP / run_id
    return RunSpec(run_id, None, paper.EXP, command, [], config, str(run_dir))


def make_launcher(nodes: int, mbit: float) -> Launcher:
    """Nodes with links of `mbit` Mbit/s; a single node has none."""
    common: dict[str, Any] = {"nodes": nodes, "ranks_per_node": 1, "backend": "gloo"}
    launcher: Launcher
    if nodes == 1:
        launcher = LocalLauncher(name="local", **common)
    else:
        # The dilation differs from cell to cell, over one and the same link.
        launcher = EmulatedLauncher(name="emulated", link_gbps=mbit / 1000, dilation=1.0, **common)
    launcher.worker = WORKER
    return launcher


def measure(options: argparse.Namespace, command: str) -> None:
    """Runs every cell that the options ask for. Raises UserError and RunFailed."""
    if max(options.nodes) > 1 and (reason := emulated.why_not()) is not None:
        raise UserError(f"the table needs links of a set rate, and this machine has none to give: {reason}")
    for model in options.models:
        for rate in options.rates:
            timelines.load(f"{model}_{rate}")
    methods = [*options.methods, *(["fp32_serial"] if "fp32" in options.methods else [])]
    for nodes in options.nodes:
        cells = paper.cells(nodes, options.models, options.rates, options.links, methods)
        began = time.monotonic()
        make_launcher(nodes, options.mbit).launch(make_spec(options, nodes, cells, command))
        print(f"{len(cells)} cells on {nodes} node{'s' * (nodes > 1)} in {time.monotonic() - began:.0f} s", flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises UserError for names that do not exist."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(paper.DEFAULT_MODELS), help=f"of {', '.join(paper.MODELS)}")
    parser.add_argument("--nodes", default=",".join(map(str, paper.NODES)), help="numbers of nodes, 8 GPUs each")
    parser.add_argument("--methods", default=",".join(paper.ROWS), help=f"of {', '.join(paper.ROWS)}")
    parser.add_argument("--links", default=",".join(paper.LINKS), help="Gbit/s of TCP")
    parser.add_argument("--rates", default=",".join(paper.RATES), help="the GPU's precision: tf32, amp")
    parser.add_argument(
        "--steps", type=int, help="timed steps of every cell; default: 2 or 3, see experiments/paper.py"
    )
    parser.add_argument("--mbit", type=float, default=paper.MBIT, help="rate of the emulated links, Mbit/s")
    parser.add_argument(
        "--tables-only", action="store_true", help="measure nothing, make table and plot from the records"
    )
    parser.add_argument("--results", default="results", help="results folder")
    parser.add_argument("--output", default="outputs", help="folder for logs")
    options = parser.parse_args(arguments)
    for key, known in (
        ("models", paper.MODELS),
        ("methods", paper.ROWS),
        ("links", paper.LINKS),
        ("rates", paper.RATES),
    ):
        setattr(options, key, _names(key, getattr(options, key), list(known)))
    options.nodes = [int(n) for n in _names("nodes", options.nodes, list(map(str, paper.NODES)))]
    if options.steps is not None and options.steps < 1:
        raise UserError(f"--steps must be at least 1, got {options.steps}")
    if options.mbit <= 0:
        raise UserError(f"--mbit must be positive, got {options.mbit:g}")
    return options


def _names(option: str, text: str, known: list[str]) -> list[str]:
    given = [name for name in text.split(",") if name]
    if unknown := [name for name in given if name not in known]:
        raise UserError(f"--{option} knows no '{unknown[0]}'; there are: {', '.join(known)}")
    if not given:
        raise UserError(f"--{option} is empty; there are: {', '.join(known)}")
    return [name for name in known if name in given]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line's work and exit status."""
    try:
        options = parse(arguments)
        if not options.tables_only:
            measure(options, run.typed("paper_table", list(arguments if arguments is not None else sys.argv[1:])))
        paper_report.write(options.results)
        paper_report.show(options.results)
    except (UserError, RunFailed, KeyboardInterrupt, Stopped) as error:
        return run.report(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
