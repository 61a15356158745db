"""SparseLoCo in one process, written down from the paper's algorithm: [workers] of everything, parameter by parameter.

It shares no code with the package: chunks are cut from each flat parameter, the last one as short as it comes; the k largest
are found by sorting.
"""

from __future__ import annotations

import torch
from torch import Tensor


def top_k(e: Tensor, k: int, chunk: int) -> Tensor:
    """e with all but the k entries of each chunk that are largest in magnitude set to 0."""
    kept = torch.zeros_like(e)
    for begin in range(0, e.numel(), chunk):
        part = e[begin : begin + chunk]
        order = torch.argsort(part.abs(), descending=True, stable=True)[:k] + begin
        kept[order] = e[order]
    return kept


def codes(e: Tensor, chunk: int) -> Tensor:
    """Whole numbers from -7 to 7 times a scale in bf16, chunk by chunk."""
    kept = torch.zeros_like(e)
    for begin in range(0, e.numel(), chunk):
        part = e[begin : begin + chunk]
        s = float((part.abs().max() / 7).bfloat16())
        if s >= torch.finfo(torch.float32).tiny:
            kept[begin : begin + chunk] = torch.round(part * (1 / torch.tensor(s))).clamp(-7, 7) * s
    return kept


class SparseLoCo:
    """State of every worker and parameter; `params` hold the model at which worker 0 stands after a synchronisation."""

    def __init__(
        self,
        params: list[Tensor],
        workers: int,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        sync_every: int,
        top_k: int,
        chunk: int,
        error_decay: float = 0.95,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        wire: torch.dtype = torch.float32,
        message: str = "top_k",
    ) -> None:
        """message="int4" leaves out what a server keeps of its own rounding: it wants error_decay = 0."""
        self.message = message
        self.n, self.lr, self.betas, self.eps, self.decay = workers, lr, betas, eps, weight_decay
        self.every, self.k, self.chunk, self.beta = sync_every, top_k, chunk, error_decay
        self.alpha, self.mu, self.wire = outer_lr, outer_momentum, wire
        flat = [p.detach().flatten().clone() for p in params]
        self.x = [[p.clone() for p in flat] for _ in range(workers)]
        self.m, self.v, self.e = ([[torch.zeros_like(p) for p in flat] for _ in range(workers)] for _ in range(3))
        self.z = flat
        self.w = [torch.zeros_like(p) for p in flat]
        self.steps = 0

    def step(self, grads: list[list[Tensor]]) -> None:
        """grads[worker][parameter], each at that worker's own model."""
        self.steps += 1
        t, (b1, b2) = self.steps, self.betas
        for i in range(len(self.z)):
            for r in range(self.n):
                g, m, v, x = grads[r][i].flatten(), self.m[r][i], self.v[r][i], self.x[r][i]
                m.copy_(m * b1 + g * (1 - b1))
                v.copy_(v * b2 + g * g * (1 - b2))
                u = m / (v.sqrt() / (1 - b2**t) ** 0.5 + self.eps)
                u = torch.where(m == 0, 0.0, u) / (1 - b1**t) + x * self.decay
                x.copy_(x - u * self.lr)
            if t % self.every == 0:
                self._synchronise(i)

    def _synchronise(self, i: int) -> None:
        total = torch.zeros_like(self.z[i])
        for r in range(self.n):
            e = self.e[r][i] * self.beta + (self.z[i] - self.x[r][i])
            if self.message == "top_k":
                sent = top_k(e, self.k, self.chunk).to(self.wire).float()
            else:
                sent = codes(e, self.chunk) if self.message == "int4" else e
            self.e[r][i] = e - sent
            total = total + sent
        mean = total / self.n
        if self.message == "int4":
            mean = codes(mean, self.chunk)
        if self.mu:
            self.w[i] = self.w[i] * self.mu + mean
            mean = self.w[i] * self.mu + mean
        self.z[i] = self.z[i] - mean * self.alpha
        for r in range(self.n):
            self.x[r][i] = self.z[i].clone()
