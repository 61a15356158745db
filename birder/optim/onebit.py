"""The 1-bit all-reduce with error feedback that 1-bit Adam, 1-bit LAMB, 0/1 Adam and Efficient-Adam share.

With C(z) = (|z|_2 / sqrt(d)) sgn(z) and sgn(0) = +1:

    (1) z_i = message_i + e_i                            worker i
    (2) send C(z_i);  e_i = z_i - C(z_i)
    (3) a = mean_i C(z_i) + s                            server of a chunk
    (4) send C(a) to all;  s = a - C(a)

A scale travels behind the bits of each chunk (birder/kernels/bits.py): (2) and (4) are one exchange each.
|z|_2 is added up in fp64 in a fixed order (birder/kernels/reference.py). A one-process reference gets the same scale from
`(z.double().square().sum() / d).sqrt().float()`, in any order of summation.
"""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor

from birder import kernels
from birder.comm import AcrossHolders, AllGather, AllToAll, Communicator, Requests
from birder.comm.late import Late, sent
from birder.optim.base import BucketOptimizer, Unit, gradient
from birder.optim.layout import maxima
from birder.optim.watch import FIRST, Counted, looked_at

FAR = 1000.0
"""Times lr. Adam itself moves a number by a few lr in a step."""
Exchange = Requests[Tensor]
"""Ends with the messages of all servers, in element order: uint8[shards workers, message_bytes of a chunk]."""


class Support:
    """The coordinates that take part, with their number in this rank's shard and in the chunk that it serves, int64[].

    A coordinate that never has a gradient must not: one bit cannot say 0, it would get +-scale.
    """

    def __init__(self, mask: Tensor, comm: Communicator, version: int) -> None:
        """mask: bool[padded], the same on all ranks. version: `OneBitMean.support_version`."""
        self.mask: Tensor | None = mask  # None: all of them
        self.version = version
        self.shard, self.chunk = comm.shard_of(mask.numel()), comm.chunk_of(mask.numel())
        self.shard_count, self.chunk_count = mask[self.shard].sum(), mask[self.chunk].sum()
        self.whole = Late(mask.all())

    def inside(self, part: slice) -> Tensor | None:
        """That part of the mask."""
        return None if self.mask is None else self.mask[part]


class OneBitMean(BucketOptimizer):
    """Base of the methods that send the 1-bit mean: the two errors, and which coordinates take part."""

    compressed: ClassVar[bool] = True
    carried: ClassVar[dict[str, str]] = {"worker_error": "mean", "server_error": "cut"}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._support: dict[int, Support] = {}
        super().__init__(*args, **kwargs)

    def init_errors(self, unit: Unit) -> None:
        """The worker's error, fp32[padded/shards], the server's, fp32[padded/(shards workers)], and the messages' buffers."""
        workers, shards = self.comm.workers, self.comm.shards
        shard = unit.padded // shards
        chunk = shard // workers
        size = kernels.message_bytes(chunk)
        unit.keep("worker_error", numel=shard)
        unit.keep("server_error", numel=chunk)
        unit.buffers = {
            "bits": unit.bytes(workers * size),  # of this rank's shard, a message to each server
            "rows": unit.bytes(workers * size),  # what the workers have sent
            "chunk": unit.bytes(size),  # of the server
            "result": unit.bytes(shards * workers * size),
            "sums": kernels.partial_sums(shard, unit.device),  # of squares, for either scale
        }

    def onebit_mean(self, unit: Unit, z: Tensor) -> Exchange:
        """The mean over workers of `z`, in one bit per element each way. z: fp32[padded/shards], this shard's message."""
        support, error = self.support(unit), unit.state["worker_error"]
        squares = kernels.add_message(error, z, support.inside(support.shard), sums=unit.buffers["sums"])  # (1)
        return (yield from self._exchange_signs(unit, squares))

    def onebit_momentum_mean(self, unit: Unit, g: Tensor, m: Tensor, beta: float) -> Exchange:
        """`onebit_mean` of (1-beta) g + beta m, which is made in the same pass. g and m: fp32[padded/shards]."""
        support, error = self.support(unit), unit.state["worker_error"]
        mask = support.inside(support.shard)
        squares = kernels.add_momentum(error, g, m, beta=beta, mask=mask, sums=unit.buffers["sums"])  # (1)
        return (yield from self._exchange_signs(unit, squares))

    def _exchange_signs(self, unit: Unit, squares: Tensor) -> Exchange:
        """(2) to (4). The worker's error holds z, `squares` is the sum of its squares, fp64[]."""
        comm, support, buffers = self.comm, self.support(unit), unit.buffers
        worker_error, server_error = unit.state["worker_error"], unit.state["server_error"]
        inside, factor = support.inside(support.shard), scale(squares, support.shard_count)
        messages = kernels.split_signs(worker_error, factor, inside, parts=comm.workers, out=buffers["bits"])  # (2)
        rows = yield AllToAll(messages.view(-1), buffers["rows"])
        inside = support.inside(support.chunk)
        squares = kernels.add_average(server_error, rows, inside, sums=buffers["sums"])  # (3)
        factor = scale(squares, support.chunk_count)
        message = kernels.split_signs(server_error, factor, inside, out=buffers["chunk"])  # (4)
        return (yield AllGather(message.view(-1), buffers["result"])).view(comm.shards * comm.workers, -1)

    def write_mean(self, unit: Unit, out: Tensor, mean: Tensor) -> None:
        """Writes what `onebit_mean` returned into `out`, fp32[padded]; 0 where nothing takes part."""
        kernels.write_signs(out, mean, self.support(unit).mask)

    def taking_part(self, unit: Unit) -> Tensor:
        """bool[padded], the same on all ranks."""
        raise NotImplementedError

    def support_version(self, unit: Unit) -> int:
        """Changes when `taking_part` may."""
        return 0

    def support(self, unit: Unit) -> Support:
        """Of `taking_part`; computed once for each `support_version`."""
        known, version = self._support.get(unit.index), self.support_version(unit)
        if known is None or known.version != version:
            known = self._support[unit.index] = Support(self.taking_part(unit), self.comm, version)
        if known.mask is not None and known.whole.there and known.whole.read()[0]:
            known.mask = None  # no mask of all is read any more, which changes no result
        return known

    def forget_derived(self) -> None:
        self._support.clear()


class OneBitMethod(OneBitMean):
    """The same under a variance that is frozen after a dense warm-up: coordinates without one take no part."""

    warmup_steps: int
    """Steps after which the variance is frozen."""
    warmup_counts: ClassVar[bool] = True
    """Whether the state depends on how long the warm-up was."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._with_variance: dict[int, Late] = {}
        """By unit, once variances are frozen: 1 for each parameter whose variance is not 0 everywhere."""
        self._asking: Late | None = None
        """Over shards: whether one of them asked for this again in the last step. None: all do."""
        self._lost = Counted()
        """Numbers that got a gradient outside of the support."""
        self._far = Counted()
        """Numbers that were moved further than FAR lr in a step."""
        super().__init__(*args, **kwargs)

    def taking_part(self, unit: Unit) -> Tensor:
        """bool[padded], the same on all ranks: where the variance is not 0."""
        return unit.state["v"] > 0

    def support_version(self, unit: Unit) -> int:
        """Of the variance, which the method or a script may change."""
        variance = unit.state["v"]
        return 0 if variance.is_inference() else variance._version

    def support(self, unit: Unit) -> Support:
        known = self._support.get(unit.index)
        found = super().support(unit)
        if found is not known:
            self._with_variance.pop(unit.index, None)
        return found

    def restores(self, name: str, step: int) -> bool:
        return name != "v" or step <= self.warmup_steps  # frozen later

    def loaded(self, options: dict[str, Any]) -> None:
        """A warm-up that was over is as long as it was; one that was not ends after the next step at the earliest."""
        theirs, mine = options.get("warmup_steps"), self.warmup_steps
        if not self.warmup_counts or theirs is None:
            return
        self.warmup_steps = theirs if self.steps >= theirs else max(mine, self.steps + 1)
        if self.warmup_steps != mine:
            warnings.warn(
                f"{self.kind}: the state is of step {self.steps} and was saved with warmup_steps={theirs}, so warmup_steps "
                f"is {self.warmup_steps} from now on, not {mine}",
                RuntimeWarning,
                stacklevel=3,
            )

    def forget_derived(self) -> None:
        super().forget_derived()
        self._with_variance.clear()
        self._asking = None
        self._lost.clear()
        self._far.clear()

    def check_step(self, step: int) -> None:
        """Raises RuntimeError for a parameter whose first gradient comes when variances are frozen: it would never move.
        Warns of one of which that is true in part, and of one that was moved too far."""
        self._far.warn(
            self,
            f"move by more than {FAR:.0f} lr in a step, as their frozen variance is nearly 0: "
            "raise eps, or use a longer warm-up",
        )
        if step <= self.warmup_steps:
            return
        self._lost.warn(
            self,
            f"get a gradient that they did not have in the {self.warmup_steps} steps of the warm-up. Their variance stays "
            "0, so they never move: use a longer warm-up, or another optimizer for this parameter",
        )
        for unit in self.units:
            self.support(unit)
            if unit.index not in self._with_variance:
                if self._sharded:  # `before_update` asks the other shards
                    continue
                largest = torch.stack(list(torch._foreach_norm(unit.views(unit.state["v"]), float("inf"))))
                self._with_variance[unit.index] = Late(largest > 0)
            self._refuse_without_variance(unit)

    def note_lost(self, unit: Unit, grad: Tensor, step: int) -> None:
        """Counts the numbers that this rank's gradient, fp32[padded], would move, whose variance is 0 for good. Seldom."""
        mask = self.support(unit).mask
        late = step - self.warmup_steps
        if mask is None or self._lost.warned or late <= 0 or not looked_at(FIRST + late):
            return
        self._lost.note(unit, (grad != 0).logical_and_(~mask))

    def note_far(self, unit: Unit, numerator: Tensor, *, lr: float, correction: float = 1.0, step: int) -> None:
        """Counts the numbers for which numerator / (sqrt(v) / correction + eps) is more than FAR lr. Once the variance is
        frozen they go as far in every step. More and more seldom, on one of the ranks that have the same.

        lr: what stands for it in `numerator`; 1 - beta1^t where that is m without bias correction.
        """
        frozen_for = step - self.warmup_steps
        if (
            self._far.warned
            or (self.comm.rank and not self._sharded)
            or frozen_for < 1
            or frozen_for & (frozen_for - 1)
        ):
            return
        eps, far = unit.group["eps"], torch.zeros_like(numerator, dtype=torch.bool)
        for part, n, v in zip(unit.views(far), unit.views(numerator), unit.state_views("v"), strict=True):
            part.copy_(n.abs() > v.sqrt().div_(correction).add_(eps).mul_(FAR * lr))
        self._far.note(unit, far)

    def before_update(self, step: int) -> Requests[None]:
        """The same over shards: one alone may have no variance where others have, as of an embedding with rows not yet seen.
        In the first step after the warm-up or after the state was loaded, and a step after a script has changed it, on
        whichever of them.
        """
        if step <= self.warmup_steps or not self._sharded:
            return
        if self._asking is None or any(self._asking.read()):
            views = [view for unit in self.units for view in unit.views(unit.state["v"])]
            largest = yield from maxima(self.comm, views)
            for unit, row in zip(self.units, largest.split([len(unit.wholes) for unit in self.units]), strict=True):
                self._with_variance[unit.index] = Late(row > 0)
            for unit in self.units:
                self._refuse_without_variance(unit)
        asks = sent(torch.tensor([len(self._with_variance) < len(self.units)], device="cpu").long(), self.device)
        self._asking = Late((yield AcrossHolders(asks, largest=True, counted=False)))

    def _refuse_without_variance(self, unit: Unit) -> None:
        there = self._with_variance[unit.index]
        if not there.there:  # on a GPU: a step later
            return
        for i in (i for i, seen in enumerate(there.read()) if not seen):
            if (g := gradient(unit.wholes[i])) is not None and bool(g.any()):
                raise RuntimeError(
                    f"{self.named(unit.wholes[i])} had no gradient in the {self.warmup_steps} steps of the warm-up, or a "
                    "script has set its state to 0 since: its variance is 0, so it would never move. Use a longer warm-up, "
                    "or give it to another optimizer"
                )


def scale(squares: Tensor, count: Tensor) -> Tensor:
    """|z|_2 / sqrt(d), fp32[], of the sum of the squares of z, fp64[], and the number of coordinates that take part, int64[].

    Rounded once: the same on every device and back end, with any number of threads.
    """
    return (squares / count.clamp(min=1)).sqrt().float()
