"""Real training on emulated links beside its prediction: `python experiments/predict.py --validate`. Needs a quiet machine.

For ResNet-50 and BERT-Base on 2, 4 and 8 emulated nodes, three link rates and four methods, `experiments/run.py` trains some
steps on random data. What is predicted for each comes from two things only: the record of the run without communication of
the same model, nodes and link, which gives forward, backward and update (spread over the gradients as the timeline of the
model has them), and the rate that the launcher measured. Cells that have run are not run again: an interrupted validation
goes on where it stopped.

A part of it: `--validate resnet50 nodes=2,4 gbps=2.5,10 methods=fp32,birder`. The bound is always run.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from birder.predict import METHODS, Cluster, Costs, Layout, Link, measure_kernels, simulate
from experiments.cells import timelines
from experiments.cells.predicted import Case
from experiments.records.record import ROOT
from experiments.report.formats import number
from experiments.report.prediction import HEAD, Outcome, line
from experiments.report.table import Table
from launch.errors import UserError
from launch.failure import RunFailed

MODELS = {"resnet50": "resnet50_b32_tf32", "bert_squad": "bert_base_b12_tf32"}
"""Experiment of conf/exp, and the timeline whose order of gradients is taken."""
NODES, GBPS = (2, 4, 8), (2.5, 5.0, 10.0)
RUNS: dict[str, list[str]] = {
    "none": ["comm.enabled=false"],
    "fp32": ["optimizer=sgdm"],
    "bf16": ["optimizer=sgdm", "comm.hook=bf16"],
    "birder": ["optimizer=birder"],
    "onebit_adam": ["optimizer=onebit_adam", "optimizer.warmup_steps=2"],
}
STEPS = 8
BOUND = "none"
KEYS = "nodes", "gbps", "methods"
"""What a part of the validation is named by, beside experiments."""


@dataclass(frozen=True)
class Cell:
    """One training run."""

    exp: str
    nodes: int
    gbps: float
    method: str

    @property
    def folder(self) -> Path:
        return Path("outputs") / "validate" / f"{self.exp}-n{self.nodes}-{self.gbps:g}-{self.method}"

    def command(self) -> list[str]:
        """What runs it. Its records stay in its own folder: they are no results."""
        pairs = [
            f"cluster.nodes={self.nodes}",
            f"cluster.link_gbps={self.gbps:g}",
            f"train.max_steps={STEPS}",
            "wandb=disabled",
        ]
        pairs += [f"output_dir={self.folder}", f"results_dir={self.folder}/results", "cluster=emulated", "scale=quick"]
        return [sys.executable, str(ROOT / "experiments" / "run.py"), f"+exp={self.exp}", *RUNS[self.method], *pairs]

    def record(self) -> dict[str, Any] | None:
        """What the run left; None: it has not run, or failed."""
        found = sorted((self.folder / "results" / "records").glob("*.json"))
        content: dict[str, Any] = json.loads(found[-1].read_text(encoding="utf-8")) if found else {}
        return content if content.get("status") == "completed" else None


def cells(asked: Sequence[str] = ()) -> Iterator[Cell]:
    """The cells that are meant, those of one place together, the bound first.

    asked: experiments of `MODELS`, none: all; nodes=2,4, gbps=2.5,10 and methods=fp32,birder: only these.
    Raises UserError for anything else.
    """
    pairs = dict(a.split("=", 1) for a in asked if "=" in a)
    if unknown := sorted(set(pairs) - set(KEYS)):
        raise UserError(f"--validate knows {', '.join(KEYS)} and experiments, not {unknown[0]}=")
    exps = _among([a for a in asked if "=" not in a], list(MODELS))
    nodes = _among(pairs.get("nodes"), [str(n) for n in NODES])
    rates = _among(pairs.get("gbps"), [f"{g:g}" for g in GBPS])
    methods = _among(pairs.get("methods"), list(RUNS))
    for exp, n, rate, method in itertools.product(exps, nodes, rates, dict.fromkeys([BOUND, *methods])):
        yield Cell(exp, int(n), float(rate), method)


def _among(names: str | list[str] | None, known: list[str]) -> list[str]:
    """Names, in the order of those that are known; all of them where none is named."""
    chosen = names.split(",") if isinstance(names, str) else names or known
    if unknown := [n for n in chosen if n not in known]:
        raise UserError(f"--validate knows {', '.join(known)}, not {unknown[0]}")
    return [n for n in known if n in chosen]


def outcome(cell: Cell, bound: dict[str, Any], own: dict[str, Any], costs: Costs) -> Outcome:
    """A cell beside what the bound and the link alone make one expect."""
    shape = timelines.load(MODELS[cell.exp])
    update = float(bound["timing"]["split"].get("update_ms") or 0.0)
    factor = (float(bound["timing"]["median_ms"]) - update) / shape.step_ms
    whole = shape.scaled(factor)
    cluster = Cluster(cell.nodes, int(own["ranks_per_node"]), Link(float(own["link"]["mbit_per_s"]) / 1e3), ring=False)
    layout = Layout(25.0, 25.0, 25.0, gpu=False)
    step = simulate(whole, cluster, METHODS[cell.method], costs, layout)
    ms = step.ms if not METHODS[cell.method].dense else step.ms - step.update_ms + update
    case = Case(
        str(cell.folder),
        "validate",
        cell.exp,
        "emulated",
        cell.nodes,
        cell.method,
        whole,
        METHODS[cell.method],
        layout,
        None,
    )
    return Outcome(case, ms, *(float(own["timing"][k]) for k in ("median_ms", "p10_ms", "p90_ms")))


def run(names: Sequence[str]) -> None:
    """Trains what has not been trained yet, and prints the comparison. names: as in `cells`.

    Raises UserError and RunFailed.
    """
    every = list(cells(names))
    for number_, cell in enumerate(every, start=1):
        if cell.record() is None:
            print(f"[{number_}/{len(every)}] {cell.folder.name}", flush=True)
            if code := subprocess.run(cell.command(), cwd=Path.cwd(), check=False).returncode:
                name = cell.folder.name
                raise RunFailed(f"{name} ended with status {code}; the command again goes on from here")
    costs = measure_kernels("cpu")
    found = []
    for cell in every:
        bound, own = Cell(cell.exp, cell.nodes, cell.gbps, BOUND).record(), cell.record()
        if bound and own and cell.method != BOUND:
            found.append(outcome(cell, bound, own, costs))
    rows = [[o.case.id, number(o.predicted_ms), number(o.measured_ms), f"{o.error:+.1%}"] for o in found]
    print(Table.text(("cell", "predicted, ms", "trained, ms", "difference"), rows).grid())
    print(Table.text(HEAD, [line("all", found)]).grid())
