"""Time to a fixed loss: steps that were measured in a study, times the step that is predicted for a large cluster. No torch.

The loss is that which the baseline has after `SHARE` of its steps. A method's step is predicted for GPT-2 of 124 M parameters
on 8 nodes of 8 GPUs, from the timelines of `FOLDER` (studies/gpt2_timelines.py makes them).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from birder.predict import METHODS, Cluster, Link, predict
from birder.predict.layouts import TrainingPlan
from birder.predict.table import whole_run
from experiments.cells import timelines
from experiments.records.labels import OURS
from experiments.records.record import PUBLISHED, ResultRecord
from experiments.report import curves, gaps
from experiments.report.sentences import say

EXPS = ("language_model", "zero_one_gpt2")
"""Studies of a language model. The one with most methods counts, the first of equals."""
SHARE = 0.5
GPUS, GBPS, NODES, LATENCY_US = ("a100", "h100"), (10.0, 100.0), 8, 20.0
FOLDER = PUBLISHED / "predict"
PREDICTED = {
    **{METHODS[name].label: name for name in ("powersgd4", "fp8", "onebit_adam", "zero_one_adam", "lion", "birder")},
    **{
        METHODS[name].label: name
        for name in ("sigma_delta", "efficient_adam", "slamb", "cser", "ef21_sgdm", "diloco", "diloco_int4")
    },
    **dict.fromkeys(("AdamW fp32", "SGDM fp32", "Muon fp32"), "fp32"),
    "AdamW bf16": "bf16",
    "4-bit all-reduce with error feedback": "int4",
    "Birder hierarchical": "birder_hierarchical",
    "Birder one-phase, weyl bits, two betas (this project's)": "birder_one_phase",
}
"""What a method of a table is called by the predictor. SparseLoCo's messages are not predicted."""


@dataclass(frozen=True)
class Reached:
    """A method. steps: to the loss; None: not within the run. ms: of a step, by GPU and link."""

    label: str
    steps: int | None
    ms: dict[tuple[str, float], float]

    def seconds(self, place: tuple[str, float]) -> float | None:
        return None if self.steps is None else self.steps * self.ms[place] / 1000


@dataclass(frozen=True)
class Race:
    """All methods of a study. total: steps of a run."""

    title: str
    baseline: str
    loss: float
    total: int
    methods: tuple[Reached, ...]

    def point(self) -> str:
        """Who is first on the slow link and on the fast one, in one sentence."""
        first = {}
        for gbps in GBPS:
            ranked = [(s, m.label) for m in self.methods if (s := m.seconds((GPUS[0], gbps))) is not None]
            first[gbps] = min(ranked)[1]
        return say("race", race=self, first={gbps: label.removesuffix(OURS) for gbps, label in first.items()})

    def setting(self) -> str:
        """Which steps, and for what they are predicted."""
        return say("race_setting", race=self, study=self.title.partition(": ")[2], share=SHARE, nodes=NODES)


def build(studies: gaps.Studies, results_dir: Path) -> Race | None:
    """Of those of `EXPS` with a baseline that has a curve, and with a method that comes to its loss; None without any."""
    tables, races = {t.first.exp: t for t in gaps.chosen(studies)}, []
    for table in (tables[exp] for exp in EXPS if exp in tables):
        found = curves.read(table, results_dir)
        base = found.baseline
        if base is None:
            continue
        half = SHARE * base.steps[-1]
        loss = next(loss for step, loss in zip(base.steps, base.loss, strict=True) if step >= half)
        made = []
        for curve in found.curves:
            r = curve.cell.records[0]
            if r.method in PREDICTED and curve.cell in table.one_of_each:
                # By the running mean over seeds.
                there = (step for step, value in zip(curve.steps, curve.loss, strict=True) if value <= loss)
                made.append(Reached(r.method, next(there, None), step_ms(r, curve.steps[-1])))
        if all(m.steps is None for m in made):  # the baseline is none that is predicted
            continue
        place = GPUS[0], GBPS[0]
        made.sort(key=lambda m: (m.steps is None, m.seconds(place) or 0.0, m.label))
        races.append(Race(table.title, base.label, loss, base.steps[-1], tuple(made)))
    return max(races, key=lambda race: len(race.methods), default=None)


def step_ms(r: ResultRecord, total: int) -> dict[tuple[str, float], float]:
    """A predicted step by GPU and link: with the run's own share of dense steps, and its own H."""
    name, options = PREDICTED[r.method], r.config["optimizer"]
    warm = float(options.get("warmup_steps") or 0.0) if name == "onebit_adam" else 0.0
    dense = warm if warm < 1 else warm / total
    every = int(options["sync_every"]) if name.startswith("diloco") else None
    found = {}
    for gpu in GPUS:
        timeline = timelines.load(FOLDER / f"gpt2_{gpu}.json")
        for gbps in GBPS:
            cluster = Cluster.of_gpus(NODES, 8, Link(gbps, LATENCY_US))
            p = predict(
                timeline, cluster, ["fp32", "none", name], local_steps=every, plan=TrainingPlan(run_steps=total)
            )
            found[gpu, gbps] = whole_run(p, p[name], dense)
    return found
