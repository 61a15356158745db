"""Short runs of the harness on scikit-learn's digits."""

from __future__ import annotations

from pathlib import Path

from experiments.config import compose
from launch.spec import RunSpec


def digits(folder: Path, *overrides: str) -> RunSpec:
    """At quick scale; records and files below `folder`."""
    common = ["+exp=digits", "scale=quick", "wandb=disabled", "train.batch_per_rank=8"]
    common += [f"results_dir={folder}/results", f"output_dir={folder}/outputs"]
    return compose.make_spec(compose.compose([*common, *overrides]))


def train(rank: int, world: int, spec: RunSpec) -> None:
    """On the ranks of `fresh_world`, which has made no process group."""
    from experiments.training import loop

    loop.train(spec)
