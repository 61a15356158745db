"""One-process oracle of SLAMB: n models side by side, state [workers, numel] for each parameter.

It shares no code with the package. Element numbers and draws are those of tests/helpers/reference.py.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tests.helpers.reference import draws, element_numbers

MASK, ORDER = 1 << 27, 1 << 28


def mean(rows: Tensor) -> Tensor:
    """Over workers, added up in their order."""
    total = rows[0].clone()
    for row in rows[1:]:
        total = total + row
    return total / len(rows)


class Slamb:
    """SLAMB over `workers` workers; parameters x: [workers, numel] for each tensor, from the same start."""

    def __init__(
        self,
        params: list[Tensor],
        workers: int,
        lr: float,
        form: str,
        fraction: float,
        sync_every: int,
        dense_below: int,
        beta3: float = 0.93,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.n, self.lr, self.form, self.k, self.every = workers, lr, form, fraction, sync_every
        self.beta3, self.decay, self.seed = beta3, weight_decay, seed
        self.elements = element_numbers(params)
        self.dims = [p.dim() for p in params]
        self.dense = [p.dim() < 2 or p.numel() < dense_below for p in params]
        self.x = [p.detach().flatten().repeat(workers, 1) for p in params]
        self.m = [torch.zeros_like(x) for x in self.x]
        self.v = [torch.zeros_like(x) for x in self.x]
        self.tau = [torch.zeros(x.shape[1], dtype=torch.int64) for x in self.x]
        self.masks: list[Tensor] = []
        self.steps = 0

    def mask(self, i: int) -> Tensor:
        """Which elements of tensor i are averaged in the present step."""
        numbers = self.elements[i]
        if self.dense[i]:
            return torch.ones(len(numbers), dtype=torch.bool)
        if self.form != "v1":
            return draws(numbers, seed=self.seed, step=self.steps, stream=MASK) < round(self.k * 65536)
        parts = int(1 / self.k)
        high, low = (draws(numbers, seed=self.seed, step=s, stream=ORDER).numpy() for s in (0, 1))
        place = np.empty(len(numbers), dtype=np.int64)
        place[np.lexsort((numbers, low, high))] = np.arange(len(numbers))
        return torch.from_numpy(place * parts // len(numbers) == self.steps % parts)

    def syncs(self) -> bool:
        return self.steps % self.every == (0 if self.form == "paper" else 1)

    @torch.no_grad()
    def step(self, grads: list[list[Tensor]]) -> None:
        """grads[worker][parameter], each taken at that worker's own model."""
        self.steps += 1
        self.masks = [self.mask(i) for i in range(len(self.x))]
        for i, mask in enumerate(self.masks):
            g = torch.stack([grads[w][i].flatten() for w in range(self.n)])
            self.m[i] = 0.9 * self.m[i] + (1 - 0.9) * g
            self.v[i] = 0.999 * self.v[i] + (1 - 0.999) * (g * g)
            self.m[i] = torch.where(mask, mean(self.m[i]), self.m[i])
            self.tau[i] = torch.where(mask, 0, self.tau[i] + 1)
            for w in range(self.n):
                self._move(i, w, mask)
            if self.syncs():
                self.x[i] = mean(self.x[i]).repeat(self.n, 1)

    def _move(self, i: int, w: int, mask: Tensor) -> None:
        x, root = self.x[i][w].clone(), (1 - 0.999**self.steps) ** 0.5
        eps = 1e-6 if self.form == "v2" else 1e-6 * root
        r = self.m[i][w] / (self.v[i][w].sqrt() + eps) * (root / (1 - 0.9**self.steps))
        if self.form == "v1":
            r = r + self.decay * x
        s = torch.tensor([self.beta3 ** int(t) for t in self.tau[i]], dtype=torch.float32)
        stale_lr = self.lr / self.n**0.5
        fresh = self.quotient(x * mask, r * mask, 1.0)
        stale = self.quotient(x * ~mask, r * ~mask, 1.0 if self.form == "v1" else 0.0)
        if self.form == "v1":
            phi = fresh if self.dims[i] == 1 else (s * fresh + (1 - s) * stale).clamp(0.01, 1000.0)
            rate = phi * (s * self.lr + (1 - s) * stale_lr)
        else:
            rate = s * (fresh.clamp(0.01, 1000.0) * self.lr) + (1 - s) * (stale.clamp(0.0, 1000.0) * stale_lr)
            r = r + self.decay * x
        self.x[i][w] = x - rate * r

    @staticmethod
    def quotient(x: Tensor, r: Tensor, otherwise: float) -> Tensor:
        above, below = torch.linalg.vector_norm(x), torch.linalg.vector_norm(r)
        return above / below if above > 0 and below > 0 else torch.tensor(otherwise)
