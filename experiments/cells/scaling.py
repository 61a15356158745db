"""How much of a model a cell holds on this machine, and how much slower than the cluster it runs. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from birder.predict.timeline import Timeline
from experiments.cells.suite import Cell, Method, Suite
from experiments.cells.timelines import flattened, select, shares


@dataclass(frozen=True)
class Scaled:
    """A cell as this machine replays it.

    share:    of the model's elements, as the suite asks for it. sent: of the bytes, what really is.
    timeline: the model's. replayed: what is waited for; another one where whole tensors are selected.
    elements: that are there. dilation: how much slower than on the cluster.
    """

    cell: Cell
    method: Method
    share: float
    timeline: Timeline
    replayed: Timeline
    elements: int
    sent: float
    dilation: float

    @property
    def key(self) -> tuple[str, float]:
        """Cells of one architecture that have it in common can share a setup."""
        return self.cell.method, self.share


def scale(suite: Suite, cell: Cell, mbit_per_s: float) -> Scaled:
    """The cell over links that carry `mbit_per_s`. Raises UserError for a timeline that is not there."""
    method, share = suite.methods[cell.method], suite.fraction(cell)
    whole = suite.timeline(cell.model, cell.rate)
    part = select(whole, share) if method.whole else flattened(whole, share)
    sent = shares(whole, part, method.rank) if method.whole else part.elements / whole.elements
    dilation = round(suite.dilation(cell, sent, mbit_per_s), 6)
    replayed = part if method.whole else whole
    return Scaled(cell, method, share, whole, replayed, part.elements, sent, dilation)


def comparisons(cells: Sequence[Scaled]) -> list[list[Scaled]]:
    """Cells that are compared with each other, and so take turns: those of one model and rate, whatever the link."""
    found: dict[tuple[str, str | None], list[Scaled]] = {}
    for s in cells:
        found.setdefault((s.cell.model, s.cell.rate), []).append(s)
    return list(found.values())
