"""The papers' headline claims beside what this project has run, computed or predicted of them. No torch.

Each `Claim` is one row of docs/claims.md. Numbers come from published records, from results/paper, or from the predictor; a
verdict is decided by them, not written down. docs/claims.md holds the table (documents.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from experiments.report import published
from experiments.report.formats import times
from experiments.report.table import Column, Table

Kind = Literal["trained", "replayed", "predicted", "computed", "nothing"]
VERDICTS = ("confirmed", "exceeded", "not reached", "not decided", "cannot be tried here")
NEAR = 0.15
"""A factor is met by what is as close as this to it."""
CLOSE = 0.01
"""Margin of an accuracy, as a share of the baseline's, where the experiment states none."""
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


def grid(claims: Sequence[Claim]) -> str:
    """The table of docs/claims.md."""
    return Table(tuple(Column(name, "left") for name in COLUMNS), tuple(c.cells for c in claims)).grid()


def paper(quantity: str, source: str) -> tuple[float, str]:
    """(value, source) of a published number whose quantity and source begin like this. Raises KeyError."""
    for entry in published.load():
        if entry["quantity"].startswith(quantity) and entry["source"].startswith(source):
            return float(entry["value"]), f"{entry['source']}; {entry['status']}"
    raise KeyError(f"results/paper has no {quantity!r} of {source!r}")


def met(factor: float, found: Sequence[tuple[float, str]], why: str = "") -> str:
    """The verdict on "up to `factor`": under which assumptions it is met, exceeded, and not reached. why: of the last.

    Met is within `NEAR`: a paper that says "up to 2.5" and a prediction of 12.8 disagree.
    """
    close = sorted(f for f in found if abs(f[0] / factor - 1) <= NEAR)
    above = sorted(f for f in found if f not in close and f[0] > factor)
    below = sorted(f for f in found if f not in close and f[0] < factor)
    said = [f"confirmed within {100 * NEAR:g} % under {listed(close)}"] * bool(close)
    said += [f"exceeded under {listed(above)}: these assumptions disagree with the claim"] * bool(above)
    said += [f"not reached under {listed(below)}{why}"] * bool(below)
    return "; ".join(said)


def listed(found: Sequence[tuple[float, str]]) -> str:
    """Each name with its factor."""
    return ", ".join(f"{name} ({times(value)})" for value, name in found)


def joined(names: Sequence[Any]) -> str:
    """a, b and c"""
    return " and ".join(map(str, names)) if len(names) < 3 else ", ".join(map(str, names[:-1])) + f" and {names[-1]}"
