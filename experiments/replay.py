"""Replays a suite of cells: computation is waited for, communication is real.

    python experiments/replay.py suite=paper [nodes=2,8] [methods=A,B] [...]

suite is paper, bench or a YAML file. Every option is a key (`nodes=2`, `profile=true`) or a flag (`--nodes 2`, `--profile`).
Timing is interleaved. Every cell is a record. Page and picture are made from all records, so one part can be measured again.
Exit status: 0 success; 1 a run failed; 2 bad input, or nothing to measure on; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script
    import _script  # noqa: F401

from experiments.cells import suite as suites
from experiments.cells.suite import Measurement, Suite
from experiments.config import compose
from experiments.records import record
from experiments.report import replay_page, tables
from experiments.runs import command, start
from launch.base import Launcher
from launch.emulated import launcher as emulated
from launch.environment import cores
from launch.errors import UserError
from launch.local import LocalLauncher
from launch.spec import RunSpec
from launch.words import count, say, there_are

WORKER = Path(__file__).resolve().parent / "cells" / "engine.py"
LISTS = ("models", "nodes", "methods", "links", "rates")
"""Options that take names of the suite, separated by commas."""


def make_spec(
    suite: Suite,
    options: argparse.Namespace,
    name: str,
    plan: dict[str, Any],
    command: str,
    *,
    emulated: bool = False,
    nodes: int = 1,
) -> RunSpec:
    """The run that measures a plan, which stands in the configuration under the suite's name."""
    config: dict[str, Any] = {
        "seed": 0,
        "results_dir": options.results,
        "cluster": {"name": "emulated" if emulated else "local", "nodes": nodes, "ranks_per_node": 1},
        "scale": {"name": "paper"},
        "workload": {"_target_": "experiments.cells.replay.Replay"},
        "optimizer": {"_target_": "birder.SGDM"},
        "comm": {"enabled": True},
        suite.name: plan,
    }
    run_id = compose.new_name(suite.name, name)
    return RunSpec(run_id, None, suite.name, command, [], config, str(Path(options.output) / suite.name / run_id))


def make_launcher(shaped: bool, nodes: int, mbit: float) -> Launcher:
    """Nodes with links of `mbit` Mbit/s, or as many ranks on this machine.

    The dilation is 1: it differs from cell to cell, over one and the same link.
    """
    launcher: Launcher
    if shaped:
        launcher = emulated.EmulatedLauncher(
            name="emulated", link_gbps=mbit / 1000, dilation=1.0, nodes=nodes, ranks_per_node=1, backend="gloo"
        )
    else:
        launcher = LocalLauncher(name="local", nodes=1, ranks_per_node=nodes, backend="gloo")
    launcher.worker, launcher.on_failure = WORKER, record.write_failed
    return launcher


def measure(suite: Suite, options: argparse.Namespace, command: str) -> None:
    """Runs every cell that the options ask for. Raises UserError and RunFailed."""
    places = suite.places(options.models, options.rates, options.links, options.nodes)
    worlds = suite.worlds(suite.cells(places, options.methods))
    for model, rate in dict.fromkeys((p.model, p.rate) for p in places):
        suite.timeline(model, rate)
    if any(shaped for shaped, _ in worlds) and (reason := emulated.why_not()) is not None:
        if all(suite.links[name].goodput_mbit for name in options.links):
            raise UserError(f"the table needs links of a set rate, and this machine has none to give: {reason}")
        say(f"No emulated links here ({reason}): loopback alone is measured.")
        worlds = {world: some for world, some in worlds.items() if not world[0]}
    for shaped, nodes in worlds:
        if shaped and options.mbit > (most := 1000 * emulated.capacity_gbps(nodes, cores())):
            raise UserError(
                f"--mbit={options.mbit:g} is more than this machine ({count(cores(), 'core')}) can carry for {nodes} nodes "
                f"at once: {most:.4g} at most"
            )
    start.check_folder(Path(options.results))
    for (shaped, nodes), cells in worlds.items():
        began = time.monotonic()
        launch(suite, options, shaped, nodes, cells, command)
        where = f"{len(cells)} cells on {count(nodes, 'node')}{', emulated' * shaped}"
        say(f"{where}: {time.monotonic() - began:.0f} s")


def launch(
    suite: Suite, options: argparse.Namespace, shaped: bool, nodes: int, cells: Sequence[Measurement], command: str
) -> None:
    """One run: all `cells` in one world."""
    plan = {"suite": suite.model_dump(mode="json"), "mbit": options.mbit, "steps": options.steps}
    plan |= {"profile": options.profile, "cells": [c._asdict() for c in cells]}
    name = f"{'emulated' if shaped else 'local'}-{nodes}"
    spec = make_spec(suite, options, name, plan, command, emulated=shaped, nodes=nodes)
    make_launcher(shaped, nodes, options.mbit).launch(spec)


def measure_kernels(suite: Suite, options: argparse.Namespace, command: str) -> None:
    """Times the kernels on the CPU; one record."""
    import torch

    from experiments.bench import kernels

    start.check_folder(Path(options.results))
    device = torch.device("cpu")
    plan = {"kernels": list(kernels.measure(device, options.elements)), "backend": kernels.backend_name(device)}
    write_kernels(suite, options, plan, device.type, command)


def write_kernels(suite: Suite, options: argparse.Namespace, plan: dict[str, Any], device: str, command: str) -> None:
    """Writes the record of the kernels on that kind of device: `kernels` and `backend`, on a GPU also `hooks`."""
    from experiments.bench import kernels

    plan = {**plan, "workers": kernels.WORKERS}
    made = record.from_spec(make_spec(suite, options, "kernels", plan, command), device=device)
    name = f"{suite.name}-kernels-{device}"
    record.write(dataclasses.replace(made, id=name, method="kernels", wire="none"), options.results)


def parse(arguments: Sequence[str]) -> tuple[Suite, argparse.Namespace]:
    """The suite and what is asked of it. Raises UserError for names that do not exist."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--suite")
    given = _as_flags(arguments)
    name = first.parse_known_args(given)[0].suite
    parser = command.parser(__doc__)
    parser.allow_abbrev = False
    parser.add_argument("--suite", help=f"of {', '.join(suites.names())}, or the path of a YAML file")
    if name is None and not {"-h", "--help"} & set(given):
        raise UserError(f"which suite? suite=NAME; there are: {', '.join(suites.names())}")
    suite = None if name is None else suites.load(name)
    lists = {option: _known(suite, option) for option in LISTS} if suite is not None else {}
    for option, (known, default) in lists.items():
        parser.add_argument(f"--{option}", default=",".join(default), help=f"of {', '.join(known)}")
    parser.add_argument(
        "--steps", type=int, help="timed steps of every cell, one in each round; default: the suite's rounds"
    )
    parser.add_argument("--mbit", type=float, default=suite and suite.mbit, help="rate of the emulated links, Mbit/s")
    parser.add_argument("--tables-only", action="store_true", help="measure nothing, make the page from the records")
    # Also by the names that a run's keys have: so messages call them.
    parser.add_argument("--results", "--results-dir", default=record.LOCAL, help="results folder")
    parser.add_argument("--output", "--output-dir", default="outputs", help="folder for logs and profiles")
    parser.add_argument("--profile", action="store_true", help="a chrome trace and a PNG of one step of every cell")
    parser.add_argument("--kernels-only", action="store_true", help="the kernels alone")
    parser.add_argument("--no-kernels", action="store_true", help="the methods alone")
    parser.add_argument("--elements", type=int, help="size of the kernels' tensors; default 2^24")
    options = parser.parse_args(given)
    assert suite is not None
    for key in (a.partition("=")[0] for a in arguments if a.lower().endswith("=false")):
        if not isinstance(vars(options).get(key.replace("-", "_")), bool):
            switches = [k for k, v in vars(options).items() if isinstance(v, bool)]
            raise UserError(f"{key}=false: no such switch{there_are(key, switches)}")
    for option, (known, _) in lists.items():
        setattr(options, option, _chosen(option, getattr(options, option), known))
    options.nodes = [int(n) for n in options.nodes]
    for option, least in (("steps", 1), ("elements", 32)):
        value = getattr(options, option)
        if value is not None and value < least:
            raise UserError(f"--{option} must be at least {least}, got {value}")
    if not 0 < options.mbit < math.inf:  # nor NaN
        raise UserError(f"--mbit must be positive and finite, got {options.mbit:g}")
    if options.kernels_only and not suite.kernels:
        raise UserError(f"suite {suite.name} has no kernels: leave out --kernels-only")
    return suite, options


def _as_flags(arguments: Sequence[str]) -> list[str]:
    """key=value as --key=value; key=true as --key, key=false as nothing. Lists may stand in brackets."""
    given = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if argument.startswith("-") or not equals:
            given.append(argument)
        elif value.lower() != "false":
            flag, value = "--" + key.replace("_", "-"), value.strip("[]").replace(" ", "") if key in LISTS else value
            given.append(flag if value.lower() == "true" else f"{flag}={value}")
    return given


def _known(suite: Suite, option: str) -> tuple[list[str], list[str]]:
    """All names that an option takes, and those that it has by itself."""
    if option == "models":
        return list(suite.models), [name for name, model in suite.models.items() if model.default]
    names = [str(n) for n in suite.rows] if option == "methods" else [str(n) for n in getattr(suite, option)]
    return names, names


def _chosen(option: str, text: str, known: Sequence[str]) -> list[str]:
    given = [name for name in text.split(",") if name]
    if unknown := [name for name in given if name not in known]:
        raise UserError(f"--{option} knows no '{unknown[0]}'{there_are(unknown[0], known)}")
    if not given and known:
        raise UserError(f"--{option} is empty; there are: {', '.join(known)}")
    return [name for name in known if name in given]


@command.report_errors
def main(arguments: Sequence[str] | None = None) -> int:
    typed = list(sys.argv[1:] if arguments is None else arguments)
    suite, options = parse(typed)
    line, kernels = command.typed("replay", typed), options.kernels_only
    if not options.tables_only:
        if not kernels:
            measure(suite, options, line)
        if suite.kernels and not options.no_kernels:
            measure_kernels(suite, options, line)
    tables.save(replay_page.render(suite, options.results))
    replay_page.show(suite, options.results, device="cpu", kernels_only=kernels)
    return 0


if __name__ == "__main__":
    command.start(main)
