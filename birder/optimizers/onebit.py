"""The 1-bit all-reduce with error feedback that 1-bit Adam, 1-bit LAMB and 0/1 Adam share.

With C(z) = (|z|_2 / sqrt(d)) sgn(z) and sgn(0) = +1:

    (1) z_i = message_i + e_i                            worker i
    (2) send C(z_i);  e_i = z_i - C(z_i)
    (3) a = mean_i C(z_i) + s                            server of a chunk
    (4) send C(a) to all;  s = a - C(a)

|z|_2 is added up in fp64 (birder/compress/scaled_sign.py). A one-process reference gets the same scale from
`(z.double().square().sum() / d).sqrt().float()`, in any order of summation.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from birder import kernels
from birder.comm import Communicator
from birder.compress.scaled_sign import split
from birder.optimizers.base import BucketOptimizer
from birder.optimizers.layout import Unit
from birder.room import Empty

Exchange = Generator[None, None, tuple[Tensor, Tensor]]


@dataclass
class Support:
    """The coordinates that take part, with their number in this rank's shard and chunk.

    A coordinate that never has a gradient must not: one bit cannot say 0, it would get +-scale.
    """

    mask: Tensor | None  # bool[padded]; None: all of them
    shard: slice
    chunk: slice
    shard_count: int
    chunk_count: int

    @property
    def in_shard(self) -> Tensor | None:
        """The part of the mask for this rank's shard."""
        return None if self.mask is None else self.mask[self.shard]

    @property
    def in_chunk(self) -> Tensor | None:
        """The part of the mask for the chunk that this rank serves."""
        return None if self.mask is None else self.mask[self.chunk]

    @classmethod
    def of(cls, mask: Tensor, comm: Communicator) -> Support:
        """Of `mask`, bool[padded], the same on all ranks."""
        size = mask.numel() // comm.shards
        chunk = size // comm.workers
        begin = comm.shard * size
        shard_part = slice(begin, begin + size)
        chunk_part = slice(begin + comm.worker * chunk, begin + (comm.worker + 1) * chunk)
        counts = int(mask[shard_part].sum()), int(mask[chunk_part].sum())
        return cls(None if mask.all() else mask, shard_part, chunk_part, *counts)


def onebit_mean(
    z: Tensor,
    worker_error: Tensor,
    server_error: Tensor,
    support: Support,
    comm: Communicator,
    empty: Empty = torch.empty,
) -> tuple[Tensor, Tensor]:
    """The mean over workers of `z`, in one bit per element each way.

    z:            fp32[padded/shards], the worker's message for its shard.
    worker_error: fp32[padded/shards], e above; server_error: fp32[padded/(shards workers)], s above. Both updated.
    empty:        makes what is sent and received (birder/room.py).
    Returns what `take_signs` takes: bits, uint8[padded/8], and the scale of each chunk, fp32[shards workers].
    """
    squares = kernels.add_message(worker_error, z, support.in_shard, empty=empty)  # (1)
    rest = _exchange(squares, worker_error, server_error, support, comm, empty)
    while True:
        try:
            next(rest)
        except StopIteration as end:
            return end.value


def onebit_momentum_mean(
    g: Tensor,
    m: Tensor,
    beta: float,
    worker_error: Tensor,
    server_error: Tensor,
    support: Support,
    comm: Communicator,
    empty: Empty = torch.empty,
) -> Exchange:
    """`onebit_mean` of the message (1-beta) g + beta m, which is made in the same pass. g and m: fp32[padded/shards].

    A generator for `yield from`: it yields once, when the worker's bits are on their way.
    """
    squares = kernels.add_momentum(worker_error, g, m, beta=beta, mask=support.in_shard, empty=empty)  # (1)
    return (yield from _exchange(squares, worker_error, server_error, support, comm, empty))


def _exchange(
    squares: Tensor,
    worker_error: Tensor,
    server_error: Tensor,
    support: Support,
    comm: Communicator,
    empty: Empty,
) -> Exchange:
    """(2) to (4). worker_error holds z, `squares` is the sum of its squares, fp64[]."""
    bits, scale = split(worker_error, squares, support.in_shard, support.shard_count, empty)  # (2)
    received = comm.start_scatter(bits, empty)
    yield
    rows, scales = received(), comm.gather_workers(scale.view(1), empty)
    squares = kernels.add_average(server_error, rows, scales.view(-1), support.in_chunk, empty=empty)  # (3)
    bits, scale = split(server_error, squares, support.in_chunk, support.chunk_count, empty)  # (4)
    return comm.gather(bits, empty), comm.gather(scale.view(1), empty)


def take_signs(out: Tensor, result: tuple[Tensor, Tensor], mask: Tensor | None) -> None:
    """Writes what `onebit_mean` returned into `out`, fp32[padded]; 0 outside of `mask`."""
    kernels.write_signs(out, *result, mask)


class OneBitMethod(BucketOptimizer):
    """Base of the methods that send `onebit_mean`: the two errors, and which coordinates take part."""

    compressed: ClassVar[bool] = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._support: dict[int, Support] = {}
        super().__init__(*args, **kwargs)

    def init_errors(self, unit: Unit) -> None:
        """The worker's error, fp32[padded/shards], and the server's, fp32[padded/(shards workers)]."""
        shard = unit.padded // self.comm.shards
        unit.state["worker_error"] = unit.zeros(shard)
        unit.state["server_error"] = unit.zeros(shard // self.comm.workers)

    def taking_part(self, unit: Unit) -> Tensor:
        """bool[padded], the same on all ranks: where the variance is not 0."""
        return unit.state["v"] > 0

    def support(self, unit: Unit) -> Support:
        """Of `taking_part`; computed once, until `forget_support`."""
        if unit.index not in self._support:
            self._support[unit.index] = Support.of(self.taking_part(unit), self.comm)
        return self._support[unit.index]

    def forget_support(self, unit: Unit) -> None:
        """For when what takes part may have changed."""
        self._support.pop(unit.index, None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        super().load_state_dict(state_dict)
        self._support.clear()
