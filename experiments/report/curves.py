"""Loss curves behind an accuracy table: each method at its best learning rate, next to a baseline. No torch.

A run's curve has the training loss of each step, which is that of one batch: what is shown is its mean over the last
`WINDOW` of the run's length, at `POINTS` steps, averaged over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.records.labels import is_compressed
from experiments.records.record import ResultRecord
from experiments.report.accuracy import AccuracyTable
from experiments.report.comparison import Cell
from experiments.report.metrics import Difference, difference
from launch.errors import UserError, refused

WINDOW = 0.05
"""Share of a run's steps over which its loss is averaged."""
POINTS = 60
BASELINES = {"methods": "SGDM fp32"}
"""Experiments whose baseline is not simply their best run in fp32, where their configuration names none (`parity`)."""


@dataclass(frozen=True)
class Curve:
    """One method at its best learning rate.

    steps:     optimizer steps at which the loss is shown.
    loss:      mean over seeds of the running mean of the training loss there; low, high: the lowest and the highest seed.
    final:     by seed, the mean loss over the last steps of the run.
    evaluated: (step, mean over seeds of the metric), where the workload was evaluated.
    """

    cell: Cell
    steps: tuple[int, ...]
    loss: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    final: Mapping[int, float]
    evaluated: tuple[tuple[int, float], ...]

    @property
    def label(self) -> str:
        return self.cell.label

    @property
    def compressed(self) -> bool:
        return is_compressed(self.cell.valid[0].wire)

    def gap(self, base: Curve) -> tuple[float | None, ...]:
        """Loss less the baseline's at the same steps; None beyond the baseline's curve."""
        theirs = np.interp(self.steps, base.steps, base.loss, left=np.nan, right=np.nan)
        found = np.asarray(self.loss) - theirs
        return tuple(None if math.isnan(v) else round(float(v), 6) for v in found)


@dataclass(frozen=True)
class Curves:
    """The curves of a table's methods, in its order."""

    table: AccuracyTable
    curves: tuple[Curve, ...]

    @cached_property
    def baseline(self) -> Curve | None:
        """That of the method which others are held against; None where it has no curve."""
        cell = baseline(self.table)
        return next((c for c in self.curves if cell is not None and c.cell is cell), None)

    @property
    def others(self) -> list[Curve]:
        return [c for c in self.curves if c is not self.baseline]

    def loss_difference(self, curve: Curve) -> Difference | None:
        """Of the last losses, seed by seed; None for the baseline itself and without one."""
        base = self.baseline
        return None if base is None or base is curve else difference(curve.final, base.final)

    def metric_difference(self, curve: Curve) -> Difference | None:
        """Of the metric, seed by seed: as the tables of accuracies have it where a margin is stated; None as above.

        Shares wherever the margin is one, also where the stated baseline was not run.
        """
        base, table = self.baseline, self.table
        if base is None or base is curve:
            return None
        own, theirs = curve.cell, base.cell
        if table.comparison is not None:
            return table.compared(own)
        return difference(own.by_seed, theirs.by_seed, table.relative)


def baseline(table: AccuracyTable) -> Cell | None:
    """What others are held against: `parity` of the runs, else `BASELINES`, else the strongest fp32 all-reduce."""
    name = BASELINES.get(table.first.exp)
    named = [c for c in table.chosen if c.valid and c.label == name]
    return table.baseline or next(iter(named), table.strongest)


def read(table: AccuracyTable, results_dir: Path) -> Curves:
    """The curves that there are. Raises UserError for a file that a record names and that is gone."""
    found = [curve for cell in table.chosen if (curve := _of_cell(cell, results_dir)) is not None]
    return Curves(table, tuple(found))


def frame(r: ResultRecord, results_dir: Path) -> pd.DataFrame | None:
    """A run's curve; None without one. Raises UserError."""
    if r.curve is None:
        return None
    path = results_dir / r.curve
    if not path.is_file():
        raise UserError(f"record {r.id} names the curve {path}, which is not there: bring it back or remove the record")
    with refused(f"{path} is not a readable curve", ValueError):
        points = pd.read_csv(path, usecols=["step", "loss", "metric"], dtype=float)
    return None if points.empty else points


def _of_cell(cell: Cell, results_dir: Path) -> Curve | None:
    runs = {r.seed: points for r in cell.valid if (points := frame(r, results_dir)) is not None}
    smooth = {seed: _running(points) for seed, points in runs.items()}
    smooth = {seed: s for seed, s in smooth.items() if not s.empty}
    if not smooth:
        return None
    begin = max(int(s.index[0]) for s in smooth.values())
    end = min(int(s.index[-1]) for s in smooth.values())
    steps = np.unique(np.linspace(begin, end, POINTS).round().astype(int))
    rows = np.array([np.interp(steps, s.index.to_numpy(), s.to_numpy()) for s in smooth.values()])
    return Curve(
        cell,
        steps=tuple(int(s) for s in steps),
        loss=_short(rows.mean(axis=0)),
        low=_short(rows.min(axis=0)),
        high=_short(rows.max(axis=0)),
        final={seed: float(s.iloc[-1]) for seed, s in smooth.items()},
        evaluated=_evaluated(list(runs.values())),
    )


def _short(values: np.ndarray) -> tuple[float, ...]:
    """Six digits: beyond them versions of numpy and pandas may differ, and pictures of the same data shall be the same."""
    return tuple(float(f"{v:.6g}") for v in values)


def _running(points: pd.DataFrame) -> pd.Series[float]:
    """Running mean of the loss, by step; it begins where the window is full."""
    loss = points.set_index("step")["loss"].dropna()
    window = max(1, round(WINDOW * len(loss)))
    return loss.rolling(window).mean().dropna()


def _evaluated(runs: list[pd.DataFrame]) -> tuple[tuple[int, float], ...]:
    means = pd.concat(runs).dropna(subset=["metric"]).groupby("step")["metric"].mean()
    return tuple(zip(means.index.astype(int).tolist(), means.tolist(), strict=True))
