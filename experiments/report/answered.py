"""A question to the predictor, answered in text of 80 columns: the sentences, six rows, what was assumed."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from birder.predict import METHODS, Prediction, gpus, table
from birder.predict.answers import Answer
from experiments.records.record import ResultRecord, read_all
from experiments.report.metrics import BETTER, OPEN, PARITY, WORSE
from experiments.report.sentences import lines, say
from experiments.report.table import Table
from launch.errors import UserError

Studies = Sequence[Sequence[Sequence[str]]]
"""Of every study the methods with their verdicts: [label, verdict]."""
WIDTH = 80
VERDICTS = Path("tables") / "accuracy_verdicts.json"
"""In a results folder: what `verdicts` says of its records, so that an answer need not read them all."""
MAKER = re.compile(r" \([^)]*\)")
"""Behind a method's name: who has made it."""
ALL = "The whole table: --all (make: ARGS=--all). As data: --json. See docs/predict.md."


def verdicts(records: Sequence[ResultRecord]) -> list[list[list[str]]]:
    """Of every study the methods with their verdicts: [label, verdict]. One that diverged at every rate is worse."""
    from experiments.report import accuracy_page, gaps

    groups = [group for tables in accuracy_page.studies(records).values() for group in accuracy_page.together(tables)]
    each = {t.slug: t for group in groups for t in group if t.comparison is not None}.values()
    found = [
        [*([row.label, row.verdict] for row in getattr(gaps.panel(t), "rows", ())), *([m, WORSE] for m in t.diverged)]
        for t in each
    ]
    return [rows for rows in found if rows]


def known_verdicts(results: Path) -> list[list[list[str]]]:
    """The same of a results folder: as its tables have it, else from its records."""
    file = results / VERDICTS
    if file.is_file():
        return list(json.loads(file.read_text(encoding="utf-8")))
    if not (results / "records").is_dir():
        raise UserError(f"no results folder {results}: it has no records/; leave --results out for the published ones")
    return verdicts(read_all(results))


def price(label: str, studies: Studies) -> str:
    """What a method costs in accuracy: in how many `verdicts` it was at parity, better, worse, or open."""
    found = _counted(label, studies)
    others = {verdict: found[verdict] for verdict in (WORSE, OPEN) if found[verdict]}
    return say("price", count=found.total(), good=found[PARITY] + found[BETTER], others=others)


def warning(found: Answer, studies: Studies) -> str:
    """What must be said of the method that is advised, and which one that pays did best in studies: empty where a study shows
    parity, or there is none."""
    good = {r.name: kept for r in found.paying if (kept := kept_in(r.method.label, studies)) is not None}
    if found.best is None or good.get(found.best.name, 1):
        return ""
    shares = lost(studies)
    other = min((r for r in found.paying if good.get(r.name)), key=lambda r: (shares[r.name], r.ms), default=None)
    if other is None:
        return say("warning", other=None, percent=None, price=None)
    percent, cost = 100 * found.saving(other.name)[0], price(other.method.label, studies)
    return say("warning", other=other.method, percent=percent, price=cost)


def kept_in(label: str, studies: Studies) -> int | None:
    """In how many studies a method was at parity or better; None: it was in none."""
    found = _counted(label, studies)
    return found[PARITY] + found[BETTER] if found else None


def lost(studies: Studies) -> dict[str, float]:
    """Of each method of birder.predict that was studied: the share of its studies in which it was worse, less that of those
    in which it was at parity or better."""
    every = {name: _counted(method.label, studies) for name, method in METHODS.items()}
    return {
        name: (found[WORSE] - found[PARITY] - found[BETTER]) / found.total() for name, found in every.items() if found
    }


def _counted(label: str, studies: Studies) -> Counter[str]:
    """Verdicts on the very method, its options included; a hierarchical one has those of the flat one too."""
    own = label.removesuffix(", hierarchical").removesuffix(" form")
    names = {own, f"{own} hierarchical"} if label.endswith(", hierarchical") else {own}
    return Counter(verdict for study in studies for name, verdict in study if MAKER.sub("", name) in names)


def sentences(found: Answer, studies: Studies) -> list[str]:
    """What is advised, with what it costs in accuracy. studies: `verdicts`."""
    best = found.best
    said = found.sentences(price(best.method.label, studies) if best and found.pays else "")
    if found.pays and (caution := warning(found, studies)):
        said.insert(2, caution)  # behind what the advised one needs
    return said


def text(found: Answer, studies: Studies, everything: bool = False, unsaid: Sequence[str] = ()) -> str:
    """The answer. studies: `verdicts`. everything: the whole table instead of six rows. unsaid: as `taken` says it."""
    parts = [_wrapped(sentences(found, studies)), _whole(found.prediction) if everything else "\n".join(found.table())]
    return "\n\n".join([*parts, _wrapped(assumed(found, unsaid))])


def taken(unsaid: Sequence[str]) -> str:
    """What nobody has said, key=value, in lines of text."""
    return _wrapped(lines("taken", unsaid=unsaid))


def _wrapped(said: Sequence[str]) -> str:
    return "\n".join(line for one in said for line in textwrap.wrap(one, WIDTH))


def _whole(p: Prediction) -> str:
    """Every method, as wide as the terminal."""
    notes = _wrapped([f"{r.method.label}: {r.method.about}" for r in p.rows if r.method.about])
    return Table.text(table.HEAD, table.cells(p)).drawn() + f"\n\n{notes}" * bool(notes)


def assumed(found: Answer, unsaid: Sequence[str] = ()) -> list[str]:
    """Where the numbers come from, a line each."""
    p, gpu = found.prediction, found.gpu
    cheap = any(not r.method.dense and r.ms < p["none"].ms for r in found.rows())
    full = gpu if gpu and not all(found.fits(name) for name in found.memory) else None
    said = lines("assumed", found=found, unsure=100 * gpus.UNSURE, cheap=cheap, full=full)
    return [*said, *lines("taken", unsaid=unsaid), ALL]
