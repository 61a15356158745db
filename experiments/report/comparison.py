"""What is compared in accuracy: runs of one setting; runs of a method that differ in their seed alone; methods against a
baseline, seed by seed."""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from experiments.records.record import ResultRecord, is_finite
from experiments.report.metrics import BETTER, LEVEL, OPEN, WORSE, Difference, StatedParity, difference, holm


class Setting(NamedTuple):
    """What runs share that stand in one table. Words are empty for what is usual, or not known."""

    exp: str
    scale: str
    nodes: int
    ranks_per_node: int
    length: str
    schedule: str
    batch: int
    """Samples that a rank has in a step."""
    precision: str
    data: str
    workload: str = ""
    """Keys of the workload in which it differs from others: "layers=2"."""

    @classmethod
    def of(cls, r: ResultRecord, data: str | None = None) -> Setting:
        """Of a run. data: of one that does not know its own."""
        train = r.config.get("train", {})
        batch = int(train.get("batch_per_rank") or 0) * int(train.get("accumulate") or 1)
        precision = train.get("precision") or "fp32"
        words = (
            _length(train, r.steps),
            _schedule(train),
            batch,
            "" if precision == "fp32" else f"precision {precision}",
        )
        return cls(r.exp, r.scale, r.nodes, r.ranks_per_node, *words, str(r.data.get("name") or data))

    @property
    def workers(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def batch_in_all(self) -> int:
        return self.batch * self.workers

    @property
    def studied(self) -> str:
        """Experiment, data, workload, length and schedule."""
        return ", ".join(filter(None, (f"{self.exp}: {self.data}", self.workload, self.length, self.schedule)))

    @property
    def title(self) -> str:
        ranks = f"{self.workers} ranks ({self.nodes} x {self.ranks_per_node}), batch {self.batch} each"
        return ", ".join(filter(None, (self.studied, ranks, self.precision, f"scale {self.scale}")))


def _length(train: dict[str, Any], took: int | None) -> str:
    """How long it trained, in words. took: steps, where the record says so: the epochs may end before `max_steps`."""
    steps, epochs = train.get("max_steps"), train.get("epochs")
    if steps is not None and (took is None or took >= int(steps)):
        return f"{steps} steps"
    return "length unknown" if epochs is None else "1 epoch" if epochs == 1 else f"{epochs} epochs"


def _schedule(train: dict[str, Any]) -> str:
    """How the learning rate goes, in words; empty where the record does not say."""
    known = {k: v for k, v in (train.get("lr_schedule") or {}).items() if v is not None}
    name = known.pop("name", None)
    return f"{name} schedule ({', '.join(f'{k} {v}' for k, v in known.items())})" if name else ""


def counts(r: ResultRecord) -> bool:
    """Whether a run says something of its method: it ended well or diverged, and was not only broken off."""
    return r.status == "completed" or r.diverged


@dataclass(frozen=True)
class Cell:
    """Runs of one method at one learning rate that differ in their seed only: the latest run of each seed."""

    label: str
    lr: float | None
    records: tuple[ResultRecord, ...]

    @property
    def method(self) -> str:
        """The label without what tells its variants apart."""
        return self.records[0].method

    @cached_property
    def valid(self) -> list[ResultRecord]:
        """Runs that ended with a finite metric."""
        return [r for r in self.records if r.status == "completed" and is_finite(r.metric.get("value"))]

    @property
    def counting(self) -> list[ResultRecord]:
        """Runs that ended well or diverged."""
        return [r for r in self.records if counts(r)]

    @property
    def settled(self) -> bool:
        """Whether several seeds ended well, and none diverged."""
        return len(self.valid) > 1 and len(self.valid) == len(self.counting)

    def summary(self, name: str | None, seeds: Collection[int] | None = None) -> tuple[float | None, float | None]:
        """Mean and sample standard deviation of the metric (None) or of another one by its name, over the valid runs or those
        with `seeds`; None where one of them is not there or has no value."""
        runs = [r for r in self.valid if seeds is None or r.seed in seeds]
        found = [r.metric["value"] if name is None else r.metric.get("all", {}).get(name) for r in runs]
        values = [float(v) for v in found if is_finite(v)]
        if not values or len(values) < len(self.valid if seeds is None else seeds):
            return None, None
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None

    @cached_property
    def by_seed(self) -> dict[int, float]:
        """The metric of every valid run, by its seed."""
        return {r.seed: float(r.metric["value"]) for r in self.valid}

    def count(self) -> str:
        """How many runs have a metric, and of how many where some do not."""
        return f"{len(self.valid)}" + (f" of {len(self.records)}" if len(self.valid) < len(self.records) else "")


@dataclass(frozen=True)
class Comparison:
    """Methods against one of them, `base`, seed by seed: the one rule of better and worse.

    others: the methods over which Holm's correction goes.
    """

    base: Cell
    others: tuple[Cell, ...]
    parity: StatedParity
    higher_is_better: bool

    def gap(self, cell: Cell) -> Difference | None:
        """The paired difference; None where no seed is shared."""
        return difference(cell.by_seed, self.base.by_seed, self.parity.relative)

    @cached_property
    def p(self) -> dict[str, float]:
        """By label, p of the difference of each of `others` with several seeds, after Holm's correction."""
        found = {c.label: gap for c in self.others if (gap := self.gap(c)) is not None and gap.n > 1}
        return dict(zip(found, holm(list(found.values())), strict=True))

    def verdict(self, cell: Cell) -> str:
        """What `gap` decides. "better" only where Holm's correction leaves it; "worse" where a method loses more seeds."""
        lost, theirs = (sum(r.diverged for r in c.records) for c in (cell, self.base))
        if lost > theirs:
            return WORSE
        gap = self.gap(cell)
        said = OPEN if gap is None else gap.verdict(self.parity.margin, self.higher_is_better)
        return OPEN if said is BETTER and self.p[cell.label] > 1 - LEVEL else said
