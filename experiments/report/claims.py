"""The papers' headline claims next to what this project has run, computed or predicted of them. No torch.

claims.yaml has the rows of docs/claims.md as data; the numbers come from published records, from results/paper, or from the
predictor (claims_evidence.py), and a verdict is decided by them, not written down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from experiments.config.data_files import Data
from experiments.records.record import ResultRecord
from experiments.report import captions, published
from experiments.report.claims_evidence import CLOSE as CLOSE
from experiments.report.claims_evidence import EVIDENCE, STEPS, TABLES
from experiments.report.formats import times
from experiments.report.sentences import say
from experiments.report.table import Column, Table

Kind = Literal["trained", "replayed", "predicted", "computed", "nothing"]
VERDICTS = ("confirmed", "exceeded", "not reached", "not decided", "cannot be tried here")
COLUMNS = ("claim", "source", "what was run", "result", "verdict")
FILE = Path(__file__).with_name("claims.yaml")


class Entry(Data):
    """A row, or one for each of `each`; left out where nothing of it was run.

    claim, run, result, verdict: text that names in {}: keys of `each`, what the evidence found, `value`, `met`; of factors
              `least`, `most` and `count`.
    paper:    how quantity and source of the claim's number, `value`, begin in results/paper; or source: where it stands.
    kind:     what was done of it.
    evidence: a function of claims_evidence.EVIDENCE. each: what it is given.
    why:      why a factor is not reached, behind `met`.
    """

    claim: str
    paper: tuple[str, str] | None = None
    source: str = ""
    kind: Kind
    evidence: str = ""
    each: tuple[dict[str, Any], ...] = ({},)
    run: str = ""
    result: str = "—"
    verdict: str = "{met}"
    why: str = ""

    def rows(self, records: Sequence[ResultRecord]) -> Iterator[Claim]:
        for given in self.each:
            value, source = 0.0, self.source
            if self.paper is not None:
                quantity, who = (text.format(**given) for text in self.paper)
                found_there = paper(quantity, who)
                value, source = float(found_there["value"]), f"{found_there['source']}; {found_there['status']}"
            found = EVIDENCE[self.evidence](records, value, **given) if self.evidence else {}
            if found is None:
                continue
            names = {"value": value, "tables": TABLES, "steps": STEPS, **given}
            if factors := sorted(found.get("factors", ())):
                ends = {"least": times(factors[0][0]), "most": times(factors[-1][0]), "count": len(factors)}
                names |= {"met": met(value, factors, self.why), **ends}
            names |= found
            said = (text.format(**names) for text in (self.run, self.result, self.verdict))
            yield Claim(self.claim.format(**names), source, self.kind, *said)


@dataclass(frozen=True)
class Claim:
    """One row. run: what was run, after its kind; verdict: begins with one of `VERDICTS`. Raises ValueError for another."""

    text: str
    source: str
    kind: Kind
    run: str
    result: str
    verdict: str

    def __post_init__(self) -> None:
        if not self.verdict.startswith(VERDICTS):
            raise ValueError(f"a verdict begins with one of {', '.join(VERDICTS)}: {self.verdict!r}")

    @property
    def cells(self) -> tuple[str, ...]:
        run = f"{self.kind}: {self.run}" if self.run else self.kind
        return self.text, self.source, run, self.result, self.verdict


def collect(records: Sequence[ResultRecord], file: Path = FILE) -> list[Claim]:
    """All rows, in the order of the file."""
    entries = map(Entry.model_validate, yaml.safe_load(file.read_text(encoding="utf-8")))
    return [row for entry in entries for row in entry.rows(records)]


def grid(claims: Sequence[Claim]) -> str:
    """The table of docs/claims.md."""
    return Table(tuple(Column(name, "left") for name in COLUMNS), tuple(c.cells for c in claims)).grid()


def paper(quantity: str, source: str) -> dict[str, Any]:
    """The entry of a published number whose quantity and source begin like this. Raises KeyError."""
    for entry in published.load():
        if entry["quantity"].startswith(quantity) and entry["source"].startswith(source):
            return entry
    raise KeyError(f"results/paper has no {quantity!r} of {source!r}")


def met(factor: float, found: Sequence[tuple[float, str]], why: str = "") -> str:
    """The verdict on "up to `factor`": under which assumptions it is met, exceeded, and not reached. why: of the last.

    Met is within `captions.NEAR`: a paper that says "up to 2.5" and a prediction of 12.8 disagree.
    """
    close, below, above = captions.by_factor(factor, found)
    return say("met", near=captions.NEAR, close=close, above=above, below=below, why=why)
