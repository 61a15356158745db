"""The kernels of the 1-bit all-reduce with error feedback in plain torch: the definition that the fused ones equal.

A message is made in the buffer of the error that it carries along, and leaves its own error there. With e that buffer,
fp32[d], and S(e) its sum of squares:

    add_*        e = message + e;    returns S(e), from which the caller computes the scale
    split_signs  bits of e >= 0;     e = e - scale sgn(e)

What travels is bits with their scale behind them (birder/kernels/message.py).

`mask` is bool[d] or None: outside of it e is 0, in its sum, its bits (+1) and its error.

S adds in fp64 and in a fixed order (`tree_sum`), so that every back end gets the same bits. The squares of fp32 numbers are
exact in fp64, and 29 more bits than the scale has make the order all but irrelevant: a sum in another order gives another
fp32 scale less than once in 10^6 times. An oracle may therefore compute the scale as
`(z.double().square().sum() / count).sqrt().float()`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from birder.kernels.bits import pack, unpack
from birder.kernels.message import bits_of, new_messages, scales_of

BLOCK = 1024
"""Numbers that `tree_sum` adds up to one, level by level."""


def partial_sums(numel: int, device: torch.device | str = "cpu") -> Tensor:
    """What `sums` of the kernels wants for `numel` elements: fp64, a number for each block of each level of `tree_sum`."""
    size = 0
    while True:
        numel = -(-numel // BLOCK)
        size += numel
        if numel <= 1:
            return torch.empty(size, dtype=torch.float64, device=device)


def tree_sum(x: Tensor) -> Tensor:
    """The sum of fp64[k] as fp64[]: BLOCK numbers (the last with zeros) become one, again and again until one is left.

    In a block the second half is added to the first, element by element, then the second quarter to the first, and so on.
    """
    if x.numel() == 0:
        return x.new_zeros(())
    while True:
        x = torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)
        while x.shape[1] > 1:
            half = x.shape[1] // 2
            x = x[:, :half] + x[:, half:]
        x = x.reshape(-1)
        if x.numel() == 1:
            return x[0]


def sum_squares(z: Tensor, mask: Tensor | None = None) -> Tensor:
    """S(z) as fp64[]; z, fp32[d], becomes 0 outside of the mask."""
    if mask is not None:
        z.masked_fill_(~mask, 0.0)
    return tree_sum(z.double().square_())


def add_message(error: Tensor, z: Tensor, mask: Tensor | None, *, sums: Tensor | None = None) -> Tensor:
    """e = z + e; returns S(e). All fp32[d]."""
    error.add_(z)
    return sum_squares(error, mask)


def add_momentum(
    error: Tensor, g: Tensor, m: Tensor, *, beta: float, mask: Tensor | None, sums: Tensor | None = None
) -> Tensor:
    """e = ((1-beta) g + beta m) + e; returns S(e). All fp32[d]; g and m stay as they are."""
    error.copy_(g * (1.0 - beta) + m * beta + error)
    return sum_squares(error, mask)


def add_average(error: Tensor, messages: Tensor, mask: Tensor | None, *, sums: Tensor | None = None) -> Tensor:
    """e = (1/n) sum_i scale_i * (+-1) + e, in the order of the workers; returns S(e).

    error: fp32[d]; messages: the workers', uint8[n, message_bytes(d)].
    """
    error.copy_(average_signs(bits_of(messages, error.numel()), scales_of(messages)).add_(error))
    return sum_squares(error, mask)


def split_signs(
    error: Tensor, scale: Tensor, mask: Tensor | None, *, parts: int = 1, out: Tensor | None = None
) -> Tensor:
    """e = e - scale sgn(e) with sgn(0) = +1, 0 outside of the mask; returns the bits of e >= 0 as messages.

    error: fp32[d], 0 outside of the mask already; scale: fp32[]; parts: into how many messages, one after the other,
    d is cut, a divisor of d/8. All of them have the same scale. Returns uint8[parts, message_bytes(d/parts)].
    """
    size = error.numel() // parts
    messages = new_messages(parts, size, error.device) if out is None else out.view(parts, -1)
    bits_of(messages, size).copy_(pack(error >= 0).view(parts, size // 8))
    scales_of(messages).copy_(scale)
    error.copy_(torch.where(error >= 0, error - scale, error + scale))
    if mask is not None:
        error.masked_fill_(~mask, 0.0)
    return messages


def write_signs(out: Tensor, messages: Tensor, mask: Tensor | None) -> None:
    """out = +-scale, 0 outside of the mask. out: fp32[d]; messages: of its k parts in order, uint8[k, message_bytes(d/k)]."""
    parts = out.view(len(messages), -1)
    signs, scales = unpack(bits_of(messages, parts.shape[1])).bool(), scales_of(messages).unsqueeze(1)
    torch.where(signs, scales, -scales, out=parts)
    if mask is not None:
        out.masked_fill_(~mask, 0.0)


def average_signs(rows: Tensor, scales: Tensor) -> Tensor:
    """(1/n) sum_i scales[i] * (+-1): uint8[n, c], fp32[n] -> fp32[8c], summed in the order of the workers."""
    n = rows.shape[0]
    weights = scales / n
    total = torch.zeros(8 * rows.shape[1], dtype=torch.float32, device=rows.device)
    for row, weight in zip(rows, weights, strict=True):
        total.add_(torch.where(unpack(row).bool(), weight, -weight))
    return total


def pack_signs(z: Tensor) -> Tensor:
    """The packed bits of z >= 0: fp32[8c] -> uint8[c]. Zero counts as +1, NaN as -1."""
    return pack(z >= 0)


def move_adam(
    params: list[Tensor], m: list[Tensor], v: list[Tensor], *, rate: float, correction: float, eps: float, keep: float
) -> None:
    """p = keep p - rate m / (sqrt(v) / correction + eps), in place, for each parameter; m and v in its shape, fp32.

    The root is rounded to nearest, which torch's on CPU is not.
    """
    if params[0].is_cuda:
        denominator = list(torch._foreach_sqrt(v))
    else:
        denominator = [x.double().sqrt_().float() for x in v]
    torch._foreach_div_(denominator, correction)
    torch._foreach_add_(denominator, eps)
    if keep != 1:
        torch._foreach_mul_(params, keep)
    torch._foreach_addcdiv_(params, m, denominator, -rate)
