"""What tells two runs of one method apart: the configuration keys in which they differ, for labels of table rows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from experiments.config.same_run import BEFORE, BOOKKEEPING, flatten, within
from experiments.records.record import ResultRecord

# Bookkeeping, and what tables show in other columns or in titles.
NOT_A_VARIANT = (
    *BOOKKEEPING,
    *("seed", "exp", "scale", "scales", "cluster", "data", "workload.data_path", "timing", "parity"),
)


def distinguishing(config: dict[str, Any], ignore: Iterable[str] = ()) -> dict[str, Any]:
    """The keys of a configuration that may tell variants apart, dotted, with their values; none that is as in `BEFORE`.

    ignore: further keys, or whole sections, that do not count.
    """
    skip = (*NOT_A_VARIANT, *ignore)
    return {k: v for k, v in flatten(config).items() if not within(k, skip) and BEFORE.get(k, ...) != v}


def variants(records: Iterable[ResultRecord], ignore: Iterable[str] = ()) -> dict[str, str]:
    """For each record id, "" or " (key=value, ...)": the keys in which runs of the same method and wire differ.

    ignore: as in `distinguishing`.
    """
    ignore = tuple(ignore)
    methods: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for r in records:
        flat = {k: json.dumps(v, sort_keys=True).strip('"') for k, v in distinguishing(r.config, ignore).items()}
        methods.setdefault((r.method, r.wire), {})[r.id] = flat
    labels: dict[str, str] = {}
    for flats in methods.values():
        keys = sorted({key for flat in flats.values() for key in flat})
        differing = [key for key in keys if len({flat.get(key) for flat in flats.values()}) > 1]
        for run, flat in flats.items():
            shown = ", ".join(f"{key}={flat[key]}" for key in differing if key in flat)
            labels[run] = f" ({shown})" if shown else ""
    return labels


def order(r: ResultRecord) -> tuple[int, str]:
    """Sort key of rows: dense methods first, then compressed ones, the bound without communication last."""
    rank = {"fp32": 0, "bf16": 1, "fp16": 2, "none": 9}
    return rank.get(r.wire, 5), r.method
