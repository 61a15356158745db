"""The workload `replay`: one cell at full size through the ordinary harness (`+exp=replay_bert`, `+exp=replay_resnet50`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from birder.comm import Communicator
from experiments.cells import timelines
from experiments.cells.model import ReplayModel
from experiments.cells.nodes import maker
from experiments.cells.timelines import bucket_delay_ms
from experiments.workloads.base import Shard, Workload, at_least
from launch.errors import UserError

DILATION = 20.0
"""How much slower than the GPU a replay runs where nobody says (`auto`)."""


class Replay(Workload):
    """Every rank is a node of the timeline's GPUs: its parameters and its gradients' times, dilated.

    timeline:     name of a file of results/timelines, or a path.
    dilation:     the clock runs this much slower: a positive number, or "auto" for `DILATION`. An emulated link must be
                  slower by the same factor, which is what `cluster.dilation` says.
    communicates: whether gradients are sent (comm.enabled): dense methods then wait for a node's own GPUs too.
    ring:         flat methods' all-gather as NCCL's ring; false: pairwise (`FlatNode`).
    steps:        steps that one epoch has.
    """

    name = "replay"
    metric = "none"
    synthetic = True
    sample = "samples"

    def __init__(
        self,
        timeline: str,
        dilation: float | str = "auto",
        communicates: bool = True,
        ring: bool = True,
        steps: int = 10,
    ) -> None:
        if dilation == "auto":
            dilation = DILATION
        if isinstance(dilation, str) or dilation <= 0:
            raise UserError(f"workload.dilation must be auto or a positive number, got {dilation}")
        at_least(1, steps=steps)
        self.timeline = timelines.load(timeline)
        self.dilation, self.communicates, self.ring, self.steps = float(dilation), communicates, ring, steps
        self.data_name = (
            f"replay of {self.timeline.name} ({self.timeline.gpu}), {self.timeline.gpus_per_node} GPUs a rank"
        )
        self.model: ReplayModel | None = None

    def check(self) -> None:
        """The constructor has seen to everything."""

    def prepare(self, shard: Shard) -> None:
        """There is no data."""

    def build_model(self) -> nn.Module:
        delay = bucket_delay_ms(self.timeline) if self.communicates else 0.0
        self.model = ReplayModel(self.timeline, self.dilation, delay_ms=delay)
        return self.model

    def steps_per_epoch(self, world_size: int, batch_per_rank: int) -> int:
        return self.steps

    def train_batches(
        self, shard: Shard, batch_per_rank: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Tensor]:
        for _ in range(start, self.steps):
            yield torch.zeros(1, device=shard.device)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum()

    def evaluate(self, model: nn.Module, shard: Shard) -> dict[str, float]:
        return {}

    def samples(self, batch_per_rank: int) -> int:
        """What the GPUs of a node take in one step, whatever the batch is called here."""
        return self.timeline.batch_per_gpu * self.timeline.gpus_per_node

    def communicator(self, hierarchical: bool) -> Callable[..., Any] | None:
        def make(*arguments: Any) -> Communicator:
            assert self.model is not None
            self.model.delay_ms = 0.0  # called for methods that compress, and theirs is another way
            return maker(self.model, hierarchical, self.timeline.gpus_per_node, self.ring)(*arguments)

        return make
