"""0/1 Adam written down plainly for all workers in one process, with counters where the package has closed forms.

Shares no code with the package. State is [workers, ...] on one flat vector that makes up a single unit.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sign(z: Tensor) -> Tensor:
    return torch.where(z >= 0, 1.0, -1.0)


class Compressor:
    """The 1-bit mean with error feedback."""

    def __init__(self, workers: int, size: int) -> None:
        self.n, self.chunk = workers, size // workers
        self.worker_error = torch.zeros(workers, size)
        self.server_error = torch.zeros(workers, self.chunk)

    @staticmethod
    def squeeze(z: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
        """(scale, what C(z) leaves behind)."""
        scale = (z.double().square().sum() / max(int(live.sum()), 1)).sqrt().float()
        return scale, (z - scale * sign(z)) * live

    def mean(self, messages: Tensor, live: Tensor) -> Tensor:
        z = (messages + self.worker_error) * live
        scales = []
        for w in range(self.n):
            scale, self.worker_error[w] = self.squeeze(z[w], live)
            scales.append(scale)
        out = torch.zeros(z.shape[1])
        for r in range(self.n):
            part = slice(r * self.chunk, (r + 1) * self.chunk)
            a = torch.zeros(self.chunk)
            for w in range(self.n):
                a += sign(z[w, part]) * (scales[w] / self.n)
            a = (a + self.server_error[r]) * live[part]
            scale, self.server_error[r] = self.squeeze(a, live[part])
            out[part] = scale * sign(a) * live[part]
        return out

    def reset(self) -> None:
        self.worker_error.zero_()
        self.server_error.zero_()


class ZeroOneAdam:
    """x, m, u: [workers, size]; v: [size]. `parts`: where the parameters lie in the flat vector."""

    def __init__(
        self,
        flat: Tensor,
        workers: int,
        *,
        warmup: int,
        kappa: int,
        doubling: int,
        limit: int,
        deepspeed: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        decay: float = 0.0,
    ) -> None:
        self.n, self.warmup, self.kappa, self.doubling, self.limit = workers, warmup, kappa, doubling, limit
        self.deepspeed, self.betas, self.eps, self.decay = deepspeed, betas, eps, decay
        self.x = flat.repeat(workers, 1)
        self.m, self.u = torch.zeros_like(self.x), torch.zeros_like(self.x)
        self.v = torch.zeros_like(flat)
        self.one_bit = Compressor(workers, flat.numel())
        self.steps = 0
        self.last = flat.clone()  # the model of the last sync
        self.rate, self.kept = 0.0, 1.0
        # counters of the two schedules
        self.next_variance, self.variance_count, self.variance_gap = 1, 0, 1
        self.next_sync, self.interval, self.local_count = 1, 1, 0
        self.had = {"variance": False, "sync": False, "onebit": False}

    def rounds_now(self) -> None:
        """What this step has, by counting on; afterwards in `had`."""
        t = self.steps
        if self.deepspeed:
            variance = t <= self.warmup and t % self.variance_gap == 0
            if variance:
                self.variance_count += 1
                if self.variance_count == self.kappa:
                    self.variance_count, self.variance_gap = 0, 2 * self.variance_gap
            sync = t <= self.warmup or t % self.interval == 0
            if t > self.warmup:
                self.local_count += 1
                if self.local_count == self.doubling:
                    self.local_count, self.interval = 0, min(self.limit, 2 * self.interval)
            self.had = {"variance": variance, "sync": sync, "onebit": sync and not variance}
            return
        variance = t <= self.warmup and t == self.next_variance
        if variance:
            self.next_variance = t + 2 ** (self.variance_count // self.kappa)
            self.variance_count += 1
        sync = t <= self.warmup or t == self.next_sync
        if sync:
            if t >= self.warmup:
                self.interval = min(self.limit, 2 ** ((t - self.warmup) // self.doubling))
            self.next_sync = t + self.interval
        self.had = {"variance": variance, "sync": sync, "onebit": sync}

    @torch.no_grad()
    def step(self, grads: Tensor, lr: float) -> None:
        """grads: [workers, size], each at its own worker's x."""
        self.steps += 1
        self.rounds_now()
        mean = grads[0].clone()
        for g in grads[1:]:
            mean += g
        mean /= self.n
        if self.deepspeed and self.steps <= self.warmup:
            if self.had["variance"]:
                self.refresh(mean)
            else:
                mean = self.one_bit.mean(grads, self.v > 0)
            for w in range(self.n):
                self.m[w].lerp_(mean, 1 - self.betas[0])
            self.move(lr)
            self.last = self.x[0].clone()
            return
        if self.deepspeed and self.steps == self.warmup + 1:
            self.one_bit.reset()
        live = self.v > 0
        if lr:
            for w in range(self.n):
                self.m[w].lerp_(grads[w], 1 - self.betas[0]).mul_(live)
                self.u[w].add_(self.m[w], alpha=lr)
                if self.deepspeed:
                    self.u[w].addcmul_(self.x[w], self.denominator(), value=lr * self.decay)
            self.rate += lr
            if not self.deepspeed:
                self.kept *= 1 - lr * self.decay
        if not self.had["sync"]:
            self.move(lr)
            return
        u = self.one_bit.mean(self.u, live)
        if self.rate:
            self.m[:] = u / self.rate
        x = self.last * self.kept if self.kept != 1.0 else self.last
        self.x[:] = x - u / self.denominator() * live
        self.last = self.x[0].clone()
        self.u.zero_()
        self.rate, self.kept = 0.0, 1.0
        if self.had["variance"]:
            self.refresh(mean)

    def denominator(self) -> Tensor:
        return self.v.sqrt() + self.eps

    def refresh(self, mean: Tensor) -> None:
        self.v.mul_(self.betas[1]).addcmul_(mean, mean, value=1 - self.betas[1])

    def move(self, lr: float) -> None:
        for w in range(self.n):
            self.x[w].mul_(1 - lr * self.decay)
            self.x[w].add_(self.m[w] / self.denominator() * (self.v > 0), alpha=-lr)
