"""Checkpoints that hold every rank's own state, and of which a torn one is never taken.

Written with torch.distributed.checkpoint into `step-NNNNNNNN.tmp`, completed by a list of files and sizes, then renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

COMPLETE = "complete.json"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _pack(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The tree as JSON, its tensors moved to `tensors` under names that begin with `name`."""
    if isinstance(tree, Tensor):
        tensors[name] = tree
        return {"tensor": name}
    if isinstance(tree, dict):
        return {"dict": [[k, _pack(v, f"{name}/{k}", tensors)] for k, v in tree.items()]}
    if isinstance(tree, (list, tuple)):
        return {"list": [_pack(v, f"{name}/{i}", tensors) for i, v in enumerate(tree)]}
    return {"value": tree}


def _unpack(shape: Any, tensors: dict[str, Any]) -> Any:
    ((kind, content),) = shape.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {k: _unpack(v, tensors) for k, v in content}
    if kind == "list":
        return [_unpack(v, tensors) for v in content]
    return content


def save(root: str | Path, step: int, shared: dict[str, Any], local: dict[str, Any], keep: int = 2) -> Path:
    """Writes checkpoint `step` under `root` and removes all but the newest `keep`. Every rank calls it.

    shared: nested dicts and lists of tensors and scalars that are the same on all ranks (the model); stored once.
            Scalars are what JSON knows: numbers, strings, booleans, None.
    local:  the same kind of tree, this rank's own (optimizer state, random states); stored for each rank.
    Returns the checkpoint's folder. Raises OSError when the disk is full; nothing that looks complete is left then.
    """
    root = Path(root)
    final, draft = root / f"step-{step:08d}", root / f"step-{step:08d}.tmp"
    if _rank() == 0:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    _barrier()
    flat: dict[str, Any] = {}
    for name, tree in (("shared", shared), (f"rank{_rank()}", local)):
        flat[name] = json.dumps(_pack(tree, name, flat))
    try:
        dcp.save(flat, checkpoint_id=str(draft), no_dist=not dist.is_initialized())
    except Exception as e:
        if _rank() == 0:
            shutil.rmtree(draft, ignore_errors=True)
        cause = _os_error(e)
        if cause is None:  # a lost peer, say: not the disk's fault
            raise
        raise OSError(f"checkpoint {final.name} was not written: {cause}") from e
    if _rank() == 0:
        sizes = {p.name: p.stat().st_size for p in sorted(draft.iterdir())}
        with open(draft / COMPLETE, "w") as f:
            json.dump({"step": step, "world_size": _world(), "files": sizes}, f)
            f.flush()
            os.fsync(f.fileno())
        shutil.rmtree(final, ignore_errors=True)
        os.replace(draft, final)
        for old in sorted(root.glob("step-????????"))[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    _barrier()
    return final


def _os_error(e: BaseException) -> str | None:
    """The operating system's words, from wherever torch.distributed.checkpoint wrapped them."""
    failures = getattr(e, "failures", None) or {}
    for inner in [e, e.__cause__, *(f[0] for f in failures.values() if isinstance(f, tuple))]:
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror
    return None


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def latest(root: str | Path) -> tuple[int, Path] | None:
    """(step, folder) of the newest complete checkpoint under `root`, or None. Torn ones are passed over."""
    for folder in sorted(Path(root).glob("step-????????"), reverse=True):
        try:
            manifest = json.loads((folder / COMPLETE).read_text())
            whole = all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
        except (OSError, ValueError, KeyError):
            continue
        if whole:
            return int(manifest["step"]), folder
    return None


def world_size(folder: str | Path) -> int:
    """The number of ranks that wrote a complete checkpoint."""
    return int(json.loads((Path(folder) / COMPLETE).read_text())["world_size"])


def load(folder: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(shared, local) as saved by this rank. Tensors come on CPU; dictionaries and lists as they were, tuples as lists.

    Every rank calls it. Raises ValueError when this run has another number of ranks than the one that saved.
    """
    ranks = _world()
    saved = world_size(folder)
    if saved != ranks:
        raise ValueError(
            f"checkpoint {Path(folder).name} was saved by {saved} ranks, this run has {ranks}: use {saved} ranks"
        )
    reader = dcp.FileSystemReader(str(folder))
    mine = f"rank{_rank()}"
    flat: dict[str, Any] = {}
    for name, meta in reader.read_metadata().state_dict_metadata.items():
        if name.partition("/")[0] in ("shared", mine):
            if isinstance(meta, TensorStorageMetadata):
                flat[name] = torch.empty(meta.size, dtype=meta.properties.dtype)
            else:
                flat[name] = None
    dcp.load(flat, storage_reader=reader, no_dist=not dist.is_initialized())
    return _unpack(json.loads(flat["shared"]), flat), _unpack(json.loads(flat[mine]), flat)
