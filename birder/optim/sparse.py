"""Sparse compressors behind one interface: C(v) keeps some elements of a vector as they are, the others become 0.

"CSER: Communication-efficient SGD with Error Reset", NeurIPS 2020, asks one thing of a compressor:

    (1) E |C(v) - v|^2 <= (1 - delta) |v|^2 with 0 < delta <= 1

R is the ratio, n the elements of a parameter:

| compressor | keeps                                                  | alike on all ranks | delta             |
| blocks     | of every R blocks in a row one, drawn (GRBS)           | yes                | 1/R, an equality  |
| random_k   | of every R elements in a row one, drawn                | yes                | 1/R, an equality  |
| top_k      | of each parameter the ceil(n/R) largest in magnitude   | no                 | 1/R, in each draw |

What is alike on all ranks is drawn from a common seed, and no place travels. top_k sends the place of each value beside it,
an int32, and every rank's message goes to all others. blocks and random_k are birder/optim/blocks.py, with blocks of
one element for the latter. Never communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

COMPRESSORS = ("blocks", "random_k", "top_k")
SHARED = ("blocks", "random_k")
"""Those that choose the same elements on all ranks."""
PLACE = torch.int32
"""What a place travels as: an element of a unit's flat buffer."""


def delta(compressor: str, ratio: int) -> float:
    """The delta of (1) that a compressor guarantees. Raises KeyError for a name that is unknown."""
    if compressor not in COMPRESSORS:
        raise KeyError(f"no compressor {compressor!r}; there are: {', '.join(COMPRESSORS)}")
    return 1.0 / ratio


def kept(sizes: Sequence[int], ratio: int) -> int:
    """How many elements top_k keeps of tensors of these sizes."""
    return sum(-(-n // ratio) for n in sizes)


def _largest(v: Tensor, k: int) -> Tensor:
    """Places of the k largest of v >= 0, rising: int64[k]. Of equal ones the first, which torch's own topk leaves open."""
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

    def clear(self, flat: Tensor) -> None:
        """v - C(v), in place. What the rounding of the wire takes from a value stays behind."""
        flat.index_add_(0, self.places, self.values, alpha=-1)

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
