"""What the command lines of experiments/paper_table.py and experiments/bench_suite.py share. Imports no torch.

Both measure a plan of cells in one world after the other (experiments/cells/cells.py) and make their page from the records.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.config import compose
from experiments.records import record
from launch.base import Launcher
from launch.emulated.launcher import EmulatedLauncher
from launch.errors import UserError
from launch.local import LocalLauncher
from launch.spec import RunSpec

Choices = Mapping[str, tuple[Sequence[str], Collection[str]]]
"""Options that take names, separated by commas: option -> (all names, those that it takes by itself)."""


def add_common(parser: argparse.ArgumentParser, mbit: float, plan: str) -> None:
    """The options that both have. mbit: the emulated links' usual rate; plan: the file that sets the number of steps."""
    parser.add_argument("--steps", type=int, help=f"timed steps of every cell; default: 2 or 3, see experiments/{plan}")
    parser.add_argument("--mbit", type=float, default=mbit, help="rate of the emulated links, Mbit/s")
    parser.add_argument("--tables-only", action="store_true", help="measure nothing, make the page from the records")
    parser.add_argument("--results", default="results", help="results folder")
    parser.add_argument("--output", default="outputs", help="folder for logs and profiles")


def add_choices(parser: argparse.ArgumentParser, known: Choices) -> None:
    """Adds the options of `known`."""
    for option, (names, default) in known.items():
        parser.add_argument(f"--{option}", default=",".join(default), help=f"of {', '.join(names)}")


def check(options: argparse.Namespace, known: Choices) -> None:
    """Turns the options of `add_choices` into lists, nodes into numbers. Raises UserError for what cannot be."""
    for option, (names, _) in known.items():
        setattr(options, option, _chosen(option, getattr(options, option), names))
    options.nodes = [int(n) for n in options.nodes]
    at_least(options, "steps", 1)
    if options.mbit <= 0:
        raise UserError(f"--mbit must be positive, got {options.mbit:g}")


def at_least(options: argparse.Namespace, option: str, least: int) -> None:
    """Raises UserError for a number below `least`; an option that was not given passes."""
    value = getattr(options, option)
    if value is not None and value < least:
        raise UserError(f"--{option} must be at least {least}, got {value}")


def _chosen(option: str, text: str, known: Sequence[str]) -> list[str]:
    given = [name for name in text.split(",") if name]
    if unknown := [name for name in given if name not in known]:
        raise UserError(f"--{option} knows no '{unknown[0]}'; there are: {', '.join(known)}")
    if not given:
        raise UserError(f"--{option} is empty; there are: {', '.join(known)}")
    return [name for name in known if name in given]


def make_spec(
    options: argparse.Namespace,
    exp: str,
    name: str,
    plan: dict[str, Any],
    command: str,
    *,
    emulated: bool = False,
    nodes: int = 1,
) -> RunSpec:
    """The run that measures a plan, which stands in the configuration under the experiment's name."""
    config: dict[str, Any] = {
        "seed": 0,
        "results_dir": options.results,
        "cluster": {"name": "emulated" if emulated else "local", "nodes": nodes, "ranks_per_node": 1},
        "scale": {"name": "paper"},
        "workload": {"_target_": "experiments.workloads.replay.Replay"},
        "optimizer": {"_target_": "birder.SGDM"},
        "comm": {"enabled": True},
        exp: plan,
    }
    run_id = f"{compose.new_stamp()}-{exp}-{name}-{secrets.token_hex(2)}"
    return RunSpec(run_id, None, exp, command, [], config, str(Path(options.output) / exp / run_id))


def make_launcher(worker: Path, nodes: int, mbit: float | None) -> Launcher:
    """Starts `worker` on `nodes` nodes with links of `mbit` Mbit/s; None: as many ranks on this machine.

    The dilation is 1: it differs from cell to cell, over one and the same link.
    """
    launcher: Launcher
    if mbit is None:
        launcher = LocalLauncher(name="local", nodes=1, ranks_per_node=nodes, backend="gloo")
    else:
        launcher = EmulatedLauncher(
            name="emulated", link_gbps=mbit / 1000, dilation=1.0, nodes=nodes, ranks_per_node=1, backend="gloo"
        )
    launcher.worker, launcher.on_failure = worker, record.write_failed
    return launcher
