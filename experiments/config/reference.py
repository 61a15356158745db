"""The table of all keys, from the schema; docs/configuration.md holds it (`make tables`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from pydantic import BaseModel

from experiments.config import kinds, validate
from experiments.config.question import Question
from experiments.config.schema import Config
from experiments.config.schema_cluster import CLUSTERS, Cluster
from experiments.config.schema_optimizer import OPTIMIZERS, Optimizer
from experiments.records import old_keys

FREE = ("workload", "optimizer", "cluster", "scales")
"""Sections whose keys the table does not list under their own name."""


def tables() -> str:
    """Tables of the keys of every run, of the launchers', of the optimizers', of predictions', and the renamed ones."""
    parts = ["### Every run\n", _table(_rows(Config, but=FREE))]
    parts += ["### Launchers: `cluster.`\n", "All of them:\n", _table(_rows(Cluster, "cluster."))]
    for target, model in CLUSTERS.items():
        if rows := _rows(model, "cluster.", Cluster.model_fields):
            parts += [f"`cluster={target.split('.')[1]}`:\n", _table(rows)]
    parts += ["### Optimizers: `optimizer.`\n", "All of them:\n", _table(_rows(Optimizer, "optimizer."))]
    for target, chosen in OPTIMIZERS.items():
        parts += [f"`{target}`:\n", _table(_rows(chosen, "optimizer.", Optimizer.model_fields))]
    parts += ["### Predictions: `experiments/predict.py`\n", _table(_rows(Question))]
    parts += [
        "### Renamed keys\n",
        "The old names still work, with a warning; records with old names can be read.\n",
    ]
    parts += [_table(map(_renamed, old_keys.RENAMED), ("old", "new"))]
    return "\n".join(parts)


def _renamed(old: str) -> tuple[str, str]:
    new, values = old_keys.RENAMED[old]
    typed = [f"`{old}={a}`: `{new}={str(b).lower() if isinstance(b, bool) else b}`" for a, b in values.items()]
    return f"`{old}`", "; ".join([f"`{new}`", *typed])


def _rows(model: type[BaseModel], prefix: str = "", but: Collection[str] = ()) -> list[tuple[str, str, str]]:
    """A row for each key of a schema. but: sections and keys that stand elsewhere."""
    return [
        (f"`{prefix}{key}`", kinds.words(field.annotation, field.metadata).text, field.description or "")
        for key, field in validate.fields(model)
        if key.partition(".")[0] not in but and validate.section_of(field.annotation) in (None, dict)
    ]


def _table(rows: Iterable[Sequence[str]], columns: Sequence[str] = ("key", "value", "meaning")) -> str:
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
