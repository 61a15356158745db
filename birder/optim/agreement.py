"""Whether ranks have the same hyper-parameters in every step: one that differs once leaves replicas apart for good.

`p.grad` is each rank's own with a method that compresses, and so is what a script computes from it.
"""

from __future__ import annotations

from typing import Any

import torch

from birder.comm import GatherRanks, Requests
from birder.comm.late import Late, sent
from birder.comm.launcher import digest_of


class Agreement:
    """Of one optimizer. `note` in steps in which ranks do not meet; `compare` and then `apart` in the others.

    Ranks send 8 bytes for each name, with the step's last messages; they are not counted.
    """

    def __init__(self) -> None:
        self._noted: list[dict[str, Any]] = []
        self._late: list[tuple[list[str], Late]] = []
        """Of steps, the names and whether ranks differ in each: on its way to the host."""

    def note(self, values: dict[str, Any]) -> None:
        """By name, what is to be compared the next time that ranks meet."""
        self._noted.append(values)

    def compare(self, values: dict[str, Any], device: torch.device) -> Requests[None]:
        """Compares `values` by name, and what was noted of these before."""
        steps, self._noted = [*self._noted, values], []
        digests = [digest_of([step.get(name) for step in steps]) for name in values]
        mine = sent(torch.tensor(digests, dtype=torch.int64, device="cpu"), device)
        said = (yield GatherRanks(mine, counted=False)).view(-1, len(digests))
        self._late.append((list(values), Late((said != mine).any(0))))

    def apart(self) -> list[str]:
        """The names in which ranks differed, once the host knows: on a GPU it waits for nothing."""
        found: list[str] = []
        while not found and self._late and self._late[0][1].there:
            names, late = self._late.pop(0)
            found = [name for name, differs in zip(names, late.read(), strict=True) if differs]
        return found
