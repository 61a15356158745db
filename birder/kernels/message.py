"""A message with error feedback: the bits of some elements and, behind them, their scale, so that one exchange carries both.

    bytes    0 ... c-1     bits, 8 to a byte; c is rounded up to a multiple of 4
             c ... c+3     the scale, fp32

A unit's chunks have a multiple of 32 elements, so that nothing is rounded up there.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4


def message_bytes(elements: int) -> int:
    """Of a message about that many elements, a multiple of 8."""
    return -(-elements // 32) * 4 + SCALE_BYTES


def new_messages(count: int, elements: int, device: torch.device) -> Tensor:
    """Room for `count` messages about `elements` elements each: uint8[count, message_bytes]."""
    return torch.empty((count, message_bytes(elements)), dtype=torch.uint8, device=device)


def scales_of(messages: Tensor) -> Tensor:
    """uint8[n, message_bytes], contiguous -> fp32[n], a view."""
    return messages.view(torch.float32)[:, -1]


def bits_of(messages: Tensor, elements: int) -> Tensor:
    """uint8[n, message_bytes(elements)] -> uint8[n, elements / 8], a view."""
    return messages[:, : elements // 8]
