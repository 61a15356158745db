"""Resuming with another number of workers: the state of each new rank, out of the states of all old ones.

`Method.carried` says what happens to each state:

    copy    the same on all ranks: taken over
    mean    every worker's own: each new worker gets the mean of the old ones'
    sum     every worker's own: each new worker gets its share of the sum of the old ones'
    cut     every server's own: put together in the order of elements, and cut again

The mean of the workers' errors stays as it was, so that nothing that was withheld is lost or sent twice. Two exceptions of
sigma-delta Adam are in docs/appendix/methods.md. |m| <= b of Birder still holds, for |mean m| <= mean b. Nothing is random:
all new ranks get the same, bit for bit. The resumed run is not the one that would have followed with the old number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from birder.checkpoint import Restored
from birder.optim.base import BucketOptimizer, Unit, round_up
from birder.optim.by_parameter import OWN, Flat, as_kind, check_layout, own


def resize(optimizer: BucketOptimizer, states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The state for this rank of `optimizer`, attached where there are several processes, for its `load_state_dict`.

    states: what `state_dict` returned on each rank of the old run, in the order of ranks; read one at a time. Units must be
            the same: same model, parameter groups and `unit_mb`. Old and new ranks may lie on nodes in any way.

    Where ranks' models differ (`local_models`), every new rank begins with the mean of the old ones': `mean`.
    Raises ValueError for states that do not belong together or to this optimizer, and for a method that does not say what
    becomes of its state.
    """
    if not optimizer._bound:
        optimizer._bind_alone()
    if optimizer.comm.holders > 1:
        raise ValueError(
            "parameters are sharded: birder.checkpoint.shards loads their state on another number of shards"
        )
    first: dict[str, Any] | None = None
    wholes: list[dict[str, _Whole]] = []
    frozen: dict[int, dict[str, _Whole]] = {}
    count, changed = 0, False
    for state in states:
        optimizer._check_state(state)
        if first is None:
            first = state
            wholes, frozen = _begin(optimizer, state)
        elif any(state[key] != first[key] for key in ("steps", "signature")):
            raise ValueError(f"the state of rank {count} is of another run or step than that of rank 0")
        if optimizer.compressed and state.get("rank", count) != count:
            raise ValueError(f"state number {count} was saved by rank {state['rank']}: give them in the order of ranks")
        for flat, whole in zip([*state["units"], *_aside(state).values()], [*wholes, *frozen.values()], strict=True):
            if set(flat) != set(whole):
                raise ValueError(f"the state of rank {count} holds {sorted(flat)}, that of rank 0 {sorted(whole)}")
            for name, tensor in flat.items():
                whole[name].add(count, tensor)
        changed = changed or bool(state.get("changed"))
        count += 1
    if first is None:
        raise ValueError("there is no state to go on from")
    workers, shards = first["signature"]
    if optimizer.compressed and count != workers * shards:
        raise ValueError(f"there are {count} states, the old run had {workers * shards} ranks")
    now = optimizer.comm.workers
    return {
        **first,
        "signature": list(optimizer.comm.signature),
        "rank": optimizer.comm.rank,
        "fingerprint": None,
        "changed": changed,
        "aside": {
            i: (first["aside"][i][0], {name: whole.result(now) for name, whole in of_layer.items()})
            for i, of_layer in frozen.items()
        },
        "units": [
            own(optimizer, unit, {name: whole.result(now, unit) for name, whole in of_unit.items()})
            for unit, of_unit in zip(optimizer.units, wholes, strict=True)
        ],
    }


def state(optimizer: BucketOptimizer, found: Restored, key: str = "optimizer") -> dict[str, Any]:
    """What this rank loads of what `birder.checkpoint.restore(..., any_world=True)` found: its own state, or `resize`d.

    key: where `local` has the optimizer's state. Raises as `resize` does.
    """
    own: dict[str, Any] = found.local[key]
    fits = found.same_world and of_this_shape(optimizer, own)
    return own if fits else resize(optimizer, (local[key] for local in found.of_all()))


def of_this_shape(optimizer: BucketOptimizer, state: dict[str, Any]) -> bool:
    """Whether as many workers and shards saved it as there are now: as many ranks may lie on more or fewer nodes."""
    return tuple(state.get("signature", ())) == optimizer.comm.signature


def mean(models: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of models, tensors by name, added in fp64 in their order, read one at a time.

    Raises ValueError for none, and for models that differ in their tensors' shapes.
    """
    totals: dict[str, Tensor] = {}
    first: dict[str, Tensor] = {}
    count = 0
    for model in models:
        first = first or model
        for name, tensor in model.items():
            if name not in first or tensor.shape != first[name].shape:
                raise ValueError(f"ranks have different shapes of {name}: they kept no whole models")
            totals[name] = tensor.double() if count == 0 else totals[name].add_(tensor)
        count += 1
    if not count:
        raise ValueError("there is nothing to take the mean of")
    return {name: (total / count).to(first[name].dtype) for name, total in totals.items()}


def _begin(
    optimizer: BucketOptimizer, state: dict[str, Any]
) -> tuple[list[dict[str, _Whole]], dict[int, dict[str, _Whole]]]:
    """For each unit, and by number for each layer that is frozen, what its states are put together in."""
    name, units = type(optimizer).__name__, state["units"]
    check_layout(optimizer, state)
    if units is None or len(units) != len(optimizer.units):
        raise ValueError(f"the saved state has {len(units or [])} units, this optimizer has {len(optimizer.units)}")
    workers, shards = state["signature"]
    multiple = math.lcm(32 * workers * shards, optimizer.alignment * shards)
    wholes = []
    for unit, tensors in zip(optimizer.units, units, strict=True):
        padded = round_up(unit.numel, multiple)
        unknown = sorted(set(tensors) - set(optimizer.carried))
        if unknown:
            raise ValueError(
                f"{name} cannot resume with another number of workers: its `carried` does not name {', '.join(unknown)}"
            )
        wholes.append({key: _Whole(optimizer.carried[key], t, padded, workers, shards) for key, t in tensors.items()})
    rules = optimizer.carried | {key: "copy" for key, rule in optimizer.carried.items() if rule == "cut"}
    frozen = {  # every shard of a worker, and every server, keeps the whole of it
        i: {key: _Whole(rules[key], t, t.numel(), workers, shards) for key, t in kept.items()}
        for i, kept in _aside(state).items()
    }
    return wholes, frozen


def _aside(state: dict[str, Any]) -> dict[int, Flat]:
    """By number, what is kept of each layer that is frozen."""
    return {i: kept for i, (_, kept) in (state.get("aside") or {}).items()}


class _Whole:
    """One state of one unit or layer, all elements of it, put together from the old ranks' tensors."""

    def __init__(self, rule: str, first: Tensor, padded: int, workers: int, shards: int) -> None:
        own = padded, padded // shards
        known = {"mean": own, "sum": own, "cut": (padded // (workers * shards),)}
        if first.numel() not in known.get(rule, (first.numel(),)):
            raise ValueError(
                f"a saved tensor has {first.numel()} elements, a unit of {padded} on {workers} x {shards} ranks keeps "
                f"{known[rule][-1]}: resume with the same model, parameter groups and unit size"
            )
        self.rule, self.padded, self.workers, self.shards = rule, padded, workers, shards
        self.size, self.shape, self.kind = first.numel(), first.shape, first.dtype
        self.sharded = rule in OWN and self.size != padded
        kind = torch.float64 if rule in OWN else first.dtype
        self.whole = torch.zeros(self.size if rule == "copy" else padded, dtype=kind, device="cpu")

    def add(self, rank: int, tensor: Tensor) -> None:
        """Of old rank number `rank`; rank = worker * shards + shard."""
        if tensor.numel() != self.size:
            raise ValueError(f"a tensor of rank {rank} has {tensor.numel()} elements, rank 0's has {self.size}")
        if self.rule == "copy" and rank > 0:
            return
        worker, shard = divmod(rank, self.shards)
        place = shard * self.workers + worker if self.rule == "cut" else shard if self.sharded else 0
        part = self.whole[place * self.size :][: self.size].view(self.shape)
        if self.rule in OWN:
            part += tensor.cpu()
        else:
            part.copy_(tensor)

    def result(self, workers: int, unit: Unit | None = None) -> Tensor:
        """All of it as so many new workers keep it together, padded as their unit, on the CPU."""
        whole = self.whole
        if self.rule in OWN:
            parts = self.workers if self.rule == "mean" else workers
            whole = whole / (parts if self.sharded else parts * self.shards)
            whole = as_kind(whole, self.kind)
        if unit is None or len(whole) != self.padded:
            return whole.view(self.shape)
        return torch.nn.functional.pad(whole[: unit.numel], (0, unit.padded - unit.numel))
