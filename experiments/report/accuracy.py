"""Accuracy tables: mean ± sample standard deviation over seeds, for every learning rate that was tried."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from experiments.config.same_run import SAME_NUMBERS
from experiments.records.labels import DENSE, class_name
from experiments.records.record import FINGERPRINTS, ResultRecord, is_finite
from experiments.report.comparison import Cell, Comparison, Setting, counts
from experiments.report.differences import by_workload, grouped, order, variants
from experiments.report.formats import DASH, mean_sd, numbered, task
from experiments.report.metrics import Difference, StatedParity
from experiments.report.sentences import say
from experiments.report.table import Column, Note, Table

# Shown in other columns or in headings, or without effect on what is reached.
SHOWN = ("optimizer.lr", "train.epochs", "train.max_steps", *SAME_NUMBERS)
STUDIES = "studies."
"""The package of ideas that no method has; rows of tables, and of nothing else."""
EDGE = "§"
"""Marks a best learning rate that is the smallest or the largest one tried."""
HELD_OUT = "held_out"
"""The metric's value on a part of the training set that was not trained on, where the workload kept one back."""


@dataclass(frozen=True)
class AccuracyTable:
    """All methods and learning rates tried in one setting. `slug` names its plot.

    against: the baseline of a study that is not the setting's first; empty for that one.
    """

    slug: str
    setting: Setting
    cells: tuple[Cell, ...]
    against: str = ""

    @property
    def title(self) -> str:
        return self.setting.title + (f", against {self.against}" if self.against else "")

    @cached_property
    def by_label(self) -> dict[str, list[Cell]]:
        """Of each method, by its label, what was tried."""
        return grouped(self.cells, lambda c: c.label)

    @cached_property
    def first(self) -> ResultRecord:
        """One of the runs, which share their setting; one that ended well."""
        return next(r for cell in self.cells for r in cell.valid)

    @property
    def task(self) -> str:
        """What is trained on: digits."""
        return task(self.setting.data)

    @property
    def name(self) -> str:
        """A short title: digits, 150 steps, 64 workers."""
        return f"{self.task}, {self.setting.length}, {self.setting.workers} workers"

    @cached_property
    def metric(self) -> dict[str, Any]:
        """The metric's description: that of the latest run that has one."""
        runs = [r for cell in self.cells for r in cell.valid]
        return max(runs, key=lambda r: (r.time, r.id)).metric

    @property
    def higher_is_better(self) -> bool:
        return bool(self.metric.get("higher_is_better", True))

    def value(self, cell: Cell, name: str | None = None, seeds: Collection[int] | None = None) -> float:
        """What cells are compared by, the larger the better: the mean that `Cell.summary` finds; -inf where there is none."""
        mean = cell.summary(name, seeds)[0]
        return -math.inf if mean is None else mean if self.higher_is_better else -mean

    @cached_property
    def criterion(self) -> str | None:
        """The metric by which learning rates are chosen: `HELD_OUT` where every run has that; None: the metric itself."""
        known = (r.metric.get("all", {}).get(HELD_OUT) for cell in self.cells for r in cell.valid)
        return HELD_OUT if all(map(is_finite, known)) else None

    @cached_property
    def parity(self) -> StatedParity | None:
        """What methods are compared with and what counts as no difference; None where runs say nothing, or not the same."""
        said = {StatedParity.of(r.config) for cell in self.cells for r in cell.valid}
        return said.pop() if len(said) == 1 else None

    @property
    def relative(self) -> bool:
        """Whether differences are shares of the baseline's value."""
        return self.parity is not None and self.parity.relative

    @cached_property
    def baseline(self) -> Cell | None:
        """The best learning rate of the method that others are compared with; in fp32 where there is that.

        Of its variants, such as two values of eps, the one with most seeds, and of these the best.
        """
        if self.parity is None:
            return None
        name = self.parity.baseline.lower()
        mine = [c for c in self.chosen if c.valid[0].optimizer.lower() == name and not hooked(c.valid[0])]
        return max(mine, key=lambda c: (c.valid[0].wire == "fp32", *self._score(c)), default=None)

    def _score(self, cell: Cell) -> tuple[int, float]:
        """What variants of a method are chosen by, the larger the better: seeds, then as learning rates are."""
        seeds = choosers(self.by_label[cell.label])[: self.choosing] if self.criterion else None
        return len(cell.valid), self.value(cell, self.criterion, seeds)

    @cached_property
    def strongest(self) -> Cell | None:
        """Of the methods whose gradients are all-reduced in fp32 (`full_precision`) the one with the best mean metric."""
        dense = [c for c in self.chosen if full_precision(c.valid[0])]
        return max(dense, key=self.value, default=None)

    def compared(self, cell: Cell) -> Difference | None:
        """The paired difference of a method's best learning rate to `held_against`; None for all other rows."""
        found = self.comparison
        return found.gap(cell) if found is not None and cell in found.others else None

    @cached_property
    def comparison(self) -> Comparison | None:
        """Of all methods, each at its best learning rate, to `held_against`."""
        if self.held_against is None or self.parity is None:
            return None
        return self.versus(self.held_against, self.chosen, self.parity)

    def versus(self, base: Cell, cells: Sequence[Cell], parity: StatedParity) -> Comparison:
        """Of some cells to one."""
        return Comparison(base, tuple(c for c in cells if c.label != base.label), parity, self.higher_is_better)

    def difference_text(self, cell: Cell) -> str:
        """`compared` as text; empty where it is None."""
        found = self.compared(cell)
        return "" if found is None else found.text(self.relative)

    def verdict(self, cell: Cell) -> str:
        """What `compared` decides; empty where it is None."""
        found = self.comparison
        return "" if found is None or self.compared(cell) is None else found.verdict(cell)

    @cached_property
    def held_against(self) -> Cell | None:
        """What others are compared with: the baseline, or that of its rates with several seeds, none of which diverged, that
        does better than the chosen one. A method is not better than a baseline whose own tuning has failed."""
        base = self.baseline
        mine = [] if base is None else [c for c in self.by_label[base.label] if c is base or c.settled]
        return max(mine, key=lambda c: self.value(c, self.criterion), default=None)

    @cached_property
    def choosing(self) -> int:
        """How many seeds of a method, the first ones, choose its learning rate by held-out data; 1 where runs differ."""
        said = {(r.config.get("parity") or {}).get("choose_seeds", 1) for cell in self.cells for r in cell.valid}
        return int(said.pop()) if len(said) == 1 else 1

    def rate(self, cell: Cell) -> str:
        """A method's learning rate, marked where nothing was tried beyond it."""
        if cell.lr is None:
            return DASH
        tried = [c.lr for c in self.by_label[cell.label] if c.lr is not None]
        return f"{cell.lr:g}" + f" {EDGE}" * (len(tried) > 1 and cell.lr in (min(tried), max(tried)))

    @cached_property
    def bests(self) -> dict[str, Cell | None]:
        """Of each method, by its label, the learning rate with the best mean metric: of those with several seeds, where there
        are any, over the seeds that they share. One of which a seed diverged is not one.

        With a held-out part it is the one whose runs with the method's first seeds (`choosing`) are best there. It stays the
        choice even if other seeds fail.
        """
        return {label: self._best(mine) for label, mine in self.by_label.items()}

    @property
    def chosen(self) -> list[Cell]:
        """The best learning rate of each method that has one, in the order of the table. It has a valid run."""
        return [cell for cell in self.bests.values() if cell is not None]

    @property
    def one_of_each(self) -> list[Cell]:
        """Of the variants of each method that are `chosen`, such as two values of eps, the one that `baseline` would be.

        What `STUDIES` hold are ideas, not methods.
        """
        groups = grouped(filter(_of_a_method, self.chosen), lambda c: c.method)
        return [max(every, key=lambda c: (c is self.baseline, *self._score(c))) for every in groups.values()]

    @property
    def diverged(self) -> list[str]:
        """Methods of which a seed diverged at every learning rate, so that none is `chosen`; not what was only broken off."""
        tried = grouped((c for c in self.cells if c.counting and _of_a_method(c)), lambda c: c.method)
        known = {c.method for c in self.chosen}
        return [
            m for m, cells in tried.items() if m not in known and all(any(r.diverged for r in c.records) for c in cells)
        ]

    def _best(self, mine: Sequence[Cell]) -> Cell | None:
        if self.criterion:
            sound, seeds = mine, choosers(mine)[: self.choosing]
        else:
            sound = [c for c in mine if c.valid and len(c.valid) == len(c.counting)]
            sound = [c for c in sound if c.settled] or sound
            seeds = sorted(set.intersection(*(set(c.by_seed) for c in sound))) if sound else []
        scored = [(value, c) for c in sound if (value := self.value(c, self.criterion, seeds or None)) > -math.inf]
        return max(scored, key=lambda found: found[0], default=(0.0, None))[1]


def _of_a_method(cell: Cell) -> bool:
    return not cell.records[0].config["optimizer"]["_target_"].startswith(STUDIES)


def choosers(mine: Iterable[Cell]) -> list[int]:
    """The seeds of a method, those first by which its learning rate is chosen: that most rates were tried with, then the
    smaller. A sweep's first seed need not be the smallest."""
    rates = Counter(r.seed for c in mine for r in c.records)
    return sorted(rates, key=lambda seed: (-rates[seed], seed))


def build(records: list[ResultRecord]) -> list[AccuracyTable]:
    """One table for each experiment, scale, shape, batch, precision, data, workload, length of training and learning rate's
    schedule.

    A study that stated another baseline (`parity`) has its own table. Synthetic data has no accuracy.
    """
    known = [r for r in records if not r.data.get("synthetic") and r.wire != "none"]
    settings = grouped((r for r in known if r.status == "completed" and r.metric.get("name")), Setting.of)
    asked = {setting: set(map(_asked, members)) for setting, members in settings.items()}
    # A run that failed early knows neither its data's name nor where its epochs end.
    for r in (r for r in known if r.status != "completed"):
        for setting, members in settings.items():
            here = Setting.of(r, setting.data)._replace(length=setting.length)
            if here == setting and _asked(r) in asked[setting]:
                members.append(r)
    made = []
    for setting, every in settings.items():
        models = by_workload(every).items()
        for model, files, runs in ((model, *one) for model, of in models for one in by_files(of).items()):
            of_model = setting._replace(workload=model, data=setting.data + files)
            made += [(of_model, _cells(of), against) for against, of in _by_comparison(runs)]
    made.sort(key=lambda one: (one[2] != "", one[0]))  # first studies have the first slugs
    shown = [one for one in made if any(cell.valid for cell in one[1])]
    slugs = numbered(f"{s.exp}_{s.scale}_{s.nodes}x{s.ranks_per_node}" for s, *_ in shown)
    return [AccuracyTable(slug, *one) for slug, one in zip(slugs, shown, strict=True)]


def by_files(records: Sequence[ResultRecord]) -> dict[str, list[ResultRecord]]:
    """Runs by the files of their data, and by the weights that they begin with, where these differ: two folders of one name.
    Older runs do not know theirs."""
    labels = dict.fromkeys((r.id for r in records), "")
    for what in FINGERPRINTS:
        found = {r.id: str((r.config.get("data") or {}).get(what) or "") for r in records}
        if len(set(found.values()) - {""}) > 1:
            labels |= {run: labels[run] + f" ({what} {print[:8]})" for run, print in found.items() if print}
    return grouped(records, lambda r: labels[r.id])


def _asked(r: ResultRecord) -> tuple[Any, ...]:
    """Which data and which length the run was to have."""
    train = r.config.get("train", {})
    return (r.config.get("data") or {}).get("path"), train.get("max_steps"), train.get("epochs")


def _by_comparison(records: list[ResultRecord]) -> list[tuple[str, list[ResultRecord]]]:
    """(`AccuracyTable.against`, runs) by stated baseline, the oldest first; runs that state none go with it."""
    found = grouped(sorted(records, key=lambda r: (r.time, r.id)), lambda r: _stated_baseline(r).lower())
    loose = found.pop("", [])
    if len(found) < 2:
        return [("", records)]
    first, *others = found.values()
    return [("", first + loose), *((_stated_baseline(every[0]), every) for every in others)]


def _stated_baseline(r: ResultRecord) -> str:
    said = StatedParity.of(r.config)
    return "" if said is None else said.baseline


def columns(table: AccuracyTable) -> list[Column]:
    """The columns, each with what makes its cells from a `Cell`; to add one see experiments/report/table.py."""
    name, target = table.metric["name"], table.metric.get("target")
    others = sorted({k for c in table.cells for r in c.valid for k in r.metric.get("all", {})} - {name})
    said = Column("verdict", "left", value=table.verdict)
    return [
        Column("method", "left", value=lambda cell: cell.label),
        Column("lr", value=lambda cell: DASH if cell.lr is None else f"{cell.lr:g}"),
        Column(name, value=lambda cell: _value(table, cell)),
        *map(_other, others),
        *([Column(f"vs {base.label}", value=table.difference_text), said] if (base := table.baseline) else []),
        Column("n", value=Cell.count),
        Column("target", value=lambda _: DASH if target is None else f"{target:g}"),
        Column("best lr", value=lambda cell: "best" if table.bests[cell.label] is cell else ""),
        Column("records", terminal=False, value=lambda cell: links((str(r.seed), r) for r in cell.records)),
    ]


def as_table(table: AccuracyTable, drawn: bool = False) -> Table:
    """The table, and above it how it is to be read. drawn: whether there is a picture of its curves."""
    note = Note(say("accuracies", t=table, held_out=HELD_OUT))
    picture = f"![{table.metric['name']}](../plots/{table.slug}_curve.png)" if drawn else ""
    return Table.of(columns(table), table.cells, title=table.title, notes=(note,), picture=picture)


def hooked(r: ResultRecord) -> bool:
    """Whether one of PyTorch's hooks sent the gradients, instead of plain all-reduce."""
    return (r.config.get("comm") or {}).get("hook") is not None


def full_precision(r: ResultRecord) -> bool:
    """Whether gradients were all-reduced in fp32: by none of PyTorch's hooks, whose `wire` is never fp32, and not by Birder
    without bits, which sends its update in fp32."""
    return r.wire == "fp32" and class_name(r.config["optimizer"]) in DENSE


def _value(table: AccuracyTable, cell: Cell) -> str:
    if not cell.valid:
        return next((f"failed: {r.reason}" for r in cell.records if r.status != "completed"), "not finite")
    value = mean_sd(*cell.summary(None))
    return f"**{value}**" if table.bests[cell.label] is cell else value


def _other(name: str) -> Column:
    return Column(name, value=lambda cell: mean_sd(*cell.summary(name)))


def links(records: Iterable[tuple[str, ResultRecord]]) -> str:
    """(name, record) as links of a page in the tables folder."""
    return " ".join(f"[{name}](../records/{r.id}.json)" for name, r in records)


def _cells(records: list[ResultRecord]) -> tuple[Cell, ...]:
    suffix = variants(records, SHOWN)
    # Of runs with the same seed the latest counts, but for one that was only broken off.
    ordered = sorted(records, key=lambda r: (r.seed, counts(r), r.time, r.id))
    found = grouped(ordered, lambda r: (*order(r), suffix[r.id], -math.inf if (lr := _lr(r)) is None else lr))
    return tuple(
        Cell(method + variant, _lr(runs[0]), tuple({r.seed: r for r in runs}.values()))
        for (_, method, variant, _), runs in sorted(found.items())
    )


def _lr(r: ResultRecord) -> float | None:
    lr = r.config.get("optimizer", {}).get("lr")
    return None if lr is None else float(lr)
