"""A question to the predictor, answered in text of 80 columns: the sentences, six rows, what was assumed."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from birder.predict import METHODS, gpus
from birder.predict.answers import Answer
from experiments.records.record import ResultRecord, read_all
from experiments.report.paired import WORSE
from experiments.report.sentences import lines, say

WIDTH = 80
VERDICTS = Path("tables") / "accuracy_verdicts.json"
"""In a results folder: what `verdicts` says of its records, so that an answer need not read them all."""
ALL = "The whole table: --all (make: ARGS=--all). As data: --json. See docs/predict.md."


def verdicts(records: Sequence[ResultRecord]) -> list[list[list[str]]]:
    """Of every study the methods with their verdicts: [label, verdict]."""
    from experiments.report import accuracy_page, gaps

    found = gaps.panels(accuracy_page.studies(records))
    return [[[row.label, row.verdict] for row in panel.rows] for panel in found]


def known_verdicts(results: Path) -> list[list[list[str]]]:
    """The same of a results folder: as its tables have it, else from its records."""
    file = results / VERDICTS
    if file.is_file():
        return list(json.loads(file.read_text(encoding="utf-8")))
    return verdicts(read_all(results))


def price(label: str, studies: Sequence[Sequence[Sequence[str]]]) -> str:
    """What a method costs in accuracy: in how many `verdicts` it was at parity, better, worse, or open."""
    if not (found := _counted(label, studies)):
        return "no study of its accuracy is published here"
    return say("price", by=found)


def lost(studies: Sequence[Sequence[Sequence[str]]]) -> dict[str, float]:
    """Of each method of birder.predict that was studied, the share of its studies in which it was worse."""
    every = {name: _counted(method.label, studies) for name, method in METHODS.items()}
    return {name: found[WORSE] / found.total() for name, found in every.items() if found}


def _counted(label: str, studies: Sequence[Sequence[Sequence[str]]]) -> Counter[str]:
    """Verdicts on the very method, its options included; communication by nodes or flat."""
    own = label.removesuffix(", hierarchical").removesuffix(" form")
    return Counter(verdict for study in studies for name, verdict in study if name.partition(" (")[0] == own)


def text(found: Answer, studies: Sequence[Sequence[Sequence[str]]], everything: bool = False) -> str:
    """The answer. studies: `verdicts`. everything: the whole table instead of six rows."""
    best = found.best
    said = found.sentences(price(best.method.label, studies) if best and found.pays else "")
    parts = ["\n".join(line for one in said for line in textwrap.wrap(one, WIDTH))]
    parts.append(str(found.prediction) if everything else "\n".join(found.table()))
    parts.append("\n".join(line for one in assumed(found) for line in textwrap.wrap(one, WIDTH)))
    return "\n\n".join(parts)


def assumed(found: Answer) -> list[str]:
    """Where the numbers come from, a line each."""
    p = found.prediction
    cheap = any(not r.method.dense and r.ms < p["none"].ms for r in found.rows())
    full = None if all(found.fits(name) for name in found.memory) else found.gpu
    return [*lines("assumed", found=found, p=p, unsure=gpus.UNSURE, cheap=cheap, full=full), ALL]
