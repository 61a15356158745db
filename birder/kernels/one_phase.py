"""Birder's server stage without a server: every 32-bit word of the result is copied from one worker, drawn by all alike.

With k of n bits set, "average, then binarise again" gives +1 with probability k/n: exactly as often as the bit of one
worker drawn at random. If all ranks draw the same worker, that worker alone has to send the bit.

Words are taken in groups of n. In group k, word j comes from worker (j + s_k) mod n with s_k uniform in [0, n): every
worker is drawn equally often, and sends one word of each group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from birder.kernels.bits import into
from birder.kernels.philox import shifts


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
