"""`attach`: connects an optimizer of this package to DistributedDataParallel, as its communication hook, or to FSDP2."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from birder.comm import Collectives, Communicator, Hierarchical, Requests, Topology, TwoPhase, run
from birder.comm.groups import borrow
from birder.hooks.attachment import (
    Attachment,
    NotCopied,
    agree,
    check_reducer,
    done,
    mark_overflow,
    pipeline_for,
    queue_after_backward,
    unwrap_method,
    unwrap_model,
)
from birder.hooks.bucket_hook import bucket_hook
from birder.hooks.other_optimizers import watch
from birder.optim.base import WIRES, BucketOptimizer, Plan
from birder.optim.checks import require_flag
from birder.optim.guards import BACKWARD, READY, say, who_is_missing


class BucketAttachment(Attachment):
    """The connection to DistributedDataParallel: gradients come bucket by bucket.

    After its first backward pass DDP rebuilds its buckets in the next forward pass, where ranks wait for each other. Those
    that skipped `step` would wait for those that wait in it. So ranks say where they are, in both, until the first step.
    Where DDP rebuilds nothing, ranks may have other numbers of forward passes under `no_sync`: without overlap backward asks.
    """

    def opening(self) -> Requests[None]:
        if not self.opened:
            yield from self._say_where(READY)
            self.opened = True

    def before_forward(self, rebuilds: bool) -> None:
        begun = self._compared and not self.opened and not self.closed  # a pass has begun, and no step has been taken
        if begun and (rebuilds or self.overlap):
            with who_is_missing(self.optimizer.steps + 1):
                run(self.optimizer.comm, self._say_where(BACKWARD))

    def _say_where(self, what: int) -> Requests[None]:
        optimizer, step = self.optimizer, self.optimizer.steps + 1
        plan = optimizer.plan(step)
        meets = plan is Plan.COMPRESSED if optimizer._in_backward else plan is not Plan.SKIP
        if self.communicate and optimizer.compressed and meets:
            yield from self.pipeline.waiting()  # its threads use the same process group
            yield from say(optimizer.comm, step, what, optimizer.device)

    def take(self, bucket: dist.GradBucket, mine: list[int]) -> str | None:
        """Takes the gradients of the bucket's parameters number `mine`, which are the optimizer's.

        Returns how these are to be averaged instead, a key of WIRES; None: not at all.
        """
        optimizer, step = self.optimizer, self.optimizer.steps + 1
        params = bucket.parameters()
        chosen = [params[i] for i in mine]
        optimizer._reduced.update(chosen)
        plan = optimizer.plan(step)
        if plan is not Plan.DENSE and self.overlap:
            # Not `bucket.gradients()`: these are contiguous views of memory that DDP lays out as each parameter's own strides
            # say. What DDP has copied there is `p.grad`, and for a parameter that has none on this rank 0.
            optimizer.feed(chosen, [p.grad for p in chosen])
        if bucket.is_last():
            if optimizer.compressed and self.overlap:
                _after_ddp(optimizer.note_gradients)
            elif plan is not Plan.DENSE:
                _after_ddp(self._agree_on_overflow)
        return optimizer.wire if plan is Plan.DENSE else None

    def _agree_on_overflow(self) -> None:
        """Makes a gradient that is not finite on one rank visible on all of them.

        A GradScaler looks at its own rank's gradients. If it skipped a step on one rank only, the others would wait for
        that rank's messages for ever, and the loss scales would drift apart.
        """
        optimizer = self.optimizer
        with who_is_missing(optimizer.steps + 1):
            run(optimizer.comm, mark_overflow(optimizer._gradients(), optimizer.device))


Sent = dict[torch.dtype, tuple[BucketAttachment, list[int]]]
"""By the type in which it is sent: whose counter counts it, and the places of parameters in the bucket. The first attachment
that has gradients in the message counts it; what is nobody's the first of all."""


class BucketHook(NotCopied):
    """What DDP calls for every bucket that is ready, in the same order on every rank: the state of its communication hook.

    Each attached optimizer takes its own parameters' gradients; those that belong to none, or to one whose attachment was
    closed, are averaged, as DDP does.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        # No strong reference to the model: DDP holds this object where Python's collector sees no cycle.
        self._model = weakref.ref(model)
        self.attachments: list[BucketAttachment] = []

    def on_bucket(self, bucket: dist.GradBucket) -> Future[Any]:
        buffer, params = bucket.buffer(), bucket.parameters()
        attached = [a for a in self.attachments if not a.closed]
        if any(a._paused or not a.communicate for a in attached):
            return done(buffer)
        if bucket.index() == 0:
            self._begin(attached)
        sent: Sent = {}
        owned: set[int] = set()
        for attachment in attached:
            mine = [i for i, p in enumerate(params) if attachment.optimizer.holds(p)]
            owned.update(mine)
            wire = attachment.take(bucket, mine)
            if wire is not None and mine:
                sent.setdefault(WIRES[wire], (attachment, []))[1].extend(mine)
        others = [i for i in range(len(params)) if i not in owned]
        if others:
            sent.setdefault(buffer.dtype, (self.attachments[0], []))[1].extend(others)
        if bucket.is_last():
            for attachment in attached:
                attachment.compare_steps()
        return self._average(bucket, sent)

    def _begin(self, attached: list[BucketAttachment]) -> None:
        """A backward pass brings its first gradients."""
        model: Any = self._model()
        joined = getattr(getattr(model, "_join_config", None), "enable", False)
        for attachment in attached or self.attachments[:1]:  # a closed one's link averages everything
            messages = attachment.optimizer.compressed and not attachment.closed
            if joined and (messages or not model._divide_by_initial_world_size):
                raise RuntimeError(
                    f"{attachment.optimizer.kind} does not work inside torch's Join: a rank without batches sends no "
                    "messages, and means are over all ranks (dense methods: divide_by_initial_world_size=True). Give all "
                    "ranks the same number of batches (DistributedSampler, drop_last=True)"
                )
        for attachment in attached:
            attachment.begin_pass()

    def _average(self, bucket: dist.GradBucket, sent: Sent) -> Future[Any]:
        """Starts to replace the gradients of some of the bucket's parameters, by number, by their means over ranks."""
        buffer = bucket.buffer()
        if not sent:
            return done(buffer)
        if len(sent) == 1:
            ((wire, (sender, numbers)),) = sent.items()
            if len(numbers) == len(bucket.parameters()):
                return sender.all_reduce_mean(buffer, bucket.index(), wire)
        views = bucket.gradients()
        futures = []
        for wire, (sender, numbers) in sent.items():
            parts = [views[i].view(-1) for i in sorted(numbers)]

            def put_back(future: Future[Any], parts: list[Tensor] = parts) -> Tensor:
                mean: Tensor = future.value()
                torch._foreach_copy_(parts, list(mean.split([p.numel() for p in parts])))
                # Of a value without a GPU's tensors torch records no event, and nobody would wait for the copies.
                return mean

            futures.append(sender.all_reduce_mean(torch.cat(parts), bucket.index(), wire).then(put_back))
        every = futures[0] if len(futures) == 1 else torch.futures.collect_all(futures)

        def whole(future: Future[Any]) -> Tensor:
            for one in futures:
                one.wait()  # this callback's stream too; raises what a collective met
            return buffer

        return every.then(whole)


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
    """Makes `model` communicate as `optimizer` wants. Call it on every rank, before the first step.

    Call it again, between two steps, if the model was wrapped again or the optimizer has more parameters. Existing state is
    kept. A model may have several optimizers over different parameters: attach each one of this package. With FSDP2 attach
    only one, unless all are dense. Gradients of parameters that none of them holds are averaged, as DDP does.

    model:        DistributedDataParallel, on gloo or NCCL. No other hook may be registered. Or, with `mesh`, what
                  torch.distributed.fsdp.fully_shard made of a model. torch.compile may have wrapped either.
    optimizer:    one of `birder.optim`, over (some of) the model's parameters. Accelerate may have wrapped it.
    mesh:         which ranks are one worker. With DDP: all of them by itself (1-D, or None), or nodes x ranks per node (2-D):
                  reduce-scatter inside a node, 1 bit between nodes. With FSDP2: replicas x shards (2-D); parameters are
                  sharded over its second dimension alone (birder/hooks/fsdp.py).
    hierarchical: the 2-D mesh with the nodes of `topology`. For methods that compress.
    topology:     nodes x ranks per node. When not given, what the launcher says (torchrun, mpirun, srun), or the names of
                  hosts where they differ.
    communicator: a function of a process group and the topology that returns another way to send 1-bit messages. The same
                  on every rank. Overrides `hierarchical`.
    overlap:      send messages during backward. False: send them inside `step`, from the `p.grad` of that moment. Set False
                  with GradScaler (ranks then agree on overflow), or if you change `p.grad` before `step`. Set it too if a
                  loop changes a hyper-parameter between backward and `step`, and the method uses it during backward. An
                  optimizer with `max_grad_norm` does this by itself in compressed steps.
    communicate:  False: no gradient is sent at all and replicas drift apart. The bound for any speedup; not training.
    unit_mb:      size in MiB of fp32 gradient that is encoded and sent as one.

    Raises TypeError for a model or optimizer of another kind.

    Raises ValueError for parameters that the model does not have, for a mesh of other ranks, and for nodes of unequal size.
    For a flag that is not True or False too: "no" would count as True.
    Also if two arguments say which ranks share a node, or if `hierarchical` is set and nothing says it.

    Raises RuntimeError if ranks disagree on parameters, hyper-parameters or completed steps. Also if DDP gives hooks no
    buckets (compiled autograd) or has another hook.
    """
    for name, flag in {"hierarchical": hierarchical, "overlap": overlap, "communicate": communicate}.items():
        require_flag(name, flag)
    model, optimizer = unwrap_model(model), unwrap_method(optimizer)
    if mesh is not None and (hierarchical or communicator is not None):
        raise ValueError("mesh= says which ranks are one worker: leave out hierarchical and communicator")
    if not isinstance(model, DistributedDataParallel):
        if mesh is not None:
            from birder.hooks.fsdp import attach_shards  # loads FSDP, which takes its time

            return attach_shards(
                model, optimizer, mesh, topology=topology, overlap=overlap, communicate=communicate, unit_mb=unit_mb
            )
        raise TypeError(
            f"attach needs a DistributedDataParallel model, got {type(model).__name__}: wrap the model first "
            "(one that FSDP's fully_shard made needs mesh=)"
        )
    if mesh is not None:
        if topology is not None:
            raise ValueError("mesh= says which ranks share a node: leave out topology")
        topology = _nodes(mesh, model.process_group)
        hierarchical = topology is not None and topology.ranks_per_node > 1
    if optimizer.compressed and getattr(model, "skip_all_reduce_unused_params", False):
        raise RuntimeError(
            "DistributedDataParallel(skip_all_reduce_unused_params=True) keeps buckets from the hook, and so messages: leave "
            "it out"
        )
    hook = _hook_of(model)
    if hook is None:
        check_reducer(model)
    others = [a for a in (hook.attachments if hook else ()) if a.optimizer is not optimizer and not a.closed]
    names = {p: name for name, p in model.module.named_parameters()}
    mine = {p for g in optimizer.param_groups for p in g["params"]}
    if not mine <= names.keys():
        raise ValueError(
            "the optimizer holds parameters that the model does not have: build it from model.parameters(), one for each "
            "wrapped model"
        )
    _check_split(optimizer, {name: p for p, name in names.items() if p in mine})
    if not mine.isdisjoint(getattr(model, "_delay_all_reduce_params", [])):
        raise RuntimeError(
            "DistributedDataParallel(delay_all_reduce_named_params=...) keeps gradients of this optimizer's parameters from "
            "the hook: leave it out"
        )
    for other in others:
        if any(map(other.optimizer.holds, mine)):
            raise ValueError(
                "another attached optimizer holds some of these parameters: give each to one of them, or call close() of "
                "what attach returned for the other"
            )
        if other.communicate != communicate:
            raise ValueError("give all optimizers of one model the same communicate=: False stops all of its averages")
    group = model.process_group
    overlap = overlap and optimizer.max_grad_norm is None
    device = next(model.parameters()).device
    by_nodes = hierarchical and communicator is None
    order = [names[p] for g in optimizer.param_groups for p in g["params"]] if optimizer.compressed else None
    topology = agree(group, device, optimizer, topology, by_nodes, hierarchical, overlap, communicate, unit_mb, order)
    own: dist.ProcessGroup | None = None
    comm: Communicator | None = None
    if optimizer.compressed and communicate:
        # A separate group: these collectives overlap DDP's, in another order.
        own = borrow(group, device)
        comm = (communicator or (Hierarchical if hierarchical else TwoPhase))(own, topology)
    optimizer.bind(comm, pipeline_for(device, own if overlap else None), unit_mb)
    link = Collectives(group, topology, optimizer.comm.counter)
    attachment = BucketAttachment(optimizer, link, overlap, communicate, own)
    attachment.replace(names)
    if hook is None:
        hook = BucketHook(model)
        model.register_comm_hook(hook, bucket_hook)
        model.register_forward_pre_hook(before_forward)
    hook.attachments = [*others, attachment]
    watch(attachment)
    return attachment


def before_forward(model: nn.Module, _: Any) -> None:
    """Called before each forward pass of a model that `attach` was given."""
    if torch.compiler.is_compiling() or model._has_rebuilt_buckets or not torch.is_grad_enabled():
        return
    if (hook := _hook_of(model)) is not None:
        for attachment in hook.attachments:
            attachment.before_forward(bool(model.static_graph) or not model.find_unused_parameters)


def attached(model: nn.Module, optimizer: BucketOptimizer) -> bool:
    """Whether `optimizer` is attached to this very model: one that was wrapped again has no hook yet."""
    hook = _hook_of(unwrap_model(model))
    return hook is not None and any(a.optimizer is optimizer and not a.closed for a in hook.attachments)


def _hook_of(model: Any) -> BucketHook | None:
    """The hook that an earlier `attach` registered with the model."""
    return next((state for _, state in getattr(model, "_comm_hooks", ()) if isinstance(state, BucketHook)), None)


def _check_split(optimizer: BucketOptimizer, params: dict[str, Tensor]) -> None:
    """Raises RuntimeError if tensor parallelism has split `params` and ranks with other parts would compute other steps of
    what they hold in common. Torch marks parts so (torch.distributed.tensor.parallel.ddp)."""
    for name, spec in ((name, p._st_info) for name, p in params.items() if hasattr(p, "_st_info")):
        even = all(spec.shape[at.dim] % spec.mesh.size(i) == 0 for i, at in enumerate(spec.placements) if at.is_shard())
        clips = [optimizer.max_grad_norm, *(group.get("tensor_clip") for group in optimizer.param_groups)]
        if not optimizer.elementwise or any(c is not None for c in clips) or (optimizer.compressed and not even):
            raise RuntimeError(
                f"tensor parallelism has split {name}{'' if even else ', in unequal parts'}: with DDP it takes SGDM, AdamW, "
                "BertAdam(tensor_clip=None), and with equal parts Birder, SigmaDeltaAdam or Lion, each without "
                "max_grad_norm. Other methods have scales and norms of more than this rank's part"
            )


def _nodes(mesh: DeviceMesh, group: dist.ProcessGroup) -> Topology | None:
    """Nodes x ranks per node of a 2-D mesh. Raises ValueError unless the mesh has the ranks of `group`, in their order."""
    if mesh.ndim > 2 or mesh.mesh.flatten().tolist() != dist.get_process_group_ranks(group):
        raise ValueError(
            f"mesh must be nodes x ranks per node over the {dist.get_world_size(group)} ranks of the model, in their order, "
            f"got {' x '.join(map(str, mesh.shape))}: init_device_mesh(device, (nodes, ranks_per_node))"
        )
    return Topology(*mesh.shape) if mesh.ndim == 2 else None


def _after_ddp(call: Callable[[], None]) -> None:
    """Calls it when the backward pass under way is over, and DDP has put its gradients where they belong."""
    # DDP queues the end of its work after the last bucket's hook: what is queued when this call's turn comes, comes after.
    queue_after_backward(lambda: queue_after_backward(call))
