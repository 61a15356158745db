"""A method's state by parameter, whatever units, workers and shards keep it.

`Method.carried` says of what kind each state is. It has a number for every element of the unit, or for every parameter
(`Method.by_tensor`), or a few for the whole unit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from birder.comm import AllGather, Communicator, GatherShards, Mean, run
from birder.comm.groups import ended
from birder.optim.contract import Method
from birder.optim.layout import Unit, round_up

Flat = dict[str, Tensor]
"""A unit's state; what has a number for every element has `padded` of them."""
OWN = frozenset({"mean", "sum"})
"""Of `Method.carried`: what every worker has for itself."""


def span(method: Method, unit: Unit, tensor: Tensor) -> slice | None:
    """Which elements of the unit a state of this rank holds. None: it is not by element."""
    comm, padded = method.comm, unit.padded
    for held in (slice(0, padded), comm.shard_of(padded), comm.chunk_of(padded)):
        if held.stop - held.start == tensor.numel():
            return held
    return None


def parts(method: Method, unit: Unit, i: int) -> Flat:
    """What this rank keeps of parameter i: views of the states, in one dimension. Empty where it keeps another part."""
    found: Flat = {}
    first, last = unit.offsets[i], unit.offsets[i] + unit.params[i].numel()
    for name, tensor in unit.state.items():
        if name in method.by_tensor:
            found[name] = tensor[i : i + 1]
        elif (held := span(method, unit, tensor)) is not None:
            found[name] = tensor[max(first - held.start, 0) : max(min(last, held.stop) - held.start, 0)]
    return found


def gathered(method: Method, unit: Unit) -> Flat:
    """The unit's state, with what other ranks keep of it gathered. Every rank calls it; its bytes are not counted.

    Raises ValueError for a state that `carried` does not name.
    """
    state = method.complete_state(unit)
    for name, tensor in state.items():
        if name not in method.carried:
            raise ValueError(f"{type(method).__name__} cannot be laid out again: its `carried` does not name {name}")
        if not _divided(method, unit, name, tensor):
            continue
        whole = AllGather if method.carried[name] == "cut" else GatherShards
        state[name] = run(method.comm, whole(tensor, counted=False)).clone()
    return state


def _divided(method: Method, unit: Unit, name: str, tensor: Tensor) -> bool:
    """Whether other ranks keep the rest of a state."""
    return name not in method.by_tensor and tensor.numel() != unit.padded and span(method, unit, tensor) is not None


def check_whole(method: Method, comm: Communicator | None) -> None:
    """Raises RuntimeError where the state cannot be laid out for `comm`: ranks that have gone keep a part of it."""
    size, before = 1 if comm is None else comm.world_size, method.comm
    if not ended(before.all.group) or size == before.world_size:
        return
    if any(_divided(method, unit, *state) for unit in method.units for state in method.complete_state(unit).items()):
        raise RuntimeError(
            f"the state of {method.kind} is divided among {before.world_size} ranks whose process group was destroyed, and "
            f"now there are {size}: before destroy_process_group() save it by birder.checkpoint, and load that"
        )


def own(method: Method, unit: Unit, flat: Flat) -> Flat:
    """The reverse of `gathered`: what this rank keeps of it."""
    held = {name: span(method, unit, t) for name, t in unit.state.items() if name not in method.by_tensor}
    return {name: t if (mine := held.get(name)) is None else t[mine] for name, t in flat.items()}


def of_parameter(method: Method, unit: Unit, name: str, tensor: Tensor, i: int) -> Tensor:
    """The part of a gathered state that is parameter i's, a view; all of it where it is of the whole unit."""
    if name in method.by_tensor:
        return tensor[i]
    return unit.view(tensor, i) if tensor.numel() == unit.padded else tensor


def taken(method: Method) -> dict[Tensor, Flat]:
    """Copies of the state by parameter. Every rank calls it."""
    found: dict[Tensor, Flat] = {}
    for unit in method.units:
        flat = gathered(method, unit)
        for i, p in enumerate(unit.wholes):
            found[p] = {name: of_parameter(method, unit, name, tensor, i).clone() for name, tensor in flat.items()}
    return found


@torch.no_grad()
def shared_out(method: Method, before: Communicator, kept: Flat) -> Flat:
    """A parameter's state for other workers or shards than those of `before`: the mean of what workers withhold stays, or its
    sum, as birder/checkpoint/elastic.py has it. Every rank calls it, once the new units are there."""
    comm, found = method.comm, dict(kept)
    cut = {name for unit in method.units for name, t in unit.state.items() if t.numel() * comm.shards == unit.padded}
    for name, tensor in kept.items():
        rule, part = method.carried.get(name), tensor.float()
        if rule not in OWN:
            continue
        if comm.shards > 1 and before.world_size > 1 and name in cut:  # each rank keeps a part of what it had
            part = run(comm, Mean(part.reshape(-1), counted=False)).view(tensor.shape)
        found[name] = as_kind(part * (before.workers / comm.workers if rule == "sum" else 1.0), tensor.dtype)
    return found


def as_kind(values: Tensor, kind: torch.dtype) -> Tensor:
    """Rounded where `kind` is of whole numbers; of many workers' errors the sum may be too large for int8."""
    if not kind.is_floating_point:
        limits = torch.iinfo(kind)
        values = values.round().clamp(limits.min, limits.max)
    return values.to(kind)


@torch.no_grad()
def put_back(method: Method, saved: dict[Tensor, Flat], given: dict[Tensor, Flat]) -> None:
    """Gives parameters that were there before the state that `taken` found, others what `joins` says. Every rank calls it.

    given: by the script, instead.
    """
    for unit in method.units:
        flat = {name: tensor.clone() for name, tensor in gathered(method, unit).items()}
        for i, p in enumerate(unit.wholes):
            since, kept = method._aside.get(p, (0, {}))
            passed = 0 if p in given else method.steps - since  # with a state it takes over that one's steps
            kept = saved.get(p, kept) | given.get(p, {})
            state = kept if p in saved else method.joins(p, kept, passed)
            for name in flat.keys() & state.keys():
                place = of_parameter(method, unit, name, flat[name], i)
                place.copy_(state[name].view(place.shape))
        method.load_unit(unit, own(method, unit, flat))
    method.forget_derived()


# ---- a saved state and the parameters that it is of --------------------------------------------------------------------


def numbering(method: Method) -> list[Tensor]:
    """All parameters, in the order in which torch numbers them."""
    return [p for group in method.param_groups for p in group["params"]]


def layout(method: Method) -> str:
    """Which parameters the units hold, by torch's numbers, and their shapes: "0:3x4 1:3 | 2:5". "" before `attach`."""
    numbers = {p: i for i, p in enumerate(numbering(method))}
    return " | ".join(
        " ".join(f"{numbers[p]}:{_shape(p)}" for p in unit.wholes if p in numbers) for unit in method.units
    )


def check_layout(method: Method, state_dict: dict[str, Any]) -> None:
    """Raises ValueError where the saved units hold other parameters, or in other places: lengths may well be the same."""
    begins = state_dict.get("alignment", method.alignment)
    if begins != method.alignment:
        raise ValueError(
            f"in the saved state every parameter begins at a multiple of {begins} elements, in this optimizer of "
            f"{method.alignment}: use the options that it was saved with (of SparseLoCo: chunk)"
        )
    saved, mine = state_dict.get("layout"), layout(method)
    if saved is None or saved == mine:
        return
    theirs, ours = (dict(part.split(":") for part in text.replace("|", " ").split()) for text in (saved, mine))
    names = {str(i): method._names.get(p, f"parameter {i}") for i, p in enumerate(numbering(method))}
    wrong = {
        "lacks": [i for i in ours if i not in theirs],
        "has, but this run does not train,": [i for i in theirs if i not in ours],
        "has another shape of": [i for i in ours if theirs.get(i, ours[i]) != ours[i]],
    }
    said = [f"{what} {_listed([names[i] for i in sorted(found, key=int)])}" for what, found in wrong.items() if found]
    raise ValueError(
        f"the saved state {' and '.join(said) or 'has these parameters in other units'}: resume with the same model and "
        "unit size, and with those layers frozen that were frozen when it was saved (requires_grad, before birder.attach "
        "or the first step); freeze and unfreeze after loading"
    )


def by_number(method: Method, state_dict: dict[str, Any]) -> dict[int, Flat] | None:
    """The saved state by torch's numbers of parameters; None where units are the saved ones, or ranks keep parts of it.

    Raises ValueError for a parameter whose shape is not the saved one.
    """
    saved = state_dict.get("layout")
    if saved in (None, layout(method)) or method.compressed or method.comm.holders > 1:
        return None
    held, found = numbering(method), {}
    for unit, tensors in zip(saved.split(" | ") if saved else (), state_dict["units"], strict=True):
        first = 0
        for i, (number, _, shape) in enumerate(part.partition(":") for part in unit.split()):
            p = held[int(number)]
            if shape != _shape(p):
                check_layout(method, state_dict)
            places = slice(first, first + p.numel())
            found[int(number)] = {
                name: t[i].clone() if name in method.by_tensor else t[places].view(p.shape).clone()
                for name, t in tensors.items()
            }
            first += round_up(p.numel(), method.alignment)
    return found


def _shape(p: Tensor) -> str:
    return "x".join(map(str, p.shape))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)
