"""What each cell came out as, kept in outcomes.json, and the table of docs/appendix/habits.md that is made of it.

python -m tests.distributed.habits.outcomes         writes the table into the page
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.distributed.habits.catalogue import HABITS
from tests.distributed.habits.methods import METHODS
from tests.helpers import ROOT

FILE = Path(__file__).with_name("outcomes.json")
PAGE = ROOT / "docs/appendix/habits.md"
BEGIN, END = "<!-- habits: begin -->", "<!-- habits: end -->"
COLUMNS = {
    "DDP": ("DDP",),
    "DDP, overlap=False": ("DDP, overlap=False",),
    "hierarchical": ("hierarchical", "hierarchical, overlap=False"),
    "one process": ("one process",),
    "FSDP2": ("FSDP2", "FSDP2, overlap=False"),
    "Accelerate": ("Accelerate", "Accelerate, overlap=False"),
    "Trainer, Lightning": ("Trainer", "Lightning"),
}
Kept = dict[str, dict[str, dict[str, str]]]
"""Of each habit and way, what came of each method that was tried: "same", "refused", or "none" where it does not apply."""
SIGNS = {"same": "=", "refused": "r", "none": " ", "": "?"}
KINDS = {sign: kind for kind, sign in SIGNS.items()}


def read() -> Kept:
    """The file has one sign for each method, in the order of its own list of methods."""
    if not FILE.is_file():
        return {}
    methods, habits = (kept := json.loads(FILE.read_text()))["methods"], kept["habits"]
    return {
        habit: {
            way: {m: KINDS[sign] for m, sign in zip(methods, signs, strict=True) if KINDS[sign]}
            for way, signs in ways.items()
        }
        for habit, ways in habits.items()
    }


def write(kept: Kept) -> None:
    """A line for each habit and way."""
    ours = [m for m in METHODS if not METHODS[m].torch]
    habits = {
        habit: {way: "".join(SIGNS[cells.get(m, "")] for m in ours) for way, cells in sorted(ways.items())}
        for habit, ways in sorted(kept.items())
    }
    FILE.write_text(json.dumps({"signs": SIGNS, "methods": ours, "habits": habits}, indent=1) + "\n")


def put(kept: Kept, habit: str, way: str, method: str, kind: str) -> None:
    """Enters one cell in the place of what was there."""
    kept.setdefault(habit, {}).setdefault(way, {})[method] = kind


def outcome(kept: Kept, habit: str, way: str, method: str) -> str:
    """ "same", "refused", "none", or "" for a cell that is not kept."""
    return kept.get(habit, {}).get(way, {}).get(method, "")


def _cell(kept: Kept, habit: str, ways: tuple[str, ...]) -> str:
    found: dict[str, set[str]] = {"same": set(), "refused": set()}
    for way in ways:
        for method, m in METHODS.items():
            if not m.torch and (kind := outcome(kept, habit, way, method)) in found:
                found[kind].add(method)
    same, refused = found["same"], found["refused"]
    if not refused:
        return "as torch" if same else ""
    if not same:
        return "refused"
    if not any(METHODS[m].compressed for m in same):
        return "refused; dense as torch"
    few = sorted(refused - same) if len(refused - same) < len(same) else []
    return "as torch, or refused" + (": " + ", ".join(few) if few else "")


def table(kept: Kept) -> str:
    """The table in Markdown. Ways that were not tried with any method have no column."""
    tried = {m for ways in kept.values() for cells in ways.values() for m in cells}
    ours = [m for m in METHODS if m in tried and not METHODS[m].torch]
    names = [name for name in HABITS if name in kept]
    cells = {column: [_cell(kept, name, ways) for name in names] for column, ways in COLUMNS.items()}
    cells = {column: values for column, values in cells.items() if any(values)}
    rows = [f"| what the script does | {' | '.join(cells)} |", "|---" * (len(cells) + 1) + "|"]
    for name, *values in zip(names, *cells.values(), strict=True):
        rows.append(f"| {(HABITS[name].__doc__ or '').strip()} | {' | '.join(values)} |")
    return "\n".join([f"Methods and variants tried: {', '.join(ours)}.", "", *rows])


def updated(page: str, kept: Kept) -> str:
    """The page with the table as it should be."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + table(kept) + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(), read()))
