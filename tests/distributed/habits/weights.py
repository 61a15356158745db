"""Weights that the script itself changes: loaded, clipped."""

from __future__ import annotations

import contextlib
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.habits.base import (
    EVERYWHERE,
    habit,
)
from tests.distributed.habits.script import DEVICE, NAMES, SIZES, Gradients, Script, Stop, drawn


class Loaded(Script):
    """Other weights, the same on all ranks, are loaded before step 5 (not a sync of any method here)."""

    accelerate = False

    ways = EVERYWHERE
    twin = None
    steps = 13
    at: ClassVar[int] = 6
    says = r"parameters|weights|model|changed"

    def applies(self) -> bool:
        return not self.method.scaled and self.method.options.get("weight_decay", 0.0) in (0, 0.0)

    def new(self) -> dict[str, Tensor]:
        gen = torch.Generator().manual_seed(5)
        return {n: torch.randn(shape, generator=gen).to(DEVICE) for n, shape in SIZES.items()}

    def load(self) -> None:
        self.inner_model().load_state_dict(self.new())

    def inner_model(self) -> nn.Module:
        return self.model

    def step(self) -> None:
        if self.t == self.at:
            self.load()
            self.loaded = self.values()
        super().step()

    def finish(self) -> None:
        plain = PlainLonger(self.method, self.way, self.rank)
        plain.build()
        plain.record()
        for plain.t in range(1, self.steps + 1):
            plain.step()
            plain.record()
        new = self.new()
        # Ranks that meet after such a change average their models, and get all that was withheld.
        all_moves = max(float(np.abs(x[n] - plain.trace[0][n]).max()) for x in plain.trace for n in NAMES)
        near = all_moves if self.method.meets else 2e-4
        for t in range(self.at, self.steps + 1):
            for n in NAMES:
                values = self.trace[t][n], plain.trace[t][n], plain.trace[self.at - 1][n]
                mine, theirs, before = map(self.mean, values)
                goal = new[n].cpu().numpy() + theirs - before
                if not np.allclose(mine, goal, atol=near):
                    raise Stop(
                        f"step {t}: {n} is {np.abs(mine - goal).max():.3g} from where the loaded weights would go"
                    )
        for pick in (min, max):
            spread, usual = (pick(self.spread(t) for t in trace[-5:]) for trace in (self.trace, plain.trace))
            if spread > 3 * usual + 1e-6:
                raise Stop(f"ranks' models are {spread:.3g} apart afterwards ({usual:.3g} without loading)")
        if hasattr(plain, "attachment"):
            plain.attachment.close()

    def mean(self, x: np.ndarray) -> np.ndarray:
        t = torch.from_numpy(x).clone()
        if self.way.ranks > 1:
            dist.all_reduce(t)
        return (t / self.way.ranks).numpy()

    def spread(self, values: dict[str, np.ndarray]) -> float:
        if self.way.ranks == 1:
            return 0.0
        flat = torch.cat([torch.from_numpy(v).flatten() for v in values.values()])
        low, high = flat.clone(), flat.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN)
        dist.all_reduce(high, dist.ReduceOp.MAX)
        return float((high - low).max())


class PlainLonger(Script):
    steps = 13


@habit
class LoadWeights(Loaded):
    """model.load_state_dict of other weights in mid-training"""

    ways = Script.ways


@habit
class LoadWeightsByCopy(Loaded):
    """the same by p.data.copy_, between two steps"""

    def load(self) -> None:
        for n, p in self.named().items():
            new = self.new()[n]
            if self.way.sharded:
                from torch.distributed.tensor import distribute_tensor

                p.data.copy_(distribute_tensor(new, p.device_mesh, p.placements))
            else:
                p.data.copy_(new)


@habit
class LoadWeightsByData(Loaded):
    """the same by p.data = new"""

    ways = Script.ways

    def load(self) -> None:
        for n, p in self.named().items():
            p.data = self.new()[n]


@habit
class LoadWeightsAfterSync(LoadWeights):
    """the same one step later"""

    at = 7


@habit
class LoadWeightsLater(LoadWeights):
    """the same two steps later"""

    at = 8


@habit
class LoadWeightsBetween(LoadWeights):
    """the same between backward and step"""

    races = True
    ways = Script.ways
    since = Loaded.at

    def step(self) -> None:
        Script.step(self)

    def between(self) -> None:
        if self.t == self.at:
            self.load()


LIMIT = 0.05


@habit
class WeightClipping(Script):
    """p.clamp_(-0.05, 0.05) after every step"""

    accelerate = False

    ways = EVERYWHERE
    steps = 18
    says = r"parameters|weights|model|changed"

    def after(self) -> None:
        with torch.no_grad():
            for p in self.model.parameters():
                p.clamp_(-LIMIT, LIMIT)

    def finish(self) -> None:
        if self.way.sharded:
            return
        plain = PlainClippedLater(self.method, self.way, self.rank)
        plain.build()
        plain.record()
        for plain.t in range(1, self.steps + 1):
            plain.step()
            plain.record()
        spreads = [Loaded.spread(self, t) for t in self.trace]  # type: ignore[arg-type]
        usual = max(Loaded.spread(self, t) for t in plain.trace)  # type: ignore[arg-type]
        if min(spreads[-6:]) > 1e-7 and min(Loaded.spread(self, t) for t in plain.trace[-6:]) <= 1e-7:  # type: ignore[arg-type]
            raise Stop(f"ranks' models do not come together any more: {min(spreads[-6:]):.3g} apart at best")
        if max(spreads[-6:]) > 3 * usual + 1e-7:
            raise Stop(f"ranks' models come apart by {max(spreads[-6:]):.3g} (without clipping: {usual:.3g})")
        if hasattr(plain, "attachment"):
            plain.attachment.close()
        if self.method.local or self.method.scaled or (not self.method.elementwise and self.way.ranks > 2):
            return
        for t in range(1, self.steps + 1):
            for n in NAMES:
                moved = plain.trace[t][n] - plain.trace[t - 1][n]
                goal = np.clip(self.trace[t - 1][n] + moved, -LIMIT, LIMIT)
                if not np.allclose(self.trace[t][n], goal, atol=2e-5):
                    raise Stop(
                        f"step {t}: {n} is {np.abs(self.trace[t][n] - goal).max():.3g} from where clipping takes it"
                    )


class PlainClippedLater(Script):
    steps = 18


@habit
class Sam(Script):
    """sharpness-aware minimisation: weights are moved before the second backward pass and put back before the step"""

    races = True
    # A method with local steps may average whole models, where its thread has read the moved weights in the first step alone.
    twin = staticmethod(lambda m, w: None if m.meets and w.overlap else SecondBatch)
    says = r"parameters|weights|changed"
    sync: ClassVar[bool] = False

    def step(self) -> None:
        self.opt.zero_grad()
        with self.ddp.no_sync() if self.way.ranks > 1 else contextlib.nullcontext():
            self.ddp(drawn(self.rank, self.t)).backward()
        kept = [p.detach().clone() for p in self.model.parameters()]
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(p.grad, alpha=0.05)  # type: ignore[arg-type]
        self.opt.zero_grad()
        self.ddp(drawn(self.rank, self.t, 1)).backward()
        self.put_back(kept)
        self.update()

    def put_back(self, kept: list[Tensor]) -> None:
        with torch.no_grad():
            for p, k in zip(self.model.parameters(), kept, strict=True):
                p.copy_(k)


@habit
class SamByData(Sam):
    """the same, and weights are put back by p.data = old"""

    def put_back(self, kept: list[Tensor]) -> None:
        for p, k in zip(self.model.parameters(), kept, strict=True):
            p.data = k


class SecondBatch(Script):
    def gradients(self, t: int, rank: int) -> Gradients:
        return drawn(rank, t, 1)


@habit
class DecayByHand(Script):
    """p.mul_(0.99) between backward and step"""

    races = True
    ways = EVERYWHERE
    twin = staticmethod(lambda m, w: DecayByHandBefore)
    says = r"parameters|weights|changed"

    def shrink(self) -> None:
        with torch.no_grad():
            for p in self.model.parameters():
                p.mul_(0.99)

    def between(self) -> None:
        self.shrink()


class DecayByHandBefore(DecayByHand):
    def backward(self) -> None:
        self.shrink()
        super().backward()

    def between(self) -> None:
        pass


@habit
class Lookahead(Script):
    """every third step the weights are drawn half-way to a slow copy of them"""

    ways = EVERYWHERE
    twin = None

    def prepared(self) -> None:
        self.slow = [p.detach().clone() for p in self.model.parameters()]

    def after(self) -> None:
        if self.t % 3 == 0:
            with torch.no_grad():
                for p, s in zip(self.model.parameters(), self.slow, strict=True):
                    s.lerp_(p.detach(), 0.5)
                    p.copy_(s)


@habit
class ConvertedMidway(Script):
    """model.bfloat16() in mid-training"""

    ways = ("DDP", "one process")
    torch_fails = True
    refuses = True
    since = 4
    says = r"float32"

    def step(self) -> None:
        if self.t == 4:
            self.model.bfloat16()
        super().step()
