"""The benchmark against peers: `python experiments/bench_suite.py [--nodes 2,8] [--methods ...] [--links loopback] [...]`.

Side by side in one run, over emulated links of 10 Gbit/s and over plain loopback, on 2, 4 and 8 nodes, for the gradients of
ResNet-50 and BERT-Base: PyTorch DDP and its hooks, 1-bit Adam, Birder, no communication. Then the kernels on this machine.
Every cell is a record; the page and the picture are made from all records there are, so that a subset can be measured again
alone. Exit status: 0; 1 a run failed; 2 bad input, or nothing to measure on; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository, not from this file's own folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from launch import interrupt

    interrupt.ends_silently()

from experiments import run
from experiments.cells import bench_plan, cells_cli
from experiments.cells.bench_plan import EXP, METHODS
from experiments.records import record
from launch.base import Launcher
from launch.emulated import launcher as emulated
from launch.errors import UserError
from launch.failure import RunFailed
from launch.process import Stopped
from launch.spec import RunSpec

WORKER = Path(__file__).resolve().parent / "cells" / "bench_worker.py"


def make_spec(options: argparse.Namespace, link: str, nodes: int, command: str) -> RunSpec:
    """The run that measures all chosen methods over one link on `nodes` nodes."""
    cells = bench_plan.cells(link, nodes, options.models, options.methods)
    plan = {"mbit": options.mbit, "steps": options.steps, "profile": options.profile, "timelines": bench_plan.MODELS}
    plan["cells"] = [c.as_dict() for c in cells]
    emulates = link == "emulated"
    return cells_cli.make_spec(options, EXP, f"{link}-{nodes}", plan, command, emulated=emulates, nodes=nodes)


def make_launcher(link: str, nodes: int, mbit: float) -> Launcher:
    """Emulated nodes with links of `mbit` Mbit/s, or as many ranks on this machine."""
    return cells_cli.make_launcher(WORKER, nodes, mbit if link == "emulated" else None)


def measure(options: argparse.Namespace, command: str) -> None:
    """Runs every cell that the options ask for. Raises UserError and RunFailed."""
    links = list(options.links)
    if "emulated" in links and (reason := emulated.why_not()) is not None:
        if links == ["emulated"]:
            raise UserError(f"emulated links need a system that gives them, and this one does not: {reason}")
        print(f"No emulated links here ({reason}): loopback alone is measured.", flush=True)
        links.remove("emulated")
    for link in links:
        for nodes in options.nodes:
            began = time.monotonic()
            make_launcher(link, nodes, options.mbit).launch(make_spec(options, link, nodes, command))
            print(f"{link}, {nodes} nodes: {time.monotonic() - began:.0f} s", flush=True)


def measure_kernels(options: argparse.Namespace, command: str) -> None:
    """Times the kernels, and on a GPU the hooks; one record."""
    import torch

    from experiments.bench import hooks as bench_hooks
    from experiments.bench import kernels as bench_kernels

    device = torch.device("cuda" if options.gpu else "cpu")
    plan: dict[str, Any] = {
        "kernels": bench_kernels.measure(device, options.elements),
        "backend": bench_kernels.backend_name(device),
    }
    if options.gpu:
        plan["hooks"] = bench_hooks.measure(device, bench_plan.MODELS["resnet50"])
    made = record.from_spec(cells_cli.make_spec(options, EXP, "kernels", plan, command), device=device.type)
    from dataclasses import replace

    record.write(replace(made, id=f"{EXP}-kernels-{device.type}", method="kernels", wire="none"), options.results)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises UserError for names that do not exist."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    nodes = [str(n) for n in bench_plan.NODES]
    names = {"models": bench_plan.MODELS, "links": bench_plan.LINKS, "nodes": nodes, "methods": METHODS}
    known = {option: (list(some), list(some)) for option, some in names.items()}
    cells_cli.add_choices(parser, known)
    cells_cli.add_common(parser, bench_plan.MBIT, "bench_plan.py")
    parser.add_argument("--profile", action="store_true", help="a chrome trace and a PNG of one step of every cell")
    parser.add_argument("--kernels-only", action="store_true", help="the kernels alone")
    parser.add_argument("--no-kernels", action="store_true", help="the methods alone")
    parser.add_argument("--elements", type=int, help="size of the kernels' tensors; default 2^24, on a GPU 10^8")
    parser.add_argument("--gpu", action="store_true", help="kernels and hooks on one GPU, nothing else")
    options = parser.parse_args(arguments)
    cells_cli.check(options, known)
    cells_cli.at_least(options, "elements", 32)
    return options


def has_gpu() -> bool:
    """Whether torch finds a CUDA GPU."""
    import torch

    return bool(torch.cuda.is_available())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line's work and exit status."""
    from experiments.report import bench_report

    try:
        options = parse(arguments)
        command = run.typed("bench", list(arguments if arguments is not None else sys.argv[1:]))
        if options.gpu and not options.tables_only and not has_gpu():
            raise UserError("make bench-gpu needs a CUDA GPU and finds none: make bench measures on the CPU")
        if not options.tables_only:
            if not options.kernels_only and not options.gpu:
                measure(options, command)
            if not options.no_kernels:
                measure_kernels(options, command)
        bench_report.write(options.results)
        bench_report.show(options.results, device="cuda" if options.gpu else "cpu", cells=not options.kernels_only)
    except (UserError, RunFailed, KeyboardInterrupt, Stopped) as error:
        return run.report(error)
    return 0


if __name__ == "__main__":
    from launch import interrupt

    interrupt.is_heard()
    sys.exit(main())
