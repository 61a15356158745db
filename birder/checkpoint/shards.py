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
from birder.optim.by_parameter import Flat, gathered, own
from birder.optim.layout import Unit

OWN = {"mean", "sum"}
"""Of `Method.carried`: what every replica has for itself."""


def save(folder: str | Path, model: nn.Module, attachment: ShardAttachment) -> None:
    """Writes parameters, buffers and the optimizer's state to `folder`. Every rank calls it.

    Raises TypeError for an entry of a group that JSON cannot hold.
    """
    reshard(model)
    attachment.optimizer.pipeline.wait()
    flats = [gathered(attachment.optimizer, unit) for unit in attachment.optimizer.units]
    state = {
        "meta": _meta(attachment),
        "model": model.state_dict(),
        "optimizer": _by_parameter(model, attachment, flats),
    }
    dcp.save(state, checkpoint_id=folder)


def load(folder: str | Path, model: nn.Module, attachment: ShardAttachment) -> None:
    """Restores what `save` wrote. Every rank calls it, after `attach`; `unit_mb` may be another one.

    Raises ValueError for the state of another method or, where replicas keep different parts, of another number of them.
    """
    optimizer = attachment.optimizer
    about: dict[str, Any] = {"meta": ""}
    dcp.load(about, checkpoint_id=folder)
    saved, mine = json.loads(about["meta"]), json.loads(_meta(attachment))
    if saved["method"] != mine["method"]:
        raise ValueError(f"the checkpoint holds what {saved['method']} keeps, this optimizer is {mine['method']}")
    differs = not OWN.isdisjoint(optimizer.carried.values())
    if differs and saved["replicas"] != mine["replicas"]:
        raise ValueError(
            f"state of {saved['method']} was saved by {saved['replicas']} replicas, this run has {mine['replicas']}, and "
            f"every replica keeps its own part: use {saved['replicas']} replicas, of any number of shards"
        )
    reshard(model)
    optimizer.pipeline.wait()
    flats = [{k: v.clone() for k, v in gathered(optimizer, unit).items()} for unit in optimizer.units]
    state = {"model": model.state_dict(), "optimizer": _by_parameter(model, attachment, flats)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    groups = [
        {k: tuple(v) if isinstance(v, list) else _like(present.get(k), v) for k, v in g.items()}
        for g, present in zip(saved["groups"], optimizer.param_groups, strict=True)
    ]
    numbers = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({
        "steps": saved["steps"],
        "options": saved.get("options"),
        "signature": optimizer.comm.signature,
        "units": [own(optimizer, unit, flat) for unit, flat in zip(optimizer.units, flats, strict=True)],
        "param_groups": [g | {"params": n["params"]} for g, n in zip(groups, numbers, strict=True)],
    })  # fmt: skip


def _meta(attachment: ShardAttachment) -> str:
    """What is not a tensor, as JSON."""
    optimizer = attachment.optimizer
    groups = [
        {k: _plain(v, f"param_groups[{i}][{k!r}]") for k, v in g.items() if k != "params"}
        for i, g in enumerate(optimizer.param_groups)
    ]
    replicas = attachment.mesh.size(0)
    about = {"method": optimizer.kind, "options": optimizer.shared_options, "steps": optimizer.steps}
    return json.dumps(about | {"replicas": replicas, "groups": groups})


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


def _by_parameter(model: nn.Module, attachment: ShardAttachment, flats: list[Flat]) -> dict[str, dict[str, Tensor]]:
    """{parameter: {name: tensor}}; the tensors share the memory of `flats`."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    found: dict[str, dict[str, Tensor]] = {}
    for unit, flat in zip(attachment.optimizer.units, flats, strict=True):
        for i, p in enumerate(unit.wholes):
            found[names[p]] = dict(_entries(attachment, unit, flat, i))
    return found


def _entries(attachment: ShardAttachment, unit: Unit, flat: Flat, i: int) -> Iterator[tuple[str, Tensor]]:
    p, mesh, optimizer = unit.wholes[i], attachment.mesh, attachment.optimizer
    one = torch.empty(p.shape, device="meta").stride()
    for name in flat:
        kind = optimizer.carried[name]
        if name in optimizer.by_tensor:
            yield name, flat[name][i]
        elif kind in OWN:
            part = unit.view(flat[name], i).unsqueeze(0)
            shape = torch.Size([mesh.size(0), *p.shape])
            yield name, DTensor.from_local(part, mesh, (Shard(0), Shard(1)), shape=shape, stride=(p.numel(), *one))
        else:
            over = p.device_mesh  # type: ignore[attr-defined]
            yield name, DTensor.from_local(unit.view(flat[name], i), over, (Shard(0),), shape=p.shape, stride=one)
