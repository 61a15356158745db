"""Ranks with different numbers of batches."""

from __future__ import annotations

from tests.distributed.habits.base import (
    DDP_ONLY,
    Plain,
    habit,
)
from tests.distributed.habits.script import Script, drawn


@habit
class JoinUneven(Script):
    """Join with one batch more on the last rank"""

    accelerate = False

    ways = DDP_ONLY
    says = r"Join"
    twin = None
    steps = 3

    def step(self) -> None:
        from torch.distributed.algorithms.join import Join

        with Join([self.ddp]):
            for k in range(3 + (self.rank == self.way.ranks - 1)):
                self.opt.zero_grad()
                self.ddp(drawn(self.rank, self.t, k)).backward()
                self.opt.step()


@habit
class JoinDividesByPresent(JoinUneven):
    """the same, and gradients are divided by the number of ranks that still have batches"""

    refuses = True

    def step(self) -> None:
        from torch.distributed.algorithms.join import Join

        with Join([self.ddp], divide_by_initial_world_size=False):
            for k in range(3 + (self.rank == self.way.ranks - 1)):
                self.opt.zero_grad()
                self.ddp(drawn(self.rank, self.t, k)).backward()
                self.opt.step()


@habit
class JoinEven(Script):
    """Join, all ranks with as many batches"""

    accelerate = False

    ways = DDP_ONLY
    says = r"Join"
    twin = Plain
    steps = 9

    def step(self) -> None:
        from torch.distributed.algorithms.join import Join

        with Join([self.ddp]):
            super().step()
