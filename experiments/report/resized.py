"""What a change of the number of workers costs: the table of losses that studies/resize.py measured. No torch.

A line of the losses: {method, before, after, rule, seed, losses}, one loss for each step after the change.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.records.record import write_file
from experiments.report import paired
from experiments.report.formats import DASH
from experiments.report.table import Table

METHODS = {"birder": "Birder", "onebit_adam": "1-bit Adam"}
"""Variants of conf/exp/methods_digits.yaml, with its learning rates, constant here. 0/1 Adam is none of them: it diverges
at a constant rate, unchanged too."""
CHANGE, STEPS = 100, 160
"""After which step the number changes, and after which the run ends."""
SOON, LATER = slice(0, 20), slice(-20, None)
"""Of the steps after the change."""
FILE = "resize.jsonl"


def table(lines: Iterable[dict[str, Any]]) -> Table:
    """A row for each method and change."""
    means: dict[tuple[Any, ...], dict[int, float]] = {}
    for line in lines:
        for name, part in (("soon", SOON), ("later", LATER)):
            key = (line["method"], line["before"], line["after"], line["rule"], name)
            means.setdefault(key, {})[line["seed"]] = statistics.fmean(line["losses"][part])
    rows = []
    for method, before, after in dict.fromkeys(key[:3] for key in means):
        of = {key[3:]: value for key, value in means.items() if key[:3] == (method, before, after)}
        base = {when: of["unchanged", when] for when in ("soon", "later")}
        cells = [f"{statistics.fmean(base['soon'].values()):.3f}"]
        for rule, when in (("mean", "soon"), ("zeros", "soon"), ("mean", "later"), ("zeros", "later")):
            cells.append(share(of[rule, when], base[when]))
        rows.append([f"{METHODS[method]}, {before} → {after}", *cells])
    soon, later = f"steps 1 to {SOON.stop}", f"the last {-LATER.start} of {STEPS - CHANGE} steps"
    names = ["method, workers", f"loss unchanged, {soon}", f"`mean`, {soon}", f"`zeros`, {soon}"]
    return Table.text([*names, f"`mean`, {later}", f"`zeros`, {later}"], rows)


def share(values: dict[int, float], base: dict[int, float]) -> str:
    """By how much the losses differ from the unchanged runs', by seed; or how many are no numbers."""
    lost = sum(not (math.isfinite(value) and math.isfinite(base[seed])) for seed, value in values.items())
    if lost:
        return f"no number in {lost} of {len(values)}"
    found = paired.difference(values, base, relative=True)
    return found.text(relative=True) if found else DASH


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that `write` made; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write(lines: Sequence[dict[str, Any]], folder: Path) -> None:
    """Writes the losses into a results folder; docs/elastic.md has their table (documents.py)."""
    write_file(folder / FILE, "".join(json.dumps(line) + "\n" for line in lines).encode(), "losses")
