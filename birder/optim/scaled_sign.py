"""Sign with one scale, the compressor of 1-bit Adam and its relatives: C(z) = (|z|_2 / sqrt(count)) sgn(z), sgn(0) = +1.

The sum of squares is added up in fp64 in a fixed order (birder/kernels/reference_feedback.py), the scale is rounded to fp32
once: it does not depend on device, back end or number of threads.
"""

from __future__ import annotations

from torch import Tensor

from birder import kernels


def split(
    error: Tensor,
    squares: Tensor,
    mask: Tensor | None,
    count: int | Tensor,
    parts: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """C(z) in one pass, as what is sent of it. 1 bit for each element, and the scale behind the bits of each part.

    error:   fp32[d]: z, 0 outside of the mask; becomes z - C(z).
    squares: the sum of the squares of z, fp64[].
    mask:    bool[d] or None; coordinates outside count as absent: `count` is the number of coordinates inside, or int64[].
    parts:   to how many servers it goes.
    Returns messages (birder/kernels/message.py), uint8[parts, message_bytes(d/parts)], in `out` where it is given.
    """
    scale = (squares / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))).sqrt().float()
    return kernels.split_signs(error, scale, mask, parts=parts, out=out)
