"""What the cells of a suite have measured, from records alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd

from experiments.cells.suite import Measurement, Place, Setting, Suite
from experiments.records.labels import is_compressed
from experiments.records.record import ResultRecord, read_all
from experiments.report import captions, metrics, prediction
from experiments.report.metrics import Speedup
from launch.errors import UserError


@dataclass(frozen=True)
class Results:
    """All cells of a suite that have been measured, the kernels by device, and what is predicted (`prediction.load`)."""

    suite: Suite
    records: dict[Measurement, ResultRecord]
    kernels: dict[str, ResultRecord]
    predicted: pd.DataFrame = field(default_factory=pd.DataFrame, compare=False)

    def ms(self, place: Place, method: str, key: str = "median_ms") -> float | None:
        """`clock` of what this place of a table shows; None where nothing was measured."""
        cell = self.suite.cell(place, method)
        return self.clock(cell, key) if cell in self.records else None

    def clock(self, cell: Measurement, key: str = "median_ms") -> float:
        """Step time, or a part of it (a key of the split), on the cluster: this machine's clock divided by the dilation."""
        r = self.records[cell]
        return float({**r.timing, **r.timing["split"]}[key]) / float(r.link["dilation"])

    def compared(self, place: Place, method: str, base: str = "fp32") -> Speedup | None:
        """Of a method over another one, on the cluster's clock; None where one was not measured."""
        cells = [self.suite.cell(place, m) for m in (base, method)]
        found = [self.records[c] for c in cells if c in self.records]
        if len(found) < 2:
            return None
        return metrics.speedup(*map(undilated, found))

    def versus(self, place: Place, method: str, base: str = "fp32", share: bool = False) -> str:
        """`compared` as text. share: as a percentage."""
        return (captions.share if share else captions.faster)(self.compared(place, method, base))

    def best(self, setting: Setting, method: str, base: str = "fp32") -> tuple[float, Place] | None:
        """The largest speedup over the numbers of nodes above one, and where."""
        found = [(self.compared(p, method, base), p) for p in self.suite.across(setting) if p.nodes > 1]
        return max(((s.value, p) for s, p in found if s is not None), default=None)

    def places(self) -> list[Place]:
        """Where anything has been sent over a link, in the order of the tables."""
        known = {(c.model, c.rate, c.nodes, c.link) for c in self.records}
        return [p for p in self.suite.places() if tuple(p) in known]

    def settings(self) -> list[Setting]:
        """Those of `places`."""
        return list(dict.fromkeys((p.model, p.rate, p.link) for p in self.places()))

    @property
    def models(self) -> list[str]:
        return [m for m in self.suite.models if any(c.model == m for c in self.records)]

    def fastest(self, place: Place) -> list[tuple[float, str]]:
        """Compressed methods of a place, the fastest first."""
        found = [(self.ms(place, name), name) for name, m in self.suite.rows.items() if is_compressed(m.wire)]
        return sorted((ms, name) for ms, name in found if ms is not None)


def undilated(r: ResultRecord) -> ResultRecord:
    """A cell's record with its times on the cluster's clock: each cell has its own dilation."""
    slower = float(r.link["dilation"])
    timing = {
        key: value / slower if key.endswith("_ms") else value for key, value in r.timing.items() if key != "steps_ms"
    }
    return replace(r, timing=timing, turns={**r.turns, "ms": [ms / slower for ms in r.turns.get("ms", ())]})


def collect(suite: Suite, records: Sequence[ResultRecord]) -> Results:
    """The latest completed record of every cell of the suite: its section of the configuration, named as the suite, tells
    which. What a suite has no more, such as a number of nodes, is left out."""
    known = frozenset(suite.cells(suite.places(), suite.methods))
    cells: dict[Measurement, ResultRecord] = {}
    kernels: dict[str, ResultRecord] = {}
    for r in sorted(records, key=lambda r: (r.time, r.id)):
        about = r.config.get(suite.name, {})
        if r.exp != suite.name or r.status != "completed":
            continue
        if "kernels" in about:
            kernels[r.hardware["device"]] = r
        elif (cell := Measurement(**{key: about.get(key) for key in Measurement._fields})) in known:
            cells[cell] = r
    return Results(suite, cells, kernels)


def load(suite: Suite, results_dir: str | Path) -> Results:
    """Results of a folder. Raises UserError when there are none."""
    known = read_all(results_dir)
    results = collect(suite, known)
    if not results.records and not results.kernels:
        raise UserError(f"no record of {suite.subject} in {results_dir}/records: leave out --tables-only")
    return replace(results, predicted=prediction.load(results_dir, list(results.records.values())))
