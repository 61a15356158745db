"""The table of all keys, from the schema; docs/configuration.md holds it (`make tables`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    parts = ["### Every run\n", _table(_rows(Config, ""))]
    parts += ["### Launchers: `cluster.`\n", "All of them:\n", _table(_rows(Cluster, "cluster."))]
    for target, model in CLUSTERS.items():
        if rows := list(_own(model, Cluster, "cluster.")):
            parts += [f"`cluster={target.split('.')[1]}`:\n", _table(rows)]
    parts += ["### Optimizers: `optimizer.`\n", "All of them:\n", _table(_rows(Optimizer, "optimizer."))]
    for target, chosen in OPTIMIZERS.items():
        parts += [f"`{target}`:\n", _table(_own(chosen, Optimizer, "optimizer."))]
    parts += ["### Predictions: `experiments/predict.py`\n", _table(_every(Question))]
    parts += [
        "### Renamed keys\n",
        "The old names still work, with a warning; records with old names can be read.\n",
    ]
    parts += [_renamed()]
    return "\n".join(parts)


def _renamed() -> str:
    lines = ["| old | new |", "|---|---|"]
    for old, (new, values) in old_keys.RENAMED.items():
        typed = [f"`{old}={a}`: `{new}={str(b).lower() if isinstance(b, bool) else b}`" for a, b in values.items()]
        lines.append(f"| `{old}` | {'; '.join([f'`{new}`', *typed])} |")
    return "\n".join(lines) + "\n"


def _rows(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    return _every(model, prefix, () if prefix else FREE)


def _every(model: type[BaseModel], prefix: str = "", but: Sequence[str] = ()) -> Iterator[tuple[str, str, str]]:
    for path, field in validate.fields(model):
        if path[0] in but or validate.section_of(field.annotation) not in (None, dict):
            continue
        words = kinds.words(field.annotation, field.metadata).text
        yield f"`{prefix}{'.'.join(path)}`", words, field.description or ""


def _own(model: type[BaseModel], common: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    shared = {key for key, _, _ in _rows(common, prefix)}
    return (row for row in _rows(model, prefix) if row[0] not in shared)


def _table(rows: Iterator[tuple[str, str, str]] | list[tuple[str, str, str]]) -> str:
    lines = ["| key | value | meaning |", "|---|---|---|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
