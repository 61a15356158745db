"""What tells two runs of one method apart: the configuration keys in which they differ, for labels of table rows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from experiments.config.same_run import BEFORE, BOOKKEEPING, flatten, within
from experiments.records.old_keys import CHANGED
from experiments.records.record import ResultRecord

# Bookkeeping, and what tables show in other columns or in titles.
NOT_A_VARIANT = (
    *(key for key in BOOKKEEPING if key != CHANGED),  # a run that was resumed with other keys is another one
    *("seed", "exp", "scale", "scales", "cluster", "data", "workload.data_path", "timing", "parity"),
)


def distinguishing(config: dict[str, Any], ignore: Iterable[str] = ()) -> dict[str, Any]:
    """The keys of a configuration that may tell variants apart, dotted, with their values; none that is as in `BEFORE`.

    ignore: further keys, or whole sections, that do not count.
    """
    skip = (*NOT_A_VARIANT, *ignore)
    return {k: v for k, v in flatten(config).items() if not within(k, skip) and BEFORE.get(k, ...) != v}


def variants(records: Iterable[ResultRecord], ignore: Iterable[str] = ()) -> dict[str, str]:
    """For each record id, "" or " (key=value, ...)": the keys in which runs of the same method differ.

    ignore: as in `distinguishing`.
    """
    ignore = tuple(ignore)
    methods: dict[str, dict[str, dict[str, str]]] = {}
    for r in records:
        flat = {k: shown(v) for k, v in distinguishing(r.config, ignore).items()}
        methods.setdefault(r.method, {})[r.id] = flat
    labels: dict[str, str] = {}
    for flats in methods.values():
        keys = sorted({key for flat in flats.values() for key in flat})
        differ = [key for key in keys if len({flat.get(key) for flat in flats.values()}) > 1]
        for run, flat in flats.items():
            words = ", ".join(f"{key}={flat[key]}" for key in differ if key in flat)
            labels[run] = f" ({words})" if words else ""
    return labels


def differing(records: Iterable[ResultRecord], section: str) -> dict[str, str]:
    """For each record id the keys of a section in which these runs differ, whatever their method: "layers=2"; "" for none."""
    flats = {
        r.id: {k: shown(v) for k, v in distinguishing({section: r.config.get(section) or {}}).items()} for r in records
    }
    keys = sorted({key for flat in flats.values() for key in flat})
    differ = [key for key in keys if len({flat.get(key, "null") for flat in flats.values()}) > 1]
    start = len(section) + 1
    return {run: ", ".join(f"{key[start:]}={flat.get(key, 'null')}" for key in differ) for run, flat in flats.items()}


def shown(value: Any) -> str:
    """A value as a row's label has it."""
    return json.dumps(value, sort_keys=True).strip('"')


def order(r: ResultRecord) -> tuple[int, str]:
    """Sort key of rows: dense methods first, then compressed ones, the bound without communication last."""
    rank = {"fp32": 0, "bf16": 1, "fp16": 2, "none": 9}
    return rank.get(r.wire, 5), r.method
