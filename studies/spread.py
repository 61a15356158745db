"""How far repeated comparisons differ: `python studies/spread.py resnet50 [--runs 5] [--busy 2] [key=value ...]`.

Repeats the comparison of an experiment on the idle machine, then next to a program that keeps one core busy. Prints a
table of all interleaved comparisons of this experiment and number of nodes in the results folder. --out writes it to a
file, --table only prints. Exit status: 0 success; 1 a run failed; 2 bad input; 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

if not __package__:  # run as a script
    import _script  # noqa: F401

from experiments import compare
from experiments.config import compose
from experiments.records.record import read_all, write_file
from experiments.report import spread
from experiments.runs import command
from launch.errors import UserError


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """One core of this machine is busy while it is open."""
    worker = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        worker.kill()
        worker.wait()


def study(exp: str, idle: int, busy: int, overrides: list[str], out: Path | None) -> int:
    """Runs and shows. Returns the exit status; raises UserError."""
    overrides = [f"+exp={exp}", *overrides]
    resolved = compose.resolve(compose.compose(overrides))
    status = 0
    for number in range(idle + busy):
        busy_core_too = number >= idle
        print(f"Run {number + 1} of {idle + busy}{', next to a busy core' if busy_core_too else ''}", flush=True)
        with busy_core() if busy_core_too else contextlib.nullcontext():
            status = max(status, compare.compare(overrides, None))
    found = spread.runs(read_all(resolved["results_dir"]), exp, int(resolved["cluster"]["nodes"]))
    if not found:
        raise UserError(
            f"no interleaved comparison of {exp} in {resolved['results_dir']}: give --runs, or timing.mode=interleaved"
        )
    text = spread.as_table(found).markdown()
    print(text)
    if out is not None:
        write_file(out, text.encode(), "table")
    return status


@command.report_errors
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__)
    parser.add_argument("exp", help="experiment, a file of conf/exp")
    parser.add_argument("--runs", type=int, default=5, help="comparisons on the idle machine (default: 5)")
    parser.add_argument("--busy", type=int, default=2, help="comparisons next to a busy core (default: 2)")
    parser.add_argument("--table", action="store_true", help="run nothing, show the table")
    parser.add_argument("--out", type=Path, help="file for the table")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides, cluster.nodes=4 among them")
    options = parser.parse_intermixed_args(arguments)
    if options.runs < 0 or options.busy < 0:
        raise UserError("--runs and --busy are numbers of 0 or more")
    idle, busy = (0, 0) if options.table else (options.runs, options.busy)
    return study(options.exp, idle, busy, options.overrides, options.out)


if __name__ == "__main__":
    command.start(main)
