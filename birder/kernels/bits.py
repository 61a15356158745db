"""Packed bits, in plain torch: 8 to a byte, the lowest bit first; a set bit is +1."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(flags: Tensor) -> Tensor:
    """bool[8c] -> uint8[c]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=flags.device)
    return (flags.view(-1, 8).to(torch.uint8) << shifts).sum(1, dtype=torch.uint8)


def unpack(bits: Tensor) -> Tensor:
    """uint8[..., c] -> uint8[..., 8c] of zeros and ones."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits.unsqueeze(-1) >> shifts) & 1).flatten(-2)


def part(bits: Tensor, first: int, count: int) -> Tensor:
    """The bits of `count` elements from element `first` on: uint8[c] -> uint8[ceil(count/8)]. What follows them is any."""
    begin, skip = divmod(first, 8)
    size = (count + 7) // 8
    low = bits[begin : begin + size]
    if not skip:
        return low
    high = torch.zeros_like(low)
    rest = bits[begin + 1 : begin + 1 + size]
    high[: rest.numel()] = rest
    return (low >> skip) | (high << (8 - skip))


def into(out: Tensor | None, value: Tensor) -> Tensor:
    """`value`, copied into `out` where that is given."""
    return value if out is None else out.copy_(value)
