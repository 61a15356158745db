"""A method's state by parameter, whatever units, workers and shards keep it: to lay an optimizer out anew, and to save it.

`Method.carried` says of what kind each state is. A state has a number for every element of the unit, or for every parameter
(`Method.by_tensor`), or a few for the whole unit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from birder.comm import AllGather, GatherShards, run
from birder.optim.contract import Method
from birder.optim.layout import Unit

Flat = dict[str, Tensor]
"""A unit's state; what has a number for every element has `padded` of them."""


def span(method: Method, unit: Unit, tensor: Tensor) -> tuple[int, int] | None:
    """Which elements of the unit a state of this rank holds: (first, number of them). None: it is not by element."""
    comm, size = method.comm, tensor.numel()
    if size == unit.padded:
        return 0, size
    if size == unit.padded // comm.shards:
        return comm.shard * size, size
    if size == unit.padded // (comm.shards * comm.workers):
        return (comm.shard * comm.workers + comm.worker) * size, size
    return None


def parts(method: Method, unit: Unit, i: int) -> Flat:
    """What this rank keeps of parameter i: views of the states, in one dimension. Empty where it keeps another part."""
    found: Flat = {}
    first, last = unit.offsets[i], unit.offsets[i] + unit.params[i].numel()
    for name, tensor in unit.state.items():
        if name in method.by_tensor:
            found[name] = tensor[i : i + 1]
        elif (place := span(method, unit, tensor)) is not None:
            begin, size = place
            found[name] = tensor[max(first - begin, 0) : max(min(last - begin, size), 0)]
    return found


def gathered(method: Method, unit: Unit) -> Flat:
    """The unit's state, with what other ranks keep of it gathered. Every rank calls it; its bytes are not counted.

    Raises ValueError for a state that `carried` does not name.
    """
    state = method.complete_state(unit)
    for name, tensor in state.items():
        if name not in method.carried:
            raise ValueError(f"{type(method).__name__} cannot be laid out anew: its `carried` does not name {name}")
        if name in method.by_tensor or tensor.numel() == unit.padded or span(method, unit, tensor) is None:
            continue
        whole = AllGather if method.carried[name] == "cut" else GatherShards
        state[name] = run(method.comm, whole(tensor, counted=False)).clone()
    return state


def own(method: Method, unit: Unit, flat: Flat) -> Flat:
    """The reverse of `gathered`: what this rank keeps of it."""
    kept: Flat = {}
    for name, tensor in flat.items():
        place = None
        if name in unit.state and name not in method.by_tensor:
            place = span(method, unit, unit.state[name])
        kept[name] = tensor if place is None else tensor[place[0] : place[0] + place[1]]
    return kept


def taken(method: Method) -> dict[Tensor, Flat]:
    """Copies of the state by parameter. Every rank calls it."""
    found: dict[Tensor, Flat] = {}
    for unit in method.units:
        for name, tensor in gathered(method, unit).items():
            for i, p in enumerate(unit.wholes):
                if name in method.by_tensor:
                    value = tensor[i]
                else:
                    value = unit.view(tensor, i) if tensor.numel() == unit.padded else tensor
                found.setdefault(p, {})[name] = value.clone()
    return found


@torch.no_grad()
def put_back(method: Method, saved: dict[Tensor, Flat]) -> None:
    """Gives parameters that were there before the state that `taken` found. Others begin with none. Every rank calls it."""
    for unit in method.units:
        flat = {name: tensor.clone() for name, tensor in gathered(method, unit).items()}
        for i, p in enumerate(unit.wholes):
            for name, value in saved.get(p, {}).items():
                if name not in flat:
                    continue
                if name in method.by_tensor:
                    flat[name][i] = value
                elif flat[name].numel() == unit.padded:
                    unit.view(flat[name], i).copy_(value)
                else:
                    flat[name].copy_(value)
        method.load_unit(unit, own(method, unit, flat))
    method.forget_derived()
