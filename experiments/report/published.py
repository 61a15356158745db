"""Published numbers (results/paper/*.json), each with its source and with how far it could be verified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.records.record import ROOT
from experiments.report.formats import DASH
from experiments.report.table import Note, Table
from launch.errors import UserError

FOLDER = ROOT / "results" / "paper"
FIELDS = ("quantity", "value", "unit", "source", "status")
TABLE_FIELDS = ("title", "columns", "rows", "source", "status")
STATUSES = ("verified", "secondary", "chart", "recomputed", "unverified", "not found")


def load(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """All published values, in the order of the files. Raises UserError for an entry without source or status."""
    return _read(folder, "values", "quantity", FIELDS)


def load_tables(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """All published tables: {title, columns, rows, source, status}. Raises UserError for one that lacks something."""
    tables = _read(folder, "tables", "title", TABLE_FIELDS)
    for table in tables:
        if any(len(row) != len(table["columns"]) for row in table["rows"]):
            raise UserError(f"{folder}: {table['title']!r} needs {len(table['columns'])} cells in every row")
    return tables


def _read(folder: Path, section: str, name: str, fields: tuple[str, ...]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.json")):
        for entry in json.loads(path.read_text(encoding="utf-8")).get(section, []):
            absent = [f for f in fields if f not in entry]
            if absent or entry["status"] not in STATUSES:
                raise UserError(f"{path}: {entry.get(name)!r} needs {', '.join(absent) or 'a known status'}")
            entries.append(entry)
    return entries


def _belongs(entry: dict[str, Any], exp: str, kind: str) -> bool:
    return entry.get("kind") == kind and any(exp == e or exp.startswith(e + "_") for e in entry.get("exps", ()))


def beside(exp: str, kind: str, folder: Path = FOLDER) -> list[str]:
    """Sentences with the published values that belong beside the tables of `exp`. kind: "speedup" or "accuracy"."""
    sentences = []
    for e in load(folder):
        if _belongs(e, exp, kind):
            value = e["value"] if e["value"] is None or isinstance(e["value"], str) else f"{e['value']:g}"
            if value is not None:
                unit = "" if e["unit"] is None else e["unit"] if e["unit"] == "x" else " " + e["unit"]
                sentences.append(f"Published: {e['quantity']}: {value}{unit} ({e['source']}; {e['status']}).")
            else:
                sentences.append(f"Published: {e['quantity']}: not found ({e['source']}).")
    return sentences


def tables_beside(exp: str, kind: str, folder: Path = FOLDER) -> list[str]:
    """The published tables that belong beside those of `exp`, as Markdown."""
    found = []
    for e in load_tables(folder):
        if _belongs(e, exp, kind):
            rows = [[DASH if cell is None else str(cell) for cell in row] for row in e["rows"]]
            said = Note(f"Published: {e['title']} ({e['source']}; {e['status']}).")
            found.append(Table.text(e["columns"], rows, notes=(said,)).markdown())
    return found


def sections(exp: str, kind: str) -> list[str]:
    """All that stands above the tables of `exp`, as Markdown."""
    return [f"{sentence}\n" for sentence in beside(exp, kind)] + tables_beside(exp, kind)
