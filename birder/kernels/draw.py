"""Draws that all ranks make alike, in plain torch: masks of elements, and one block out of every run of blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from birder.kernels.philox import BLOCK_STREAM, LANES, MASK_STREAM, uniform16, words


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
