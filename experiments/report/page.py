"""What results/published/index.html shows, as data, and the page with the data in it. No torch.

The page is one file (page.html with plotly, the data and nothing from a network). Every number on it is one of `data`'s, and
every number of `data` is one of a record's or of the predictor's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from birder.predict import METHODS, Cluster, Link, Method, predict
from experiments.cells import timelines
from experiments.records.record import ResultRecord
from experiments.report import methods_table, prediction, sentences, speedup
from experiments.report.claims_measured import newest
from experiments.report.formats import size

TEMPLATE = Path(__file__).with_name("page.html")
EXP = "resnet50"
"""The experiment of the main table."""
BASELINE = "SGDM fp32"
"""Whose accuracy the others' are held against."""
LATENCY_US = 20.0
RANKS_PER_NODE = 8


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
    gbps: tuple[float, ...] = (1, 2.5, 5, 10, 25, 50, 100, 200, 400)
    methods: tuple[str, ...] = ("fp32", "bf16", "powersgd4", "onebit_adam", "birder", "birder_hierarchical", "none")


def data(results_dir: str | Path, records: Sequence[ResultRecord], grid: Grid = Grid()) -> dict[str, Any]:
    """All that the page shows, as JSON's types."""
    return {
        "speedups": speedups(records),
        "accuracy": accuracies(records),
        "replays": replays(results_dir, records),
        "grid": predicted(grid),
    }


def speedups(records: Sequence[ResultRecord]) -> list[dict[str, Any]]:
    """The main table on emulated links, the latest for each cluster: ms, speedups, their 95 % intervals or null."""
    found = []
    for table in newest(records, EXP):
        r = table.records[0]
        rows = [
            {
                "method": row.label,
                "ms": 1000 * row.seconds,
                "payload": size(row.payload),
                **{base: _versus(table, row, base) for base in ("fp32", "bf16")},
            }
            for row in table.rows
            if row.seconds
        ]
        title = f"{r.nodes} nodes of {r.ranks_per_node} rank{'s' * (r.ranks_per_node > 1)}"
        found.append({"slug": table.slug, "title": title, "honesty": sentences.honesty(table.records), "rows": rows})
    return found


def _versus(table: speedup.SpeedupTable, row: speedup.Row, base: str) -> dict[str, float | None]:
    ratio = table.ratio(row, base) if row is not table.baseline(base) else None
    return {
        "value": table.speedup(row, base),
        "low": None if ratio is None else ratio.low,
        "high": None if ratio is None else ratio.high,
    }


def accuracies(records: Sequence[ResultRecord]) -> dict[str, Any]:
    """Of all methods on one task: what is sent, as a share of fp32, and the metric's difference to the baseline's."""
    tables = methods_table.build(records)
    if not tables:
        return {"title": "", "rows": [], "failures": []}
    table = tables[0]
    scored = [line for line in table.lines if line.best is not None and line.best.mean is not None]
    base = next((line.best.mean for line in scored if line.label == BASELINE and line.best), None)
    rows = [
        {
            "method": line.label,
            "share": table.payload_ratio(line),
            "mean": line.best.summary(None)[0],
            "sd": line.best.summary(None)[1],
            "difference": None if base is None else line.best.summary(None)[0] - base,  # type: ignore[operator]
            "seeds": len(line.best.valid),
        }
        for line in scored
        if line.best is not None
    ]
    return {
        "title": table.scores.title,
        "metric": table.metric,
        "baseline": BASELINE,
        "rows": rows,
        "failures": [said for line in table.lines for said in line.failures],
    }


def replays(results_dir: str | Path, records: Sequence[ResultRecord]) -> list[dict[str, Any]]:
    """Every replayed cell on links of a set rate beside its prediction, which knows none of its times."""
    outcomes = prediction.evaluate(records, prediction.load(results_dir))
    return [
        {
            "id": o.case.id,
            "kind": _kind(o.case.method),
            "replayed": o.measured_ms,
            "predicted": o.predicted_ms,
        }
        for o in outcomes
        if o.case.link == "emulated" and o.sends
    ]


def _kind(method: Method) -> str:
    """What cells are told apart by in one chart."""
    if method.dense:
        return "all-reduce"
    if method.hierarchical:
        return "Birder, hierarchical"
    for begin, kind in (("birder", "Birder, flat"), ("powersgd", "PowerSGD")):
        if method.name.startswith(begin):
            return kind
    return "1-bit Adam"


def predicted(grid: Grid) -> dict[str, Any]:
    """ms of a step for each model, number of nodes, rate and method: ms[model][nodes][rate][method], by place."""
    ms = []
    for name, _ in grid.models:
        t = timelines.load(name)
        by_nodes = []
        for nodes in grid.nodes:
            made = [
                predict(t, Cluster(nodes, RANKS_PER_NODE, Link(g, LATENCY_US)), list(grid.methods)) for g in grid.gbps
            ]
            by_nodes.append([[round(p[m].ms, 3) for m in grid.methods] for p in made])
        ms.append(by_nodes)
    return {
        "models": [label for _, label in grid.models],
        "nodes": list(grid.nodes),
        "gbps": list(grid.gbps),
        "methods": [METHODS[m].label for m in grid.methods],
        "fp32": grid.methods.index("fp32"),
        "bound": grid.methods.index("none"),
        "ranks_per_node": RANKS_PER_NODE,
        "ms": ms,
    }


def html(content: dict[str, Any], library: str) -> str:
    """The page. library: the text of plotly's script."""
    # Within a script element nothing may look like its end.
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("</", "<\\/")
    page = TEMPLATE.read_text(encoding="utf-8")
    for mark, part in (("/*DATA*/", text), ("/*PLOTLY*/", library)):  # neither is looked for in what was put in
        before, _, after = page.partition(mark)
        page = before + part + after
    return page
