"""A timeline without the GPU, from the architecture: forward and backward run once on the meta device, and every kernel's
operations and bytes are counted.

    work = count(module, loss, "bf16")          what one step computes and moves; `module` holds no memory
    timeline = work.timeline(find("h100"))      when each gradient is ready there

A GPU computes kernels one after the other, each as soon as the host has started it (`HOST_US` for each until then):

    (1) end_i = max(end_(i-1), started_i) + t_i,   t_i by (1) of gpus.py

and a gradient is ready at the end of the kernel that made its last part: that of a tied embedding with the input's layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from birder.predict.costs import HOST_US, LAUNCH_US
from birder.predict.gpus import GPU, UNSURE
from birder.predict.timeline import Gradient, IntraNode, Timeline

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
FREE = ("detach", "_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "alias", "lift_fresh")
"""Operators other than views that start no kernel."""
TWICE = {"native_batch_norm": 1.5, "native_batch_norm_backward": 5 / 3, "cudnn_batch_norm": 1.5}
"""Statistics come first: what is read once more, as a factor on the bytes of inputs and outputs."""
APART = ("embedding", "embedding_dense_backward", "max_pool2d_with_indices", "max_pool2d_with_indices_backward")
"""Kernels, other than products, that a compiler does not fuse with their neighbours."""
CAST = 6.0
"""Bytes per parameter that mixed precision moves: fp32 to 16 bits before forward, the gradient back after it."""
UPDATE = {"adamw": 28.0, "sgd": 20.0}
"""Bytes per parameter of a fused step of the user's own optimizer."""
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


@dataclass(frozen=True)
class GpuKernel:
    """kind: of `gpus.KINDS`."""

    flops: float
    nbytes: float
    kind: str = ""


@dataclass(frozen=True)
class Work:
    """One step of a model. forward: kernels of forward; ready: parameter -> kernels done when its gradient is ready;
    saved_bytes: of activations that backward needs, at the end of forward; frozen, frozen_bytes: as of a `Timeline`;
    host_us: see `HOST_US`; tokens: of a sample, where that is known."""

    model: str
    precision: str
    batch: int
    kernels: tuple[GpuKernel, ...]
    forward: int
    ready: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    saved_bytes: float
    host_us: tuple[float, float] = HOST_US
    frozen: tuple[int, ...] = ()
    frozen_bytes: int = 0
    tokens: int | None = None

    @property
    def elements(self) -> int:
        return sum(torch.Size(s).numel() for s in self.shapes.values())

    @property
    def tflop(self) -> float:
        """Of forward and backward, 10^12 operations."""
        return sum(k.flops for k in self.kernels) / 1e12

    def timeline(self, gpu: GPU, *, gpus_per_node: int = 8, optimizer: str = "adamw", faster: float = 1.0) -> Timeline:
        """The step on `gpu`. faster: than assumed, for the ends of an interval. Raises ValueError for a precision that it
        does not compute in."""
        ends, now, started = [0.0], 0.0, 0.0
        for i, k in enumerate(self.kernels):
            ms = gpu.ms(k.flops, k.nbytes, self.precision, k.kind) / faster
            started += self.host_us[i >= self.forward] / 1e3
            now = max(now, started) + ms
            ends.append(now)
        forward = ends[self.forward]
        gradients = (Gradient(n, s, max(ends[self.ready[n]], forward)) for n, s in self.shapes.items())
        return Timeline(
            name=f"{self.model}_b{self.batch}_{self.precision}_{gpu.name}",
            model=self.model,
            gpu=gpu.name,
            precision=self.precision,
            batch_per_gpu=self.batch,
            gpus_per_node=gpus_per_node,
            forward_ms=forward,
            step_ms=ends[-1],
            gradients=tuple(gradients),
            intra_node=IntraNode.of(self.elements, gpus_per_node),
            source="the architecture",
            note=f"{self.tflop:.3g} TFLOP; assumed shares of the data sheet's rates, ±{100 * UNSURE:g} %",
            update_ms=gpu.ms(0.0, UPDATE[optimizer] * self.elements, self.precision) / faster,
            frozen=self.frozen,
            frozen_bytes=self.frozen_bytes,
        )


def count(
    module: nn.Module,
    loss: Callable[[], Tensor],
    precision: str,
    *,
    model: str = "",
    batch: int = 1,
    compiled: bool = False,
) -> Work:
    """What a step of `loss` and its backward computes and moves. All tensors must be on the meta device.

    precision: bf16 and fp16 mean mixed precision: parameters in fp32, cast once in a step. compiled: neighbouring
    kernels that do not multiply are fused into one, as torch.compile does. Raises ValueError for a parameter that gets no
    gradient and for a matrix product whose operations are not known.
    """
    dtype, own_dtype = HALF.get(precision), next((p.dtype for p in module.parameters()), None)
    kept = [p for p in module.parameters() if not p.requires_grad]
    frozen = tuple(p.numel() for p in kept), sum(p.numel() * p.element_size() for p in kept)
    if dtype is not None:
        module.to(dtype)
    counter = _Counter(compiled)
    ready: dict[str, int] = {}
    shapes = {n: tuple(p.shape) for n, p in module.named_parameters() if p.requires_grad}
    hooks = [module.register_forward_pre_hook(_casting(dtype), with_kwargs=True)] if dtype else []
    for name, p in module.named_parameters():
        counter.parameters.add(p.untyped_storage()._cdata)
        if p.requires_grad:
            hooks.append(p.register_post_accumulate_grad_hook(lambda _, n=name: ready.__setitem__(n, counter.done)))
    counting = _COUNTER.set(counter)
    try:
        with _fused_operators(), torch.autograd.graph.saved_tensors_hooks(counter.save, lambda t: t), counter:
            value = loss()
            forward = counter.done
            value.backward()
    finally:
        _COUNTER.reset(counting)
        for hook in hooks:
            hook.remove()
        module.zero_grad(set_to_none=True)
        if dtype is not None:
            module.to(own_dtype)
    if lost := [n for n in shapes if n not in ready]:
        raise ValueError(f"the parameter {lost[0]} gets no gradient")
    kernels = counter.kernels
    if dtype is not None:
        kernels, forward, ready = _with_casts(kernels, forward, ready, shapes)
    host = (LAUNCH_US, LAUNCH_US) if compiled else HOST_US
    about = (tuple(kernels), forward, ready, shapes, counter.saved, host)
    return Work(model, precision, batch, *about, *frozen)


def _casting(dtype: torch.dtype) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    """A hook that casts a module's inputs, also those that are given by name."""

    def cast(a: Any) -> Any:
        return a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a

    return lambda _, args, named: (tuple(map(cast, args)), {name: cast(a) for name, a in named.items()})


def _with_casts(
    kernels: list[GpuKernel], forward: int, ready: dict[str, int], shapes: dict[str, tuple[int, ...]]
) -> tuple[list[GpuKernel], int, dict[str, int]]:
    """Mixed precision: a cast of all parameters before forward, of each gradient when it is there."""
    sizes = {n: CAST * torch.Size(s).numel() for n, s in shapes.items()}
    added = [0.0] * (len(kernels) + 1)
    for name, at in ready.items():
        added[at] += sizes[name]
    made, done = [GpuKernel(0.0, sum(sizes.values()))], []
    for i, nbytes in enumerate(added):
        made += kernels[i - 1 : i] if i else []
        made += [GpuKernel(0.0, nbytes)] if nbytes else []
        done.append(len(made))
    return made, forward + 1, {n: done[at] for n, at in ready.items()}


class _Counter(TorchDispatchMode):
    """Every operator that starts a kernel."""

    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self.compiled = compiled
        self.kernels: list[GpuKernel] = []
        self.parameters: set[int] = set()
        self.saved = 0.0
        self.attention_kept = False
        self.kept: dict[int, Any] = {}  # storages, so that none has the number of one that is gone
        self.seen: set[int] = set()  # saved ones
        self.group: set[int] = set()  # storages that the fused kernel at the end holds in registers
        self.unwritten: set[int] = set()  # of those, results that nobody else has asked for

    @property
    def done(self) -> int:
        return len(self.kernels)

    def save(self, t: Tensor) -> Tensor:
        key = self.key(t)
        if key not in self.seen and key not in self.parameters:
            self.seen.add(key)
            self.saved += t.nbytes
        return t

    def key(self, t: Tensor) -> int:
        storage = t.untyped_storage()
        self.kept.setdefault(storage._cdata, storage)
        return int(storage._cdata)

    def add(self, flops: float, nbytes: float, kind: str) -> None:
        self.group, self.unwritten = set(), set()
        self.kernels.append(GpuKernel(flops, nbytes, kind))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        name = packet.__name__
        if name == "_local_scalar_dense":  # "is every token there?": there are no data, and all are the same
            return args[0].dtype == torch.bool
        out = func(*args, **kwargs)
        if func.is_view or name in FREE:
            return out
        ins = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        flops = _flops(packet, args, kwargs, out)
        if self.compiled and not flops and name not in APART:
            self._fuse(ins, outs)
        else:
            late = sum(t.nbytes for t in ins if self._late(t))
            kind = "convolution" if name.startswith("convolution") else ""
            self.add(flops, late + TWICE.get(name, 1.0) * sum(t.nbytes for t in (*ins, *outs)), kind)
        return out

    def _late(self, t: Tensor) -> bool:
        """Whether it was only inside a fused kernel until now, which has to write it."""
        late = self.key(t) in self.unwritten
        self.unwritten.discard(self.key(t))
        return late

    def _fuse(self, ins: list[Tensor], outs: list[Tensor]) -> None:
        nbytes = 0.0
        fresh = not self.group
        for t in ins:
            if self.key(t) not in self.group:
                nbytes += t.nbytes
                self.group.add(self.key(t))
        for t in outs:
            self.group.add(self.key(t))
            self.unwritten.add(self.key(t))
        before = GpuKernel(0.0, 0.0) if fresh else self.kernels.pop()
        self.kernels.append(GpuKernel(before.flops, before.nbytes + nbytes))


_COUNTER: ContextVar[_Counter] = ContextVar("counter")
"""Who counts now."""


def _flops(packet: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Operations of an operator; 0: it does not multiply. Raises ValueError for a matrix product that nobody can count."""
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=out))
    name = packet.__name__
    if name == "_grouped_mm":  # of experts: each row, or each number that is added up, is in one group
        a, b = args[:2]
        groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
        return 2.0 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]
    if any(word.endswith("mm") for word in name.split("_")):
        raise ValueError(f"the operations of torch's operator {name}, a matrix product, are not known")
    return 0.0


def products_kept() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """`context_fn` of torch.utils.checkpoint: every second matrix product and fused attention are kept, everything else is
    computed again."""
    counter, seen = _COUNTER.get(), {False: 0, True: 0}

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op.overloadpacket.__name__ not in PRODUCTS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        seen[ctx.is_recompute] += 1
        if seen[ctx.is_recompute] % 2 == 0:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if not ctx.is_recompute:
            a, b = [t for t in args if isinstance(t, Tensor)][-2:]
            counter.saved += a.shape[:-1].numel() * b.shape[-1] * a.element_size()
        return CheckpointPolicy.MUST_SAVE

    first, again = create_selective_checkpoint_contexts(policy)
    return first, _again(again)


@contextmanager
def _again(inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Forward's second time under `products_kept`: attention is there already."""
    counter = _COUNTER.get()
    counter.attention_kept = True
    try:
        with inner:
            yield
    finally:
        counter.attention_kept = False


class _Loss(torch.autograd.Function):
    """Cross entropy in one kernel: reads the logits, and writes their gradient in backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        _COUNTER.get().add(0.0, logits.nbytes, "")
        return logits.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (logits,) = ctx.saved_tensors
        _COUNTER.get().add(0.0, 2 * logits.nbytes, "")
        return torch.empty_like(logits)


def fused_loss(logits: Tensor) -> Tensor:
    """The cross entropy of some labels, as fused kernels compute it."""
    return _Loss.apply(logits)  # type: ignore[no-any-return,no-untyped-call]


class _Attention(torch.autograd.Function):
    """Fused attention: 4 S^2 D operations of each head forward, 2.5 times as many backward, half of both if causal."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        counter, out = _COUNTER.get(), q.new_empty((*q.shape[:-1], v.shape[-1]))
        ctx.save_for_backward(q, k, v, out)
        ctx.mask = mask if mask is not None and mask.requires_grad else None
        ctx.flops = 2.0 * q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1]) / (2 if causal else 1)
        if not counter.attention_kept:
            counter.add(ctx.flops, sum(t.nbytes for t in (q, k, v, out)), "attention")
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out = ctx.saved_tensors
        _COUNTER.get().add(2.5 * ctx.flops, 2 * sum(t.nbytes for t in (q, k, v, out)), "attention")
        mask = None if ctx.mask is None else torch.empty_like(ctx.mask)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), mask, None


@contextmanager
def _fused_operators() -> Iterator[None]:
    """Operators that the meta device would take apart and a GPU does not. A mode of torch would not see checkpointing's
    second forward."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> Tensor:
        return _Attention.apply(query, key, value, attn_mask, is_causal)  # type: ignore[no-any-return,no-untyped-call]

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return torch.native_dropout(input, p, True)[0] if training and p else input

    f = nn.functional
    with mock.patch.multiple(f, scaled_dot_product_attention=attention, dropout=dropout):
        yield
