"""`attach`: connects an optimizer of this package to DistributedDataParallel, with the only hook there is, or to FSDP2."""

# No postponed annotations here: DDP inspects the hook's annotations and wants the classes themselves.
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from birder.attachment import Attachment, all_finite, check_agreement, pipeline_for, queue_after_backward
from birder.comm import ByteCounter, Communicator, Hierarchical, Link, Pipeline, Topology, TwoPhase
from birder.comm.groups import borrow
from birder.comm.nodes import agreed as agreed_topology
from birder.optimizers.base import BucketOptimizer
from birder.optimizers.contract import Plan
from birder.wrappers import check_reducer, unwrap_method, unwrap_model


class BucketAttachment(Attachment):
    """The connection to DistributedDataParallel: gradients come bucket by bucket."""

    _finite: Tensor | None = None

    def on_bucket(self, bucket: dist.GradBucket) -> Future[Any]:
        """What DDP calls for every bucket that is ready, in the same order on every rank."""
        if self._paused or not self.communicate:
            return _done(bucket.buffer())
        plan = self.optimizer.plan(self.optimizer.steps + 1)
        if plan is Plan.DENSE:
            if self.optimizer.compressed and self.overlap and bucket.is_last():
                self.optimizer.note_options()  # what would be refused after the warm-up is refused in it
            return self.all_reduce_mean(bucket.buffer(), bucket.index())
        if self.overlap:
            self.optimizer.feed(bucket.parameters(), bucket.gradients())
            if bucket.is_last():
                _after_ddp(self.optimizer.note_gradients)
        else:
            self._agree_on_overflow(bucket)
        return _done(bucket.buffer())

    def _agree_on_overflow(self, bucket: dist.GradBucket) -> None:
        """Makes a gradient that is not finite on one rank visible on all of them.

        A GradScaler looks at its own rank's gradients. If it skipped a step on one rank only, the others would wait for
        that rank's messages for ever, and the loss scales would drift apart.
        """
        # Nothing of it is looked at on the host: the scaler does that, once.
        buffer = bucket.buffer()
        finite = all_finite(buffer).view(1)
        self._finite = finite if self._finite is None else finite & self._finite.to(buffer.device)
        if bucket.is_last():
            bad = self.optimizer.comm.union(~self._finite)
            buffer[:1] = torch.where(bad, torch.full_like(buffer[:1], float("inf")), buffer[:1])
            self._finite = None


def hook(state: BucketAttachment, bucket: dist.GradBucket) -> Future[Tensor]:
    """The hook in the form that `DistributedDataParallel.register_comm_hook` wants."""
    return state.on_bucket(bucket)


def attach(
    model: nn.Module,
    optimizer: BucketOptimizer,
    *,
    mesh: DeviceMesh | None = None,
    hierarchical: bool = False,
    communicator: Callable[[dist.ProcessGroup, Topology], Communicator] | None = None,
    topology: Topology | None = None,
    overlap: bool = True,
    communicate: bool = True,
    unit_mb: float = 25.0,
) -> Attachment:
    """Makes `model` communicate as `optimizer` wants. Call once on every rank, before the first step.

    model:        DistributedDataParallel, on gloo or NCCL. No other hook may be registered. Or, with `mesh`, what
                  torch.distributed.fsdp.fully_shard made of a model. torch.compile may have wrapped either.
    optimizer:    one of `birder.optimizers`, over (some of) the model's parameters. Accelerate may have wrapped it.
    mesh:         for FSDP2: replicas x shards, 2-D; parameters are sharded over its second dimension alone
                  (birder/fsdp.py). `hierarchical` and `communicator` are not for it.
    hierarchical: nodes are the workers: reduce-scatter inside a node, 1 bit between nodes. For methods that compress.
    communicator: makes another way for 1-bit messages to travel, from a process group of its own and the topology; the
                  same on every rank. `hierarchical` then has no say.
    topology:     nodes x ranks per node. When not given, what the launcher says (torchrun, mpirun, srun), or the names of
                  hosts where they differ.
    overlap:      take messages during backward. False: inside `step`, from `p.grad` as it is by then; needed with
                  GradScaler (ranks then agree on overflow), whenever you change `p.grad` before `step`, and where a loop
                  sets a hyper-parameter that the method uses during backward between backward and `step`. An optimizer
                  with `max_grad_norm` does this by itself in compressed steps.
    communicate:  False: no gradient is sent at all and replicas drift apart. The bound for any speedup; not training.
    unit_mb:      size in MiB of fp32 gradient that is encoded and sent as one.

    Raises TypeError for a model or optimizer of another kind. ValueError for parameters that the model does not have, for
    nodes of unequal size, and for hierarchical communication where nothing says which ranks share a node. RuntimeError when
    ranks disagree on parameters, hyper-parameters or completed steps, when DDP gives hooks no buckets (compiled autograd) or
    has another hook.
    """
    model, optimizer = unwrap_model(model), unwrap_method(optimizer)
    if mesh is not None:
        from birder.fsdp import attach_shards  # loads FSDP, which takes its time

        if hierarchical or communicator is not None:
            raise ValueError("FSDP shards inside a node itself: leave out hierarchical and communicator with mesh=")
        return attach_shards(
            model, optimizer, mesh, topology=topology, overlap=overlap, communicate=communicate, unit_mb=unit_mb
        )
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"attach needs a DistributedDataParallel model, got {type(model).__name__}: wrap the model first "
            "(one that FSDP's fully_shard made needs mesh=)"
        )
    check_reducer(model)
    known = set(model.module.parameters())
    if any(p not in known for g in optimizer.param_groups for p in g["params"]):
        raise ValueError(
            "the optimizer holds parameters that the model does not have: build it from model.parameters()"
        )
    group = model.process_group
    overlap = overlap and optimizer.max_grad_norm is None
    device = next(model.parameters()).device
    topology = agreed_topology(group, device, topology, hierarchical and communicator is None)
    # Before anything that ranks do together: those that differ would wait for each other.
    digest = optimizer.digest(topology, hierarchical, overlap, communicate, unit_mb)
    agreed = Link(group, topology, ByteCounter())
    check_agreement(agreed, digest, device)
    if topology.world_size != dist.get_world_size(group):
        raise ValueError(
            f"the topology has {topology.world_size} ranks, the process group {dist.get_world_size(group)}"
        )
    own: dist.ProcessGroup | None = None
    comm: Communicator | None = None
    pipeline = Pipeline()
    if optimizer.compressed and communicate:
        # A group of its own: these collectives run beside DDP's, in an order of their own.
        own = borrow(agreed, device)
        comm = (communicator or (Hierarchical if hierarchical else TwoPhase))(own, topology)
        if overlap:
            pipeline = pipeline_for(device, own)
    pipeline.trace.on = device.type == "cpu"
    optimizer.bind(comm, pipeline, unit_mb)
    link = Link(group, topology, optimizer.comm.counter)
    attachment = BucketAttachment(optimizer, link, overlap, communicate, own)
    model.register_comm_hook(attachment, hook)
    return attachment


def _after_ddp(call: Callable[[], None]) -> None:
    """Calls it when the backward pass under way is over, and DDP has put its gradients where they belong."""
    # DDP queues the end of its work after the last bucket's hook: what is queued when this call's turn comes, comes after.
    queue_after_backward(lambda: queue_after_backward(call))


def _done(value: Tensor) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
