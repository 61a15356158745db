"""One-process oracles: the methods written down plainly, with state [workers, ...], to hold the real ones against.

They share no code with the package, except that 1-bit Adam's is told which elements make up a unit and a chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

SERVER = 1 << 24
SELECT = 1 << 29


def philox(counter: list[np.ndarray], key: list[int]) -> list[np.ndarray]:
    """Philox 4x32-10, one block per array element, in uint64."""
    mask, s32 = np.uint64(0xFFFFFFFF), np.uint64(32)
    c = [x.astype(np.uint64) for x in counter]
    k0, k1 = key
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> s32) ^ c[1] ^ np.uint64(k0), b & mask, (a >> s32) ^ c[3] ^ np.uint64(k1), a & mask]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def draws(elements: np.ndarray, *, seed: int, step: int, stream: int) -> Tensor:
    """The 16-bit random number of each element, int64."""
    block = elements // 8
    full = np.zeros_like(block)
    counter = [block & 0xFFFFFFFF, block >> 32, full + step, full + stream]
    words = np.stack(philox(counter, [seed & 0xFFFFFFFF, seed >> 32]))
    lane = elements % 8
    word = words[lane // 2, np.arange(len(elements))]
    return torch.from_numpy(((word >> (16 * (lane % 2)).astype(np.uint64)) & np.uint64(0xFFFF)).astype(np.int64))


def element_numbers(params: list[Tensor]) -> list[np.ndarray]:
    """Each parameter's element numbers: last parameter first, each starting at a multiple of 32."""
    numbers: list[np.ndarray] = []
    start = 0
    for p in reversed(params):
        numbers.append(np.arange(start, start + p.numel(), dtype=np.int64))
        start += -(-p.numel() // 32) * 32
    return numbers[::-1]


class Layout:
    """Where a model's parameters lie among the elements 0 .. d-1."""

    def __init__(self, model: nn.Module, ranks: int = 1) -> None:
        """ranks: among which the elements can be cut, in words of 32."""
        self.params = list(model.parameters())
        self.where = [torch.from_numpy(e) for e in element_numbers(self.params)]
        self.d = -(-sum(-(-p.numel() // 32) for p in self.params) // ranks) * 32 * ranks

    def gather(self, tensors: list[Tensor]) -> Tensor:
        out = torch.zeros(self.d)
        for where, t in zip(self.where, tensors, strict=True):
            out[where] = t.detach().flatten().float()
        return out

    def parameters(self) -> Tensor:
        return self.gather(self.params)

    @torch.no_grad()
    def load(self, flat: Tensor) -> None:
        for where, p in zip(self.where, self.params, strict=True):
            p.copy_(flat[where].view_as(p))

    def gradients(self, loss: Callable[[], Tensor]) -> Tensor:
        for p in self.params:
            p.grad = None
        loss().backward()
        return self.gather([torch.zeros_like(p) if p.grad is None else p.grad for p in self.params])


def copied(bits: Tensor, elements: np.ndarray, seed: int, step: int) -> Tensor:
    """The bit of one of n = 2^k workers for each element, drawn by k random bits: bool[n, d] -> bool[d]."""
    worker = np.zeros(len(elements), np.int64)
    block, place = elements // 128, elements % 128
    zero = np.zeros_like(block)
    for level in range(len(bits).bit_length() - 1):
        counter = [block & 0xFFFFFFFF, block >> 32, zero + step, zero + SELECT + level]
        words = np.stack(philox(counter, [seed & 0xFFFFFFFF, seed >> 32]))
        word = words[place // 32, np.arange(len(elements))]
        worker += ((word >> (place % 32).astype(np.uint64)) & np.uint64(1)).astype(np.int64) << level
    return bits.gather(0, torch.from_numpy(worker).unsqueeze(0)).squeeze(0)


class Birder:
    """Birder over `workers` workers: state m, b [workers, numel] for each parameter, x shared."""

    def __init__(
        self,
        params: list[Tensor],
        workers: int,
        lr: float,
        beta: float = 0.95,
        weight_decay: float = 0.0,
        decoupled: bool = True,
        hold: bool = False,
        seed: int = 0,
        parts: list[tuple[int, int, int]] | None = None,
        beta2: float | None = None,
        weyl: bool = False,
        exact: bool = False,
    ) -> None:
        """parts: for the one-phase form (start, end, size) of each unit: its elements, and those of one shard.

        weyl: a bit's threshold is a 32-bit word, drawn once in its upper half, that goes round by a number in each step.
        exact: u itself in the place of its bits.
        """
        self.exact = exact
        self.parts, self.beta2, self.weyl = parts, beta2, weyl
        self.params, self.workers, self.lr, self.beta, self.seed = params, workers, lr, beta, seed
        self.weight_decay, self.decoupled, self.hold = weight_decay, decoupled, hold
        self.elements = element_numbers(params)
        self.m = [torch.zeros(workers, p.numel()) for p in params]
        self.b = [torch.zeros(workers, p.numel()) for p in params]
        self.active = [torch.zeros(p.numel(), dtype=torch.bool) for p in params]
        self.steps = 0

    @torch.no_grad()
    def step(self, grads: list[list[Tensor]]) -> None:
        """grads[worker][parameter]."""
        self.steps += 1
        for i, p in enumerate(self.params):
            bits = torch.stack([self._worker(w, i, grads[w][i].flatten(), p) for w in range(self.workers)])
            if self.exact:
                q = sum(bits[1:], bits[0]) / self.workers
            else:
                if self.parts is None:
                    plus = self._server(bits, self.elements[i])
                else:
                    plus = bits.gather(0, self._owners(self.elements[i]).unsqueeze(0)).squeeze(0)
                q = torch.where(plus, 1.0, -1.0)
            self.active[i] |= (self.b[i] > 0).any(0)
            if self.decoupled and self.weight_decay:
                p.mul_(1 - self.lr * self.weight_decay)
            p.sub_((self.lr * q * self.active[i]).view_as(p))

    def _server(self, bits: Tensor, elements: np.ndarray) -> Tensor:
        """The bit of one worker, drawn by log2(n) random bits; for odd n the average against a random number."""
        n = self.workers
        if self.weyl and n > 1:
            draw = self._turned(elements, SERVER, 0x6A09E667, 0)
            return draw < (bits.sum(0) * 65536 + n // 2) // n
        if n & (n - 1):
            draw = draws(elements, seed=self.seed, step=self.steps, stream=SERVER)
            return draw < (bits.sum(0) * 65536 + n // 2) // n
        return copied(bits, elements, self.seed, self.steps)

    def _owners(self, elements: np.ndarray) -> Tensor:
        """The worker whose bit each element takes: one draw for every n words of 32 elements of a shard."""
        assert self.parts is not None
        (start, size) = next((a, s) for a, end, s in self.parts if a <= elements[0] < end)
        first = start + (elements - start) // size * size  # of the shard
        word = (elements - first) // 32
        group = first // 32 + word // self.workers * self.workers
        zero = np.zeros_like(group)
        counter = [group & 0xFFFFFFFF, group >> 32, zero + (0 if self.weyl else self.steps), zero + (1 << 25)]
        drawn = philox(counter, [self.seed & 0xFFFFFFFF, self.seed >> 32])[0]
        shift = ((drawn * np.uint64(self.workers)) >> np.uint64(32)).astype(np.int64)
        turn = self.steps if self.weyl else 0
        return torch.from_numpy((word % self.workers + shift + turn) % self.workers)

    def _turned(self, elements: np.ndarray, stream: int, by: int, ahead: int) -> Tensor:
        word = draws(elements, seed=self.seed, step=0, stream=stream) * 2**16 + self.steps * by + ahead
        return (word % 2**32) >> 16

    def _worker(self, w: int, i: int, g: Tensor, p: Tensor) -> Tensor:
        if not self.decoupled:
            g = g + self.weight_decay * p.flatten()
        m, b = self.m[i][w], self.b[i][w]
        idle = g == 0
        second = self.beta if self.beta2 is None else self.beta2
        m.copy_(self.beta * m + (1 - self.beta) * g)
        b.copy_(torch.where(idle & self.hold, b, second * b + (1 - second) * g.abs()))
        if self.beta2 is None:
            u = torch.where(b > 0, m / b, 0.0)
        else:  # m/(1 - beta^t) over b/(1 - beta2^t)
            u = torch.where(b > 0, m * ((1 - second**self.steps) / (1 - self.beta**self.steps)) / b, 0.0).clamp(-1, 1)
        if self.exact:
            return u
        threshold = torch.floor(u * 32768 + 32768.5).long()
        if self.weyl:
            ahead = w * 2**32 // self.workers if self.parts is None else 0
            return self._turned(self.elements[i], 0, 0x9E3779B9, ahead) < threshold
        return draws(self.elements[i], seed=self.seed, step=self.steps, stream=w) < threshold


class Lion:
    """Distributed Lion over `workers` workers: m [workers, numel] for each parameter, x shared."""

    def __init__(
        self,
        params: list[Tensor],
        workers: int,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        average: bool = False,
        seed: int = 0,
    ) -> None:
        self.params, self.workers, self.lr, self.betas, self.seed = params, workers, lr, betas, seed
        self.weight_decay, self.average = weight_decay, average
        self.elements = element_numbers(params)
        self.m = [torch.zeros(workers, p.numel()) for p in params]
        self.active = [torch.zeros(p.numel(), dtype=torch.bool) for p in params]
        self.steps = 0

    @torch.no_grad()
    def step(self, grads: list[list[Tensor]]) -> None:
        """grads[worker][parameter]."""
        self.steps += 1
        (beta1, beta2), n = self.betas, self.workers
        for i, p in enumerate(self.params):
            g = torch.stack([grads[w][i].flatten() for w in range(n)])
            plus = torch.lerp(g, self.m[i], beta1) >= 0
            self.m[i].lerp_(g, 1.0 - beta2)
            ones = plus.sum(0)
            if self.average:
                q = ones.float() * (2 / n) - 1.0
            else:
                tie = self._drawn(plus, self.elements[i])
                q = torch.where(torch.where(2 * ones == n, tie, 2 * ones > n), 1.0, -1.0)
            self.active[i] |= (self.m[i] != 0).any(0)
            p.mul_(1.0 - self.lr * self.weight_decay)
            p.sub_((q * self.active[i]).view_as(p), alpha=self.lr)

    def _drawn(self, plus: Tensor, elements: np.ndarray) -> Tensor:
        """Where votes are even: the bit of one worker, or a bit that is drawn against their average."""
        n = self.workers
        if n & (n - 1):
            return draws(elements, seed=self.seed, step=self.steps, stream=SERVER) < 65536 // 2
        return copied(plus, elements, self.seed, self.steps)


class OneBitAdam:
    """1-bit Adam over `workers` workers, on one flat unit of `padded` elements: errors [workers, ...]."""

    def __init__(
        self, flat: Tensor, workers: int, lr: float, warmup_steps: int, betas: tuple[float, float] = (0.9, 0.999)
    ) -> None:
        self.x, self.n, self.lr, self.warmup, self.betas = flat, workers, lr, warmup_steps, betas
        self.m, self.v = torch.zeros_like(flat), torch.zeros_like(flat)
        self.worker_error = torch.zeros(workers, flat.numel())
        self.server_error = torch.zeros(workers, flat.numel() // workers)
        self.steps = 0

    @staticmethod
    def sign(z: Tensor) -> Tensor:
        return torch.where(z >= 0, 1.0, -1.0)

    def compressed(self, z: Tensor, live: Tensor) -> Tensor:
        squares = z.double().square().sum()  # in fp64 the order of summation does not show in the scale
        return (squares / max(int(live.sum()), 1)).sqrt().float() * self.sign(z)

    @torch.no_grad()
    def step(self, grads: Tensor) -> None:
        """grads: [workers, padded]."""
        self.steps += 1
        b1, b2 = self.betas
        if self.steps <= self.warmup:
            g = grads[0].clone() / self.n
            for other in grads[1:]:
                g += other / self.n
            self.m.lerp_(g, 1 - b1)
            self.v.mul_(b2).addcmul_(g, g, value=1 - b2)
        else:
            live = self.v > 0
            sent = []
            for w in range(self.n):
                z = ((1 - b1) * grads[w] + b1 * self.m + self.worker_error[w]) * live
                c = self.compressed(z, live)
                self.worker_error[w] = (z - c) * live
                sent.append(c)
            size = self.x.numel() // self.n
            for r in range(self.n):
                part = slice(r * size, (r + 1) * size)
                a = torch.zeros(size)
                for c in sent:  # the scale is divided by n, then the signs are added up
                    a += self.sign(c[part]) * (c.abs().max() / self.n)
                a = (a + self.server_error[r]) * live[part]
                c = self.compressed(a, live[part])
                self.server_error[r] = (a - c) * live[part]
                self.m[part] = c * live[part]
        root = self.v.double().sqrt().float()  # rounded to nearest, which torch's root of fp32 is not
        denominator = root / (1 - b2 ** min(self.steps, self.warmup)) ** 0.5 + 1e-8
        self.x.addcdiv_(self.m, denominator, value=-self.lr / (1 - b1**self.steps))


class EfficientAdam:
    """Efficient-Adam over `workers` workers, on one flat unit: states [workers, ...]. real: bool[padded], not padding."""

    def __init__(self, flat: Tensor, real: Tensor, workers: int, lr: float, weight_decay: float = 0.0) -> None:
        self.x, self.real, self.n, self.weight_decay = flat, real, workers, weight_decay
        self.lr = float(np.float32(lr))
        self.m, self.v, self.error = (torch.zeros(workers, flat.numel()) for _ in range(3))
        self.server_error = torch.zeros(workers, flat.numel() // workers)
        self.steps = 0

    def compressed(self, z: Tensor, live: Tensor) -> Tensor:
        scale = (z.double().square().sum() / max(int(live.sum()), 1)).sqrt().float()
        return torch.where(z >= 0, scale, -scale)

    @torch.no_grad()
    def step(self, grads: Tensor) -> None:
        """grads: [workers, padded]."""
        self.steps += 1
        b1, b2, t = 0.9, 0.999, self.steps
        self.m = b1 * self.m + grads * (1 - b1)
        self.v = b2 * self.v + grads * grads * (1 - b2)
        wanted = self.m / (self.v.sqrt() / (1 - b2**t) ** 0.5 + 1e-8) * (self.lr / (1 - b1**t))
        sent = torch.zeros_like(wanted)
        for w in range(self.n):
            z = (wanted[w] + self.error[w]) * self.real
            sent[w] = self.compressed(z, self.real)
            self.error[w] = (z - sent[w]) * self.real
        mean = torch.zeros_like(self.x)
        for part, error in zip(torch.arange(len(self.x)).chunk(self.n), self.server_error, strict=True):
            a, live = torch.zeros(len(part)), self.real[part]
            for c in sent:  # the scale is divided by n, then the signs are added up
                a += torch.sign(c[part]) * (c.abs().max() / self.n)
            a = (a + error) * live
            mean[part] = self.compressed(a, live)
            error.copy_((a - mean[part]) * live)
        seen = (self.v != 0).any(0)
        self.x.mul_(1 - self.lr * self.weight_decay).sub_(mean * (seen & self.real))


def local_gradients(
    model: nn.Module, loss: Callable[[nn.Module, int, int], Tensor], workers: int, step: int
) -> list[list[Tensor]]:
    """grads[worker][parameter] of `loss(model, worker, step)` at the model's present parameters."""
    grads = []
    for w in range(workers):
        model.zero_grad()
        loss(model, w, step).backward()
        grads.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()])
    return grads


def worker_gradients(
    model: nn.Module, loss: Callable[[nn.Module, int, int], Tensor], workers: int, per_worker: int, step: int
) -> list[list[Tensor]]:
    """grads[worker][parameter]: the mean of `local_gradients` over a worker's `per_worker` ranks, in their order."""
    local = local_gradients(model, loss, workers * per_worker, step)
    grads = []
    for w in range(workers):
        mean = local[w * per_worker]
        for other in local[w * per_worker + 1 : (w + 1) * per_worker]:
            mean = [a + b for a, b in zip(mean, other, strict=True)]
        grads.append([g / per_worker for g in mean] if per_worker > 1 else mean)
    return grads
