"""The paper's speedup table, replayed: `python experiments/paper_table.py [--models A,B] [--nodes 2,8] [--methods ...]`.

1, 2, 4 and 8 nodes of 8 A100 on emulated links, computation replayed from results/timelines (experiments/cells/replay.py).
Every cell is a record; table and plot are made from all records there are, so that a subset can be measured again alone. Exit
status: 0; 1 a run failed; 2 bad input, or no shaped link on this machine; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script: import from the repository, not from this file's own folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from launch import interrupt

    interrupt.ends_silently()

from experiments import run
from experiments.cells import cells_cli, paper, timelines
from experiments.report import paper_report
from launch.base import Launcher
from launch.emulated import launcher as emulated
from launch.errors import UserError
from launch.failure import RunFailed
from launch.process import Stopped
from launch.spec import RunSpec

WORKER = Path(__file__).resolve().parent / "cells" / "paper_worker.py"


def make_spec(options: argparse.Namespace, nodes: int, cells: Sequence[paper.Cell], command: str) -> RunSpec:
    """The run that measures `cells`, all of them on `nodes` nodes."""
    plan = {"mbit": options.mbit, "steps": options.steps, "cells": [c.as_dict() for c in cells]}
    return cells_cli.make_spec(options, paper.EXP, str(nodes), plan, command, emulated=nodes > 1, nodes=nodes)


def make_launcher(nodes: int, mbit: float) -> Launcher:
    """Nodes with links of `mbit` Mbit/s; a single node has none."""
    return cells_cli.make_launcher(WORKER, nodes, mbit if nodes > 1 else None)


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
    nodes = [str(n) for n in paper.NODES]
    known = {
        "models": (list(paper.MODELS), paper.DEFAULT_MODELS),
        "nodes": (nodes, nodes),
        "methods": (list(paper.ROWS), paper.ROWS),
        "links": (list(paper.LINKS), paper.LINKS),
        "rates": (list(paper.RATES), paper.RATES),
    }
    cells_cli.add_choices(parser, known)
    cells_cli.add_common(parser, paper.MBIT, "paper.py")
    options = parser.parse_args(arguments)
    cells_cli.check(options, known)
    return options


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
    from launch import interrupt

    interrupt.is_heard()
    sys.exit(main())
