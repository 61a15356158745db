"""Sign with one scale, the compressor of 1-bit Adam and its relatives: C(z) = (|z|_2 / sqrt(count)) sgn(z), sgn(0) = +1.

The sum of squares is added up in fp64 in a fixed order (birder/kernels/reference_feedback.py), the scale is rounded to fp32
once: it does not depend on device, back end or number of threads.
"""

from __future__ import annotations

from torch import Tensor

from birder import kernels


def split(
    error: Tensor, squares: Tensor, mask: Tensor | None, count: int | Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """C(z) in one pass. 1 bit for each element, and one scale.

    error:   fp32[d]: z, 0 outside of the mask; becomes z - C(z).
    squares: the sum of the squares of z, fp64[].
    mask:    bool[d] or None; coordinates outside count as absent: `count` is the number of coordinates inside, or int64[].
    Returns the packed bits, uint8[d/8], in `out` where it is given, and the scale, fp32[].
    """
    scale = (squares / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))).sqrt().float()
    return kernels.split_signs(error, scale, mask, out=out), scale


def scaled_sign(z: Tensor, error: Tensor, mask: Tensor | None, part: slice, count: int) -> tuple[Tensor, Tensor]:
    """C(z) with z and the error apart.

    z:     fp32[d], stays as it is.
    error: fp32[d]; receives z - C(z).
    mask:  bool of the whole unit of which z is `part`, or None; as in `split`.
    Returns what `split` returns.
    """
    inside = None if mask is None else mask[part]
    error.copy_(z)
    return split(error, kernels.sum_squares(error, inside), inside, count)
