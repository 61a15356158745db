"""Sparse compressors, and what PSync needs of a vector once its chosen part has been sent.

Source: "CSER: Communication-efficient SGD with Error Reset", NeurIPS 2020. A compressor C keeps some elements of a vector,
the others become 0. The paper asks one thing of it, and uses it in one way (Algorithm 3):

    (1) E |C(v) - v|^2 <= (1 - delta) |v|^2 with 0 < delta <= 1
    (2) PSync(v_i, C):   r_i = v_i - C(v_i);   v'_i = mean_j C(v_j) + r_i

R is the ratio, n the elements of a parameter:

| compressor | keeps                                                  | same on all ranks  | delta             |
| blocks     | one of every R blocks in a row, drawn (GRBS)           | yes                | 1/R, an equality  |
| random_k   | one of every R elements in a row, drawn                | yes                | 1/R, an equality  |
| top_k      | of each parameter the ceil(n/R) largest in magnitude   | no                 | 1/R, in each draw |

blocks and random_k (blocks of one element) are drawn from a common seed, and no place is sent. All elements of a model are
numbered (`Unit.start`) and cut into blocks; exactly one of every R consecutive blocks, a run, is chosen, each with the same
chance: E |C(v) - v|^2 = (1 - 1/R) |v|^2. The choice is a pure function of (seed, step, stream, number of the run): all ranks
make the same one, whatever the size of units, and a restart repeats it. top_k sends the place of each value too, an int32,
and every rank's message goes to all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from birder import kernels
from birder.comm import GatherRanks, Requests
from birder.kernels.philox import BLOCK_STREAM, words

COMPRESSORS = ("blocks", "random_k", "top_k")
SHARED = ("blocks", "random_k")
"""Those that choose the same elements on all ranks."""
PLACE = torch.int32
"""What a place travels as: an element of a unit's flat buffer."""


def _drawn(run: int, ratio: int, *, seed: int, step: int, stream: int) -> int:
    """The place within that run of its chosen block, as `kernels.chosen_blocks` draws it."""
    return (words(run, seed=seed, step=step, stream=BLOCK_STREAM + stream)[0] * ratio) >> 32


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

    def add(self, flat: Tensor, values: Tensor, sign: int = 1) -> None:
        """Adds values, as `gather` returns them, to the chosen elements; with sign -1 takes them away."""
        parts = values.split([len(self.rows) * self.block, *(cut.stop - cut.start for cut in self.edges)])
        # Without the second dimension where it is 1: many times faster on a CPU.
        whole, rows = self._whole(flat).squeeze(1), parts[0].view(-1, self.block).squeeze(1)
        whole.index_add_(0, self.rows, rows, alpha=sign)
        for cut, part in zip(self.edges, parts[1:], strict=True):
            flat[cut].add_(part, alpha=sign)


def _largest(v: Tensor, k: int) -> Tensor:
    """Places of the k largest of v >= 0, rising: int64[k]. Of equal ones the first, which torch's own topk leaves open. NaN,
    of a parameter that is not a number, counts as infinite."""
    v = v.nan_to_num(nan=torch.inf, posinf=torch.inf)
    least = v.topk(k, sorted=False).values.min()
    above, equal = v > least, v == least
    # Sums and a known size: nobody waits for the device to count.
    chosen = above | (equal & (equal.cumsum(0) <= k - above.sum()))
    return torch.nonzero_static(chosen, size=k).view(-1)


@dataclass(frozen=True)
class Largest:
    """C(v) of top_k: where, and what is sent. places: int64[k], of a flat buffer; values: fp32[k], rounded as they travel."""

    places: Tensor
    values: Tensor

    @classmethod
    def choose(
        cls, flat: Tensor, offsets: Sequence[int], sizes: Sequence[int], ratio: int, wire: torch.dtype
    ) -> Largest:
        """Of each tensor, `sizes[i]` elements from `offsets[i]` on, the ceil(size/ratio) largest; of equals the first."""
        parts = zip(offsets, sizes, strict=True)
        places = torch.cat([_largest(flat[at : at + n].abs(), -(-n // ratio)).add_(at) for at, n in parts])
        return cls(places, flat[places].to(wire).float())

    def add(self, flat: Tensor, sign: int = 1) -> None:
        """Adds C(v) to any vector; with sign -1 takes it away."""
        flat.index_add_(0, self.places, self.values, alpha=sign)

    def message(self, wire: torch.dtype) -> Tensor:
        """Places, then values: uint8, whole words of 32 bits."""
        parts = self.places.to(PLACE).view(torch.uint8), self.values.to(wire).view(torch.uint8)
        used = sum(p.numel() for p in parts)
        return torch.cat([*parts, parts[0].new_zeros(-used % PLACE.itemsize)])

    @staticmethod
    def read(message: Tensor, k: int, wire: torch.dtype) -> Largest:
        """What `message` was made of, k elements."""
        places = message[: k * PLACE.itemsize].view(PLACE)
        values = message[k * PLACE.itemsize :][: k * wire.itemsize].view(wire)
        return Largest(places.long(), values.float())


@dataclass(frozen=True)
class SentShared:
    """C(v_i) of this rank, and mean_j C(v_j), where all ranks have chosen the same elements: fp32[k] each, compact.

    `own` is as the wire has rounded it: what this takes is a part of r_i.
    """

    chosen: Blocks
    own: Tensor
    mean: Tensor

    def add_own(self, flat: Tensor, sign: int = 1) -> None:
        """Adds C(v_i) to any vector; with sign -1 takes it away: of v_i r_i is left."""
        self.chosen.add(flat, self.own, sign)

    def add_mean(self, flat: Tensor, sign: int = 1) -> None:
        """The same with mean_j C(v_j): r_i becomes v'_i."""
        self.chosen.add(flat, self.mean, sign)


@dataclass(frozen=True)
class SentOwn:
    """The same where ranks have chosen different elements. mean: fp32[d], of whole size."""

    own: Largest
    mean: Tensor

    @classmethod
    def exchange(cls, own: Largest, size: int, wire: torch.dtype) -> Requests[SentOwn]:
        """Sends `own` to all ranks, and adds up what all have sent in rank order. size: elements of the vector."""
        k = own.places.numel()
        rows = yield GatherRanks(own.message(wire))
        mean = own.values.new_zeros(size)
        for row in rows:
            Largest.read(row, k, wire).add(mean)
        return cls(own, mean.div_(len(rows)))

    def add_own(self, flat: Tensor, sign: int = 1) -> None:
        self.own.add(flat, sign)

    def add_mean(self, flat: Tensor, sign: int = 1) -> None:
        flat.add_(self.mean, alpha=sign)


Sent = SentShared | SentOwn
