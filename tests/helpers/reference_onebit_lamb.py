"""1-bit LAMB in one process, written down plainly: state of the workers [workers, ...]; no code of the package."""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 32


def sign(z: Tensor) -> Tensor:
    return torch.where(z >= 0, 1.0, -1.0)


class OneBitLAMB:
    """Over `workers` workers; every unit is one message, cut into `shards` parts with a scale each.

    units: for each unit the parameters' numbers, in the order in which they lie in it.
    """

    def __init__(
        self,
        params: list[Tensor],
        units: list[list[int]],
        workers: int,
        lr: float,
        warmup: int,
        weight_decay: float = 0.0,
        shards: int = 1,
        coeffs: tuple[float, float] = (0.01, 10.0),
        coeff_beta: float = 0.9,
        factors: tuple[float, float] = (0.5, 4.0),
        threshold: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self.params, self.units, self.n, self.lr, self.warmup, self.shards = params, units, workers, lr, warmup, shards
        self.decay, self.coeffs, self.coeff_beta = weight_decay, coeffs, coeff_beta
        self.factors, self.threshold, self.betas, self.eps = factors, threshold, betas, eps
        self.m = [torch.zeros_like(p) for p in params]
        self.v = [torch.zeros_like(p) for p in params]
        self.w = [torch.zeros_like(p) for p in params]
        self.coeff = [torch.zeros(()) for _ in params]
        self.factor = [torch.ones(()) for _ in params]
        self.scale = [torch.zeros(()) for _ in params]
        sizes = [self.flat(unit, self.m).numel() for unit in units]
        self.worker_error = [torch.zeros(workers, d) for d in sizes]
        self.server_error = [torch.zeros(d) for d in sizes]
        self.steps = 0

    def flat(self, unit: list[int], tensors: list[Tensor]) -> Tensor:
        """The unit's tensors side by side, each from a multiple of 32 on, padded so that every chunk has whole words."""
        parts = [torch.nn.functional.pad(tensors[i].flatten(), (0, -tensors[i].numel() % WORD)) for i in unit]
        joined = torch.cat(parts)
        return torch.nn.functional.pad(joined, (0, -joined.numel() % (WORD * self.n * self.shards)))

    @torch.no_grad()
    def step(self, grads: list[list[Tensor]]) -> None:
        """grads[worker][parameter]."""
        self.steps += 1
        if self.steps <= self.warmup:
            for i in range(len(self.params)):
                self._dense(i, [grads[w][i] for w in range(self.n)])
            if self.steps == self.warmup:
                self._freeze()
            return
        for u, unit in enumerate(self.units):
            means = self._mean(u, unit, grads)
            at = 0
            for i in unit:
                numel = self.params[i].numel()
                self._compressed(i, means[at : at + numel].view_as(self.params[i]))
                at += -(-numel // WORD) * WORD

    def _dense(self, i: int, grads: list[Tensor]) -> None:
        b1, b2 = self.betas
        g = grads[0].clone()
        for other in grads[1:]:
            g += other
        g /= self.n
        x, m, v = self.params[i], self.m[i], self.v[i]
        m.lerp_(g, 1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        r = torch.add(m / (v.sqrt() + self.eps), x, alpha=self.decay)
        long, short = torch.linalg.vector_norm(x), torch.linalg.vector_norm(r)
        c = torch.ones(())
        if long > 0 and short > 0:
            c = torch.clamp(long / short, *self.coeffs)
        if c != 1:
            self.coeff[i] = self.coeff_beta * self.coeff[i] + (1 - self.coeff_beta) * c
        x.add_(c * r, alpha=-self.lr)

    def _freeze(self) -> None:
        order = [i for unit in self.units for i in unit]
        rms = {i: float(torch.linalg.vector_norm(self.m[i])) / self.m[i].numel() ** 0.5 for i in order}
        present = [rms[i] for i in order if rms[i] > 0]
        for i in order:
            if rms[i] > 0:
                self.scale[i] = torch.tensor(sum(present) / len(present) / rms[i])
            self.w[i].copy_(self.v[i])

    def _mean(self, u: int, unit: list[int], grads: list[list[Tensor]]) -> Tensor:
        """What all workers have of their scaled momenta after both phases, flat and still scaled."""
        b1 = self.betas[0]
        live = self.flat(unit, [((v > 0) & (s > 0)).float() for v, s in zip(self.v, self.scale, strict=True)])
        out = torch.zeros_like(live)
        size = len(live) // self.shards
        chunk = size // self.n
        for first in range(0, len(live), size):
            shard = slice(first, first + size)
            sent = []
            for w in range(self.n):
                messages = [((1 - b1) * grads[w][i] + b1 * self.m[i]) * self.scale[i] for i in range(len(self.m))]
                z = (self.flat(unit, messages)[shard] + self.worker_error[u][w, shard]) * live[shard]
                scale = (z.double().square().sum() / max(int(live[shard].sum()), 1)).sqrt().float()
                self.worker_error[u][w, shard] = (z - scale * sign(z)) * live[shard]
                sent.append((sign(z), scale))
            for start in range(first, first + size, chunk):
                part = slice(start, start + chunk)
                a = torch.zeros(chunk)
                for signs, scale in sent:
                    a += signs[start - first : start - first + chunk] * (scale / self.n)
                a = (a + self.server_error[u][part]) * live[part]
                scale = (a.double().square().sum() / max(int(live[part].sum()), 1)).sqrt().float()
                self.server_error[u][part] = (a - scale * sign(a)) * live[part]
                out[part] = scale * sign(a) * live[part]
        return out

    def _compressed(self, i: int, mean: Tensor) -> None:
        b1, b2 = self.betas
        x, old = self.params[i], self.m[i]
        m = mean / self.scale[i] if self.scale[i] > 0 else torch.zeros_like(x)
        g = (m - b1 * old) / (1 - b1)
        self.m[i] = m
        self.w[i].mul_(b2).addcmul_(g, g, value=1 - b2)
        frozen, fresh = self.v[i].sqrt() + self.eps, self.w[i].sqrt() + self.eps
        r = m / frozen
        f = (frozen / fresh).max()
        if self.decay:
            before = torch.linalg.vector_norm(r)
            r = torch.add(r, x, alpha=self.decay)
            after = torch.linalg.vector_norm(r)
            share = torch.minimum(before / after, torch.ones(())) if after > 0 else torch.ones(())
            f = share * f + (1 - share)
        f = torch.clamp(f, *self.factors)
        f = torch.minimum(f, self.factor[i] * (1 + self.threshold))
        f = torch.maximum(f, self.factor[i] * (1 - self.threshold))
        self.factor[i] = f
        x.add_((self.coeff[i] * f) * r, alpha=-self.lr)
