"""FSDP2 and HSDP: full precision inside a replica, this package's exchange between replicas.

    mesh = init_device_mesh("cuda", (nodes, gpus), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = Birder(model.parameters(), lr=1e-3)
    attachment = birder.attach(model, optimizer, mesh=mesh)

A replica is one worker. FSDP gathers its parameters and reduce-scatters its gradients; each rank then exchanges its shard of
the gradient with the ranks that hold the same shard in the other replicas, during backward. That is what hierarchical
communication does under DDP, but for the parameters, which stay sharded: Birder gives the same bits for the same batches.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard
from torch.utils.hooks import RemovableHandle

from birder.comm import Collectives, Replicas, Topology, finish
from birder.comm.collectives import backend_for, gather_into, scatter_into
from birder.comm.groups import borrow, part
from birder.hooks.attachment import Attachment, agree, pipeline_for, queue_after_backward
from birder.hooks.other_optimizers import open_attachments, watch
from birder.optim.base import BucketOptimizer, Plan
from birder.optim.layout import gradient, local


@dataclass(eq=False, kw_only=True)
class ShardAttachment(Attachment):
    """The connection to FSDP2: gradients come parameter by parameter, reduced over the shards of this replica.

    mesh: replicas x shards.
    """

    mesh: DeviceMesh
    _model: weakref.ref[nn.Module]
    _handles: list[RemovableHandle] = field(default_factory=list, init=False)
    _frozen: list[Tensor] = field(default_factory=list, init=False)
    """Parameters that have no hook, as they required no gradient."""
    _pass_of: int | None = field(default=None, init=False)
    """The steps done when the backward pass under way began to bring gradients. None: no pass is under way."""
    _tasks: set[int] = field(default_factory=set, init=False)
    """The graph tasks of the pass that call `_end` when they are over."""
    _outside: bool = field(default=False, init=False)
    """Whether there is a call of `_end` at the end of the whole pass: some gradient comes in its own graph task."""

    @property
    def _active(self) -> bool:
        return self.communicate and not self._paused and not self.closed

    def close(self) -> None:
        super().close()
        for handle in self._handles:
            handle.remove()

    def _begin(self) -> None:
        """A backward pass has brought something. FSDP queued the end of its work at the beginning of the pass."""
        begins = self._pass_of != self.optimizer.steps
        if begins:
            self._pass_of, self._tasks = self.optimizer.steps, set()
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:  # reentrant checkpointing runs graph tasks inside of another
            self._tasks.add(task)
            queue_after_backward(self._end)
        if begins:
            self.hook_parameters()
            if (model := self._model()) is not None:
                check_groups(model)
            self.begin_pass()
            self.compare_steps()

    def hook_parameters(self) -> None:
        """Has FSDP call `on_gradient` for each parameter that requires a gradient by now: some may have been unfrozen."""
        unfrozen = [p for p in self._frozen if p.requires_grad]
        if unfrozen:
            self._frozen = [p for p in self._frozen if not p.requires_grad]
            self._handles += [p.register_post_accumulate_grad_hook(self.on_gradient) for p in unfrozen]

    def _end(self) -> None:
        """A graph task is over, and with it the pass, unless FSDP has not ended its own work: then it was an inner one."""
        model = self._model()
        goes_on = (
            isinstance(model, FSDPModule) and model._get_fsdp_state()._state_ctx.post_backward_final_callback_queued
        )
        if not goes_on:
            self._pass_of, self._outside = None, True
        elif self._outside:
            return  # once for a pass is enough: it looks at all gradients
        if self.optimizer.compressed and self.overlap:
            self.optimizer.note_gradients()

    def on_reduced(self, number: int, reduced: Tensor) -> None:
        """What FSDP calls with the reduced gradients of its group number `number`, before it hands them out."""
        used_here(reduced)
        if self._active:
            self._begin()
            if self.optimizer.plan(self.optimizer.steps + 1) is Plan.DENSE:
                self.all_reduce_mean(reduced, number).wait()
        elif self.closed and self.communicate:  # another optimizer may go on
            self.all_reduce_mean(reduced, number, reduced.dtype).wait()

    def on_gradient(self, p: Tensor) -> None:
        """What FSDP calls when `p.grad` is there. Raises RuntimeError under compiled autograd, which traces it instead."""
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if compiled is not None and (compiled.compiled_autograd_enabled or compiled.in_compiled_autograd_region):
            raise RuntimeError(
                "compiled autograd traces hooks instead of calling them, and the messages that one takes would be wrong: "
                "compile forward only, with torch.compile(model)"
            )
        optimizer = self.optimizer
        if not self._active:
            return
        self._begin()
        if optimizer.plan(optimizer.steps + 1) is Plan.DENSE:
            return
        found = gradient(p)
        if not optimizer.holds(p):
            if found is not None:  # nobody else averages it over replicas
                self.all_reduce_mean(found, -1, found.dtype).wait()
        elif self.overlap:
            optimizer.feed([p], [found])


def used_here(tensor: Tensor) -> None:
    """Tells torch's allocator that the current stream uses a tensor whose memory belongs to another stream.

    Where there is an all-reduce hook, FSDP casts the reduced gradients on its all-reduce stream. It keeps the buffer, which
    belongs to its reduce-scatter stream, only until the cast is queued: the next reduce-scatter could overwrite it.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def attach_shards(
    model: nn.Module,
    optimizer: BucketOptimizer,
    mesh: DeviceMesh,
    *,
    topology: Topology | None = None,
    overlap: bool = True,
    communicate: bool = True,
    unit_mb: float = 25.0,
) -> ShardAttachment:
    """`birder.attach` for a model of FSDP2; the same arguments. `unit_mb` counts whole parameters, as with DDP.

    All replicas get the parameters and buffers of the first. FSDP's all-gather and reduce-scatter are replaced by ones that
    count their bytes (and, on gloo, add up in rank order).

    Raises TypeError for a model or method of another kind, ValueError for another mesh, other parameters or a second
    optimizer where one of the two compresses, RuntimeError when ranks disagree.
    """
    if not isinstance(model, FSDPModule):
        raise TypeError(f"with mesh= attach needs DDP or a model that fully_shard made, got {type(model).__name__}")
    check_method(type(optimizer))
    reshard(model)
    _check_parameters(model, optimizer, mesh)
    _check_alone(model, optimizer, communicate)
    check_groups(model)
    overlap = overlap and optimizer.max_grad_norm is None
    device = local(next(model.parameters())).device
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    order = [names[p] for g in optimizer.param_groups for p in g["params"]]
    topology = agree(
        _world(), device, optimizer, topology, False, tuple(mesh.shape), overlap, communicate, unit_mb, order
    )
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"the world has {dist.get_world_size()} ranks, the mesh {mesh.size()}: it must be the whole world"
        )
    replica, shard = mesh.get_coordinate() or (0, 0)
    peers = mesh.mesh[:, shard].tolist()
    # Separate groups: these collectives overlap FSDP's, in another order.
    own = borrow(_world(), device)
    among = part(own, peers if communicate else [dist.get_rank()])
    comm = Replicas(among, part(own, mesh.mesh[replica].tolist()), topology)
    overlaps = optimizer.compressed and communicate and overlap
    # Dense gradients do not wait behind messages of the step before.
    link = Collectives(part(own, peers, 1), topology, comm.counter)
    _equalise([*model.parameters(), *model.buffers()], link)
    optimizer.bind(comm, pipeline_for(device, among if overlaps else None), unit_mb)
    attachment = ShardAttachment(optimizer, link, overlap, communicate, own, mesh=mesh, _model=weakref.ref(model))
    attachment.replace(names)
    _register(model, attachment, comm.inside)
    watch(attachment)
    return attachment


def check_method(cls: type[BucketOptimizer]) -> None:
    """Raises TypeError unless a method of this class works on shards of parameters."""
    if not cls.on_shards:
        raise TypeError(
            f"{cls.__name__} works on whole parameters, FSDP shards them: use Birder, SigmaDeltaAdam, OneBitAdam or AdamW, "
            "or DistributedDataParallel"
        )


def reshard(model: nn.Module) -> None:
    """Has the model's parameters be the sharded ones, which after a forward pass they may not be."""
    for module in _fsdp_modules(model):
        module.reshard()


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _check_parameters(model: nn.Module, optimizer: BucketOptimizer, mesh: DeviceMesh) -> None:
    """Raises ValueError unless the model is sharded over the mesh's second dimension alone, and the optimizer has it."""
    if mesh.ndim != 2 or mesh.mesh_dim_names is None:
        raise ValueError(
            'mesh must be replicas x shards with names, init_device_mesh(device, (replicas, shards), mesh_dim_names=("'
            f'replicate", "shard")), got {mesh.ndim} dimension(s) named {mesh.mesh_dim_names}'
        )
    name = mesh.mesh_dim_names[1]
    way = f'fully_shard(module, mesh=mesh["{name}"])'
    shards = mesh[name].mesh.tolist()
    for key, p in model.named_parameters():
        over = getattr(p, "device_mesh", None)
        if over is None:
            raise ValueError(f"{key} is not sharded: call {way} on the whole model before attach")
        if over.ndim == 2:
            raise ValueError(
                f"{key} was sharded with the 2-D mesh, so that FSDP sends gradients between replicas in full precision: "
                f"use {way}, and give the 2-D mesh to attach alone"
            )
        if over.mesh.tolist() != shards:
            raise ValueError(
                f'{key} is sharded over ranks {over.mesh.tolist()}, mesh["{name}"] has {shards}: use {way}'
            )
        if tuple(p.placements) != (Shard(0),):  # type: ignore[attr-defined]
            raise ValueError(f"{key} is sharded as {p.placements}: leave out shard_placement_fn")  # type: ignore[attr-defined]
        if p.is_meta:
            raise ValueError(
                f"{key} is on the meta device: call model.to_empty(device=...) and set its values before attach"
            )
        if local(p).device.type != mesh.device_type:
            raise ValueError(
                f"{key} is on {local(p).device.type}, the mesh on {mesh.device_type}: leave out CPUOffloadPolicy"
            )
    known = set(model.parameters())
    if any(p not in known for g in optimizer.param_groups for p in g["params"]):
        raise ValueError(
            "the optimizer holds parameters that the model does not have: build it from model.parameters() after fully_shard"
        )


def _check_alone(model: nn.Module, optimizer: BucketOptimizer, communicate: bool) -> None:
    """Raises ValueError where another optimizer is attached to some of the modules, unless the means of one do for both.

    FSDP has one hook for each module, which the last attachment takes.
    """
    modules = set(_fsdp_modules(model))
    for other in open_attachments():
        theirs = other._model() if isinstance(other, ShardAttachment) else None
        if theirs is None or other.optimizer is optimizer or modules.isdisjoint(_fsdp_modules(theirs)):
            continue
        one, two = other.optimizer, optimizer
        if one.compressed or two.compressed or one.wire != two.wire or other.communicate != communicate:
            raise ValueError(
                f"{one.kind} is attached to this model already, and FSDP gives gradients to one alone: use one for all "
                "parameters, or torch's own for the others, which needs no attach; or call close() of what attach returned "
                "for the other"
            )


def check_groups(model: nn.Module) -> None:
    """Raises RuntimeError where a script has set what keeps gradients from being averaged over replicas.

    By what FSDP divides them, or an all-reduce hook in the place of an attachment's: replicas would drift apart.
    """
    for module in _fsdp_modules(model):
        if (group := module._get_fsdp_state()._fsdp_param_group) is None:
            continue
        if group.gradient_divide_factor is not None:
            raise RuntimeError(
                f"set_gradient_divide_factor({group.gradient_divide_factor}) holds inside a replica alone, replicas take the "
                "mean: leave it out and scale the loss instead"
            )
        function = getattr(group._all_reduce_hook, "func", group._all_reduce_hook)
        if getattr(function, "__func__", function) not in (None, ShardAttachment.on_reduced):
            raise RuntimeError(
                "set_all_reduce_hook of this script and attach, whose hook averages gradients over replicas, exclude each "
                "other: leave it out"
            )


def _fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@torch.no_grad()
def _equalise(tensors: Sequence[Tensor], link: Collectives) -> None:
    """Gives every replica the values of the first."""
    for mine in map(local, tensors):
        values = mine.contiguous()
        if values.numel():
            dist.broadcast(values, link.ranks[0], group=link.group)
            if values is not mine:
                mine.copy_(values)


def _register(model: nn.Module, attachment: ShardAttachment, inside: Collectives) -> None:
    for number, module in enumerate(_fsdp_modules(model)):
        module.set_all_reduce_hook(functools.partial(attachment.on_reduced, number))
        module.set_custom_all_gather(CountedAllGather(inside))  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(CountedReduceScatter(inside))  # type: ignore[arg-type]
    attachment._frozen = list(model.parameters())
    attachment.hook_parameters()


class CountedAllGather:
    """FSDP's all-gather of parameters, counted."""

    def __init__(self, link: Collectives) -> None:
        self.link = link

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.link.count_pairwise(input_tensor.nbytes)
        return gather_into(output_tensor, input_tensor, group, async_op)


class CountedReduceScatter(CountedAllGather):
    """FSDP's reduce-scatter of gradients, counted. On gloo a mean is added up in rank order, and halves the bytes."""

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:  # fmt: skip
        if backend_for(group, input_tensor.device) == "gloo" and op == dist.ReduceOp.AVG and not async_op:
            output_tensor.copy_(finish(self.link.reduce_scatter_mean(input_tensor)))
            return None
        self.link.count_pairwise(output_tensor.nbytes)
        return scatter_into(output_tensor, input_tensor, group, async_op, op=op)
