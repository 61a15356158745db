"""What results/published/index.html shows, as data, and the page with the data in it. No torch.

The page is one file (page.html with page.css, page.js, plotly, the data and nothing from a network). Every number on it is
one of `data`'s, and every number of `data` is one of a record's or of the predictor's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Template

from birder.predict import DEFAULT, METHODS, Answer, Cluster, Link, Timeline, answer, gpus
from experiments.cells import timelines
from experiments.records.record import ResultRecord
from experiments.report import (
    accuracy,
    answered,
    curves,
    gaps,
    methods_table,
    prediction,
    sentences,
    speedup,
    speedup_table,
)
from experiments.report.curves import Curve, Curves
from experiments.report.formats import metric_axis, metric_unit
from experiments.report.metrics import Difference
from launch.words import count

FOLDER = Path(__file__).parent
EXP = "resnet50"
"""The experiment of the main table."""


@dataclass(frozen=True)
class Grid:
    """What the controls can be set to. models: timelines, with what the page calls them."""

    models: tuple[tuple[str, str], ...] = (
        ("resnet50_b32_tf32", "ResNet-50, batch 32, TF32"),
        ("resnet50_b128_tf32", "ResNet-50, batch 128, TF32"),
        ("resnet50_b32_amp", "ResNet-50, batch 32, AMP"),
        ("bert_base_b12_tf32", "BERT-Base, batch 12, TF32"),
        ("bert_base_b12_amp", "BERT-Base, batch 12, AMP"),
    )
    nodes: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    gbps: tuple[float, ...] = prediction.GBPS


def data(
    results_dir: str | Path, records: Sequence[ResultRecord], studies: answered.Studies, grid: Grid = Grid()
) -> dict[str, Any]:
    """All that the page shows, as JSON's types. studies: `answered.verdicts`. Raises UserError for a curve that is gone."""
    return {
        "accuracy": accuracies(records),
        "tasks": tasks(results_dir, records),
        "replays": replays(results_dir),
        "grid": predicted(grid, studies),
    }


MEASURED = {
    "method": "method",
    "step time, median (p10–p90), ms": "ms a step here (p10–p90)",
    "speedup vs fp32": "vs fp32 DDP",
    "speedup vs bf16": "vs bf16 DDP",
    "payload per node and step": "sent per node",
}
"""Columns of the main table that the page shows, and what they are called there."""


def measured(records: Sequence[ResultRecord]) -> list[dict[str, str]]:
    """The main table on emulated links as HTML, the latest for each cluster."""
    found = []
    for table in speedup.newest(records, EXP):
        r = table.records[0]
        title = f"{count(r.nodes, 'node')} of {count(r.ranks_per_node, 'rank')}"
        shown = speedup_table.as_table(table).pick(MEASURED)
        found.append({"title": title, "caveats": sentences.caveats(table.records), "table": shown.html()})
    return found


def accuracies(records: Sequence[ResultRecord]) -> dict[str, Any]:
    """Of all methods on one task: what is sent, as a share of fp32, and the metric's difference to the baseline's.

    axis: the differences that a chart has room for; a row `beyond` it is named next to it.
    """
    tables = methods_table.build(records)
    found = gaps.against_bytes(tables[0]) if tables else None
    if found is None:
        return {"title": "", "rows": [], "failures": [], "axis": [0, 0]}
    rows = [{**vars(p), "gap": _interval(p.gap)} for p in found.points]
    return {
        "title": found.table.scores.title,
        "point": found.point(),
        "metric": metric_axis(found.table.metric),
        "unit": metric_unit(found.table.metric),
        "baseline": found.baseline,
        "rows": rows,
        "axis": list(found.axis),
        "failures": found.table.failures,
    }


def tasks(results_dir: str | Path, records: Sequence[ResultRecord]) -> list[dict[str, Any]]:
    """Loss curves of every task with accuracies, those with most methods first."""
    found = [curves.read(table, Path(results_dir)) for table in accuracy.build(list(records))]
    found = sorted((c for c in found if c.curves), key=lambda c: -len(c.curves))
    return [_task(c) for c in found]


def _task(found: Curves) -> dict[str, Any]:
    table, base = found.table, found.baseline
    name = str(table.metric["name"])
    return {
        "slug": table.slug,
        "title": table.title,
        "metric": metric_axis(name),
        "unit": " %" if table.relative else metric_unit(name),
        "higher_is_better": table.higher_is_better,
        "baseline": None if base is None else base.label,
        "methods": [_curve(found, c) for c in found.curves],
    }


def _curve(found: Curves, curve: Curve) -> dict[str, Any]:
    """One method of a task. steps: of the optimizer; loss, low, high: training loss in nats; gap: less the baseline's."""
    base, table = found.baseline, found.table
    mean, sd = curve.cell.summary(None)
    apart = found.metric_difference(curve)
    return {
        "method": curve.label,
        "lr": curve.cell.lr,
        "seeds": len(curve.final),
        "compressed": curve.compressed,
        "steps": curve.steps,
        "loss": curve.loss,
        "low": curve.low,
        "high": curve.high,
        "gap": None if base is None else curve.gap(base),
        "final": curve.loss[-1],
        "final_gap": _interval(found.loss_difference(curve)),
        "mean": mean,
        "sd": sd,
        "difference": _interval(apart, 100.0 if table.relative else 1.0),
        "verdict": None if apart is None else table.verdict(curve.cell) or None,
    }


def _interval(found: Difference | None, scale: float = 1.0) -> dict[str, float | None] | None:
    return None if found is None else vars(found.times(scale))


def replays(results_dir: str | Path) -> list[dict[str, Any]]:
    """Every replayed cell on links of a set rate next to its prediction, which knows none of its times."""
    cells = prediction.load(results_dir)
    shown = cells[(cells.link == "emulated") & (cells.sends == 1)].reset_index()
    shown = shown.rename(columns={"measured_ms": "replayed", "predicted_ms": "predicted"})
    columns = ["id", "kind", "replayed", "predicted"]
    return [dict(zip(columns, row, strict=True)) for row in shown[columns].itertuples(index=False)]


def predicted(grid: Grid, studies: answered.Studies) -> dict[str, Any]:
    """ms of a step for each model, number of nodes, rate and method: ms[model][nodes][rate][method], by place.

    wins: the place of the method that wins, for each model, number of nodes and rate, or null: not decided; answers: what the
    command line says. curves: places of the methods that are drawn.
    """
    names, lost = DEFAULT, answered.lost(studies)

    def asked(t: Timeline, nodes: int, gbps: float) -> Answer:
        link, inside = Link(gbps, prediction.LATENCY_US), gpus.find(t.gpu).link
        return answer(t, Cluster.of_gpus(nodes, prediction.RANKS_PER_NODE, link, inside), lost=lost)

    every = [timelines.load(name) for name, _ in grid.models]
    found = [[[asked(t, nodes, gbps) for gbps in grid.gbps] for nodes in grid.nodes] for t in every]

    def each(of: Callable[[Answer], Any]) -> list[Any]:
        return [[[of(a) for a in rates] for rates in nodes] for nodes in found]

    return {
        "models": [label for _, label in grid.models],
        "nodes": list(grid.nodes),
        "gbps": list(grid.gbps),
        "methods": [METHODS[m].label for m in names],
        "fp32": names.index("fp32"),
        "bf16": names.index("bf16"),
        "bound": names.index("none"),
        "ranks_per_node": prediction.RANKS_PER_NODE,
        "near": prediction.NEAR,
        "curves": [names.index(m) for m in prediction.METHODS if m != "fp32"],
        "ms": each(lambda a: [round(a.prediction[m].ms, 3) for m in names]),
        "wins": each(lambda a: None if a.winner is None else names.index(a.winner)),
        "answers": each(lambda a: " ".join(answered.sentences(a, studies))),
    }


def html(content: dict[str, Any], tables: Sequence[dict[str, str]], library: str) -> str:
    """The page. content: of `data`; tables: of `measured`; library: the text of plotly's script."""
    # Within a script element nothing may look like its end.
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("</", "<\\/")
    parts = {"css": "page.css", "js": "page.js", "pay": "pay.js"}
    own = {name: FOLDER.joinpath(file).read_text(encoding="utf-8") for name, file in parts.items()}
    page = Template(FOLDER.joinpath("page.html").read_text(encoding="utf-8"), keep_trailing_newline=True)
    return page.render(**own, data=text, measured=tables, plotly=library)
