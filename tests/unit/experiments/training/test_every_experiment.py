"""Every experiment of conf/exp trains: two steps with each of its optimizers, at its smallest, alone in this process."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from experiments.config import compose
from experiments.training.loop import train
from launch.local import free_port
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


def listed(exp: str) -> tuple[str, list[tuple[str, ...]]]:
    """Its workload, and each choice of optimizer and compressor that it compares."""
    text = (compose.CONF / "exp" / f"{exp}.yaml").read_text()
    (workload,) = re.findall(r"^ +- override /workload: (\w+)", text, re.MULTILINE)
    variants = text.partition("\ncompare:")[2].split("\n  - ")[1:]
    return workload, list(dict.fromkeys(tuple(re.findall(r"\boptimizer(?:\.compressor)?=\w+", v)) for v in variants))


LISTED = {exp: listed(exp) for exp in EXPERIMENTS}
FAST = sorted({workload: exp for exp, (workload, _) in reversed(LISTED.items())}.values())
"""The first experiment of each workload."""
FIRST = {(workload, kind): exp for exp, (workload, kinds) in reversed(LISTED.items()) for kind in kinds}
"""The first experiment that has an optimizer and compressor with a workload."""


def chosen(exp: str, fast: bool) -> list[tuple[str, ...]]:
    """What is trained of an experiment: the ends of its list. Slow: also what no experiment before has with this workload.

    Of the many with ResNet-50 the ends alone.
    """
    workload, kinds = LISTED[exp]
    ends = [kinds[0], kinds[-1]]
    more = [kind for kind in kinds[1:-1] if FIRST[workload, kind] == exp and workload != "resnet50"]
    return ends if fast else more if exp in FAST else ends + more


def runs(exp: str, folder: Path, fast: bool) -> list[compose.Composed]:
    """As small as they go."""
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
    assert {tuple(str(o) for o in v if str(o).startswith(kinds)) for v in config.compare} == set(LISTED[exp][1])
    made = []
    for optimizer in chosen(exp, fast):
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
    ("exp", "fast"), [(exp, True) for exp in FAST] + [slow(exp, False) for exp in EXPERIMENTS if chosen(exp, False)]
)
def test_experiment_runs(exp: str, fast: bool, alone: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = runs(exp, tmp_path, fast)
    for composed in made:
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
        train(compose.make_spec(composed))
    records = [json.loads(path.read_text()) for path in (tmp_path / "results" / "records").glob("*.json")]
    assert len(records) == len(made) >= 1
    for record in records:
        assert record["status"] == "completed"
        assert record["exp"] == exp
        assert record["timing"]["steps"] == STEPS
        rows = (tmp_path / "results" / record["curve"]).read_text().split()[1:]
        losses = [float(row.split(",")[2]) for row in rows]
        assert len(losses) == STEPS
        assert all(map(math.isfinite, losses))
