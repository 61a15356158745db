"""`Unit`: a fixed group of parameters that is encoded, sent and applied together.

DDP's buckets do not serve: DDP rebuilds them after the first backward, so that state by bucket is wrong from step 2 on.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from birder.comm import AcrossHolders, Communicator, Requests
from birder.kernels.bits import round_up
from birder.optim.checks import require

ALIGN = 32
"""Every parameter starts at a multiple of at least this many elements, a 32-bit word of packed bits."""


def sharded(p: Tensor) -> bool:
    """Whether this rank holds only a part of the tensor: whether it is one of FSDP's (a DTensor)."""
    kind = type(p)
    return kind is not Tensor and kind is not Parameter and hasattr(kind, "to_local")


def local(t: Tensor) -> Tensor:
    """The part of a tensor that this rank holds; it shares the memory."""
    if not sharded(t):
        return t
    with torch.no_grad():
        return t.to_local()  # type: ignore[attr-defined]


def gradient(p: Tensor) -> Tensor | None:
    """The part of a parameter's gradient that this rank holds; None where there is no gradient."""
    return None if p.grad is None else local(p.grad)


@dataclass
class Unit:
    """Parameters of one group, side by side in flat buffers of `padded` fp32 elements.

    offsets: where each parameter starts in the flat buffers.
    start:   number of the unit's first element among all elements: the counter of the random numbers. It depends on
             the parameters alone, not on the size of units or the number of ranks.
    state:   the method's flat tensors for this unit, rank-local.
    grad:    fp32[padded], the local gradient (allocated at the first compressed step). result: of the exchange, for `update`.
    buffers: what the exchange sends and receives, by name, so that a step allocates nothing. Made in `init_unit`, not saved.
    """

    index: int
    group: dict[str, Any]
    params: list[Tensor]
    offsets: list[int]
    start: int
    numel: int
    wholes: list[Tensor] = field(default_factory=list)
    """The optimizer's own parameters. `params` are the same ones; or of FSDP's the shards on this rank (`lay_out_shards`)."""
    runs: list[tuple[int, int]] = field(default_factory=list)
    """(place in the flat buffers, element number) where each run of consecutive numbers begins; none: one from `start`."""
    shapes: list[torch.Size] = field(default_factory=list)
    """Of `params`, when the optimizer was bound."""
    padded: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)
    shown: tuple[str, ...] = ()
    """Names of the states of which there are views in `optimizer.state`."""
    grad: Tensor | None = None
    result: Any = None
    buffers: dict[str, Tensor] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    """Parameters, by position, whose gradient has not arrived in this step."""
    kept: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Those that came without a gradient on this rank, which counts as 0 in `grad`: their states here before the exchange."""
    sent: bool = False
    """Whether its exchange was submitted in this step."""
    moved: set[int] = field(default_factory=set)
    """Parameters, by position, that had a gradient since ranks last met, in a step after which they are apart."""
    _seen: dict[str, tuple[Tensor | None, list[Tensor] | None, list[Tensor]]] = field(default_factory=dict, repr=False)

    @functools.cached_property
    def device(self) -> torch.device:
        """Of the parameters when the optimizer was bound, where its state stays: Lightning's fit leaves a GPU's model on the
        CPU."""
        return self.params[0].device

    def view(self, flat: Tensor, i: int) -> Tensor:
        """Parameter i's part of a flat buffer, in the parameter's shape."""
        p = self.params[i]
        return flat[self.offsets[i] : self.offsets[i] + p.numel()].view(p.shape)

    def views(self, flat: Tensor) -> list[Tensor]:
        """All parameters' parts of a flat buffer."""
        return [self.view(flat, i) for i in range(len(self.params))]

    def state_views(self, name: str) -> list[Tensor]:
        """`views` of a state, made once: a step of hundreds of small tensors has little time for each."""
        flat, (seen, params, made) = self.state[name], self._seen.get(name, (None, None, []))
        if seen is not flat or params is not self.params:
            made = self.views(flat)
            self._seen[name] = flat, self.params, made
        return made

    def numbered(self, part: slice) -> list[tuple[slice, int]]:
        """The runs of consecutive element numbers in a part of the flat buffers: (where in that part, first number)."""
        runs = self.runs or [(0, self.start)]
        found = []
        for k, (place, number) in enumerate(runs):
            end = runs[k + 1][0] if k + 1 < len(runs) else self.padded
            low, high = max(place, part.start), min(end, part.stop)
            if low < high:
                found.append((slice(low - part.start, high - part.start), number + low - place))
        return found

    def shard_runs(self, comm: Communicator) -> list[tuple[slice, int]]:
        """`numbered` of this rank's shard; one run, but with FSDP."""
        return self.numbered(comm.shard_of(self.padded))

    def chunk_runs(self, comm: Communicator) -> list[tuple[slice, int]]:
        """`numbered` of the chunk that this rank serves."""
        return self.numbered(comm.chunk_of(self.padded))

    def zeros(self, numel: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """A flat buffer of zeros on the unit's device; of `padded` elements when no number is given."""
        return torch.zeros(self.padded if numel is None else numel, dtype=dtype, device=self.device)

    def keep(self, *names: str, numel: int | None = None) -> None:
        """Makes states of these names, fp32 zeros; of `padded` elements when no number is given."""
        for name in names:
            self.state[name] = self.zeros(numel)

    def bytes(self, count: int) -> Tensor:
        """An uninitialised buffer for a message of `count` bytes, on the unit's device."""
        return torch.empty(count, dtype=torch.uint8, device=self.device)


def make_units(groups: Sequence[dict[str, Any]], cap_bytes: int, align: int = ALIGN) -> list[Unit]:
    """Cuts every parameter group into units of about `cap_bytes` of fp32 gradient, in the order in which gradients arrive.

    That is from the last parameter on, so that the first unit is complete early in backward. A tensor larger than the cap is
    a unit by itself. Each parameter begins at a multiple of `align` elements. Raises ValueError when `align` is not a
    multiple of 32.
    """
    require(align >= ALIGN and align % ALIGN == 0, "alignment", align, f"a multiple of {ALIGN}")
    units: list[Unit] = []
    start = 0
    for group in groups:
        open_unit: Unit | None = None
        for p in reversed([p for p in group["params"] if p.requires_grad and p.numel() > 0]):
            # Of FSDP's parameters all elements count, so that all ranks cut in the same places.
            size = round_up(p.numel(), align)
            if open_unit is None or (open_unit.numel + size) * 4 > cap_bytes:
                open_unit = Unit(len(units), group, [], [], start, 0)
                units.append(open_unit)
            open_unit.params.append(p)
            open_unit.wholes.append(p)
            open_unit.offsets.append(open_unit.numel)
            open_unit.numel += size
            start += size
    return units


def first_element(p: Tensor) -> int:
    """Number within a parameter of the first element on this rank. p: a DTensor, sharded over its first dimension.

    FSDP gives every rank ceil(rows / ranks) rows while there are any.
    """
    mesh = p.device_mesh  # type: ignore[attr-defined]
    rows = -(-p.shape[0] // mesh.size())
    return min(mesh.get_local_rank() * rows, p.shape[0]) * (p.numel() // p.shape[0])


def lay_out_shards(unit: Unit, multiple: int) -> None:
    """Turns a unit of whole parameters into one of the shards on this rank, a run of numbers for each of them.

    Elements keep their numbers, so that random numbers do not depend on the number of shards. A shard begins at the same
    place within a run of `multiple` elements: the words of bits that `reduce="one_phase"` divides among workers stay
    together.
    """
    places, end = [], 0
    unit.params = [local(p) for p in unit.wholes]
    for p, shard, offset in zip(unit.wholes, unit.params, unit.offsets, strict=True):
        first = offset + first_element(p)
        inside = first % multiple if shard.numel() else 0
        places.append(end + inside)
        if shard.numel():
            unit.runs.append((end, unit.start + first - inside))
            end += round_up(inside + shard.numel(), multiple)
    unit.offsets, unit.numel = places, max(end, multiple)


def fusible(params: list[Tensor], grads: list[Tensor]) -> bool:
    """Whether torch's fused CPU kernels serve these: they go through memory in order, and states stand in logical order."""
    return all(t.device.type == "cpu" and t.is_contiguous() for t in (*params, *grads))


def with_gradient(unit: Unit, *names: str) -> tuple[list[Tensor], ...]:
    """Parameters that have a gradient, their gradients in fp32, and views of the named states."""
    found = {i: g for i, p in enumerate(unit.wholes) if (g := gradient(p)) is not None}
    params, grads = [unit.params[i] for i in found], [g.to(torch.float32) for g in found.values()]
    return params, grads, *([each[i] for i in found] for each in map(unit.state_views, names))


# ---- of whole tensors, also where FSDP has left this rank a shard of each: then ranks put them together ----------------


def norms(comm: Communicator, tensors: list[Tensor]) -> Requests[Tensor]:
    """The 2-norm of each tensor, fp32[len(tensors)]. Of shards every rank of a replica passes its own, in the same order."""
    own = torch.stack([torch.linalg.vector_norm(t, dtype=torch.float32) for t in tensors])
    if comm.holders == 1:
        return own
    return (yield AcrossHolders(own.double().square())).sqrt().float()


def maxima(comm: Communicator, tensors: list[Tensor]) -> Requests[Tensor]:
    """The largest element of each tensor, [len(tensors)]; a shard may be empty."""
    own = torch.stack([t.max() if t.numel() else t.new_tensor(-math.inf) for t in tensors])
    return own if comm.holders == 1 else (yield AcrossHolders(own, largest=True))
