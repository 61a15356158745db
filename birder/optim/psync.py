"""`Sent`: what PSync needs of a vector once its chosen part has travelled.

Source: "CSER: Communication-efficient SGD with Error Reset", NeurIPS 2020, Algorithm 3:

    PSync(v_i, C)     r_i = v_i - C(v_i);   v'_i = mean_j C(v_j) + r_i

The compressors are those of birder/optim/sparse.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from birder.comm import GatherRanks, Requests
from birder.optim.blocks import Blocks
from birder.optim.sparse import Largest


@dataclass(frozen=True)
class SentAlike:
    """C(v_i) of this rank, and mean_j C(v_j), where all ranks have chosen the same elements. mean: fp32[k], compact."""

    chosen: Blocks
    mean: Tensor

    def clear(self, v: Tensor) -> None:
        """r_i, in the place of v_i."""
        self.chosen.clear(v)

    def put_mean(self, r: Tensor) -> None:
        """v'_i, in the place of r_i as `clear` has left it."""
        self.chosen.scatter(r, self.mean)

    def add_mean(self, flat: Tensor, sign: int = 1) -> None:
        """Adds mean_j C(v_j) to any vector; with sign -1 takes it away."""
        self.chosen.scatter(flat, self.chosen.gather(flat).add_(self.mean, alpha=sign))

    def set_mean(self, now: Tensor, own: Tensor) -> None:
        """The mean, in the place of this rank's elements `own`, as they were sent. What `now` has beyond them stays."""
        self.chosen.scatter(now, self.chosen.gather(now).sub_(own).add_(self.mean))

    def change(self, v: Tensor) -> Tensor:
        """v'_i - v_i = mean_j C(v_j) - C(v_i), fp32 of v's size; v_i as it was before `clear`."""
        made = torch.zeros_like(v)
        self.chosen.scatter(made, self.mean - self.chosen.gather(v))
        return made


@dataclass(frozen=True)
class SentOwn:
    """The same where every rank has chosen elements of its own. mean: fp32[d], of whole size."""

    own: Largest
    mean: Tensor

    @classmethod
    def exchange(cls, own: Largest, size: int, wire: torch.dtype) -> Requests[SentOwn]:
        """Sends `own` to all ranks, and adds up what all have sent in rank order. size: elements of the vector."""
        k = own.places.numel()
        rows = yield GatherRanks(own.message(wire))
        mean = own.values.new_zeros(size)
        for row in rows:
            theirs = Largest.read(row, k, wire)
            mean.index_add_(0, theirs.places, theirs.values)
        return cls(own, mean.div_(len(rows)))

    def clear(self, v: Tensor) -> None:
        self.own.clear(v)

    def put_mean(self, r: Tensor) -> None:
        r.add_(self.mean)

    def add_mean(self, flat: Tensor, sign: int = 1) -> None:
        flat.add_(self.mean, alpha=sign)

    def change(self, v: Tensor) -> Tensor:
        made = self.mean.clone()
        self.own.clear(made)
        return made


Sent = SentAlike | SentOwn
