"""The published figures that stand beside a user's own: tables of the records in results/published."""

from __future__ import annotations

from pathlib import Path

from experiments.records.record import PUBLISHED, ResultRecord, read_all
from experiments.report import sentences, speedup
from experiments.report.speedup import SpeedupTable
from experiments.report.table import Note


def records(results_dir: str | Path, exp: str, published: Path = PUBLISHED) -> list[ResultRecord]:
    """The published records of an experiment; none where `results_dir` is the published folder itself, or there is none."""
    if Path(results_dir).resolve() == published.resolve() or not published.is_dir():
        return []
    return [r for r in read_all(published) if r.exp == exp]


def matching(table: SpeedupTable, known: list[ResultRecord]) -> SpeedupTable | None:
    """Of the published records `known` the latest table with the setting of `table`: shape, batch, scale, cluster."""
    wanted = speedup.setting(table.records[0])
    same = [t for t in speedup.build(known) if speedup.setting(t.records[0]) == wanted]
    return max(same, key=lambda t: t.latest, default=None)


def where(exp: str, published: Path = PUBLISHED) -> str:
    """The published page of an experiment, relative to the working directory where it lies below."""
    page = published / "tables" / f"{exp}.md"
    return str(page.relative_to(Path.cwd()) if page.is_relative_to(Path.cwd()) else page)


def note(table: SpeedupTable, theirs: SpeedupTable | None, known: list[ResultRecord]) -> list[Note]:
    """What the published figures are, or that there are none of this setting."""
    exp = table.records[0].exp
    if theirs is not None:
        r = theirs.records[0]
        return [Note(f"Published: {sentences.honesty(theirs.records)}; {sentences.hardware(r)} ({where(exp)}).")]
    return [Note(f"Published: nothing of this setting; others: {where(exp)}.")] if known else []
