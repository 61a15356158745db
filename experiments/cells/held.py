"""The setups of one architecture on one node: as many as memory holds are kept, the others are made again for every turn."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import torch.distributed as dist

from experiments.cells.model import ReplayModel
from experiments.cells.scaling import Scaled
from experiments.cells.setup import Setup
from experiments.cells.suite import Suite
from experiments.training.world import gathered, memory_left

# ---- memory of this process; Linux, elsewhere nothing is known --------------------------------------------------------


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(psutil.Process().memory_info().rss)


def tidy() -> None:
    """Gives what has been freed back to the system."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class Memory:
    """The most memory that this process has held since the object was made, above what it held then."""

    def __init__(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            self.before = float(resident())
        except OSError:
            self.before = math.nan

    def peak(self) -> int | None:
        """Bytes; None where it cannot be measured."""
        if math.isnan(self.before):
            return None
        return round(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self.before)

    def grown(self) -> int:
        """Bytes that the process holds now above what it held then; 0 where that is not known."""
        return 0 if math.isnan(self.before) else round(resident() - self.before)


# ---- setups -----------------------------------------------------------------------------------------------------------


SHARE = 0.8
"""Share of the memory available that setups may take together."""
NEED = 48
"""Bytes for each element that a setup takes at most, about: 1-bit Adam's eager passes over one buffer of the whole model."""


class Setups:
    """Makes setups and keeps them while it is open. Every node does the same, and keeps the same ones.

    peaks: the most memory that a setup has taken in its making and its first turn, by the key of its cells.
    """

    def __init__(self, suite: Suite, cells: Sequence[Scaled]) -> None:
        self.suite = suite
        self.size = dist.get_world_size()
        self.peaks: dict[tuple[str, float], int | None] = {}
        self._held: dict[tuple[str, float], Setup] = {}
        self._making: dict[tuple[str, float], tuple[int | None, int]] = {}
        self._memory: dict[tuple[float, bool, str], ReplayModel] = {}
        self._first: dict[tuple[str, float], Scaled] = {}
        """A cell of each setup, the small ones first: so most are held."""
        for s in sorted(cells, key=lambda s: s.elements):
            self._first.setdefault(s.key, s)

    def __enter__(self) -> Setups:
        budget, before = memory_left(SHARE), resident()
        waiting = list(self._first.values())
        spare = NEED * max(s.elements for s in waiting)  # where one that is not held is made
        while waiting:
            taken = max(gathered(resident() - before))
            if taken + NEED * waiting[0].elements + (spare if waiting[1:] else 0) > budget:
                break
            first = waiting.pop(0)
            self._held[first.key] = self._make(first)
        return self

    def __exit__(self, *_: object) -> None:
        for setup in self._held.values():
            setup.close()
        self._held.clear()
        self._memory.clear()
        tidy()

    def holds(self, scaled: Scaled) -> bool:
        """Whether the setup of a cell is kept."""
        return scaled.key in self._held

    @contextlib.contextmanager
    def use(self, scaled: Scaled) -> Iterator[Setup]:
        """The setup of a cell, for a turn."""
        key = scaled.key
        setup = self._held.get(key)
        if setup is None:
            setup = self._make(scaled)
            setup.step()  # without waiting: what others have is warm, too
        watched = None if key in self.peaks else Memory()
        yield setup
        if watched is not None:
            (peak, grown), later = self._making[key], watched.peak()
            self.peaks[key] = None if peak is None or later is None else max(peak, grown + later)
        if key not in self._held:
            setup.close()
            del setup
            tidy()

    def _make(self, scaled: Scaled) -> Setup:
        model = self._model(scaled)
        tidy()  # else what others have freed would be used again, and not be counted
        watched = Memory()
        setup = Setup(scaled.method, model, scaled.share, self.size, self.suite.gpus_per_node)
        self._making[scaled.key] = watched.peak(), watched.grown()
        return setup

    def _model(self, scaled: Scaled) -> ReplayModel:
        """A new model, which does not wait yet. Those of one share have their memory in common.

        But for a method whose ranks train alone: the steps of others would be changes that it has to see to.
        """
        whole, share = scaled.method.whole, scaled.share
        alone = scaled.cell.method if scaled.method.kind.local_models else ""
        form, fraction = (share, whole and share < 1, alone), 1.0 if whole else share
        if form not in self._memory:
            first = ReplayModel(scaled.replayed, 0.0, fraction=fraction)
            for p in first.parameters():
                p.detach().fill_(0.0)  # memory that was only asked for is not there yet
            self._memory[form] = first
        return ReplayModel(scaled.replayed, 0.0, fraction=fraction, like=self._memory[form])
