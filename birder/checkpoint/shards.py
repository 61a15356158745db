"""Checkpoints of a model and an optimizer over shards: torch.distributed.checkpoint, every state a DTensor by its parameter.

    save(folder, model, attachment)        on every rank, after optimizer.step()
    load(folder, model, attachment)        on every rank, after attach; maybe on another number of shards

What differs between replicas (Birder's moments, the worker's error) has a first dimension for them, so that it needs as many
replicas again. The server's error is kept by element, not by the rank that serves it. torch.distributed.checkpoint pickles
what is not a tensor: load only checkpoints that you trust.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from birder.hooks.fsdp import ShardAttachment, reshard
from birder.optim.base import BucketOptimizer
from birder.optim.by_parameter import OWN, Flat, check_layout, gathered, layout, numbering, of_parameter, own
from birder.optim.layout import local


def save(folder: str | Path, model: nn.Module, attachment: ShardAttachment) -> None:
    """Writes parameters, buffers and the optimizer's state to `folder`. Every rank calls it.

    Raises TypeError for an entry of a group that JSON cannot hold, and RuntimeError where `state_dict` does so.
    """
    reshard(model)
    optimizer, names = attachment.optimizer, _names(model)
    optimizer.refuse_half_step()
    optimizer.follow_groups()
    optimizer.pipeline.wait()
    flats = [gathered(optimizer, unit) for unit in optimizer.units]
    frozen = {p: optimizer._aside[p] for p in numbering(optimizer) if p in optimizer._aside}
    aside = {names[p]: [since, {name: _kind(t) for name, t in kept.items()}] for p, (since, kept) in frozen.items()}
    state = {
        "meta": json.dumps(_meta(attachment) | {"aside": aside}),
        "model": model.state_dict(),
        "optimizer": _by_parameter(names, attachment, flats, {p: kept for p, (_, kept) in frozen.items()}),
    }
    dcp.save(state, checkpoint_id=folder)


def load(folder: str | Path, model: nn.Module, attachment: ShardAttachment) -> None:
    """Restores what `save` wrote. Every rank calls it, after `attach`; `unit_mb` may be another one.

    Raises ValueError for the state of another method, where other layers were frozen or, where replicas keep different parts,
    for another number of replicas.
    """
    optimizer = attachment.optimizer
    about: dict[str, Any] = {"meta": ""}
    dcp.load(about, checkpoint_id=folder)
    saved, mine = json.loads(about["meta"]), _meta(attachment)
    if saved["method"] != mine["method"]:
        raise ValueError(f"the checkpoint holds what {saved['method']} keeps, this optimizer is {mine['method']}")
    differs = not OWN.isdisjoint(optimizer.carried.values())
    if differs and saved["replicas"] != mine["replicas"]:
        raise ValueError(
            f"state of {saved['method']} was saved by {saved['replicas']} replicas, this run has {mine['replicas']}, and "
            f"every replica keeps its own part: use {saved['replicas']} replicas, of any number of shards"
        )
    kept, here = saved.get("kinds", mine["kinds"]), mine["kinds"]
    if kept != here:  # torch would convert numbers that stand for others
        odd = sorted(k for k in kept.keys() | here.keys() if kept.get(k) != here.get(k))
        had, has = (", ".join(f"{k} ({of[k]})" for k in odd if k in of) or "none of it" for of in (kept, here))
        raise ValueError(f"the saved state has {had}, this optimizer {has}: use the options that it was saved with")
    theirs, ours = saved.get("tensors", mine["tensors"]), mine["tensors"]
    if theirs != ours or len(saved["groups"]) != len(ours):
        raise ValueError(f"the saved state has parameter groups of {theirs} tensors, this optimizer of {ours}")
    if sorted(_parameters(saved.get("layout", mine["layout"]))) != sorted(_parameters(mine["layout"])):
        check_layout(optimizer, saved)
    reshard(model)
    optimizer.pipeline.wait()
    names, numbers = _names(model), numbering(optimizer)
    place = {name: i for i, p in enumerate(numbers) if (name := names.get(p)) is not None}
    aside = {
        place[name]: (since, {k: _empty(optimizer, numbers[place[name]], k, dtype) for k, dtype in kept.items()})
        for name, (since, kept) in saved.get("aside", {}).items()
    }
    flats = [{k: v.clone() for k, v in gathered(optimizer, unit).items()} for unit in optimizer.units]
    frozen = {numbers[i]: kept for i, (_, kept) in aside.items()}
    state = {"model": model.state_dict(), "optimizer": _by_parameter(names, attachment, flats, frozen)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    groups = [
        {k: tuple(v) if isinstance(v, list) else _like(present.get(k), v) for k, v in g.items()}
        for g, present in zip(saved["groups"], optimizer.param_groups, strict=True)
    ]
    numbered = iter(range(sum(ours)))
    optimizer.load_state_dict({
        "steps": saved["steps"],
        "options": saved.get("options"),
        "signature": optimizer.comm.signature,
        "units": [own(optimizer, unit, flat) for unit, flat in zip(optimizer.units, flats, strict=True)],
        "aside": aside,
        "param_groups": [g | {"params": [next(numbered) for _ in range(n)]} for g, n in zip(groups, ours, strict=True)],
    })  # fmt: skip


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {p: name for name, p in model.named_parameters()}


def _parameters(saved: str) -> list[str]:
    """Those of `layout`, in whichever units: "0:3x4 1:3 | 2:5"."""
    return saved.replace("|", " ").split()


def _empty(optimizer: BucketOptimizer, p: Tensor, name: str, dtype: str) -> Tensor:
    """Room for a state of a parameter that is frozen: this rank's part."""
    like = torch.empty((), device=p.device) if name in optimizer.by_tensor else local(p)
    return torch.empty_like(like, dtype=getattr(torch, dtype))


def _meta(attachment: ShardAttachment) -> dict[str, Any]:
    """What is not a tensor, as JSON knows it."""
    optimizer = attachment.optimizer
    return {
        "method": optimizer.kind,
        "options": optimizer.shared_options,
        "steps": optimizer.steps,
        "kinds": {name: _kind(t) for unit in optimizer.units for name, t in optimizer.complete_state(unit).items()},
        "replicas": attachment.mesh.size(0),
        "groups": [
            {k: _plain(v, f"param_groups[{i}][{k!r}]") for k, v in g.items() if k != "params"}
            for i, g in enumerate(optimizer.param_groups)
        ],
        "tensors": [len(g["params"]) for g in optimizer.param_groups],
        "layout": layout(optimizer),
    }


def _kind(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _plain(value: Any, name: str) -> Any:
    """An entry of a group as JSON knows it; tensors of one element as numbers. Raises TypeError for what it does not know."""
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        return value.item()
    try:
        json.dumps(value)
    except TypeError as e:
        raise TypeError(
            f"{name} is of type {type(value).__name__}, checkpoints hold numbers and strings of groups: remove it"
        ) from e
    return value


def _like(present: Any, saved: Any) -> Any:
    """A number that was saved, of the type that this optimizer's group has: a learning rate may be a tensor."""
    if isinstance(saved, (int, float)) and isinstance(present, Tensor):
        return torch.full_like(present, saved)
    if isinstance(saved, (int, float)) and isinstance(present, np.generic):
        return present.dtype.type(saved)
    return saved


def _by_parameter(
    names: dict[Tensor, str], attachment: ShardAttachment, flats: list[Flat], aside: dict[Tensor, Flat]
) -> dict[str, dict[str, Tensor]]:
    """{parameter: {name: tensor}}; the tensors share the memory of `flats` and `aside`, what is kept of frozen parameters."""
    optimizer = attachment.optimizer
    kept = dict(aside)
    for unit, flat in zip(optimizer.units, flats, strict=True):
        for i, p in enumerate(unit.wholes):
            kept[p] = {name: of_parameter(optimizer, unit, name, tensor, i) for name, tensor in flat.items()}
    return {names[p]: dict(_entries(attachment, p, its)) for p, its in kept.items()}


def _entries(attachment: ShardAttachment, p: Tensor, kept: Flat) -> Iterator[tuple[str, Tensor]]:
    mesh, optimizer = attachment.mesh, attachment.optimizer
    one = torch.empty(p.shape, device="meta").stride()
    for name, tensor in kept.items():
        if name in optimizer.by_tensor:
            yield name, tensor
        elif optimizer.carried[name] in OWN:
            shape = torch.Size([mesh.size(0), *p.shape])
            part, stride = tensor.unsqueeze(0), (p.numel(), *one)
            yield name, DTensor.from_local(part, mesh, (Shard(0), Shard(1)), shape=shape, stride=stride)
        else:
            over = p.device_mesh  # type: ignore[attr-defined]
            yield name, DTensor.from_local(tensor, over, (Shard(0),), shape=p.shape, stride=one)
