"""What tells runs apart: groups of them, and the configuration keys in which they differ, for labels of table rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from experiments.config.same_run import BEFORE, BOOKKEEPING, flatten, within
from experiments.records.old_keys import CHANGED
from experiments.records.record import ResultRecord

# Bookkeeping, and what tables show in other columns or in titles.
NOT_A_VARIANT = (
    *(key for key in BOOKKEEPING if key != CHANGED),  # a run that was resumed with other keys is another one
    *("seed", "exp", "scale", "scales", "cluster", "data", "workload.data_path", "timing", "parity"),
)


Item = TypeVar("Item")
Key = TypeVar("Key")


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items by their key; keys and items in the order in which they come."""
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def distinguishing(config: dict[str, Any], ignore: Sequence[str] = ()) -> dict[str, Any]:
    """The keys of a configuration that may tell variants apart, dotted, with their values; none that is as in `BEFORE`.

    ignore: further keys, or whole sections, that do not count.
    """
    skip = (*NOT_A_VARIANT, *ignore)
    return {k: v for k, v in flatten(config).items() if not within(k, skip) and BEFORE.get(k, ...) != v}


def variants(records: Iterable[ResultRecord], ignore: Sequence[str] = ()) -> dict[str, str]:
    """For each record id, "" or " (key=value, ...)": the keys in which runs of the same method differ.

    ignore: as in `distinguishing`.
    """
    labels: dict[str, str] = {}
    for same in grouped(records, lambda r: r.method).values():
        found = _differing({r.id: distinguishing(r.config, ignore) for r in same})
        labels |= {run: f" ({words})" if words else "" for run, words in found.items()}
    return labels


def by_workload(records: Iterable[ResultRecord]) -> dict[str, list[ResultRecord]]:
    """Runs by the keys of their workload in which they differ, such as "layers=2": another model is another task."""
    known = list(records)
    flats = {r.id: distinguishing({"workload": r.config.get("workload") or {}}) for r in known}
    every = dict.fromkeys(key for flat in flats.values() for key in flat)  # None where a run lacks one
    begin = len("workload.")
    models = _differing({run: {key[begin:]: flat.get(key) for key in every} for run, flat in flats.items()})
    return grouped(known, lambda r: models[r.id])


def _differing(flats: dict[str, dict[str, Any]]) -> dict[str, str]:
    """For each run, of its dotted keys with their values, those in which the runs differ: "lr=1, eps=2"."""
    texts = {run: {key: shown(value) for key, value in flat.items()} for run, flat in flats.items()}
    keys = sorted({key for text in texts.values() for key in text})
    differ = [key for key in keys if len({text.get(key) for text in texts.values()}) > 1]
    return {run: ", ".join(f"{key}={text[key]}" for key in differ if key in text) for run, text in texts.items()}


def shown(value: Any) -> str:
    """A value as a row's label has it."""
    return json.dumps(value, sort_keys=True).strip('"')


def order(r: ResultRecord) -> tuple[int, str]:
    """Sort key of rows: dense methods first, then compressed ones, the bound without communication last."""
    rank = {"fp32": 0, "bf16": 1, "fp16": 2, "none": 9}
    return rank.get(r.wire, 5), r.method
