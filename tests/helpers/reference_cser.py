"""One-process oracles of CSER, QSparse-local-SGD and EF-SGD, written down from the paper's algorithms.

State is [workers, d] over all elements of the model in their common numbering. They share no code with the package.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tests.helpers.reference import philox


def choice(d: int, ratio: int | None, block: int, *, seed: int, step: int, stream: int) -> Tensor:
    """bool[d]: the chosen elements; of every `ratio` blocks in a row one."""
    if ratio is None:
        return torch.zeros(d, dtype=torch.bool)
    number = np.arange(d) // block
    run = number // ratio
    zero = np.zeros_like(run)
    words = philox(
        [run & 0xFFFFFFFF, run >> 32, zero + step, zero + (1 << 26) + stream], [seed & 0xFFFFFFFF, seed >> 32]
    )
    drawn = ((words[0] * np.uint64(ratio)) >> np.uint64(32)).astype(np.int64)
    return torch.from_numpy(number % ratio == drawn)


def largest(v: Tensor, ratio: int | None, parts: list[Tensor]) -> Tensor:
    """bool[workers, d]: of each parameter's n elements the ceil(n/ratio) largest, of equals the first. parts: places."""
    chosen = torch.zeros(v.shape, dtype=torch.bool)
    if ratio is not None:
        for row, mask in zip(v, chosen, strict=True):
            for part in parts:
                order = torch.argsort(row[part].abs(), descending=True, stable=True)
                mask[part[order[: -(-len(part) // ratio)]]] = True
    return chosen


def mean(v: Tensor) -> Tensor:
    """Over workers, added up in their order."""
    total = v[0].clone()
    for row in v[1:]:
        total = total + row
    return total / len(v)


def psync(v: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Algorithm 3 on [workers, d]: (what each worker has afterwards, what it did not send). chosen: [d] or [workers, d]."""
    sent = torch.where(chosen, v, 0.0)
    kept = torch.where(chosen, 0.0, v)
    return mean(sent) + kept, kept


class Local:
    """x, m [workers, d] and the local step."""

    def __init__(
        self, x: Tensor, workers: int, *, momentum: float = 0.9, weight_decay: float = 0.0, nesterov: bool = True,
        variant: str = "paper", block: int, seed: int = 0, compressor: str = "blocks", parts: list[Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.compressor, self.parts = compressor, parts or []
        self.x = x.repeat(workers, 1)
        self.m = torch.zeros_like(self.x)
        self.e = torch.zeros_like(self.x)
        self.beta, self.decay, self.nesterov, self.variant = momentum, weight_decay, nesterov, variant
        self.block, self.seed, self.steps = block, seed, 0

    def chosen(self, v: Tensor, ratio: int | None, stream: int) -> Tensor:
        """What the compressor keeps of v: [d] where all workers choose alike, else [workers, d]."""
        if self.compressor == "top_k":
            return largest(v, ratio, self.parts)
        block = 1 if self.compressor == "random_k" else self.block
        return choice(self.x.shape[1], ratio, block, seed=self.seed, step=self.steps, stream=stream)

    def local_step(self, g: Tensor, lr: float, released: bool) -> Tensor:
        if not released and self.decay:
            g = g + self.decay * self.x
        if not self.beta:
            return g * lr
        self.m = self.beta * self.m + g
        if released and self.decay:
            self.m = self.m + self.decay * self.x
        return (g + self.beta * self.m if self.nesterov else self.m) * lr


class CSER(Local):
    """Algorithms 2 and 4, implementation II, and the released code's form."""

    def __init__(
        self, x: Tensor, workers: int, *, gradient_ratio: int | None, model_ratio: int, reset_every: int,
        implementation: str = "I", **options,
    ) -> None:  # fmt: skip
        super().__init__(x, workers, **options)
        self.ratios, self.every, self.first = (gradient_ratio, model_ratio), reset_every, implementation == "I"
        self.z = x.clone()

    def step(self, g: Tensor, lr: float) -> None:
        self.steps += 1
        p = self.local_step(g, lr, self.variant == "released")
        reset = self.steps % self.every == 0
        if self.variant == "released":
            ratio, stream = (self.ratios[1], 1) if reset else (self.ratios[0], 2)
            self.x, _ = psync(self.x - p, self.chosen(self.x - p, ratio, stream))
            return
        c2 = self.chosen(p, self.ratios[0], 2)
        moved, kept = psync(p, c2)
        self.x = self.x - moved
        if self.first:
            self.z = self.z - mean(torch.where(c2, p, 0.0))
            self.e = self.e - kept  # only to compare: it is x - z in exact arithmetic
            if reset:
                e = self.x - self.z
                c1 = self.chosen(e, self.ratios[1], 1)
                sent = torch.where(c1, e, 0.0)
                self.x = self.x + (mean(sent) - sent)  # e' - e
                self.z = self.z + mean(sent)
                self.e = torch.where(c1, 0.0, self.e)
        elif reset:
            self.x, _ = psync(self.x, self.chosen(self.x, self.ratios[1], 1))


class QSparseLocalSGD(Local):
    """Algorithm 1 of the CSER paper; z is the common point, [d]."""

    def __init__(self, x: Tensor, workers: int, *, ratio: int, sync_every: int, **options) -> None:
        super().__init__(x, workers, **options)
        self.ratio, self.every, self.z = ratio, sync_every, x.clone()

    def step(self, g: Tensor, lr: float) -> None:
        self.steps += 1
        self.x = self.x - self.local_step(g, lr, self.variant == "released")
        if self.steps % self.every == 0:
            total = self.e + (self.x - self.z)
            chosen = self.chosen(total, self.ratio, 0)
            self.z = self.z + mean(torch.where(chosen, total, 0.0))
            self.e = torch.where(chosen, 0.0, total)
            self.x = self.z.repeat(len(self.x), 1)


class EFSGD(Local):
    """Error feedback; u is the momentum of the decay alone in the released form."""

    def __init__(self, x: Tensor, workers: int, *, ratio: int, **options) -> None:
        super().__init__(x, workers, **options)
        self.ratio, self.u = ratio, torch.zeros_like(self.x)
        self.separate = self.decay if self.variant == "released" else 0.0
        if self.variant == "released":
            self.decay = 0.0

    def step(self, g: Tensor, lr: float) -> None:
        self.steps += 1
        total = self.e + self.local_step(g, lr, False)
        chosen = self.chosen(total, self.ratio, 0)
        moved = mean(torch.where(chosen, total, 0.0))
        self.e = torch.where(chosen, 0.0, total)
        pull = self.separate * self.x
        self.u = self.beta * self.u + pull
        self.x = self.x - moved
        if self.separate:
            self.x = self.x - (pull + self.beta * self.u if self.nesterov else self.u) * lr


class EF21SGDM(Local):
    """v in the place of m; e: what the others do not know of it, v - h_i."""

    def __init__(self, x: Tensor, workers: int, *, ratio: int, **options) -> None:
        super().__init__(x, workers, **options)
        self.ratio, self.known, self.z = ratio, torch.zeros_like(self.x), torch.zeros_like(self.x[0])

    def step(self, g: Tensor, lr: float) -> None:
        self.steps += 1
        self.m = self.m * self.beta + (g + self.decay * self.x) * (1 - self.beta)
        change = self.m - self.known
        sent = torch.where(self.chosen(change, self.ratio, 0), change, 0.0)
        self.known = self.known + sent
        self.z = self.z + mean(sent)
        self.x = self.x - self.z * lr
