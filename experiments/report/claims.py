"""The papers' headline claims beside what this project has run, computed or predicted of them. No torch.

Each `Claim` is one row of docs/claims.md. Numbers come from published records, from results/paper, or from the predictor; a
verdict is decided by them, not written down. experiments/claims.py makes the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from experiments.report import published
from experiments.report.formats import times
from experiments.report.table import Column, Table

Kind = Literal["trained", "replayed", "predicted", "computed", "nothing"]
VERDICTS = ("confirmed", "not reached", "cannot be tried here")
COLUMNS = ("claim", "source", "what was run", "result", "verdict")
TABLES = "../results/published/tables"
"""As seen from the page."""


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


def page(claims: Sequence[Claim], notes: Sequence[str]) -> str:
    """docs/claims.md."""
    head = [
        "<!-- Made by python experiments/claims.py from the published records; do not edit. -->",
        "# The papers' claims, and what became of them here",
        "",
        *notes,
        "",
        "",
    ]
    table = Table(tuple(Column(name, "left") for name in COLUMNS), tuple(c.cells for c in claims))
    return "\n".join(head) + table.grid()


def paper(quantity: str, source: str) -> tuple[float, str]:
    """(value, source) of a published number whose quantity and source begin like this. Raises KeyError."""
    for entry in published.load():
        if entry["quantity"].startswith(quantity) and entry["source"].startswith(source):
            return float(entry["value"]), f"{entry['source']}; {entry['status']}"
    raise KeyError(f"results/paper has no {quantity!r} of {source!r}")


def listed(found: Sequence[tuple[float, str]]) -> str:
    """Each name with its factor."""
    return ", ".join(f"{name} ({times(value)})" for value, name in found)


def joined(names: Sequence[Any]) -> str:
    """a, b and c"""
    return " and ".join(map(str, names)) if len(names) < 3 else ", ".join(map(str, names[:-1])) + f" and {names[-1]}"
