"""Every experiment of conf/exp trains: two steps with each of its optimizers, at its smallest, alone in this process."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from experiments.config import compose
from experiments.training.loop import train
from tests.helpers.ranks import free_port
from tests.helpers.tiers import slow

EXPERIMENTS = sorted(p.stem for p in (compose.CONF / "exp").glob("*.yaml"))
STEPS = 2
# What makes a workload small, of the arguments that it has.
SMALLEST = {
    "preset": "tiny",
    "image_size": 32,
    "synthetic_images": 8,
    "train_questions": 8,
    "dev_questions": 2,
    "train_examples": 8,
    "dev_examples": 2,
    "doc_stride": 8,
    "steps": STEPS,
    "dilation": 1.0,
    "timeline": "resnet50_b32_tf32",
}


# The same for optimizers: what comes rarely comes in the second step.
SOONEST = {"warmup_steps": 1, "reset_every": 2, "sync_every": 2, "local_doubling": 1}


def one_of_each_workload() -> set[str]:
    """The first experiment of each workload."""
    found: dict[str, str] = {}
    for exp in EXPERIMENTS:
        text = (compose.CONF / "exp" / f"{exp}.yaml").read_text()
        (workload,) = re.findall(r"^ +- override /workload: (\w+)", text, re.MULTILINE)
        found.setdefault(workload, exp)
    return set(found.values())


def runs(exp: str, folder: Path, whole: bool) -> list[compose.Composed]:
    """Each optimizer and compressor of an experiment's comparison once, as small as it goes.

    Not the whole, and of the many with ResNet-50: first and last.
    """
    common = [
        f"+exp={exp}",
        "scale=quick",
        *("cluster=local", "cluster.nodes=1", "cluster.ranks_per_node=1", "wandb=disabled"),
        *(
            f"train.{key}"
            for key in (f"max_steps={STEPS}", "epochs=1", "batch_per_rank=2", "timing_warmup=0", "threads=1")
        ),
        *(f"results_dir={folder}/results", f"output_dir={folder}/outputs"),
    ]
    config = compose.compose(common).config
    common += [f"workload.{key}={value}" for key, value in SMALLEST.items() if key in config.workload]
    kinds = ("optimizer=", "optimizer.compressor=")
    chosen = list(dict.fromkeys(tuple(str(o) for o in v if str(o).startswith(kinds)) for v in config.compare))
    if not whole or config.workload._target_.endswith("ResNet50"):
        chosen = [chosen[0], chosen[-1]]
    made = []
    for optimizer in chosen:
        options = compose.compose([*common, *optimizer]).config.optimizer
        sooner = [f"optimizer.{key}={value}" for key, value in SOONEST.items() if key in options]
        # CSEA is the member of its family that resets in every step.
        sooner = [] if options.get("reset_every") == 1 else sooner
        made.append(compose.compose([*common, *optimizer, *sooner]))
    return made


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a rank without others."""
    for key in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(key, "0")
    for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(key, "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.mark.parametrize(
    ("exp", "whole"),
    [(exp, False) for exp in sorted(one_of_each_workload())] + [slow(exp, True) for exp in EXPERIMENTS],
)
def test_experiment_runs(exp: str, whole: bool, alone: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = runs(exp, tmp_path, whole)
    for composed in made:
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
        train(compose.make_spec(composed, command="test"))
    records = [json.loads(path.read_text()) for path in (tmp_path / "results" / "records").glob("*.json")]
    assert len(records) == len(made) >= 2
    for record in records:
        assert record["status"] == "completed"
        assert record["exp"] == exp
        assert record["timing"]["steps"] == STEPS
        rows = (tmp_path / "results" / record["curve"]).read_text().split()[1:]
        losses = [float(row.split(",")[2]) for row in rows]
        assert len(losses) == STEPS
        assert all(map(math.isfinite, losses))
