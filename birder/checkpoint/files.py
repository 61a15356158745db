"""The files of a checkpoint: safetensors and one JSON manifest. Reading them executes nothing, whoever wrote them.

    step-00000040/manifest.json           {format, step, world_size, files: {name: {size, sha256}}}
                  shared.safetensors      what is the same on all ranks
                  rank00000.safetensors   rank 0's own; one file for each rank

A safetensors file holds the tensors of a tree of dicts and lists; its metadata holds the tree itself, as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = 1
MANIFEST = "manifest.json"
SHARED = "shared.safetensors"


class Broken(ValueError):
    """A checkpoint, or a file of one, is not what was written. The message names the file in one line."""


@dataclass(frozen=True)
class Seal:
    """Size in bytes and SHA-256, in hexadecimal, by which a file is known again."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of."""

    step: int
    world_size: int
    files: dict[str, Seal]


def rank_file(rank: int) -> str:
    return f"rank{rank:05d}.safetensors"


def write_tree(path: Path, tree: Any) -> Seal:
    """Writes a tree of dicts, lists, tensors and JSON's scalars, and waits for the disk. Raises OSError, TypeError."""
    tensors: dict[str, Tensor] = {}
    shape = json.dumps(_pack(tree, "tree", tensors))
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if storage in seen else tensor  # safetensors wants separate memory for each
        seen.add(storage)
    try:
        save_file(tensors, path, metadata={"tree": shape})
    except SafetensorError as e:  # into whose own words it has wrapped what the system says
        if match := re.search(r"\(os error (\d+)\)", str(e)):
            raise OSError(int(match[1]), os.strerror(int(match[1]))) from e
        raise
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return _seal(file)


def read_tree(path: Path, seal: Seal) -> Any:
    """What `write_tree` wrote, tensors on the CPU, tuples as lists. Raises Broken when the file is not the sealed one."""
    check(path, seal)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 not a dict
            shape = json.loads((file.metadata() or {})["tree"])
        return _unpack(shape, tensors)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise Broken(f"{path.name} holds no tree of tensors ({type(e).__name__})") from e


def check(path: Path, seal: Seal) -> None:
    """Raises Broken unless the file has the size and the SHA-256 of its seal."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != seal.size:
                raise Broken(f"{path.name} has {size} bytes instead of {seal.size}")
            if _seal(file) != seal:
                raise Broken(f"{path.name} is not what was written: its SHA-256 differs from {MANIFEST}'s")
    except OSError as e:
        raise Broken(f"{path.name}: {e.strerror or e}") from e


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `<folder>/manifest.json` and waits for the disk. Raises OSError."""
    with open(folder / MANIFEST, "w") as file:
        json.dump({"format": FORMAT, **asdict(manifest)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder, every type in it checked. Raises Broken."""
    try:
        content = json.loads((folder / MANIFEST).read_text())
    except OSError as e:
        raise Broken(f"{MANIFEST}: {e.strerror or e}") from e
    except (ValueError, RecursionError) as e:
        raise Broken(f"{MANIFEST} is not JSON") from e
    if not isinstance(content, dict) or set(content) != {"format", "step", "world_size", "files"}:
        raise Broken(f"{MANIFEST} must hold format, step, world_size and files")
    if content["format"] != FORMAT or isinstance(content["format"], bool):
        raise Broken(f"{MANIFEST}: format must be {FORMAT}")
    step, world = _whole(content["step"], "step"), _whole(content["world_size"], "world_size", 1)
    if folder.name != name_of(step):
        raise Broken(f"{MANIFEST} is that of step {step}")
    listed = content["files"]
    # The names follow from the number of ranks, so that no name leads out of the folder.
    counted = isinstance(listed, dict) and len(listed) == world + 1
    if not counted or set(listed) != {SHARED, *map(rank_file, range(world))}:
        raise Broken(f"{MANIFEST}: files must be {SHARED} and one file for each of {world} ranks")
    return Manifest(step, world, {name: _read_seal(name, seal) for name, seal in listed.items()})


def name_of(step: int) -> str:
    """The folder of step `step`'s checkpoint."""
    return f"step-{step:08d}"


def _read_seal(name: str, seal: Any) -> Seal:
    if not isinstance(seal, dict) or set(seal) != {"size", "sha256"}:
        raise Broken(f"{MANIFEST}: {name} must have size and sha256")
    if not isinstance(seal["sha256"], str) or not re.fullmatch("[0-9a-f]{64}", seal["sha256"]):
        raise Broken(f"{MANIFEST}: sha256 of {name} must be 64 hexadecimal digits")
    return Seal(_whole(seal["size"], f"size of {name}"), seal["sha256"])


def _whole(value: Any, what: str, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise Broken(f"{MANIFEST}: {what} must be a whole number of at least {least}")
    return value


def _seal(file: Any) -> Seal:
    return Seal(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _pack(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The tree as JSON, its tensors moved to `tensors` under names that begin with `name`."""
    if isinstance(tree, Tensor):
        if hasattr(tree, "device_mesh"):  # a DTensor, whose memory safetensors cannot find
            raise TypeError(
                f"{name.partition('/')[2]} is sharded: save model and optimizer of FSDP2 with birder.checkpoint.shards.save"
            )
        while name in tensors:  # {"a/b": x, "a": {"b": y}}
            name += "+"
        tensors[name] = tree
        return {"tensor": name}
    if isinstance(tree, dict):
        if wrong := [k for k in tree if not isinstance(k, (bool, int, float, str, NoneType))]:
            raise TypeError(
                f"{name.partition('/')[2] or 'it'} has a key of type {type(wrong[0]).__name__}, checkpoints hold numbers and "
                "strings as keys: remove it"
            )
        return {"dict": [[k, _pack(v, f"{name}/{k}", tensors)] for k, v in tree.items()]}
    if isinstance(tree, (list, tuple)):
        return {"list": [_pack(v, f"{name}/{i}", tensors) for i, v in enumerate(tree)]}
    if isinstance(tree, np.generic):  # a learning rate that numpy has computed
        tree = tree.item()
    if not isinstance(tree, (bool, int, float, str, NoneType)):
        where = name.partition("/")[2]
        raise TypeError(
            f"{where} is of type {type(tree).__name__}, checkpoints hold tensors, numbers, strings: remove it"
        )
    return {"value": tree}


def _unpack(shape: Any, tensors: dict[str, Tensor]) -> Any:
    ((kind, content),) = shape.items() if isinstance(shape, dict) else (("", None),)
    if kind == "tensor" and isinstance(content, str):
        return tensors[content]
    if kind == "dict" and isinstance(content, list):
        return {k: _unpack(v, tensors) for k, v in content}
    if kind == "list" and isinstance(content, list):
        return [_unpack(v, tensors) for v in content]
    if kind == "value" and not isinstance(content, (dict, list)):
        return content
    raise ValueError("no tree")
