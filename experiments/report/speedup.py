"""Speedup tables: step times of methods that took turns, or of runs made one after the other, on the same machine. How they
are shown stands in speedup_table.py.

Baselines are the fp32 and the bf16 all-reduce of the same table; where there are several, the fastest. The run without
communication is the bound. What a speedup is: metrics.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from experiments.records.labels import DENSE, class_name, is_virtual
from experiments.records.record import ResultRecord
from experiments.report import metrics
from experiments.report.differences import by_workload, grouped, order, variants
from experiments.report.formats import numbered
from experiments.report.metrics import Speedup

# Hyper-parameters that do not change what a step costs.
COSTLESS = (
    *("optimizer.lr", "optimizer.weight_decay"),
    *("train.lr_schedule", "train.epochs", "train.max_steps", "train.eval_every"),
)


@dataclass(frozen=True)
class SpeedupRow:
    """One line of a table: a run, standing for `runs` runs that differ in seed and learning rate only."""

    label: str
    record: ResultRecord
    runs: int = 1

    @property
    def ms(self) -> float | None:
        return metrics.step_ms(self.record)

    @property
    def dense(self) -> bool:
        """Whether its messages are gradients, whatever their type. Birder without bits sends its own u."""
        return self.record.wire == "none" or class_name(self.record.config["optimizer"]) in DENSE

    @property
    def uneven(self) -> bool:
        return metrics.uneven(self.record)

    @property
    def payload(self) -> float | None:
        return metrics.payload(self.record)


@dataclass(frozen=True)
class SpeedupTable:
    """The runs of one group on one machine with one setting. `slug` names its plot.

    workload: keys of the workload in which they differ from others of the group: "model=resnet18".
    """

    slug: str
    group: str
    records: tuple[ResultRecord, ...]
    workload: str = ""

    @property
    def latest(self) -> tuple[str, str]:
        """Time and id of the youngest record."""
        return max((r.time, r.id) for r in self.records)

    @cached_property
    def rows(self) -> list[SpeedupRow]:
        suffix = variants(self.records, COSTLESS)
        ordered = sorted(self.records, key=lambda r: (*order(r), suffix[r.id], r.status, r.time, r.id))
        # A failure is shown by itself, never averaged away.
        cells = grouped(ordered, lambda r: (r.method + suffix[r.id], r.wire, "" if r.status == "completed" else r.id))
        rows = []
        for (label, _, _), same in cells.items():
            # A run that was resumed near its end has timed no step: the others speak for the method.
            same = [r for r in same if metrics.step_ms(r)] or same
            same.sort(key=lambda r: (metrics.step_ms(r) or 0.0, r.id))
            rows.append(SpeedupRow(label, same[(len(same) - 1) // 2], len(same)))
        return rows

    def row(self, label: str) -> SpeedupRow:
        """Raises KeyError for a label that no row has."""
        return {row.label: row for row in self.rows}[label]

    def baseline(self, wire: str) -> SpeedupRow | None:
        """The fastest completed run of a dense method whose collectives carry `wire` ("none": the bound)."""
        timed = [row for row in self.rows if row.record.wire == wire and row.ms is not None and row.dense]
        return min(timed, key=lambda row: row.ms or 0.0, default=None)

    def compared(self, row: SpeedupRow, wire: str) -> Speedup | None:
        """Of `row` over the baseline of `wire`; None when either is missing. A row of several runs has no interval."""
        base = self.baseline(wire)
        found = None if base is None else metrics.speedup(base.record, row.record)
        alone = base is not None and base.runs == row.runs == 1
        return found if found is None or alone else replace(found, low=None, high=None)

    def speedup(self, row: SpeedupRow, wire: str) -> float | None:
        """The value of `compared`."""
        found = self.compared(row, wire)
        return None if found is None else found.value

    @property
    def skips(self) -> bool:
        """Whether any method of the table has steps in which nothing is sent."""
        found = [row.record.rounds_per_step for row in self.rows if row.record.wire != "none"]
        return any(rounds is not None and rounds < 1 for rounds in found)

    def payload_ratio(self, row: SpeedupRow) -> float | None:
        """Payload of `row` as a share of the fp32 baseline's."""
        base = self.baseline("fp32")
        return row.payload / base.payload if base and base.payload and row.payload is not None else None


def build(records: list[ResultRecord], group: str | None = None) -> list[SpeedupTable]:
    """The table of the latest group of each setting and workload, or every table of `group`. Runs without a group are in
    none."""
    mine = [r for r in records if r.group is not None and group in (None, r.group) and not is_virtual(r.config)]
    found: dict[tuple[str, str, str], list[ResultRecord]] = {}
    # Of all groups of a setting: a later one of another model leaves the earlier one's table.
    settings = grouped(mine, setting).values()
    models = {r.id: model for every in settings for model, of in by_workload(every).items() for r in of}
    for (shared, model, _), members in grouped(mine, lambda r: (setting(r), models[r.id], r.group)).items():
        failed = [r for r in members if r.status != "completed"]
        machines = grouped((r for r in members if r.status == "completed"), _machine)
        # The launcher writes the record of a failed run and may know less of link and device than the workers.
        for machine, completed in (machines or {"": []}).items():
            key = (shared, machine, model)
            if key not in found or _age(completed + failed) > _age(found[key]):
                found[key] = completed + failed
    # A group in which everything failed is shown only where there is nothing better.
    timed = {shared for shared, machine, _ in found if machine}
    shown = sorted((key, rs) for key, rs in found.items() if key[1] or key[0] not in timed)
    slugs = numbered(f"{r.exp}_{r.scale}_{r.cluster}_{r.nodes}x{r.ranks_per_node}" for _, (r, *_) in shown)
    return [
        SpeedupTable(slug, of[0].group or "", tuple(of), model)
        for slug, ((_, _, model), of) in zip(slugs, shown, strict=True)
    ]


def newest(records: Sequence[ResultRecord], exp: str, cluster: str = "emulated") -> list[SpeedupTable]:
    """The latest table for each shape of a cluster, emulated links by default, the fewest nodes first."""
    tables = sorted(build([r for r in records if r.exp == exp and r.cluster == cluster]), key=lambda t: t.latest)
    found = {(t.records[0].nodes, t.records[0].ranks_per_node): t for t in tables}
    return [found[shape] for shape in sorted(found)]


def _machine(r: ResultRecord) -> str:
    """A run's hardware, and its link without what differs between two measurements of it."""
    varying = ["measured", "off_by", "note", "probed_mbit_per_s"]
    if r.link.get("link_gbps") and (r.config.get("cluster") or {}).get("dilation") == "auto":
        varying += ["dilation", "set_mbit_per_s"]
    if r.link.get("set_mbit_per_s") or r.link.get("probed_mbit_per_s"):
        varying.append("mbit_per_s")
    return json.dumps([r.hardware, {k: v for k, v in r.link.items() if k not in varying}], sort_keys=True)


def setting(r: ResultRecord) -> str:
    """What runs must share to stand in one table, but for group, machine and link."""
    train = r.config.get("train", {})
    batch = [train.get(key) for key in ("batch_per_rank", "accumulate", "precision")]
    return json.dumps([r.exp, r.scale, r.cluster, r.nodes, r.ranks_per_node, batch])


def _age(records: list[ResultRecord]) -> tuple[str, str]:
    return max((r.time, r.group or "") for r in records)
