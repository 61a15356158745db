"""Which elements are sent: masks that all ranks draw alike, so that no index travels.

A draw is a pure function of (seed, step, number of the element among all elements), see `birder/kernels/philox.py`.
torch's own random state is neither read nor changed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from birder import kernels
from birder.kernels.philox import LANES, ORDER_STREAM, uniform16

RESOLUTION = 1 << 16
"""A share of the elements is rounded to a multiple of 1/RESOLUTION."""


def _uniform16(numel: int, *, seed: int, step: int, stream: int, start: int, device: torch.device) -> Tensor:
    whole = -(-numel // LANES) * LANES
    return uniform16(whole, seed=seed, step=step, stream=stream, start=start, device=device)[:numel]


def random_mask(numel: int, fraction: float, *, seed: int, step: int, start: int, device: torch.device) -> Tensor:
    """Every element with probability `fraction`, independently of the others and of other steps: bool[numel].

    start: number of the first element, a multiple of 8.
    """
    limit = round(fraction * RESOLUTION)
    return kernels.random_mask(numel, limit, seed=seed, step=step, start=start, device=device)


def cyclic_chunks(numel: int, chunks: int, *, seed: int, start: int, device: torch.device) -> Tensor:
    """A random permutation of a tensor's elements cut into `chunks` parts, whose sizes differ by 1 at most.

    Returns the part of each element, 0 .. chunks-1, as uint8[numel], or int16 when there are more than 256 parts. The
    permutation sorts 32-bit draws; equal ones stay in the order of elements.
    """
    high, low = (
        _uniform16(numel, seed=seed, step=half, stream=ORDER_STREAM, start=start, device=device) for half in (0, 1)
    )
    order = torch.argsort((high << 16) | low, stable=True)
    part = torch.arange(numel, dtype=torch.int64, device=device).mul_(chunks).div_(max(numel, 1), rounding_mode="floor")
    out = torch.empty(numel, dtype=torch.uint8 if chunks <= 256 else torch.int16, device=device)
    return out.index_copy_(0, order, part.to(out.dtype))
