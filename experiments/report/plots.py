"""Plots of the tables, as PNG files that are the same bytes for the same records and version of matplotlib."""

from __future__ import annotations

import hashlib
import io
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.records.record import ResultRecord
from experiments.report import accuracy, sentences
from experiments.report.accuracy import AccuracyTable
from experiments.report.speedup import SpeedupTable
from launch.errors import UserError

MARK = "Made by make tables"
DPI = 110
# A method has the same colour in every plot.
COLOURS = {
    "SGDM fp32": "#4477aa",
    "SGDM bf16": "#66ccee",
    "BertAdam fp32": "#4477aa",
    "BertAdam bf16": "#66ccee",
    "AdamW fp32": "#225588",
    "AdamW bf16": "#99ddff",
    "1-bit Adam": "#ccbb44",
    "Birder": "#ee6677",
    "Birder hierarchical": "#aa3377",
    "no communication": "#bbbbbb",
}
MARKERS = "osD^v<>pPX*h"
OTHERS = ("#228833", "#ee8866", "#44bb99", "#997700", "#77aadd", "#882255")


def step_times(table: SpeedupTable) -> bytes | None:
    """Horizontal bars of step times with p10-p90 whiskers; None when nothing was timed."""
    rows = [row for row in table.rows if row.seconds is not None][::-1]
    if not rows:
        return None
    with style.context("default"):
        figure = Figure(figsize=(8, 1.5 + 0.45 * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        for place, row in enumerate(rows):
            t, typical = row.record.timing, 1000 * (row.seconds or 0.0)
            low, high = t.get("p10_ms") or typical, t.get("p90_ms") or typical
            spread = [[max(0.0, typical - low)], [max(0.0, high - typical)]]
            axes.barh(place, typical, xerr=spread, color=colour(row.record.method, place), capsize=3)
            if table.ratio(row, "fp32") is not None and row is not table.baseline("fp32"):
                axes.text(0.01 * typical, place, f"{table.versus(row, 'fp32')} vs fp32", va="center", fontsize=6)
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        mean = ", the mean where steps differ in what they send" if any(row.uneven for row in rows) else ""
        axes.set_xlabel(f"step time, ms (median, p10 to p90{mean})")
        words = textwrap.wrap(sentences.honesty(table.records), 110)
        figure.suptitle("\n".join([sentences.title(rows[0].record), *words]), fontsize=8)
        return png(figure, [[row.label, row.record.timing] for row in rows])


def metric_curves(table: AccuracyTable, results_dir: Path) -> bytes | None:
    """Metric against step at the best learning rate of each method, one thin line per seed; None without curves."""
    metric = table.metric["name"]
    drawn: list[object] = []
    with style.context("default"):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        labels = {r.id: f"{c.label}, lr {c.lr:g}" if c.lr else c.label for c in table.cells for r in c.records}
        places = {label: i for i, label in enumerate(dict.fromkeys(labels.values()))}
        named: set[str] = set()
        for r in accuracy.curves(table):
            points = _points(r, results_dir)
            if points is None:
                continue
            label = labels[r.id]
            legend = None if label in named else label
            named.add(label)
            steps, values = points["step"].to_numpy(), points["metric"].to_numpy()
            line = axes.plot(steps, values, label=legend, linewidth=0.9, marker=".", markersize=4)
            line[0].set_color(colour(r.method, places[label]))
            drawn.append([label, points.to_numpy().tolist()])
        if not drawn:
            return None
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(metric)
        figure.suptitle(table.title, fontsize=8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        return png(figure, drawn)


def metric_against_bytes(
    points: Sequence[tuple[str, str, float, float | None, float | None]], metric: str, title: str
) -> bytes | None:
    """A point for each method, with the spread over its seeds; None without points.

    points: (label, method, payload bytes per node and step, mean, sample standard deviation or None).
    """
    drawn = [(*point[:3], point[3], point[4] or 0.0) for point in points if point[3] is not None]
    if not drawn:
        return None
    with style.context("default"):
        figure = Figure(figsize=(9, 5.5), layout="constrained")
        axes = figure.add_subplot()
        for place, (label, method, payload, mean, sd) in enumerate(drawn):
            marker = MARKERS[place % len(MARKERS)]
            axes.errorbar(
                payload, mean, yerr=sd, label=label, color=colour(method, place), marker=marker, capsize=3, linestyle=""
            )
        axes.set_xscale("log")
        axes.set_xlabel("payload, bytes per node and step")
        axes.set_ylabel(metric)
        axes.grid(alpha=0.3)
        figure.legend(fontsize=8, loc="outside right upper")
        figure.suptitle(title, fontsize=8)
        return png(figure, [list(point) for point in drawn])


def colour(method: str, place: int) -> str:
    """The colour of a method; `place` decides for methods without one of their own."""
    return COLOURS.get(method, OTHERS[place % len(OTHERS)])


def digest(png: bytes, mark: str = MARK) -> bytes:
    """The digest of the data that a plot with this mark shows; of any other file, its bytes."""
    _, found, rest = png.partition(f"{mark}, data ".encode())
    return rest[:64] if found else png


def _points(r: ResultRecord, results_dir: Path) -> pd.DataFrame | None:
    if r.curve is None:
        return None
    path = results_dir / r.curve
    if not path.is_file():
        raise UserError(f"record {r.id} names the curve {path}, which is not there: bring it back or remove the record")
    points = pd.read_csv(path)[["step", "metric"]].dropna()
    return None if points.empty else points


def png(figure: Figure, data: object, mark: str = MARK) -> bytes:
    """The file of a figure; its description is the mark and a digest of the data that it shows."""
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    # Versions of matplotlib draw different pixels; the digest lets --check compare what is shown.
    described = f"{mark}, data {hashlib.sha256(repr(data).encode()).hexdigest()}"
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None, "Description": described})
    return buffer.getvalue()
