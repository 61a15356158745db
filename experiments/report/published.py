"""Published numbers (results/paper/*.json), each with its source and with how far it could be verified, and this project's
published records: what stands next to a user's own figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.records.record import PUBLISHED, ROOT, ResultRecord, read_all
from experiments.report import sentences, speedup
from experiments.report.formats import DASH
from experiments.report.speedup import SpeedupTable
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


def quoted(exp: str, kind: str) -> list[str]:
    """Sentences with the published values that belong next to the tables of `exp`. kind: "speedup" or "accuracy"."""
    return [sentences.say("published", e=e) for e in load() if _belongs(e, exp, kind)]


def tables_beside(exp: str, kind: str) -> list[str]:
    """The published tables that belong next to those of `exp`, as Markdown."""
    found = []
    for e in load_tables():
        if _belongs(e, exp, kind):
            rows = [[DASH if cell is None else str(cell) for cell in row] for row in e["rows"]]
            said = Note(f"Published: {e['title']} ({e['source']}; {e['status']}).")
            found.append(Table.text(e["columns"], rows, notes=(said,)).markdown())
    return found


def sections(exp: str, kind: str) -> list[str]:
    """All that stands above the tables of `exp`, as Markdown."""
    return [f"{sentence}\n" for sentence in quoted(exp, kind)] + tables_beside(exp, kind)


# ---- next to a user's own: tables of the records in results/published --------------------------------------------------


def records(results_dir: str | Path, exp: str, published: Path = PUBLISHED) -> list[ResultRecord]:
    """The published records of an experiment; none where `results_dir` is the published folder itself, or there is none."""
    if Path(results_dir).resolve() == published.resolve() or not published.is_dir():
        return []
    return [r for r in read_all(published) if r.exp == exp]


def matching(table: SpeedupTable, known: list[ResultRecord]) -> SpeedupTable | None:
    """Of the published records `known` the latest table with the setting of `table`: shape, batch, scale, cluster, what is
    trained, and the link that it stands for."""
    same = [t for t in speedup.build(known) if _alike(t.records[0], table.records[0])]
    return max(same, key=lambda t: t.latest, default=None)


def _alike(a: ResultRecord, b: ResultRecord) -> bool:
    """Keys of the workload that one of them lacks are newer than it."""
    mine, theirs = ((r.config.get("workload") or {}) for r in (a, b))
    keys = (mine.keys() & theirs.keys()) - {"data_path"}
    same = speedup.setting(a) == speedup.setting(b) and a.link.get("link_gbps") == b.link.get("link_gbps")
    return same and all(mine[k] == theirs[k] for k in keys)


def note(table: SpeedupTable, theirs: SpeedupTable | None, known: list[ResultRecord]) -> list[Note]:
    """What the published figures are, or that there are none of this setting."""
    page = PUBLISHED / "tables" / f"{table.records[0].exp}.md"
    where = page.relative_to(Path.cwd()) if page.is_relative_to(Path.cwd()) else page
    return Note.of(sentences.say("published_beside", theirs=theirs, known=known, where=where))
