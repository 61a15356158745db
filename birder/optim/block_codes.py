"""Codes of 4 or 8 bits with a scale for every block of B elements. Q is the largest code, 7 of int4 and 448 of fp8 (e4m3):

s = max |a| / Q of each block, as bf16;   c = a / s, rounded to an integer (int4) or to fp8
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {"int4": 7.0, "fp8": 448.0}
"""Of each code, Q."""
SMALLEST = torch.finfo(torch.float32).tiny


def encode(rows: Tensor, code: str, block: int) -> Tensor:
    """fp32[n, c] -> uint8[n, m], the codes of a row and behind them its scales, bf16. c is a multiple of `block`."""
    blocks = rows.view(rows.shape[0], -1, block)
    scales = (blocks.abs().amax(-1, keepdim=True) / LARGEST[code]).bfloat16()
    s = scales.float()
    values = blocks * torch.where(s < SMALLEST, 0.0, 1.0 / s)
    values = values.clamp_(-LARGEST[code], LARGEST[code])  # as bf16 a scale may be a little smaller than it was
    if code == "fp8":
        codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        nibbles = values.nan_to_num_(0.0).round_().add_(8.0).to(torch.uint8)
        codes = nibbles[..., ::2] | nibbles[..., 1::2] << 4
    return torch.cat([codes.flatten(1), scales.flatten(1).view(torch.uint8)], 1)


def decode(message: Tensor, code: str, block: int) -> Tensor:
    """The reverse: s c of each element, uint8[n, m] -> fp32[n, c]."""
    packed = block if code == "fp8" else block // 2
    count = message.shape[1] // (packed + 2)
    codes = message[:, : count * packed].reshape(len(message), count, packed)
    scales = message[:, count * packed :].contiguous().view(torch.bfloat16).float().unsqueeze(-1)
    if code == "fp8":
        values = codes.view(torch.float8_e4m3fn).float()
    else:
        values = torch.stack([codes & 15, codes >> 4], -1).flatten(2).float() - 8.0
    return (values * scales).flatten(1)
