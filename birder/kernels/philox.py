"""Counter-based random numbers: Philox 4x32 with 10 rounds, in torch integer arithmetic.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

A random number here is a pure function of (seed, step, worker, element). It therefore does not depend on how tensors
are bucketed, on the device, on the number of draws made before, or on a restart.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

Word = TypeVar("Word", int, Tensor)

MASK = 0xFFFFFFFF
MUL_0, MUL_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10

LANES = 8
"""Elements served by one Philox block: 4 words of 32 bits, cut into 16-bit lanes."""

# Streams keep apart what is drawn in one step. All stand here, so that no two are the same. Below 2^24: a worker's own.
SERVER_STREAM = 1 << 24
"""Draws of the server stage."""
OWNER_STREAM = 1 << 25
"""Which worker's bits are taken, for a group of 32-bit words."""
BLOCK_STREAM = 1 << 26
"""Plus the number of the compressor: which blocks are sent (birder/optim/sparse.py)."""
MASK_STREAM = 1 << 27
"""Which elements are sent (birder/optim/slamb.py)."""
ORDER_STREAM = 1 << 28
"""The permutation behind cyclic masks (birder/optim/slamb.py)."""
SELECT_STREAM = 1 << 29
"""Plus the number of the bit: which of 2^k workers' bits the server copies."""


def philox4x32(counter: tuple[Word, Word, Word, Word], key: tuple[int, int]) -> tuple[Word, ...]:
    """One Philox block per element: four 32-bit words in, four out; int64 tensors of them, or Python's numbers.

    The product of two 32-bit words wraps around in int64, which leaves both of its halves right.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MUL_0, c2 * MUL_1
        c0, c1, c2, c3 = (
            ((p1 >> 32) & MASK) ^ c1 ^ k0,
            p1 & MASK,
            ((p0 >> 32) & MASK) ^ c3 ^ k1,
            p0 & MASK,
        )
        k0, k1 = (k0 + WEYL_0) & MASK, (k1 + WEYL_1) & MASK
    return c0, c1, c2, c3


def words(number: Word, *, seed: int, step: int, stream: int) -> tuple[Word, ...]:
    """Four random 32-bit words for each `number`, int64[n] each; of a number of Python's, four of these, on the host.

    `stream` keeps apart what else is drawn in a step.
    """
    zero = number * 0
    counter = (number & MASK, number >> 32, zero + (step & MASK), zero + stream)
    return philox4x32(counter, (seed & MASK, (seed >> 32) & MASK))


def uniform16(numel: int, *, seed: int, step: int, stream: int, start: int, device: torch.device) -> Tensor:
    """Uniform integers in [0, 65536) for the elements start .. start+numel-1, as int64[numel].

    numel and start are multiples of 8. `stream` is the worker's number, plus `SERVER_STREAM` in the server stage.
    """
    drawn = random_bytes(2 * numel, seed=seed, step=step, stream=stream, first=2 * start, device=device)
    return drawn.view(torch.int16).to(torch.int64) & 0xFFFF


def random_bytes(count: int, *, seed: int, step: int, stream: int, first: int, device: torch.device) -> Tensor:
    """Uniform bytes number first .. first+count-1: uint8[count]. Byte j is byte j mod 16 of block j // 16, low ones first."""
    begin, end = first // 16, (first + count + 15) // 16
    block = torch.arange(begin, end, dtype=torch.int64, device=device)
    drawn = torch.stack(words(block, seed=seed, step=step, stream=stream), dim=1)
    skip = first - 16 * begin
    return drawn.to(torch.int32).view(torch.uint8).view(-1)[skip : skip + count]


def shifts(groups: int, n: int, *, seed: int, step: int, start: int, device: torch.device) -> Tensor:
    """A uniform integer in [0, n) for each group of n 32-bit words of bits, as int64[groups]; bias below n/2^32.

    start: number of the first element of the first group, a multiple of 32.
    """
    word = start // 32 + n * torch.arange(groups, dtype=torch.int64, device=device)
    return (words(word, seed=seed, step=step, stream=OWNER_STREAM)[0] * n) >> 32
