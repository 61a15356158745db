"""One DistributedDataParallel for methods that take turns."""

# No postponed annotations here: DDP inspects the hook's annotations and wants the classes themselves.
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from birder.hooks.attachment import done


class Ready(NamedTuple):
    """One of DDP's buckets in a pass. seconds: of `perf_counter`, when its gradients were ready."""

    elements: int
    seconds: float
    parameters: list[Tensor]


class _Switch:
    """The hook whose turn it is."""

    current: tuple[Any, Callable[..., Any]] | None = None


def _hook(switch: _Switch, bucket: dist.GradBucket) -> Future[Tensor]:
    assert switch.current is not None, "no method has its turn"
    state, hook = switch.current
    return hook(state, bucket)


def _nothing(ready: list[Ready], bucket: dist.GradBucket) -> Future[Tensor]:
    """Sends nothing: the bucket is unchanged, and noted."""
    ready.append(Ready(bucket.buffer().numel(), time.perf_counter(), bucket.parameters()))
    return done(bucket.buffer())


class SharedDDP(DistributedDataParallel):
    """DDP whose communication hook changes hands. `register_comm_hook` gives it to the newcomer at once.

    One reducer, and so one set of buckets, serves all: DDP rebuilds them once, after the first backward pass.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._switch = _Switch()
        super().register_comm_hook(self._switch, _hook)
        self._comm_hooks.clear()  # `attach` refuses a model with another hook: the switch is none, it has all of them

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        self._switch.current = (state, hook)

    @property
    def hook(self) -> Any:
        """The hook that is in use: to be handed to `use` when the turn comes again."""
        return self._switch.current

    def use(self, hook: Any) -> None:
        """Gives the turn to a hook that was registered before; None to nobody."""
        self._switch.current = hook
        self.broadcast_buffers = True

    def send_nothing(self) -> list[Ready]:
        """Until the next `use`, passes are as any others', and send neither gradients nor buffers.

        Returns a list to which every bucket of every pass is added.
        """
        ready: list[Ready] = []
        self.use((ready, _nothing))
        self.broadcast_buffers = False
        return ready
