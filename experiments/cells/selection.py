"""How a cell is scaled down, as arithmetic: without torch, so that reports can do it too."""

from __future__ import annotations

import dataclasses

from birder.predict.methods import low_rank_numbers
from birder.predict.timeline import Gradient, Timeline

LARGE = 1 / 8
"""A matrix with more than this share of the model's elements is cut by rows where whole tensors are selected."""


def scaled(numel: int, fraction: float) -> int:
    """Elements that a tensor of `numel` keeps."""
    return max(1, round(numel * fraction))


def flattened(timeline: Timeline, fraction: float) -> Timeline:
    """The timeline whose tensors are flat and hold `fraction` of their elements; 1: as it is."""
    if fraction >= 1:
        return timeline
    kept = (dataclasses.replace(g, shape=(scaled(g.numel, fraction),)) for g in timeline.gradients)
    return dataclasses.replace(timeline, gradients=tuple(kept))


def select(timeline: Timeline, fraction: float) -> Timeline:
    """A timeline with about `fraction` of the elements in whole tensors: every k-th by size, of matrices and of vectors.

    Tensors of more than `LARGE` of all elements are kept with a fraction of their rows: they have no like.
    """
    if fraction >= 1:
        return timeline
    step = round(1 / fraction)
    kept: list[Gradient] = []
    for vectors in (True, False):
        kind = [g for g in timeline.gradients if (len(g.shape) < 2) is vectors]
        large = [g for g in kind if g.numel > LARGE * timeline.elements]
        others = sorted((g for g in kind if g not in large), key=lambda g: (g.numel, g.name))
        kept += others[step // 2 :: step] or others[-1:]
        kept += [dataclasses.replace(g, shape=(max(1, round(g.shape[0] * fraction)), *g.shape[1:])) for g in large]
    # The step must not end earlier than the model's: a tensor that is ready last is there in any case.
    last = max(timeline.gradients, key=lambda g: (g.ready_ms, -g.numel))
    names = {g.name: g for g in (last, *kept)}
    chosen = tuple(names[g.name] for g in timeline.gradients if g.name in names)
    return dataclasses.replace(timeline, gradients=chosen)


def shares(timeline: Timeline, part: Timeline, rank: int) -> float:
    """Share of the numbers that PowerSGD sends for the whole model which it sends for a selection."""
    sizes = [sum(sum(low_rank_numbers(g.shape, rank)) for g in t.gradients) for t in (part, timeline)]
    return sizes[0] / sizes[1]
