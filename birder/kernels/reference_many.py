"""What is done to the parameters of a unit, in plain torch: the definition that the fused kernels equal bit for bit.

Parameters stand side by side in flat buffers, in logical order, each from a multiple of 32 elements on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from birder.kernels.bits import unpack


def apply_bits(
    params: Sequence[Tensor], offsets: Sequence[int], bits: Tensor, *, lr: float, decay: float, active: Tensor | None
) -> None:
    """p = (1-decay) p - lr * (+-1), in place, for each parameter; nothing moves where `active` (bool[numel]) is False.

    bits: uint8[>= numel/8] and active: of the whole unit.
    """
    for p, offset in zip(params, offsets, strict=True):
        signs = unpack(bits[offset // 8 : (offset + p.numel() + 7) // 8])[: p.numel()].to(p.dtype).mul_(2).sub_(1)
        if active is not None:
            signs.mul_(active[offset : offset + p.numel()])
        if decay:
            p.mul_(1.0 - decay)
        p.add_(signs.view(p.shape), alpha=-lr)


def take(flat: Tensor, grads: Sequence[Tensor], offsets: Sequence[int], *, factor: Tensor | None, screen: bool) -> None:
    """flat = factor g, as fp32, for each gradient at its offset; with `screen` 0 where that is not finite. factor: fp32[]."""
    if not grads:
        return
    slots = [flat[o : o + g.numel()].view(g.shape) for g, o in zip(grads, offsets, strict=True)]
    torch._foreach_copy_(slots, list(grads))
    if factor is not None:
        torch._foreach_mul_(slots, factor)
    if screen:
        for slot in slots:
            torch.nan_to_num_(slot, nan=0.0, posinf=0.0, neginf=0.0)
