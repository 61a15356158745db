"""Sign with one scale, the compressor of 1-bit Adam and its relatives."""

from __future__ import annotations

import torch
from torch import Tensor

from birder import kernels


def scaled_sign(z: Tensor, error: Tensor, mask: Tensor | None, part: slice, count: int) -> tuple[Tensor, Tensor]:
    """C(z) = (|z|_2 / sqrt(count)) sgn(z), with sgn(0) = +1. 1 bit for each element, and one scale.

    z:     fp32[d], overwritten.
    error: fp32[d]; receives z - C(z).
    mask:  bool of the whole unit of which z is `part`, or None; coordinates outside it count as absent: their z and
           error become 0, and `count` is the number of coordinates inside.
    Returns the packed bits, uint8[d/8], and the scale, fp32[].
    """
    if mask is not None:
        z.mul_(mask[part])
    scale = torch.linalg.vector_norm(z) / max(count, 1) ** 0.5
    bits = kernels.pack_signs(z)
    torch.where(z >= 0, z - scale, z + scale, out=error)
    if mask is not None:
        error.mul_(mask[part])
    return bits, scale
