"""Published numbers (results/paper/*.json), each with its source and with how far it could be verified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.errors import UserError
from experiments.record import ROOT

FOLDER = ROOT / "results" / "paper"
FIELDS = ("quantity", "value", "unit", "source", "status")
STATUSES = ("verified", "secondary", "chart", "recomputed", "unverified", "not found")


def load(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """All published values, in the order of the files. Raises UserError for an entry without source or status."""
    entries: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.json")):
        for entry in json.loads(path.read_text(encoding="utf-8"))["values"]:
            absent = [f for f in FIELDS if f not in entry]
            if absent or entry["status"] not in STATUSES:
                raise UserError(f"{path}: {entry.get('quantity')!r} needs {', '.join(absent) or 'a known status'}")
            entries.append(entry)
    return entries


def beside(exp: str, kind: str, folder: Path = FOLDER) -> list[str]:
    """Sentences with the published values that belong beside the tables of `exp`. kind: "speedup" or "accuracy"."""
    sentences = []
    for e in load(folder):
        if e.get("kind") == kind and any(exp == name or exp.startswith(name + "_") for name in e.get("exps", ())):
            value = e["value"] if e["value"] is None or isinstance(e["value"], str) else f"{e['value']:g}"
            if value is not None:
                unit = "" if e["unit"] is None else e["unit"] if e["unit"] == "x" else " " + e["unit"]
                sentences.append(f"Published: {e['quantity']}: {value}{unit} ({e['source']}; {e['status']}).")
            else:
                sentences.append(f"Published: {e['quantity']}: not found ({e['source']}).")
    return sentences
