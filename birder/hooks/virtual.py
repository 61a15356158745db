"""Virtual workers: one process that trains as n ranks would, bit for bit.

For accuracy at many workers without as many processes: one model, one process, the optimizer state of every rank. The step is
`BucketOptimizer.step` itself, once for each rank, in lockstep over communicators that hand tensors over in memory
(birder/comm/virtual.py). Never for times.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from birder.comm import ByteCounter, Requests, Topology
from birder.comm.launcher import digest_of
from birder.comm.runtime import OwnTurn, lockstep
from birder.comm.virtual import communicators, links, ring_sum
from birder.hooks.attachment import check_reducer, done, mark_overflow, odd_ranks
from birder.hooks.bucket_hook import bucket_hook
from birder.optim.base import WIRES, BucketOptimizer, Plan
from birder.optim.checks import require_flag
from birder.optim.watch import bit_sums


class TotalCounter(ByteCounter):
    """The bytes of all ranks, and the collectives of one: read and reset together."""

    def __init__(self, counters: Sequence[ByteCounter]) -> None:
        self.counters = counters

    intra = property(lambda self: sum(c.intra for c in self.counters))  # type: ignore[assignment]
    inter = property(lambda self: sum(c.inter for c in self.counters))  # type: ignore[assignment]
    collectives = property(lambda self: self.counters[0].collectives)  # type: ignore[assignment]

    def reset(self) -> None:
        for counter in self.counters:
            counter.reset()


class VirtualRanks:
    """The ranks of `topology`, all in this process. As `attach`, but for as many optimizers as there are ranks.

    model:        in DistributedDataParallel of a process group of this process alone, with no other hook: it cuts the
                  gradient into the buckets that real ranks would have, on which the order of a dense sum depends.
    optimizers:   one for each rank, with the same settings, over parameters of the model; not attached.
    topology, hierarchical, overlap, unit_mb: as in `attach`. All is sent inside `step`; where real ranks would do so too,
                  ranks agree on gradients that are not finite, as they do.
    seeds:        of each rank's random numbers, as `torch.manual_seed` takes it; None: all continue with the present state.

    In a step every rank computes its own gradient, one after the other, and then all of them step:

        for rank in range(ranks.size):
            with ranks.turn(rank):
                loss(model, batches[rank]).backward()
        ranks.step()

    Outside of `turn` the model is rank 0's, without gradients: to clip, give the optimizers `max_grad_norm`. Weights that are
    changed there (a checkpoint that is loaded, weights clamped) change on all ranks. Each rank keeps its own parameters,
    gradient and random state; buffers (batch statistics) begin each step as rank 0's, as under DDP. No other optimizer sees
    gradients. `ranks.zero_grad()` instead of `step` leaves a step out on every rank.

    Memory: 12 bytes for each parameter and rank, the largest bucket once for each rank, and the optimizers' state. Ranks of a
    method that does not compress are equal after every step: the first optimizer steps for all of them, the others stay;
    parameters and state are kept once.

    Raises ValueError where sizes do not fit, and where optimizers differ, later too. RuntimeError where real ranks would wait
    for each other or go apart: turns that are missing, nested, repeated or without a backward pass, `step` of an optimizer
    here, weights that only some ranks have changed; and for a parameter that was unfrozen meanwhile.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizers: Sequence[BucketOptimizer],
        *,
        topology: Topology,
        hierarchical: bool = False,
        overlap: bool = True,
        unit_mb: float = 25.0,
        seeds: Sequence[int] | None = None,
    ) -> None:
        for name, flag in {"hierarchical": hierarchical, "overlap": overlap}.items():
            require_flag(name, flag)
        self.size, self.model, self.optimizers = topology.world_size, model, list(optimizers)
        if dist.get_world_size(model.process_group) != 1:
            raise ValueError("virtual ranks are one process: the model's process group must be of this process alone")
        if (got := len(set(map(id, self.optimizers)))) != self.size or len(self.optimizers) != self.size:
            raise ValueError(f"{self.size} ranks need as many optimizers, got {got}")
        check_reducer(model)
        self._compare()
        first = self.optimizers[0]
        self._overlap = overlap and first.max_grad_norm is None
        made = communicators(topology, hierarchical) if first.compressed else [None]
        self._bound = self.optimizers[: len(made)]  # those that step
        for optimizer, comm in zip(self._bound, made, strict=True):
            optimizer.bind(comm, OwnTurn(), unit_mb)
        for optimizer in self.optimizers:
            optimizer._virtual = True
        counters = [o.comm.counter for o in self._bound] if first.compressed else [ByteCounter() for _ in optimizers]
        self.counter = TotalCounter(counters)
        self._links = links(topology, counters)
        self._params = [p for p in model.parameters() if p.requires_grad]
        self._place: dict[Tensor, int] = {p: i for i, p in enumerate(self._params)}
        self._equal = self.size // len(self._bound)  # ranks that one optimizer stands for
        own = [p.detach() for p in self._params]
        # In its strides, gaps too: DDP looks by them for the gradients in its buckets.
        self._values = [
            [p.new_empty_strided(p.shape, p.stride()).copy_(p) for p in own] for _ in self._bound
        ] * self._equal
        self._grads: list[list[Tensor | None]] = [[None] * len(self._params) for _ in range(self.size)]
        self._buffers = list(model.buffers())
        self._start = [b.detach().clone() for b in self._buffers]
        self._first: list[Tensor] = []
        self._buckets: list[list[Tensor]] = []
        # Memory that is kept from step to step: new pages cost more than what is written into them. In the strides of real
        # gradients: norms are added up, and matrices multiplied, in the order of memory.
        self._rooms = [[_in_bucket(p.new_empty(p.numel()), p) for p in self._params] for _ in range(self.size)]
        self._scratch: Tensor | None = None
        self._here: int | None = None
        """The rank whose turn it is."""
        self._turned: list[int] = []
        """The ranks that have had their turn since the last step."""
        self._sent: set[int] = set()
        """Those of them whose gradients came to DDP's hook."""
        self._device = next(model.parameters()).device
        self._states = [random_state(self._device) for _ in range(self.size)]
        if seeds is not None:
            self.seed(seeds)
        model.register_comm_hook(self, bucket_hook)
        self._load(0)
        self._known = bit_sums(self._values[0])
        """Tells rank 0's parameters from others: as they were when they were last looked at."""

    def seed(self, seeds: Sequence[int]) -> None:
        """Seeds each rank's random numbers."""
        if len(seeds) != self.size:
            raise ValueError(f"{self.size} ranks need as many seeds, got {len(seeds)}")
        for rank, seed in enumerate(seeds):
            torch.manual_seed(seed)
            self._states[rank] = random_state(self._device)

    @contextlib.contextmanager
    def turn(self, rank: int) -> Iterator[None]:
        """Inside, the model is that of `rank`, and backward leaves this rank's gradient. Ranks come in rising order."""
        if rank not in range(self.size):
            raise ValueError(f"rank must be in [0, {self.size}), got {rank}")
        self._check_outside(f"turn({rank})")
        if rank == 0:
            if self._sent and self._turned == list(range(self.size)):
                raise RuntimeError(
                    "every rank has had its turn, and step() was not called: call step() of VirtualRanks, or its zero_grad() "
                    "to leave these gradients out; to accumulate, run several passes in one turn"
                )
            self.zero_grad()
            self._take_changes()
            self._start = [b.detach().clone() for b in self._buffers]
        self._here = rank
        self._turned.append(rank)
        self._grads[rank] = [None] * len(self._params)
        self._load(rank)
        _copy(self._buffers, self._start)
        restore_random_state(self._states[rank], self._device)
        try:
            yield
        finally:
            self._states[rank] = random_state(self._device)
            if rank == 0:
                self._first = [b.detach().clone() for b in self._buffers]
                self._known = bit_sums(self._values[0])
            # DDP's next backward writes into the same buckets.
            for i, (p, value) in enumerate(zip(self._params, self._values[0], strict=True)):
                if p.grad is not None:
                    self._grads[rank][i] = self._rooms[rank][i].copy_(p.grad.detach())
                p.data, p.grad = value, None
            self._here = None

    def zero_grad(self) -> None:
        """Forgets all turns since the last step, and their gradients: the step is left out on every rank."""
        self._turned, self._sent, self._buckets = [], set(), []
        self._grads = [[None] * len(self._params) for _ in range(self.size)]

    def _check_outside(self, call: str) -> None:
        """Refuses a call inside a turn, and gradients that no turn has: they would count for no rank."""
        if self._here is not None:
            raise RuntimeError(f"{call} was called inside turn({self._here}): leave that `with` block first")
        if any(p.grad is not None for p in self._params):
            raise RuntimeError(
                f"before {call} a backward pass outside of turns has left gradients that belong to none of the ranks: call "
                "backward inside turn(rank), and zero_grad() after a pass that is not for training"
            )

    def _take_changes(self) -> None:
        """Weights that were changed outside of turns, on rank 0, become those of all ranks, whose scripts do the same."""
        for p, value in zip(self._params, self._values[0], strict=True):
            if (p.shape, p.dtype, p.device) != (value.shape, value.dtype, value.device):
                raise RuntimeError(
                    "the model was converted or moved: build DistributedDataParallel and VirtualRanks again"
                )
            if p.data_ptr() != value.data_ptr():  # p.data was replaced
                p.data = value.copy_(p.detach())
        now = bit_sums(self._values[0])
        if torch.equal(now, self._known):
            return
        first = self.optimizers[0]
        if first.local_models and first.steps and self.size > 1:
            raise RuntimeError(
                f"weights were changed outside of turns, where the model is rank 0's, and with {first.kind} ranks have "
                "different ones: change them in the turn of every rank"
            )
        self._known = now
        for values in self._values[1 : len(self._bound)]:
            _copy(values, self._values[0])

    def _check_equal(self) -> None:
        """Refuses models that differ where the method has one model for all: their ranks would never meet again."""
        if len(self._bound) == 1 or self.optimizers[0].local_models:
            return
        sums = [self._known, *map(bit_sums, self._values[1:])]
        if odd := [rank for rank, one in enumerate(sums) if not torch.equal(one, self._known)]:
            raise RuntimeError(
                f"ranks {odd} have other weights than rank 0: change weights in the turn of every rank, or outside of turns"
            )

    @torch.no_grad()
    def step(self) -> None:
        """One step of every rank. Afterwards the model is rank 0's."""
        self._check_outside("step()")
        every = list(range(self.size))
        (turned, self._turned), (sent, self._sent) = (self._turned, []), (self._sent, set())
        if turned not in ([], every):
            # The others' gradients would count as 0, where real ranks wait for them.
            raise RuntimeError(
                f"before step() each of {self.size} ranks has one turn, from rank 0 on, got turns of {turned}"
            )
        there = sent or any(g is not None for grads in self._grads for g in grads)
        if there and (silent := [rank for rank in every if rank not in sent]):
            raise RuntimeError(
                f"in their turns ranks {silent} had no backward pass outside of no_sync(), and others would wait for them: "
                "give all ranks the same number of batches"
            )
        self._compare()
        self._take_changes()
        self._check_equal()
        first = self.optimizers[0]
        held = {p for group in first.param_groups for p in group["params"] if p.requires_grad}
        for name, p in self.model.module.named_parameters():
            if p in held and p not in self._place and p.grad is not None:  # the sum of all turns, none keeps its own
                raise RuntimeError(
                    f"{name} has a gradient but was frozen when virtual ranks were made: build DistributedDataParallel and "
                    "VirtualRanks again"
                )
        try:
            self._update(first)
        finally:
            self.zero_grad()
            self._load(0)
            self._known = bit_sums(self._values[0])
        _copy(self._buffers, self._first)
        for optimizer in self.optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined] # by which torch's schedulers know of a step

    def _update(self, first: BucketOptimizer) -> None:
        dense = first.plan(first.steps + 1) is Plan.DENSE
        for i in range(len(self._params)):
            # What DDP leaves behind: where a rank has a gradient, those that have none get 0.
            missing = [rank for rank, grads in enumerate(self._grads) if grads[i] is None]
            for rank in missing if len(missing) < self.size else ():
                self._grads[rank][i] = self._rooms[rank][i].zero_()
        if dense:
            self._average()
        if len(self._bound) < self.size:
            self._load(0)
            first._virtual = False
            try:
                first.step()
            finally:
                first._virtual = True
        else:
            agree = not dense and not self._overlap
            self._together(lambda rank: self._step(rank, agree))

    def _compare(self) -> None:
        """Refuses what `attach` and steps refuse of real ranks: with other settings their models go apart."""
        # Of dense ones the first steps for all.
        said = [digest_of((*o.settings(), o.steps if o.compressed else 0)) for o in self.optimizers]
        if odd := odd_ranks(said):
            raise ValueError(
                f"the optimizers of ranks {odd} differ from rank 0's in class, hyper-parameters (a schedule changes those of "
                "every rank) or completed steps: make them equal"
            )

    def _step(self, rank: int, agree: bool) -> Requests[None]:
        optimizer = self.optimizers[rank]
        if agree:  # as `Attachment` does
            yield from mark_overflow(optimizer._gradients(), optimizer.device)
        yield from optimizer.stepping()

    def _together(self, task: Callable[[int], Requests[None]]) -> None:
        """Performs the task of every rank."""
        try:
            lockstep([o.comm for o in self.optimizers], [task(rank) for rank in range(self.size)], self._load)
        except BaseException:
            for optimizer in self.optimizers:
                optimizer.give_up()
            raise

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the parameters are the mean over ranks, as in `BucketOptimizer.averaged`."""
        self._check_outside("averaged()")
        if not self.optimizers[0].local_models or self.size == 1:
            yield
            return
        kept = [[x.clone() for x in values] for values in self._values]
        with torch.no_grad():
            self._together(lambda rank: self.optimizers[rank].average_parameters(counted=False))
        self._load(0)
        known, self._known = self._known, bit_sums(self._values[0])
        try:
            yield
        finally:
            for values, saved in zip(self._values, kept, strict=True):
                _copy(values, saved)
            self._known = known

    def state_bytes(self) -> int:
        """Bytes of optimizer state, of all ranks together."""
        return self._equal * sum(optimizer.state_bytes() for optimizer in self._bound)

    def on_bucket(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Leaves a bucket unchanged, since nothing is sent during backward, and keeps which parameters it holds.

        Rank 0's, whose first backward precedes DDP's rebuilding of its buckets.
        """
        if self._here is not None:
            self._sent.add(self._here)
        if self._here == 0:
            if bucket.index() == 0:  # a second pass adds to the same gradients, which are averaged once
                self._buckets = []
            self._buckets.append(list(bucket.parameters()))
        return done(bucket.buffer())

    def _average(self) -> None:
        """What DDP's all-reduce leaves in the gradients of all ranks."""
        for params in self._buckets:
            places = [self._place[p] for p in params]  # DDP sends those too that have no gradient
            rows = self._rows(places).div_(self.size)
            for link in self._links:
                link.count_ring_all_reduce(rows[0].nbytes)
            parts = ring_sum(rows).split([self._params[i].numel() for i in places])
            for rank, grads in enumerate(self._grads[: len(self._bound)]):
                for i, part in zip(places, parts, strict=True):
                    if grads[i] is not None:
                        grads[i] = self._rooms[rank][i].copy_(_in_bucket(part, self._params[i]))

    def _rows(self, places: list[int]) -> Tensor:
        """The gradients of a bucket, in the type that is sent: [ranks, elements]. The next call overwrites them."""
        sizes = [self._params[i].numel() for i in places]
        elements, wire = sum(sizes), WIRES[self.optimizers[0].wire]
        if self._scratch is None or self._scratch.numel() < self.size * elements:
            self._scratch = torch.empty(self.size * elements, dtype=wire, device=self._params[places[0]].device)
        rows = self._scratch[: self.size * elements].view(self.size, elements)
        for grads, row in zip(self._grads, rows, strict=True):
            for i, part in zip(places, row.split(sizes), strict=True):
                grad = grads[i]
                part.zero_() if grad is None else _in_bucket(part, self._params[i]).copy_(grad)
        return rows

    def _load(self, rank: int) -> None:
        """Makes parameters and gradients those of `rank`."""
        for p, value, grad in zip(self._params, self._values[rank], self._grads[rank], strict=True):
            p.data, p.grad = value, grad


def random_state(device: torch.device) -> tuple[Tensor, ...]:
    """Of torch's generators on the CPU and, where it is a GPU, on that device."""
    cpu = torch.get_rng_state()
    return (cpu, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (cpu,)


def restore_random_state(state: tuple[Tensor, ...], device: torch.device) -> None:
    """Puts back what `random_state` returned."""
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.cuda.set_rng_state(state[1], device)


def _in_bucket(flat: Tensor, p: Tensor) -> Tensor:
    """A gradient's view of its part of a bucket: DDP lays it out in the parameter's own strides, unless these leave gaps."""
    extent = 1 + sum((n - 1) * s for n, s in zip(p.shape, p.stride(), strict=True))
    dense = p.numel() == extent
    return flat.as_strided(p.shape, p.stride(), flat.storage_offset()) if dense else flat.view(p.shape)


def _copy(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for target, value in zip(into, values, strict=True):
            target.copy_(value)
