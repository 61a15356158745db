"""A comparison as one run of a tracker: the printed table, the numbers behind it, every round, the plots."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from experiments.config import compose
from experiments.config.compose import Composed
from experiments.records import labels
from experiments.records.record import ResultRecord, read_all
from experiments.report import speedup, tables
from experiments.report.speedup import SpeedupRow, SpeedupTable
from experiments.report.table import Table
from experiments.tracking.start import start
from experiments.tracking.tracked import About, Cell, TrackedRun
from launch.words import say

BAD_INPUT = 2
"""Exit status of a comparison that was refused before anything had run."""
BASELINES = {"vs_fp32": "fp32", "vs_bf16": "bf16", "of_bound": "none"}
"""Ratios of the table `rows` and the wire of what they are taken against."""
ROUND_COLUMNS = ("method", "round", "step_ms", "steps", "dilation", "record")


class TrackedComparison:
    """Open it before interleaved timing begins, so that the tracker's system metrics are those of its time.

    status: set it to the comparison's exit status; other than 0 marks the tracked run as failed.
    """

    def __init__(self, chosen: Sequence[Composed], group: str) -> None:
        resolved = [compose.resolve(c) for c in chosen]
        first = resolved[0]
        self.group, self.status = group, 1
        self.summary: dict[str, Any] = {}
        self.results_dir = Path(first["results_dir"])
        self.folder = Path(first["output_dir"]) / str(first["exp"]) / f"{group}-comparison"
        variants = [
            {"method": labels.method(config), "wire": labels.wire(config), "overrides": list(c.overrides)}
            for c, config in zip(chosen, resolved, strict=True)
        ]
        shared = {k: v for k, v in first.items() if k not in ("optimizer", "method")}
        config = {**shared, "variants": variants}
        self.run: TrackedRun = start(About(group, group, "comparison", config, self.folder))

    def record(self, printed: Sequence[Table]) -> None:
        """Sends what the comparison has come to. printed: the tables that were shown."""
        everything = read_all(self.results_dir)
        records = [r for r in everything if r.group == self.group]
        measured = speedup.build(records, self.group)
        names = {r.id: f"{r.method} {r.id}" for r in records}
        names |= {row.record.id: row.label for table in measured for row in table.rows}
        rounds = [row for r in records for row in rounds_of(r, names[r.id])]
        self._log_rounds(records, names)
        for number, table in enumerate(printed, start=1):
            self.run.table("comparison" + (f"_{number}" if len(printed) > 1 else ""), *table.printed())
        if rows := [numbers(table, row) for table in measured for row in table.rows]:
            self.run.table("rows", list(rows[0]), [list(row.values()) for row in rows])
        if rounds:
            self.run.table("rounds", ROUND_COLUMNS, rounds)
        for path in tables.plots_of(everything, self.results_dir, self.group):
            if path.is_file():
                self.run.image(path.stem, path)
        self.summary = summary(measured)
        if self.run.active and rounds:
            say(self.run.line)  # the first time was above all of an interleaved comparison's output

    def _log_rounds(self, records: Sequence[ResultRecord], names: Mapping[str, str]) -> None:
        """Step times as curves over the rounds."""
        series = {r.id: [round(float(ms), 4) for ms in r.turns.get("ms", ())] for r in records}
        for number in range(max(map(len, series.values()), default=0)):
            values = {f"step_ms/{names[i]}": ms[number] for i, ms in series.items() if number < len(ms)}
            self.run.log(number + 1, values)

    def __enter__(self) -> TrackedComparison:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self.run.finish(self.summary, 1 if kind is not None else self.status)
        if kind is None and self.status == BAD_INPUT and not self.summary:  # nothing has run
            shutil.rmtree(self.folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.folder.parent.rmdir()


def numbers(table: SpeedupTable, row: SpeedupRow) -> dict[str, Cell]:
    """A row of the table `rows`, by its columns: what was measured, as numbers; None: not measured."""
    r = row.record
    t, sent, ratios = r.timing, r.bytes_per_step, dict[str, Cell]()
    for name, wire in BASELINES.items():
        found = table.compared(row, wire)
        ends = {"": "value", "_low": "low", "_high": "high"}
        ratios |= {name + suffix: getattr(found, end, None) for suffix, end in ends.items()}
    return {
        "method": row.label,
        "wire": r.wire,
        "status": r.status,
        "runs": row.runs,
        "step_ms": row.ms,
        "step_is": "mean" if row.uneven else "median",
        **{key: t.get(key) for key in ("p10_ms", "p90_ms", "samples_per_s")},
        **ratios,
        "update_ms": t.get("update_ms"),
        **{f"{key}_bytes": sent.get(key) for key in ("payload_inter", "payload_intra", "nic_tx")},
        "collectives_per_step": r.collectives_per_step,
        "rounds_per_step": r.rounds_per_step,
        "state_bytes_per_rank": r.state_bytes_per_rank,
        "metric": r.metric.get("value"),
        "record": r.id,
    }


def rounds_of(r: ResultRecord, name: str) -> list[list[Cell]]:
    """Rows of the table `rounds`: one for each round of an interleaved method, which the tables call `name`."""
    known = itertools.zip_longest(*(r.turns.get(key) or () for key in ("ms", "steps", "dilations")))
    return [[name, number, *values, r.id] for number, values in enumerate(known, start=1)]


def summary(measured: Sequence[SpeedupTable]) -> dict[str, Any]:
    """The ratios by row, for tables of many comparisons: {"vs_fp32/Birder": 2.1, ...}."""
    rows = [(table, row) for table in measured for row in table.rows]
    every = {f"{name}/{row.label}": t.speedup(row, wire) for t, row in rows for name, wire in BASELINES.items()}
    return {name: value for name, value in every.items() if value is not None}
