"""`Workload`: model, batches, loss and evaluation of one task. The training loop knows nothing else about a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from launch.errors import UserError
from launch.words import shortened

Batch = Any
Samples = TypeVar("Samples", list[Any], Tensor)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shard:
    """Which part of the data this process sees: `rank` of `world_size`, on `device`."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU


class Workload(ABC):
    """One task. Constructed on every rank with the same arguments, from conf/workload/<name>.yaml.

    Class or instance attributes that the harness reads:

    name:             workload name, e.g. "resnet50".
    metric:           name of the metric in what `evaluate` returns, e.g. "top1", "f1", "perplexity".
    higher_is_better: whether a larger metric is better.
    target:           the published value of the metric, or None when none was published.
    data_name:        what the data is, e.g. "ImageNet" or "synthetic 64x64 images".
    synthetic:        True when the data is random: such a run measures time and bytes, never accuracy.
    sample:           what one sample is called in rates: "images", "sequences", "tokens".
    eval_set:         what `evaluate` looks at, in the form that `scores` takes; made by `prepare`.
    held_out_set:     likewise what is held out of training, to choose hyper-parameters by the metric on it, `held_out`;
                      None where nothing is.

    Arguments out of range and missing or broken data raise `launch.errors.UserError` with one line, from
    `__init__` or `prepare`, before any process group exists where that is possible.
    """

    name: str
    metric: str
    higher_is_better: bool = True
    target: float | None = None
    data_name: str
    synthetic: bool = False
    sample: str = "samples"
    eval_set: Any
    held_out_set: Any = None

    @property
    def data(self) -> dict[str, Any]:
        """The record's `data`."""
        return {"name": self.data_name, "synthetic": self.synthetic}

    @abstractmethod
    def check(self) -> None:
        """Cheap check of arguments and files, run once in the launcher before any worker starts. Raises UserError.

        Must not import torchvision, transformers or datasets, nor read whole files.
        """

    def data_files(self) -> Sequence[Path]:
        """What it reads at `data.path`: files, or folders. Their content tells apart two data sets of one name.

        Default: nothing, as for data that are the same everywhere.
        """
        return ()

    def weight_files(self) -> Sequence[Path]:
        """Files or folders of the weights that the model begins with. Default: none."""
        return ()

    @abstractmethod
    def prepare(self, shard: Shard) -> None:
        """Loads the data (this rank's view of it). Called once on every rank, before `build_model`."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model on CPU, in fp32, initialised from torch's global generator (same seed on all ranks)."""

    @abstractmethod
    def steps_per_epoch(self, world_size: int, batch_per_rank: int) -> int:
        """Number of batches that `train_batches` yields for one epoch: the same on every rank, at least 1."""

    @abstractmethod
    def train_batches(
        self, shard: Shard, batch_per_rank: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        """This rank's batches of one epoch, as tensors on `shard.device`, each of `batch_per_rank` samples.

        A pure function of its arguments: order and augmentation come from a separate generator, seeded with (seed,
        epoch, rank), never from torch's global one. `start` skips that many batches and then yields exactly what an
        uninterrupted iteration would have yielded (resume). Every rank yields the same number of batches.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean loss over the batch: a scalar with a graph. `model` may be wrapped (DDP): call it, don't reach into it."""

    def evaluate(self, model: nn.Module, shard: Shard) -> dict[str, float]:
        """Metrics over the whole evaluation set, including `self.metric`. Called on every rank, returns the same on all.

        `held_out` is the metric on what is held out. `model` is the bare module in eval mode, under no_grad. An empty dict
        for synthetic data.
        """
        if self.synthetic:
            return {}
        found = self.scores(model, self.eval_set, shard)
        if self.held_out_set is not None:
            found["held_out"] = self.scores(model, self.held_out_set, shard)[self.metric]
        return found

    def scores(self, model: nn.Module, samples: Any, shard: Shard) -> dict[str, float]:
        """Metrics over samples in the form of `eval_set`. Not needed where all data are synthetic.

        Work is split over ranks; sums are joined with `experiments.workloads.base.all_sum`.
        """
        raise NotImplementedError

    def samples(self, batch_per_rank: int) -> int:
        """Samples (in units of `self.sample`) that one batch holds."""
        return batch_per_rank

    def param_groups(self, model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        """Parameter groups for the optimizer: trainable parameters that decay, and those that do not, where there are any."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        groups = [
            {
                "params": [p for name, p in named if self.decays(name, p) is decays],
                "weight_decay": decays * weight_decay,
            }
            for decays in (True, False)
        ]
        return groups if groups[1]["params"] else groups[:1]

    def decays(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether weight decay is for this parameter. Default: for all of them."""
        return True

    def communicator(self, hierarchical: bool) -> Callable[..., Any] | None:
        """What `birder.attach` takes as `communicator`; None, the default, is its own choice."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Rank-local training state besides the model (e.g. the hidden state of a recurrent net). Tensors and scalars."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 most workloads keep no state
        """Restores what `state_dict` returned."""


def at_least(least: int, **arguments: int | None) -> None:
    """Raises UserError for an argument of a workload that is below `least`. None is not set."""
    for key, value in arguments.items():
        if value is not None and value < least:
            raise UserError(f"workload.{key}={shortened(str(value))} must be {least} or more")


def one_of(known: Collection[str], **arguments: str) -> None:
    """Raises UserError for an argument of a workload that is none of these."""
    for key, value in arguments.items():
        if value not in known:
            raise UserError(f"workload.{key}={shortened(str(value))} is unknown: one of {', '.join(known)}")


def leave_out(samples: Samples, number: int | None, what: str) -> tuple[Samples, Samples]:
    """(to train on, held out): the last `number` samples are held out; None or 0: none. what: what the error calls them.

    Raises UserError where nothing would be left.
    """
    kept = len(samples) - (number or 0)
    if number and kept <= 0:
        raise UserError(f"workload.held_out={number} leaves nothing of {len(samples)} training {what}")
    return samples[:kept], samples[kept:]


def all_sum(values: list[float], shard: Shard) -> list[float]:
    """Element-wise sum of `values` over all ranks, in float64. The identity when no process group is running."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return list(values)
    # NCCL cannot reduce CPU tensors; float64 exists on both kinds of device.
    total = torch.tensor(values, dtype=torch.float64, device=shard.device)
    dist.all_reduce(total)
    return [float(v) for v in total.tolist()]
