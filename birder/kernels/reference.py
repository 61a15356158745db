"""The kernels in plain torch: any device, and the definition that the fused ones must equal bit for bit.

All tensors are flat and contiguous; states are fp32. Bits are packed 8 to a byte (birder/kernels/bits.py).
Products and sums are written as separate operations, because a fused multiply-add would round differently.
Where `out` is given, the result is copied there: torch's operations in between allocate tensors.

**Error feedback.** A message is made in the buffer of the error that it carries along, and leaves its own error there. With e
that buffer, fp32[d], and S(e) its sum of squares:

    add_*        e = message + e;    returns S(e), from which the caller computes the scale
    split_signs  bits of e >= 0;     e = e - scale sgn(e)

What is sent is bits, then their scale (birder/kernels/bits.py). `mask` is bool[d] or None: outside of it e is 0, in its sum,
its bits (+1) and its error. S adds in fp64 and in a fixed order (`tree_sum`), so that every back end gets the same bits. The
squares of fp32 numbers are exact in fp64, and 29 more bits than the scale has make the order all but irrelevant: a sum in
another order gives another fp32 scale less than once in 10^6 times. An oracle may therefore compute the scale as
`(z.double().square().sum() / count).sqrt().float()`.

**Sigma-delta.** With u in [-1, 1] the number to be sent, e the error of earlier bits, and sgn(0) = +1:

    two phases   z = u + e;           q = sgn(z);   e = clip(z - q, -1, 1)
    one phase    z = e + weight u;    q = sgn(z);   e = clip(z, -2, 2)          its owner then subtracts q (`settle`)
    server       a = gamma/n sum_i q_i + s;   q = sgn(a);   s = clip(a - q, -1, 1)

`limit` is the 1 or the 2. An error is fp32, or int8: then it counts steps of 1/UNITS[limit], and what lies between two steps
is rounded down after `dither`, a number in [0, 1), has been added. With `dither` spread evenly over the training's steps,
rounding has no bias, and no u is too small to count.

**One phase.** Birder's server stage without a server: every 32-bit word of the result is copied from one worker, the same on
all ranks. With k of n bits set, "average, then binarise again" gives +1 with probability k/n: exactly as often as the bit of
one worker drawn at random. If all ranks draw the same worker, that worker alone has to send the bit. Words are taken in
groups of n. In group k, word j comes from worker (j + s_k) mod n with s_k uniform in [0, n): every worker is drawn equally
often, and sends one word of each group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from birder.kernels.bits import bits_of, into, new_messages, pack, scales_of, unpack
from birder.kernels.philox import (
    BLOCK_STREAM,
    LANES,
    MASK_STREAM,
    SELECT_STREAM,
    SERVER_STREAM,
    random_bytes,
    shifts,
    uniform16,
    words,
)

HALF_RANGE = 32768.0  # 2^15: maps u in [-1, 1] to a threshold in [0, 2^16], exact to 2^-17 in probability
BLOCK = 1024
"""Numbers that `tree_sum` adds up to one, level by level."""
UNITS = {1: 127, 2: 63}
"""Of the error's int8 form: steps in 1.0, by `limit`."""


def ratio(
    g: Tensor,
    m: Tensor,
    b: Tensor,
    *,
    beta: float,
    eps: float,
    hold: bool,
    beta2: float | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Birder's moments, updated in place, and their ratio u in [-1, 1]: fp32[d] each; g may be bf16 or fp16 too.

    m = beta m + (1-beta) g;  b = beta2 b + (1-beta2)|g|;  u = scale m/(b+eps), clipped to [-1, 1], 0 where b = 0.
    beta2: None is beta. With one beta and scale 1 there is nothing to clip, since |m| <= b.
    A gradient that is not finite counts as 0. `hold`: b does not change where g = 0.
    """
    beta2 = beta if beta2 is None else beta2
    g = torch.where(torch.isfinite(g), g, 0.0).float()
    b_next = b * beta2 + g.abs() * (1.0 - beta2)
    if hold:
        b_next = torch.where(g == 0, b, b_next)
    m.mul_(beta).add_(g * (1.0 - beta))
    b.copy_(b_next)
    return torch.where(b > 0, m * scale / (b + eps), 0.0).clamp_(-1.0, 1.0)


def binarize(
    u: Tensor, *, seed: int, step: int, worker: int, start: int, shift: int = 0, out: Tensor | None = None
) -> Tensor:
    """Stochastic sign: +1 with probability (1+u)/2. fp32[8c] in [-1, 1] -> uint8[c]. +1 and -1 never flip.

    shift: added to the draws, modulo 2^16 (birder/kernels/weyl.py).
    """
    threshold = torch.floor(u * HALF_RANGE + (HALF_RANGE + 0.5)).to(torch.int64)
    draw = uniform16(u.numel(), seed=seed, step=step, stream=worker, start=start, device=u.device)
    return into(out, pack((draw + shift & 0xFFFF) < threshold))


def encode(
    g: Tensor,
    m: Tensor,
    b: Tensor,
    *,
    beta: float,
    eps: float,
    hold: bool,
    seed: int,
    step: int,
    worker: int,
    start: int,
    beta2: float | None = None,
    scale: float = 1.0,
    shift: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Birder's worker side, `ratio` and `binarize` in one: returns the packed bits uint8[numel/8]."""
    u = ratio(g, m, b, beta=beta, eps=eps, hold=hold, beta2=beta2, scale=scale)
    return into(out, binarize(u, seed=seed, step=step, worker=worker, start=start, shift=shift))


def reduce_bits(
    rows: Tensor, *, seed: int, step: int, start: int, shift: int | None = None, out: Tensor | None = None
) -> Tensor:
    """Birder's server side: the average of n workers' bits, binarised again. uint8[n, c] -> uint8[c], n < 32768.

    With k of n bits set the average is a = 2k/n - 1 and +1 is drawn with probability (1+a)/2 = k/n. That is as often as the
    bit of one worker drawn at random is set. Where n is a power of two that bit is copied: log2(n) random bits draw the
    worker, and nothing is unpacked or added. For other n a threshold is compared with 16 random bits.

    shift: added to these 16 bits, modulo 2^16, which are then drawn for every n (birder/kernels/weyl.py).
    """
    n, c = rows.shape
    if n & (n - 1) == 0 and shift is None:
        return into(out, _copied(rows, seed=seed, step=step, first=start // 8))
    ones = unpack(rows).sum(0, dtype=torch.int64)
    threshold = (ones * 65536 + n // 2) // n
    draw = uniform16(8 * c, seed=seed, step=step, stream=SERVER_STREAM, start=start, device=rows.device)
    return into(out, pack((draw + (shift or 0) & 0xFFFF) < threshold))


def _copied(rows: Tensor, *, seed: int, step: int, first: int) -> Tensor:
    """Every bit from the worker whose number the random bits of its place make up. first: number of the first byte."""
    n, c = rows.shape
    for level in range(n.bit_length() - 1):
        stream = SELECT_STREAM + level
        chosen = random_bytes(c, seed=seed, step=step, stream=stream, first=first, device=rows.device)
        even, odd = rows[0::2], rows[1::2]
        rows = even ^ (chosen & (even ^ odd))
    return rows[0].clone()


def unseen_blocks(b: Tensor, active: Tensor, block: int) -> Tensor:
    """Of every `block` elements, whether |b| > 0 in one where `active` is False: fp32[d], bool[d] -> bool[ceil(d/block)]."""
    news = (b.abs() > 0) & ~active
    return torch.nn.functional.pad(news, (0, -news.numel() % block)).view(-1, block).any(1)


# ---- one phase --------------------------------------------------------------------------------------------------------


def owned(
    bits: Tensor, *, n: int, worker: int, seed: int, step: int, start: int, turn: int = 0, out: Tensor | None = None
) -> Tensor:
    """What this worker sends: uint8[c] -> uint8[c/n]. c is a multiple of 4n.

    turn: added to s_k: with `step` fixed and a turn more in each step, every word comes from each worker in turn.
    """
    words = bits.view(torch.int32)
    where = owned_words(len(words), n=n, worker=worker, seed=seed, step=step, start=start, turn=turn, like=bits)
    return into(out, words[where].view(torch.uint8))


def owned_words(
    count: int, *, n: int, worker: int, seed: int, step: int, start: int, turn: int, like: Tensor
) -> Tensor:
    """Which of `count` 32-bit words this worker sends, one of each group of n: int64[count/n], on the device of `like`."""
    shift = shifts(count // n, n, seed=seed, step=step, start=start, device=like.device) + turn
    return torch.arange(count // n, device=like.device) * n + (worker - shift) % n


def assemble(rows: Tensor, *, seed: int, step: int, start: int, turn: int = 0, out: Tensor | None = None) -> Tensor:
    """The result from what all workers have sent: uint8[n, c/n] -> uint8[c]. turn: as in `owned`."""
    n = rows.shape[0]
    words = rows.view(torch.int32)
    shift = shifts(words.shape[1], n, seed=seed, step=step, start=start, device=rows.device) + turn
    worker = (torch.arange(n, device=rows.device) + shift.unsqueeze(1)) % n
    return into(out, words.t().gather(1, worker).view(-1).view(torch.uint8))


# ---- draws that all ranks make -----------------------------------------------------------------------------------------


def random_mask(numel: int, limit: int, *, seed: int, step: int, start: int, device: torch.device) -> Tensor:
    """Every element with probability limit/2^16, independently of the others and of other steps: bool[numel].

    start: number of the first element, a multiple of 8.
    """
    whole = -(-numel // LANES) * LANES
    drawn = uniform16(whole, seed=seed, step=step, stream=MASK_STREAM, start=start, device=device)
    return drawn[:numel] < limit


def chosen_blocks(
    first: int, count: int, ratio: int, *, seed: int, step: int, stream: int, device: torch.device
) -> Tensor:
    """The chosen block of each of the runs first .. first+count-1, int64[count], rising. Bias below ratio/2^32.

    A run is `ratio` consecutive blocks, and exactly one of them is chosen, each with the same chance. `stream`: of the
    compressor, below 2^26.
    """
    run = torch.arange(first, first + count, dtype=torch.int64, device=device)
    word = words(run, seed=seed, step=step, stream=BLOCK_STREAM + stream)[0]
    return run * ratio + ((word * ratio) >> 32)


# ---- error feedback ---------------------------------------------------------------------------------------------------


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
    """e = ((1-beta) g + beta m) + e; returns S(e). All fp32[d]; g and m do not change."""
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
    weights = scales / len(rows)
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

    Computed in fp32, rounded once to the parameter's type. One operation after the other: what torch fuses, it rounds in
    another way on a GPU, where it also divides by a number of the host by multiplying by its inverse. On a CPU torch's root
    is not rounded to nearest.
    """
    for p, mean, square in zip(params, m, v, strict=True):
        root = square.sqrt() if square.is_cuda else square.double().sqrt_().float()
        below = root.div_(root.new_full((), correction)).add_(eps)
        wide = p.float()  # p itself where it is fp32
        if keep != 1:
            wide.mul_(keep)
        wide.add_((mean * -rate).div_(below))
        if wide is not p:
            p.copy_(wide)


# ---- sigma-delta ------------------------------------------------------------------------------------------------------


def adam_moments(g: Tensor, m: Tensor, v: Tensor, *, beta1: float, beta2: float, hold: bool) -> None:
    """m = beta1 m + (1-beta1) g; v = beta2 v + (1-beta2) g^2, in place; `hold` and g as in `modulate_adam`."""
    g = torch.where(torch.isfinite(g), g, 0.0).float()
    v_next = v * beta2 + (g * g) * (1.0 - beta2)
    m.mul_(beta1).add_(g * (1.0 - beta1))
    v.copy_(torch.where(g == 0, v, v_next) if hold else v_next)


def modulate(
    u: Tensor, error: Tensor, *, weight: float = 1.0, limit: int = 1, dither: float = 0.5, out: Tensor | None = None
) -> Tensor:
    """The worker's bits, and what they leave in `error`: fp32[d], and fp32 or int8[d] -> uint8[d/8]. d: a multiple of 8."""
    return leave(u * weight + widened(error, limit), error, limit, dither, out)


def modulate_adam(
    g: Tensor | None,
    m: Tensor,
    v: Tensor,
    error: Tensor,
    shared: Tensor | None,
    *,
    beta1: float,
    beta2: float,
    scale: float,
    eps: float,
    hold: bool,
    weight: float = 1.0,
    limit: int = 1,
    dither: float = 0.5,
    out: Tensor | None = None,
) -> Tensor:
    """`adam_moments`, u = clip(scale m / (sqrt(V) + eps), -1, 1), 0 where the divisor is 0, and `modulate` of u, in one.

    g: fp32[d], bf16 or fp16; None: the moments are those of this step already. What is not finite counts as 0.
    m, v: fp32[d]. shared: V, fp32[d]; None: v. hold: v stays where g = 0.
    """
    if g is not None:
        adam_moments(g, m, v, beta1=beta1, beta2=beta2, hold=hold)
    square = v if shared is None else shared
    below = (square.sqrt() if square.is_cuda else square.double().sqrt_().float()).add_(eps)  # rounded to nearest
    u = torch.where(below > 0, m * scale / torch.where(below > 0, below, 1.0), 0.0).clamp_(-1.0, 1.0)
    return modulate(u, error, weight=weight, limit=limit, dither=dither, out=out)


def serve_sigma(rows: Tensor, error: Tensor, *, gamma: float, dither: float = 0.5, out: Tensor | None = None) -> Tensor:
    """The server's bits, and what they leave in `error`: uint8[n, c], and fp32 or int8[8c] -> uint8[c]."""
    n = rows.shape[0]
    ones = unpack(rows).sum(0, dtype=torch.int64)
    a = (2 * ones - n).float() * (gamma / n) + widened(error, 1)
    return leave(a, error, 1, dither, out)


def settle(
    error: Tensor, bits: Tensor, *, n: int, worker: int, seed: int, step: int, start: int, turn: int = 0
) -> None:
    """e = e - q for the 32-bit words that this worker sends (`owned`, whose options these are), in place.

    error: fp32 or int8[d]; bits: of all elements, uint8[d/8]. Touches d/n elements.
    """
    where = owned_words(len(bits) // 4, n=n, worker=worker, seed=seed, step=step, start=start, turn=turn, like=bits)
    sent = unpack(bits.view(-1, 4)[where])
    one = UNITS[2] if error.dtype == torch.int8 else 1
    error.view(-1, 32)[where] -= (sent.to(error.dtype) * 2 - 1) * one


def widened(error: Tensor, limit: int) -> Tensor:
    """The error as fp32."""
    return error if error.dtype == torch.float32 else error.float() * (1.0 / UNITS[limit])


def error_form(error: Tensor, limit: int, dither: float) -> tuple[float, float, float, float]:
    """Of an error: what a number stands for, the largest number, numbers in 1.0 (0: fp32), the dither."""
    if error.dtype == torch.float32:
        return 1.0, float(limit), 0.0, 0.0
    units = UNITS[limit]
    return 1.0 / units, float(limit * units), float(units), float(dither)


def leave(z: Tensor, error: Tensor, limit: int, dither: float, out: Tensor | None) -> Tensor:
    """The bits of z. What they leave becomes the error, in its own type: clip(z - q, -1, 1), or clip(z, -2, 2) by `limit`."""
    plus = z >= 0
    bits = into(out, pack(plus))
    if limit == 1:
        z = z - torch.where(plus, 1.0, -1.0)
    _, most, units, dither = error_form(error, limit, dither)
    if units:
        z = (z * units + dither).floor_()
    error.copy_(z.clamp(-most, most))
    return bits


# ---- the parameters of a unit, from a multiple of 32 elements on each, in logical order --------------------------------


def apply_bits(
    params: Sequence[Tensor], offsets: Sequence[int], bits: Tensor, *, lr: float, decay: float, active: Tensor | None
) -> None:
    """p = (1-decay) p - lr * (+-1), in place, for each parameter; nothing moves where `active` (bool[numel]) is False.

    bits: uint8[>= numel/8] and active: of the whole unit. Computed in fp32, rounded once to the parameter's type.
    """
    for p, offset in zip(params, offsets, strict=True):
        signs = unpack(bits[offset // 8 : (offset + p.numel() + 7) // 8])[: p.numel()].float().mul_(2).sub_(1)
        if active is not None:
            signs.masked_fill_(~active[offset : offset + p.numel()], 0.0)  # not a product: from -0 it would take -0
        wide = p.float()  # p itself where it is fp32
        if decay:
            wide.mul_(1.0 - decay)
        wide.add_(signs.view(p.shape), alpha=-lr)
        if wide is not p:
            p.copy_(wide)


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
