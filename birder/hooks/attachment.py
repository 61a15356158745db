"""`Attachment`: what connects an optimizer to a wrapped model, whichever wrapper it is."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from birder.comm import Collectives, Pipeline, Requests, StreamPipeline, ThreadPipeline, Topology, Union, run
from birder.comm.collectives import backend_for, gather_numbers
from birder.comm.groups import give_back
from birder.comm.launcher import Said, said
from birder.comm.nodes import decided
from birder.optim.base import WIRES, BucketOptimizer, Plan
from birder.optim.guards import BACKWARD, TWICE, say, who_is_missing


class Detached:
    """What a copy of a model has where the model has its `Attachment`: nothing. torch gives a copied DDP model no hook, and a
    copy must not communicate through the original's optimizer."""


class NotCopied:
    """What a copy of the model does not take over."""

    def __reduce__(self) -> tuple[type[Detached], tuple[()]]:
        return Detached, ()


@dataclass(eq=False)
class Attachment(NotCopied):
    """The connection that `attach` makes.

    counter: payload bytes and collectives of this rank, over all steps since its last `reset`.
    own:     the process group that the optimizer's messages have for themselves.
    """

    # No reference to the model: DDP holds this object where Python's collector sees no cycle.
    optimizer: BucketOptimizer
    link: Collectives
    overlap: bool
    communicate: bool
    own: dist.ProcessGroup | None = None
    closed: bool = field(default=False, init=False)
    opened: bool = field(default=False, init=False)
    """Whether a step has been taken since `attach`."""
    _paused: bool = field(default=False, init=False)
    _compared: bool = field(default=False, init=False)
    """Whether ranks have compared their steps once."""

    def __post_init__(self) -> None:
        self.counter = self.link.counter
        self.pipeline = self.optimizer.pipeline
        self.optimizer._in_backward = self.overlap and self.communicate and self.optimizer.compressed
        # Models are dropped without a word to anyone, as with torch's own hooks.
        self._dropped = weakref.finalize(self, _end, self.pipeline, self.own)
        self._dropped.atexit = False

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

    def opening(self) -> Requests[None]:
        """Called in `step`, when it is ready, unless ranks meet there anyway. See hooks/ddp.py."""
        yield from ()

    def state_bytes(self) -> int:
        """Bytes that the connection itself keeps on this rank between steps: none, all state is the optimizer's."""
        return 0

    def close(self) -> None:
        """Ends the communication threads, if there are any. The optimizer's process group is the next attachment's.

        Not where something failed, or is still under way: what was sent might reach the next one.
        """
        if self.closed:
            return
        self.closed = True
        optimizer = self.optimizer
        if optimizer.pipeline is self.pipeline:  # one process may still call step()
            optimizer.pipeline = Pipeline(optimizer.comm)
            optimizer.pipeline.trace = self.pipeline.trace
        if optimizer.attachment is self:  # no later one has taken its place
            optimizer._in_backward = False
        _end(self.pipeline, None if optimizer._stepping else self.own)
        self._dropped.detach()
        self.own = None

    def replace(self, names: dict[Tensor, str]) -> None:
        """Takes the place of the optimizer's earlier attachment, which is closed. names: of the model's parameters."""
        optimizer = self.optimizer
        earlier, optimizer.attachment, optimizer._virtual = optimizer.attachment, self, False
        if earlier is not None:
            earlier.close()
        optimizer._names = {p: names[p] for group in optimizer.param_groups for p in group["params"]}

    # ---- a backward pass ---------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Called when a backward pass brings its first gradients. Raises RuntimeError for a second pass before `step`."""
        optimizer = self.optimizer
        if optimizer.compressed and not self._compared:
            self._compared = True
            self._compare()  # a checkpoint that some ranks alone have loaded makes other messages there
        if optimizer.compressed and self.overlap:
            if optimizer._unstepped:
                raise RuntimeError(TWICE)
            optimizer._unstepped = True
            optimizer.note_options()  # in a dense warm-up too: what would be refused after it is refused at once

    def compare_steps(self) -> None:
        """Raises RuntimeError when other ranks' gradients are for another step, where that would make ranks wait for ever.

        In a dense phase, and in the step after it: a rank that is a step behind would wait for gradients, the others for
        messages. Where `step` alone sends messages too: that rank would be in a backward pass and the others in `step`.
        """
        optimizer = self.optimizer
        step = optimizer.steps + 1
        dense = Plan.DENSE in (optimizer.plan(step), optimizer.plan(max(step - 1, 1)))
        if optimizer.compressed and (dense or optimizer.meets_in_step):
            self._compare()

    def _compare(self) -> None:
        optimizer = self.optimizer
        with who_is_missing(step := optimizer.steps + 1):
            run(optimizer.comm, say(optimizer.comm, step, BACKWARD, optimizer.device))

    def all_reduce_mean(self, buffer: Tensor, number: int, wire: torch.dtype | None = None) -> Future[Any]:
        """Starts to replace `buffer` by its mean over the link's ranks, sent as `wire`, the optimizer's if not given; it may
        change."""
        wire, trace = wire or WIRES[self.optimizer.wire], self.optimizer.pipeline.trace
        with trace.span("encode", number):
            sent = buffer if buffer.dtype == wire else buffer.to(wire)
            sent.div_(self.link.size)
        self.link.count_ring_all_reduce(sent.numel() * sent.element_size())  # it may be sparse
        if sent.is_cuda and backend_for(self.link.group, sent.device) == "gloo":
            # Its future is there before its copy to the GPU is, and only the stream that waits for the work waits for that.
            dist.all_reduce(sent, group=self.link.group)
            return done(buffer if sent is buffer else buffer.copy_(sent))
        began = time.perf_counter()
        work = dist.all_reduce(sent, group=self.link.group, async_op=True)
        assert work is not None

        def finish(future: Future[Any]) -> Tensor:
            reduced = future.value()[0]  # raises what the collective met
            trace.add("wire", number, began, time.perf_counter())
            with trace.span("decode", number):
                return buffer if sent is buffer else buffer.copy_(reduced)

        return work.get_future().then(finish)


def _end(pipeline: Pipeline, own: dist.ProcessGroup | None) -> None:
    """Ends the threads; the group is the next attachment's, unless something failed or is still under way."""
    pipeline.close()
    if own is not None and pipeline.sound:
        give_back(own)


def mark_overflow(grads: Sequence[Tensor], device: torch.device) -> Requests[None]:
    """Makes an element of `grads`, this rank's gradients, infinite where a gradient of any rank is not finite.

    Every rank calls it. Nothing of it is looked at on the host: a GradScaler does that, once.
    """
    grads = [g for g in grads if g.numel()]
    finite = torch.stack([torch.ones((), dtype=torch.bool, device=device), *(all_finite(g).to(device) for g in grads)])
    bad = yield Union(~finite.all().view(1))
    if grads:
        first = grads[0].as_strided((1,), (1,))
        first.copy_(torch.where(bad.to(first.device), torch.full_like(first, torch.inf), first))


def all_finite(values: Tensor) -> Tensor:
    """Whether no element is NaN or infinite, bool[]. One pass, nothing as large as `values` is made: either shows in the
    smallest or the largest."""
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    return torch.stack(torch.aminmax(values)).isfinite().all()


def done(value: Tensor) -> Future[Any]:
    """A future that has its value."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def on_thread(thread: ThreadPoolExecutor, work: Callable[[], Tensor]) -> Future[Any]:
    """What `work` will return there, or raise."""
    begun: Future[Any] = Future()
    later = begun.then(lambda _: work())  # runs where `begun` is completed
    thread.submit(begun.set_result, None)
    return later


def queue_after_backward(call: Callable[[], None]) -> None:
    """Calls it when the backward pass under way is over, after all that has been queued for its end until now."""
    queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
    queue(functools.partial(_not_compiled, call))


@torch._disable_dynamo
def _not_compiled(call: Callable[[], None]) -> None:
    """A compiled training step would compile what is called inside its backward pass, too."""
    call()


def pipeline_for(device: torch.device, group: dist.ProcessGroup | None) -> Pipeline:
    """What runs exchanges of tensors on `device` over `group` during backward; None: inside `step`."""
    if group is not None and device.type == "cuda":
        return StreamPipeline(device)
    # Two threads need messages that tags tell apart, which `Collectives` has on gloo alone.
    on_threads = group is not None and backend_for(group, device) == "gloo"
    pipeline = ThreadPipeline() if on_threads else Pipeline()
    pipeline.trace.on = device.type == "cpu"
    return pipeline


def odd_ranks(digests: Sequence[Any]) -> list[int]:
    """The ranks whose digest is not rank 0's."""
    return [rank for rank, digest in enumerate(digests) if digest != digests[0]]


def agree(
    group: dist.ProcessGroup,
    device: torch.device,
    optimizer: BucketOptimizer,
    given: Topology | None,
    hier: bool,
    *how: Any,
) -> Topology:
    """The topology of the ranks of `group`, once they agree on it, on model and optimizer, and on `how` they attach.

    All ranks call it, before anything else that they do together: those that differ would wait for each other. Raises
    ValueError for nodes that are not known or unequal, RuntimeError when ranks differ.
    """
    if given is not None and not isinstance(given, Topology):
        raise TypeError(f"topology must be birder.Topology(nodes, ranks_per_node), got {given!r}")
    size = dist.get_world_size(group)
    assumed = given or Topology(1, size)
    mine = said(os.environ, dist.get_rank(), dist.get_world_size(), given is not None, hier)
    try:
        rows = gather_numbers(group, [*mine, optimizer.digest(assumed, hier, *how)], device)
    except RuntimeError as error:
        raise RuntimeError(
            "attach waits for all ranks, and one has failed or has not called it: call it on every rank, not on rank 0 alone "
            f"({str(error).splitlines()[0]})"
        ) from error
    everyone = [Said(*numbers) for *numbers, _ in rows]
    topology = assumed if any(one.given for one in everyone) else decided(everyone, dist.get_process_group_ranks(group))
    if odd := odd_ranks([digest for *_, digest in rows]):
        raise RuntimeError(
            f"ranks {odd} differ from rank 0 in model, optimizer (the order of its parameters counts), completed steps or "
            "arguments of attach: make them equal"
        )
    if topology.world_size != size:
        raise ValueError(f"the topology has {topology.world_size} ranks, the process group {size}")
    return topology


# ---- what frameworks put around a model or an optimizer --------------------------------------------------------------


def unwrap_model(model: Any) -> Any:
    """The model inside what `torch.compile` and Lightning Fabric returned; any other one unchanged."""
    parts = getattr(model, "_modules", {})  # looked up there, as Fabric's module passes other names on to the model
    for name in ("_orig_mod", "_forward_module"):
        if isinstance(inner := parts.get(name), nn.Module):
            return unwrap_model(inner)
    return model


def unwrap_optimizer(optimizer: Any) -> Any:
    """The optimizer inside those of Accelerate, Lightning and Fabric; any other one unchanged."""
    # Lightning's claims to be of the class that it wraps, so the class says nothing.
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def unwrap_method(optimizer: Any) -> BucketOptimizer:
    """The same, and one of this package. Raises TypeError for any other."""
    inner = unwrap_optimizer(optimizer)
    if not isinstance(inner, BucketOptimizer):
        kind, advice = type(inner).__name__, "of a wrapper give the one inside"
        if kind == "ZeroRedundancyOptimizer":  # the one inside has a part of the parameters, another one on every rank
            advice = "it gives each rank some of the parameters, a method needs them all; to divide its state use FSDP2"
        raise TypeError(f"attach needs an optimizer of the birder package, got {kind}: {advice}")
    return inner


def check_reducer(model: DistributedDataParallel) -> None:
    """Raises RuntimeError for a DDP model whose buckets come to no hook, or to another one."""
    if getattr(model, "_use_python_reducer", False):
        raise RuntimeError(
            "DDP was built for compiled autograd (torch._dynamo.config.optimize_ddp='python_reducer'), and gives hooks no "
            "buckets: leave optimize_ddp at its default and compile forward only, with torch.compile(ddp)"
        )
    if any(base.__module__.split(".")[0] == "torchft" for base in type(model).__mro__):
        raise RuntimeError(
            "torchft's DistributedDataParallel averages gradients in its own hook, through groups that change while it "
            "trains: use torch's DistributedDataParallel, and go on from checkpoints after a failure"
        )
    if getattr(model, "mixed_precision", None) is not None:
        raise RuntimeError(
            "DistributedDataParallel(mixed_precision=...) averages gradients in its own hook: leave it out, and use "
            "torch.autocast"
        )
    if any(not isinstance(state, Detached) for _, state in getattr(model, "_comm_hooks", [])):
        raise RuntimeError(
            "another communication hook is registered with this model: build a new DistributedDataParallel and attach to that"
        )
