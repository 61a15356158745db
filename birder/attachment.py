"""`Attachment`: what connects an optimizer to a wrapped model, whichever wrapper it is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from birder.comm import ByteCounter, Link, Pipeline, StreamPipeline, ThreadPipeline
from birder.comm.groups import give_back
from birder.comm.link import backend_for
from birder.optimizers.base import BucketOptimizer
from birder.optimizers.contract import WIRES


class Detached:
    """What a copy of a model has in the place of its `Attachment`: nothing. torch gives a copied DDP model no hook."""


class Attachment:
    """The connection that `attach` makes. Copied or pickled, with the model that holds it, it becomes `Detached`: a copy must
    not communicate through the optimizer of the original.

    counter: payload bytes and collectives of this rank, over all steps since its last `reset`.
    own:     the process group that the optimizer's messages have for themselves.
    """

    def __init__(
        self,
        optimizer: BucketOptimizer,
        link: Link,
        overlap: bool,
        communicate: bool,
        own: dist.ProcessGroup | None = None,
    ) -> None:
        # No reference to the model: DDP holds this object where Python's collector sees no cycle.
        self.optimizer = optimizer
        self.link = link
        self.counter: ByteCounter = link.counter
        self.overlap = overlap
        self.communicate = communicate
        optimizer._in_backward = overlap and communicate and optimizer.compressed
        self._own = own
        self._paused = False

    def __reduce__(self) -> tuple[type[Detached], tuple[()]]:
        return Detached, ()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, backward passes neither communicate nor touch the optimizer.

        One such pass makes DDP rebuild its buckets, so that a resumed run has those of the interrupted one.
        """
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def state_bytes(self) -> int:
        """Bytes that the connection itself keeps on this rank between steps: none, all state is the optimizer's."""
        return 0

    def close(self) -> None:
        """Ends the communication threads, if there are any. The optimizer's process group is the next attachment's.

        Not where something failed, or is still under way: what was sent might reach the next one.
        """
        self.optimizer.pipeline.close()
        own, self._own = self._own, None
        if own is not None and self.optimizer.settled:
            give_back(own)

    def all_reduce_mean(self, buffer: Tensor, number: int) -> Future[Any]:
        """Starts to replace `buffer` by its mean over the link's ranks, sent as the optimizer's `wire`; it may change."""
        wire, trace = WIRES[self.optimizer.wire], self.optimizer.pipeline.trace
        with trace.span("encode", number):
            sent = buffer if buffer.dtype == wire else buffer.to(wire)
            sent.div_(self.link.size)
        self.link.count_ring_all_reduce(sent.numel() * sent.element_size())
        began = time.perf_counter()
        work = dist.all_reduce(sent, group=self.link.group, async_op=True)
        assert work is not None

        def finish(future: Future[Any]) -> Tensor:
            reduced = future.value()[0]  # raises what the collective met
            trace.add("wire", number, began, time.perf_counter())
            with trace.span("decode", number):
                return buffer if sent is buffer else buffer.copy_(reduced)

        return work.get_future().then(finish)


def all_finite(values: Tensor) -> Tensor:
    """Whether no element is NaN or infinite, bool[]. One pass, nothing as large as `values` is made: either shows in the
    smallest or the largest."""
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    return torch.stack(torch.aminmax(values)).isfinite().all()


def queue_after_backward(call: Callable[[], None]) -> None:
    """Calls it when the backward pass under way is over, after all that has been queued for its end until now."""
    queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
    queue(call)


def pipeline_for(device: torch.device, group: dist.ProcessGroup) -> Pipeline:
    """What runs exchanges of tensors on `device` over `group` beside backward."""
    if device.type == "cuda":
        return StreamPipeline(device)
    # Two threads need messages that are told apart by tags, which `Link` has on gloo alone.
    return ThreadPipeline() if backend_for(group, device) == "gloo" else Pipeline()


def check_agreement(link: Link, digest: int, device: torch.device) -> None:
    """Raises RuntimeError when ranks have different digests."""
    digests = link.all_gather(torch.tensor([digest], dtype=torch.int64, device=device)).view(-1).tolist()
    odd = [rank for rank, d in enumerate(digests) if d != digests[0]]
    if odd:
        raise RuntimeError(
            f"ranks {odd} differ from rank 0 in model, optimizer, completed steps or arguments of attach: make them alike"
        )
