"""Packed bits, and messages of them, in plain torch.

Bits: 8 to a byte, the lowest bit first; a set bit is +1. A message of the 1-bit all-reduce with error feedback is the bits of
some elements and their scale, so that one exchange carries both:

    bytes    0 ... c-1     bits; c is rounded up to a multiple of 4
             c ... c+3     the scale, fp32

A unit's chunks have a multiple of 32 elements, so that nothing is rounded up there.
"""

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


def room(out: Tensor | None, count: int, like: Tensor) -> Tensor:
    """`out`, or a new buffer of `count` bytes on the device of `like` where it is not given."""
    return torch.empty(count, dtype=torch.uint8, device=like.device) if out is None else out


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def message_bytes(elements: int) -> int:
    """Of a message about that many elements, a multiple of 8."""
    return round_up(elements, 32) // 8 + 4


def new_messages(count: int, elements: int, device: torch.device) -> Tensor:
    """Room for `count` messages about `elements` elements each: uint8[count, message_bytes]."""
    return torch.empty((count, message_bytes(elements)), dtype=torch.uint8, device=device)


def scales_of(messages: Tensor) -> Tensor:
    """uint8[n, message_bytes], contiguous -> fp32[n], a view."""
    return messages.view(torch.float32)[:, -1]


def bits_of(messages: Tensor, elements: int) -> Tensor:
    """uint8[n, message_bytes(elements)] -> uint8[n, elements / 8], a view."""
    return messages[:, : elements // 8]
