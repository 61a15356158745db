"""One rank of a world in which methods take turns: torchrun starts `python experiments/timing/worker.py SPEC`."""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script: import from the repository, not from this file's own folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from experiments.training import worker
from launch.spec import RunSpec


def train(spec: RunSpec) -> None:
    """See experiments/timing/turns.py, which is slow to import: what watches over this rank is there before."""
    from experiments.timing import turns

    turns.train(spec)


if __name__ == "__main__":
    worker.main(sys.argv[1], train)
