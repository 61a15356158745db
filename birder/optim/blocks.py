"""GRBS, the globally-randomized blockwise sparsifier: some blocks of a vector as they are, zero elsewhere.

Source: "CSER: Communication-efficient SGD with Error Reset", NeurIPS 2020.

All elements of a model are numbered (`Unit.start`) and cut into blocks of `block` elements. Of every `ratio` consecutive
blocks, one run, exactly one is chosen, each with the same chance:

    C(v) = v on the chosen blocks, 0 elsewhere;      E |C(v) - v|^2 = (1 - 1/ratio) |v|^2

The choice is a pure function of (seed, step, stream, number of the run), so that all ranks make the same one without sending
anything, whatever the size of units, and a restart repeats it. Never communicates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from birder import kernels
from birder.kernels.philox import BLOCK_STREAM, word


def _drawn(run: int, ratio: int, *, seed: int, step: int, stream: int) -> int:
    """The place within that run of its chosen block, as `kernels.chosen_blocks` draws it."""
    return (word(run, seed=seed, step=step, stream=BLOCK_STREAM + stream) * ratio) >> 32


@dataclass(frozen=True)
class Blocks:
    """The chosen elements of a flat buffer: whole blocks by their number, and the cut ones at its two ends.

    A buffer need not begin or end where a block does. `edges` are the chosen slices of cut blocks, `rows` the chosen whole
    blocks, counted from the first whole one, which begins at element `offset`.
    """

    block: int
    offset: int
    whole: int
    rows: Tensor
    edges: tuple[slice, ...]

    @classmethod
    def choose(
        cls,
        start: int,
        numel: int,
        ratio: int | None,
        block: int,
        *,
        seed: int,
        step: int,
        stream: int,
        device: torch.device,
    ) -> Blocks:
        """The choice among the elements start .. start+numel-1; `ratio` None chooses nothing."""
        offset = min(-start % block, numel)
        whole = (numel - offset) // block
        if ratio is None or numel == 0:
            return cls(block, offset, whole, torch.empty(0, dtype=torch.int64, device=device), ())
        run = block * ratio
        first, last = start // run, (start + numel - 1) // run
        base, draw = (start + offset) // block, {"seed": seed, "step": step, "stream": stream}
        rows = kernels.chosen_blocks(first, last - first + 1, ratio, device=device, **draw) - base
        # The first and the last run alone may choose a cut block, or one that is not here. They are drawn on the host too, so
        # that nobody waits for the device to learn how many blocks there are.
        ends = {number: number * ratio + _drawn(number, ratio, **draw) for number in (first, last)}
        begin, end = (0 <= chosen - base < whole for chosen in (ends[first], ends[last]))
        inside = rows[int(not begin) : len(rows) - int(not end)] if last > first else rows[: int(begin)]
        cuts = ((start, slice(0, offset)), (start + numel - 1, slice(offset + whole * block, numel)))
        chosen_ends = set(ends.values())
        edges = tuple(cut for element, cut in cuts if cut.stop > cut.start and element // block in chosen_ends)
        return cls(block, offset, whole, inside, edges)

    @property
    def numel(self) -> int:
        """How many elements are chosen."""
        return len(self.rows) * self.block + sum(cut.stop - cut.start for cut in self.edges)

    def _whole(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.whole * self.block].view(self.whole, self.block)

    def gather(self, flat: Tensor) -> Tensor:
        """The chosen elements, in a new compact buffer."""
        rows = self._whole(flat).index_select(0, self.rows).view(-1)
        return torch.cat([rows, *(flat[cut] for cut in self.edges)]) if self.edges else rows

    def scatter(self, flat: Tensor, values: Tensor) -> None:
        """Puts what `gather` could have returned back to its places."""
        parts = values.split([len(self.rows) * self.block, *(cut.stop - cut.start for cut in self.edges)])
        self._whole(flat).index_copy_(0, self.rows, parts[0].view(-1, self.block))
        for cut, part in zip(self.edges, parts[1:], strict=True):
            flat[cut] = part

    def clear(self, flat: Tensor) -> None:
        """Sets the chosen elements to 0."""
        self._whole(flat).index_fill_(0, self.rows, 0.0)
        for cut in self.edges:
            flat[cut] = 0.0
