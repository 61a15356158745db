"""What a change of the number of workers costs: `python experiments/resize.py [--seeds 5] [--publish]`.

scikit-learn's digits on virtual workers, several methods; experiments/runs/resize.py says what is run. What counts is the
loss over all training images after each of the steps that follow the change, as a share of the unchanged run's.

Prints a table and writes the losses to results/local/resize.jsonl; --publish writes them to results/published, and the
table into docs/elastic.md. About 4 minutes on 2 cores. Exit status: 0; 2 bad input; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script
    import _script  # noqa: F401

from rich.console import Console

from experiments.records.record import LOCAL, PUBLISHED
from experiments.report import documents
from experiments.report import resize as report
from experiments.report.table import WIDTH
from experiments.runs import command, resize
from launch.errors import UserError


@command.told
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line's work and exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind (default: 5)")
    parser.add_argument("--publish", action="store_true", help="write into the repository: results/published, docs/")
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        raise UserError("--seeds is a number of 1 or more")
    lines = resize.study(options.seeds)
    report.write(lines, PUBLISHED if options.publish else Path(LOCAL))
    if options.publish:
        documents.write()
    report.table(lines).show(Console(width=WIDTH))
    return 0


if __name__ == "__main__":
    command.start(main)
