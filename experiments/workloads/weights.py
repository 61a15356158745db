"""The parameters of a finished run as another one's initial weights: phases of a pre-training, fine-tuning after it."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from torch import Tensor, nn

from birder import checkpoint
from birder.checkpoint import elastic
from birder.checkpoint.files import read_manifest
from launch.errors import UserError, refused


def find(place: str) -> Path:
    """The checkpoint that is meant: the folder itself, or the newest whole one of a run's directory. Raises UserError."""
    folder = Path(place).expanduser()
    if (folder / checkpoint.MANIFEST).is_file():
        return folder
    root = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    newest = checkpoint.latest(root) if root.is_dir() else None
    if newest is None:
        raise UserError(
            f"workload.weights={place} is not a run with a whole checkpoint: give its directory (checkpoint.every keeps one)"
        )
    return newest[1]


def read(place: str) -> dict[str, Tensor]:
    """The parameters of a checkpoint, by name; where every rank kept its own model, their mean in fp64. Raises UserError."""
    folder = find(place)
    with refused(f"workload.weights={place}", ValueError, KeyError, OSError):
        shared, local = checkpoint.read(folder, 0)
        if "parameters" in shared:
            return dict(shared["parameters"])
        later = (checkpoint.read(folder, rank)[1] for rank in range(1, read_manifest(folder).world_size))
        return elastic.mean(of["parameters"] for of in itertools.chain([local], later))


def put(net: nn.Module, place: str, skip: tuple[str, ...] = ()) -> nn.Module:
    """`net` with the parameters of a checkpoint. skip: beginnings of names that either model may have alone (another head).

    Raises UserError where the two models differ in any other parameter.
    """
    saved = read(place)
    mine = dict(net.named_parameters())
    differ = {n for n in set(mine) ^ set(saved) if not n.startswith(skip)}
    odd = {n for n in set(mine) & set(saved) if mine[n].shape != saved[n].shape}
    if differ or odd:
        named = ", ".join(sorted(differ | odd)[:3])
        shards = ", or its ranks kept shards (comm.topology=hsdp)" * (not differ)
        raise UserError(f"workload.weights={place} is of another model{shards}: {named}")
    with torch.no_grad():
        for name in set(mine) & set(saved):
            mine[name].copy_(saved[name])
    return net
