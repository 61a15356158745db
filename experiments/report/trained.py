"""Real training in turns beside its prediction from bound, links and machine. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.cells import trained
from experiments.cells.trained import Trained
from experiments.records.record import ResultRecord
from experiments.report.formats import number
from experiments.report.prediction import line
from experiments.report.table import Table

FOLDER = "validation"
"""Of a results folder: the records of `python studies/validate.py`."""
HEAD = ("trained", "rows", "median", "95th percentile", "worst")


def rows(records: Sequence[ResultRecord]) -> list[Trained]:
    """Every row that can be predicted, world by world: by experiment, nodes and rate."""
    worlds: dict[str, list[ResultRecord]] = {}
    for r in records:
        worlds.setdefault(r.turns.get("world", ""), []).append(r)
    found = [row for name, world in sorted(worlds.items()) if name for row in trained.of_world(world)]
    return sorted(found, key=lambda t: (t.record.exp, t.record.nodes, t.record.link.get("link_gbps") or 0.0))


def summary(found: Sequence[Trained]) -> Table:
    """Errors of all, and by experiment and method."""
    parts = {"all": list(found)}
    for t in found:
        parts.setdefault(t.record.exp, []).append(t)
    for t in sorted(found, key=lambda t: t.record.method):
        parts.setdefault(t.record.method, []).append(t)
    return Table.text(HEAD, [line(name, [t.error for t in part]) for name, part in parts.items() if part])


def sentence(records: Sequence[ResultRecord]) -> str:
    """What a comparison's table says of its prediction; empty where there is none."""
    if not (found := rows(records)):
        return ""
    said = ", ".join(f"{t.record.method} {number(t.predicted_ms)} ms ({t.error:+.1%})" for t in found)
    return f"Predicted from the bound, the dense update, the links and what kernels cost here: {said}."
