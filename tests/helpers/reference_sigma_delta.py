"""One-process oracle of sigma-delta Adam: the equations written down plainly, with state [workers, ...].

Shares no code with the package.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from tests.helpers.reference import draws, element_numbers, philox


def sign(z: Tensor) -> Tensor:
    return torch.where(z >= 0, 1.0, -1.0)


def shared_steps(growth: float, steps: int) -> set[int]:
    """The steps in which V is shared, up to `steps`."""
    found, k = set(), 1
    while k <= steps:
        found.add(k)
        k = max(k + 1, int(k * growth))
    return found


class SigmaDelta:
    """State of each parameter: m, v, e [workers, numel]; V, s [numel]; in one phase r [workers, numel] for e and s."""

    def __init__(
        self,
        params: list[Tensor],
        workers: int,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        local: bool = False,
        of_mean: bool = False,
        growth: float = 1.1,
        gamma: float | None = None,
        full_scale: float | None = None,
        uniform: bool = True,
        hold: bool = False,
        seed: int = 0,
        parts: list[tuple[int, int, int]] | None = None,
    ) -> None:
        """parts: for the one-phase form (start, end, size) of each unit: its elements, and those of one shard."""
        self.params, self.workers, self.lr, self.betas, self.eps = params, workers, lr, betas, eps
        self.weight_decay, self.hold, self.seed, self.parts = weight_decay, hold, seed, parts
        self.local, self.of_mean = local, of_mean
        self.gamma = (1.0 if of_mean else math.sqrt(workers)) if gamma is None else gamma
        self.scale = (max(1.0, math.sqrt(workers) / 2) if of_mean else 1.0) if full_scale is None else full_scale
        self.shares = shared_steps(growth, 10_000)
        self.elements = element_numbers(params)
        self.m = [torch.zeros(workers, p.numel()) for p in params]
        self.v = [torch.zeros(workers, p.numel()) for p in params]
        self.V = [torch.zeros(p.numel()) for p in params]
        self.s = [torch.zeros(p.numel()) for p in params]
        self.e = [torch.stack([self._first(at, w) * uniform for w in range(workers)]) for at in self.elements]
        self.active = [torch.zeros(p.numel(), dtype=torch.bool) for p in params]
        self.steps = 0

    def _first(self, elements: np.ndarray, worker: int) -> Tensor:
        return draws(elements, seed=self.seed, step=0, stream=worker).float() / 2**15 - 1

    @torch.no_grad()
    def step(self, grads: list[list[Tensor]]) -> None:
        """grads[worker][parameter]."""
        self.steps += 1
        for i, p in enumerate(self.params):
            u = self._ratios(i, [grads[w][i].flatten() for w in range(self.workers)])
            q = self._two_phases(i, u) if self.parts is None else self._one_phase(i, u)
            self.active[i] |= (self.v[i] > 0).any(0)
            if self.weight_decay:
                p.mul_(1 - self.lr * self.weight_decay)
            p.sub_((self.lr * q * self.active[i]).view_as(p))

    def _ratios(self, i: int, grads: list[Tensor]) -> list[Tensor]:
        b1, b2 = self.betas
        for w, g in enumerate(grads):
            m, v = self.m[i][w], self.v[i][w]
            m.copy_(m * b1 + g * (1 - b1))
            v.copy_(torch.where((g == 0) & self.hold, v, v * b2 + (g * g) * (1 - b2)))
        if self.steps in self.shares:
            self.V[i].copy_(sum(self.v[i][1:], self.v[i][0]) / self.workers)
            if self.of_mean:
                mean = sum(self.m[i][1:], self.m[i][0]) / self.workers
                signal = (mean * (math.sqrt(1 - b2**self.steps) / (1 - b1**self.steps))) ** 2
                signal = torch.minimum(signal, self.V[i])
                self.V[i].copy_(self.V[i] / self.workers + signal * (1 - 1 / self.workers))
        last = self.steps if self.local else max(k for k in self.shares if k <= self.steps)
        root = math.sqrt(1 - b2**last)
        found = []
        for w in range(self.workers):
            square = self.v[i][w] if self.local else self.V[i]
            below = square.double().sqrt().float() + self.eps * root
            u = self.m[i][w] * (root / (1 - b1**self.steps) / self.scale) / below
            found.append(torch.where(below > 0, u, 0.0).clamp(-1, 1))
        return found

    def _two_phases(self, i: int, u: list[Tensor]) -> Tensor:
        total = torch.zeros_like(self.s[i])
        for w in range(self.workers):
            z = u[w] + self.e[i][w]
            self.e[i][w] = (z - sign(z)).clamp(-1, 1)
            total += sign(z)
        a = total * (self.gamma * self.scale / self.workers) + self.s[i]
        self.s[i] = (a - sign(a)).clamp(-1, 1)
        return sign(a)

    def _one_phase(self, i: int, u: list[Tensor]) -> Tensor:
        owner, q = self._owners(self.elements[i]), torch.empty_like(u[0])
        for w in range(self.workers):
            r = (u[w] * (self.gamma * self.scale / self.workers) + self.e[i][w]).clamp(-2, 2)
            mine = owner == w
            q[mine] = sign(r[mine])
            r[mine] -= q[mine]
            self.e[i][w] = r
        return q

    def _owners(self, elements: np.ndarray) -> Tensor:
        """The worker that owns each element in this step: a draw for every n words of 32 elements of a shard, and a turn."""
        assert self.parts is not None
        start, size = next((a, s) for a, end, s in self.parts if a <= elements[0] < end)
        first = start + (elements - start) // size * size  # of the shard
        word = (elements - first) // 32
        group = first // 32 + word // self.workers * self.workers
        zero = np.zeros_like(group)
        counter = [group & 0xFFFFFFFF, group >> 32, zero, zero + (1 << 25)]
        drawn = philox(counter, [self.seed & 0xFFFFFFFF, self.seed >> 32])[0]
        shift = ((drawn * np.uint64(self.workers)) >> np.uint64(32)).astype(np.int64)
        return torch.from_numpy((word % self.workers + shift + self.steps) % self.workers)
