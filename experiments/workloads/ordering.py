"""Random streams and the split of an epoch over ranks: `Shuffled`, the workloads whose samples have numbers."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.workloads.base import Batch, Shard, Workload, leave_out
from launch.errors import UserError


def generator(*keys: int | str) -> torch.Generator:
    """A CPU generator whose stream depends on `keys` alone, e.g. `generator("order", seed, epoch)`.

    torch's global generator is left untouched: dropout must not depend on how data is read.
    """
    words = [zlib.crc32(key.encode()) if isinstance(key, str) else key for key in keys]
    return torch.Generator().manual_seed(int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0]) >> 1)


@contextlib.contextmanager
def as_global(stream: torch.Generator) -> Iterator[None]:
    """Lets code that draws from torch's global CPU generator, as torchvision's transforms do, draw from `stream`."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.set_state(stream.get_state())
        yield


class Shuffled(Workload):
    """A workload whose training samples are numbered, and shuffled in every epoch.

    _train: the samples, which `prepare` sets.
    """

    _train: Any

    @property
    def training_samples(self) -> int:
        """How many there are, once `prepare` has been called."""
        return len(self._train)

    def batch(self, indices: Tensor, shard: Shard, key: tuple[int, int, int, int]) -> Batch:
        """The training samples of these numbers. key: (seed, epoch, rank, step), of what is drawn at random for them.

        Not needed where a subclass has its own `train_batches`.
        """
        raise NotImplementedError

    def steps_per_epoch(self, world_size: int, batch_per_rank: int) -> int:
        """Full batches of every rank; the remainder is dropped so that ranks stay in step. Raises UserError for none."""
        steps = self.training_samples // (world_size * batch_per_rank)
        if steps == 0:
            raise UserError(
                f"{self.data_name} has {self.training_samples} training samples, fewer than one batch of {batch_per_rank} "
                f"on each of {world_size} ranks: lower train.batch_per_rank or give more data"
            )
        return steps

    def order(
        self, shard: Shard, batch_per_rank: int, *, seed: int, epoch: int, start: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Yields (step, indices[batch_per_rank]) of this rank, from step `start`.

        One permutation per (seed, epoch), the same on all ranks; step t takes its t-th block of world_size batches and
        rank r the r-th batch in it, so ranks see disjoint samples.
        """
        steps = self.steps_per_epoch(shard.world_size, batch_per_rank)
        order = torch.randperm(self.training_samples, generator=generator("order", seed, epoch))
        for step in range(start, steps):
            first = (step * shard.world_size + shard.rank) * batch_per_rank
            yield step, order[first : first + batch_per_rank]

    def train_batches(
        self, shard: Shard, batch_per_rank: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        for step, indices in self.order(shard, batch_per_rank, seed=seed, epoch=epoch, start=start):
            yield self.batch(indices, shard, (seed, epoch, shard.rank, step))


def fixed_choice(count: int, limit: int | None, name: str) -> list[int]:
    """Sorted indices of `limit` out of `count` items, always the same ones, whatever the seed of the run."""
    if limit is None or limit >= count:
        return list(range(count))
    return sorted(torch.randperm(count, generator=generator("choice", name))[:limit].tolist())


def choose_out(count: int, number: int | None) -> tuple[list[int], list[int]]:
    """(to train on, held out), sorted indices of training images: `number` are held out, always the same ones.

    Raises UserError where nothing would be left.
    """
    held = fixed_choice(count, number or 0, "held_out")
    return leave_out([*sorted(set(range(count)).difference(held)), *held], number, "images")
