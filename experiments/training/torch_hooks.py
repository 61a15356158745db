"""Communication hooks for dense optimizers as rows of the same tables: PyTorch's bf16, fp16 and PowerSGD; int4 and fp8.

`comm.hook=powersgd comm.powersgd_rank=4` registers torch.distributed.algorithms.ddp_comm_hooks' hook in the place of
`birder.attach`'s; a dense optimizer then works on the averaged `p.grad`. Per bucket and step these hooks send

    bf16, fp16    one all-reduce of 2 bytes for each element
    int4, fp8     an all-to-all and an all-gather of codes and scales (birder/hooks/block_scaled.py)
    powersgd      three all-reduces in fp32: what is not compressed (tensors of one dimension, and matrices for which it does
                  not pay), all P, n r for a matrix of n x m, and all Q, m r; r = min(rank, n, m)

PowerSGD: "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019. Its hook begins to
compress in the third step, the first that torch allows: DDP rebuilds its buckets before the second one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from birder import BlockScaled, BucketOptimizer
from birder.comm import ByteCounter, Collectives, Topology, Trace
from birder.comm.collectives import backend_for
from birder.comm.trace import current, note_wire
from birder.hooks.attachment import done, on_thread
from birder.hooks.block_scaled import LARGEST
from birder.hooks.bucket_hook import bucket_hook
from birder.predict.methods import LOW_RANK_RATE
from birder.predict.methods import low_rank_numbers as of_tensor
from launch.errors import UserError

HALF: dict[str, Callable[..., Future[Tensor]]] = {
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
}
NAMES = (*HALF, "powersgd", *LARGEST)
DENSE_STEPS = 2
"""Steps before PowerSGD compresses: the fewest that torch takes."""


class _TimedFuture:
    """A future of torch's hooks, whose callbacks and waits leave spans in the trace. `began`: of its all-reduce, if any."""

    def __init__(self, future: Future[Any], trace: Trace, unit: int | None, began: float | None = None) -> None:
        self.future, self.trace, self.unit, self.began = future, trace, unit, began

    def then(self, callback: Callable[[Future[Any]], Any]) -> _TimedFuture:
        def timed(future: Future[Any]) -> Any:
            with self.trace.work(self.unit):
                if self.began is not None:
                    note_wire(self.began, time.perf_counter())
                return callback(future)

        return _TimedFuture(self.future.then(timed), self.trace, self.unit)

    def wait(self) -> Any:
        waited_from = time.perf_counter()
        result = self.future.wait()
        note_wire(waited_from if self.began is None else self.began, waited_from)
        return result


class _Collectives:
    """Stands for torch.distributed in the modules of torch's hooks, so that their parts can be timed separately."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, tensor: Tensor, **options: Any) -> _Work:
        began = time.perf_counter()
        return _Work(dist.all_reduce(tensor, **options), began)


class _Work:
    def __init__(self, work: Any, began: float) -> None:
        self.work, self.began = work, began

    def get_future(self) -> Any:
        future, at = self.work.get_future(), current()
        return future if at is None else _TimedFuture(future, *at, self.began)


class HookAttachment:
    """The connection that `attach_hook` makes, with what the training loop needs of a `birder.Attachment`.

    counter: payload bytes and collectives of this rank; of torch's hooks by arithmetic from what they send for each bucket.
    """

    _watching = 0
    """How many connections have torch's hooks tell them what they do: the last one to close gives them back."""

    def __init__(
        self,
        model: DistributedDataParallel,
        name: str,
        topology: Topology,
        trace: Trace,
        rank: int = 4,
        error_feedback: bool = False,
    ) -> None:
        group = model.process_group
        self.name = name
        self.scaled: BlockScaled | None = None
        if name in LARGEST:
            self.scaled = BlockScaled(name, error_feedback=error_feedback, group=group, topology=topology)
        self.counter = ByteCounter() if self.scaled is None else self.scaled.counter
        self.link = Collectives(group, topology, self.counter)
        self.low_rank: powersgd.PowerSGDState | None = None
        if name == "powersgd":
            # Against a division by zero where a gradient is 0 throughout.
            epsilon = 1e-8
            self.low_rank = powersgd.PowerSGDState(
                group, rank, DENSE_STEPS, min_compression_rate=LOW_RANK_RATE, orthogonalization_epsilon=epsilon
            )
        self.trace = trace
        self._watches = trace.on and self.scaled is None
        if self._watches:
            HookAttachment._watching += 1
            default_hooks.dist = powersgd.dist = _Collectives()  # type: ignore[assignment]
        # On gloo a bucket's second and third collective start in whatever thread has finished the one before, and ranks
        # would mix up those of several buckets. There one bucket follows the other.
        on_gloo = backend_for(group, next(model.parameters()).device) == "gloo"
        self._in_order = ThreadPoolExecutor(1) if name not in HALF and on_gloo else None
        self._paused = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, backward passes communicate nothing."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def close(self) -> None:
        """Gives torch's hooks back as they were, where no other connection needs them. No backward pass may follow."""
        HookAttachment._watching -= self._watches
        self._watches = False
        if HookAttachment._watching == 0:
            default_hooks.dist = powersgd.dist = dist
        if self._in_order is not None:
            self._in_order.shutdown()
        if self.scaled is not None:
            self.scaled.close()

    def state_bytes(self) -> int:
        """Bytes that the hook keeps on this rank between steps: errors, PowerSGD's P and Q."""
        if self.scaled is not None:
            return self.scaled.state_bytes()
        if self.low_rank is None:
            return 0
        kept = (self.low_rank.error_dict, self.low_rank.p_memory_dict, self.low_rank.q_memory_dict)
        return sum(t.numel() * t.element_size() for part in kept for t in part.values())

    def begin_compressing(self) -> None:
        """Leaves out the dense steps at the start. Only after a backward pass under `paused`, which rebuilds the buckets."""
        if self.low_rank is not None:
            self.low_rank.iter = max(self.low_rank.iter, DENSE_STEPS)

    def on_bucket(self, bucket: dist.GradBucket) -> Future[Any]:
        """What DDP calls for every bucket that is ready."""
        if self._paused:
            return done(bucket.buffer())
        if self.scaled is None:
            self._count(bucket)
        if self._in_order is None:
            return self._run(bucket) if self.scaled is None else self.scaled.on_bucket(bucket)
        return on_thread(
            self._in_order, lambda: self._run(bucket).wait() if self.scaled is None else self._reduce(bucket)
        )

    def _reduce(self, bucket: dist.GradBucket) -> Tensor:
        assert self.scaled is not None
        with self.trace.work(bucket.index()):
            return self.scaled.reduce(bucket.buffer(), bucket.parameters())

    def _run(self, bucket: dist.GradBucket) -> Future[Any]:
        with self.trace.work(bucket.index()):
            if self.low_rank is None:
                future = HALF[self.name](self.link.group, bucket)
            else:
                future = powersgd.powerSGD_hook(self.low_rank, bucket)
        return future.future if isinstance(future, _TimedFuture) else future

    def _count(self, bucket: dist.GradBucket) -> None:
        if self.low_rank is None:
            self.link.count_ring_all_reduce(2 * bucket.buffer().numel())
            return
        state = self.low_rank
        dense = state.iter < state.start_powerSGD_iter
        sent = [bucket.buffer().numel()]
        if not dense:
            sent = [*low_rank_numbers((g.shape for g in bucket.gradients()), state.matrix_approximation_rank)]
        for numbers in sent:
            self.link.count_ring_all_reduce(numbers * bucket.buffer().element_size())


def low_rank_numbers(shapes: Iterable[Sequence[int]], rank: int) -> tuple[int, int, int]:
    """How many numbers PowerSGD all-reduces for tensors of these shapes: uncompressed, P, Q."""
    found = [of_tensor(tuple(shape), rank) for shape in shapes]
    plain, p, q = (sum(numbers) for numbers in zip(*found)) if found else (0, 0, 0)
    return plain, p, q


def attach_hook(
    model: DistributedDataParallel,
    optimizer: BucketOptimizer,
    name: str,
    *,
    rank: int = 4,
    error_feedback: bool = False,
    topology: Topology | None = None,
    unit_mb: float = 25.0,
) -> HookAttachment:
    """Makes `model` communicate by the hook `name`, one of NAMES. Call once on every rank.

    optimizer: a dense one, bound here. rank: of PowerSGD. error_feedback: of int4 and fp8. topology, unit_mb: as in
    `birder.attach`. Raises ValueError for an unknown name, a rank below 1 and optimizers that compress; UserError for torch's
    hooks on a GPU over gloo.
    """
    if name not in NAMES:
        raise ValueError(f"no hook {name!r}; there are: {', '.join(NAMES)}")
    if rank < 1:
        raise ValueError(f"PowerSGD's rank must be at least 1, got {rank}")
    if optimizer.compressed:
        raise ValueError(f"{type(optimizer).__name__} sends its own messages: hooks are for dense optimizers")
    where = next(model.parameters()).device
    if name not in LARGEST and where.type != "cpu" and backend_for(model.process_group, where) == "gloo":
        raise UserError(
            f"comm.hook={name} reads sums before gloo has copied them to the GPU: use cluster.backend=nccl or "
            "cluster.device=cpu"
        )
    topology = topology or Topology.from_env(dist.get_world_size(model.process_group))
    optimizer.bind(unit_mb=unit_mb)
    trace = optimizer.pipeline.trace
    trace.on = where.type == "cpu"
    attachment = HookAttachment(model, name, topology, trace, rank, error_feedback)
    model.register_comm_hook(attachment, bucket_hook)
    return attachment
