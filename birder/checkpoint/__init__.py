"""Checkpoints that hold every rank's own state. None that is torn or changed is ever taken, and none can run code.

Written into `step-NNNNNNNN.tmp`, completed by a manifest with the size and SHA-256 of every file, then renamed. Format:
birder/checkpoint/files.py. `root` is a folder that all ranks see.
"""

from __future__ import annotations

import operator
import os
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from birder.checkpoint.files import (
    MANIFEST,
    SHARED,
    Broken,
    Manifest,
    Seal,
    check,
    name_of,
    rank_file,
    read_manifest,
    read_tree,
    write_manifest,
    write_tree,
)

__all__ = ["MANIFEST", "SHARED", "Broken", "Restored", "latest", "load", "rank_file", "read", "restore", "save"]

ALONE = (
    "every rank has to {doing}, and {missing} of {world} have not come to it: take the call ({calls}) out of "
    "`if rank == 0` or `if accelerator.is_main_process`"
)
CALLS = {"save": "checkpoint.save, accelerator.save_state", "restore": "checkpoint.restore, accelerator.load_state"}
ALONE_S = 30.0
"""Seconds after which `save` and `restore` say so. They keep waiting: another rank may be evaluating alone."""

T = TypeVar("T")


@dataclass(frozen=True)
class Restored:
    """What `restore` found. passed_over: one line for each newer checkpoint that is broken; world_size: ranks that saved."""

    step: int
    folder: Path
    shared: dict[str, Any]
    local: dict[str, Any]
    passed_over: list[str]
    world_size: int

    @property
    def same_world(self) -> bool:
        """Whether as many ranks saved it as there are now."""
        return self.world_size == _world()

    def of_all(self) -> Iterator[dict[str, Any]]:
        """`local` of each rank that saved, in their order, read one at a time."""
        return (read(self.folder, rank)[1] for rank in range(self.world_size))


def _whole(name: str, value: Any, least: int) -> int:
    """`value` as a number of Python, which numpy's and a tensor can be. True would be read as step 1, and remove the rest."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return number


def save(root: str | Path, step: int, shared: dict[str, Any], local: dict[str, Any], keep: int = 2) -> Path:
    """Writes checkpoint `step` under `root` and removes all but the newest `keep`. Every rank calls it.

    shared: nested dicts and lists of tensors and scalars that are the same on all ranks (the model); stored once.
            Scalars are what JSON knows: numbers, strings, booleans, None. numpy's numbers come back as Python's.
    local:  the same kind of tree, this rank's own (optimizer state, random states); stored for each rank.
    Checkpoints of later steps are removed too: they are those of a future that this run has left.

    Warns when not all ranks have come after ALONE_S seconds; RuntimeError once the process group's timeout is over.

    Returns the checkpoint's folder. Raises ValueError for a `step` or `keep` that is not a whole number or too small. When
    one rank fails, all raise the same: OSError for what the system says (a full disk), RuntimeError for the rest. Nothing of
    the checkpoint is left then.
    """
    step, keep = _whole("step", step, 0), _whole("keep", keep, 1)
    root, rank = Path(root), _rank()
    final, draft = root / name_of(step), root / f"{name_of(step)}.tmp"

    def begin() -> None:
        for old in root.glob("step-*.tmp"):
            shutil.rmtree(old, ignore_errors=True)
        draft.mkdir(parents=True)

    def write() -> dict[str, Seal]:
        written = {rank_file(rank): write_tree(draft / rank_file(rank), local)}
        if rank == 0:
            written[SHARED] = write_tree(draft / SHARED, shared)
        return written

    def finish() -> None:
        for name, seal in files.items():
            if not (draft / name).is_file() or (draft / name).stat().st_size != seal.size:
                raise RuntimeError(f"rank 0 does not see {name}: all ranks must write to one shared folder")
        write_manifest(draft, Manifest(step, _world(), files))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(draft, final)
        _sync(root)
        folders = _folders(root)
        for old in [*folders[: folders.index(final)], *folders[folders.index(final) + keep :]]:
            shutil.rmtree(old, ignore_errors=True)

    doing = f"checkpoint {final.name} was not written"
    _meet("save")
    try:
        _together(doing, begin if rank == 0 else None)
        files = {name: seal for part in _together(doing, write) for name, seal in (part or {}).items()}
        _together(doing, finish if rank == 0 else None)
    except BaseException:
        if rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
        raise
    return final


def latest(root: str | Path) -> tuple[int, Path] | None:
    """(step, folder) of the newest whole checkpoint under `root`, or None. Reads every file of it; one process calls it."""
    for folder in _folders(Path(root)):
        with suppress(Broken):
            manifest = read_manifest(folder)
            for name, seal in manifest.files.items():
                check(folder / name, seal)
            return manifest.step, folder
    return None


def restore(root: str | Path, any_world: bool = False) -> Restored | None:
    """Loads the newest checkpoint under `root` that is whole for every rank; None where there is none. Every rank calls it.

    any_world: also one that another number of ranks saved. All of its files are then checked on every rank, and `local` is
        that of old rank number (this rank modulo their number); birder/checkpoint/elastic.py makes this rank's state of all.

    A broken one is passed over. Raises Broken, a ValueError, when there are only broken ones, and ValueError when that one
    was saved by another number of ranks. Where not all ranks come it does as `save` does.
    """
    root = Path(root)
    _meet("restore")
    names = _together("no checkpoint was read", lambda: [f.name for f in _folders(root)])[0] or []
    passed_over: list[str] = []
    for name in names:
        found: list[Restored] = []

        def attempt(folder: Path = root / name, found: list[Any] = found) -> ValueError | None:
            try:
                found.append(_read(folder, _rank(), _world(), any_world))
            except ValueError as e:
                return e
            return None

        refused = [error for error in _together("no checkpoint was read", attempt) if error is not None]
        if not refused:
            found[0].passed_over.extend(passed_over)
            return found[0]
        if others := [error for error in refused if not isinstance(error, Broken)]:
            raise others[0]
        passed_over.append(str(refused[0]))
    if passed_over:
        more = f" (and {len(passed_over) - 1} more)" if len(passed_over) > 1 else ""
        raise Broken(f"{passed_over[0]}{more}, and there is no whole one in {root}: remove it to begin again")
    return None


def load(folder: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(shared, local) as saved by this rank. Tensors come on CPU; dictionaries and lists as they were, tuples as lists.

    Raises Broken, a ValueError, when a file is not what was written, and ValueError when this run has another number of
    ranks than the one that saved.
    """
    return read(folder, _rank(), _world())


def read(folder: str | Path, rank: int, world: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """(shared, local) as rank `rank` saved them. world: how many ranks there must have been. Raises as `load` does."""
    found = _read(Path(folder), rank, world)
    return found.shared, found.local


def _read(folder: Path, rank: int, world: int | None, any_world: bool = False) -> Restored:
    """The same, with what else is known of it. any_world: as `restore` has it, for rank number `rank` of `world`."""
    try:
        manifest = read_manifest(folder)
        if any_world:
            rank %= manifest.world_size
            for name, seal in manifest.files.items() if manifest.world_size != world else ():
                check(folder / name, seal)
        elif world not in (None, manifest.world_size):
            raise ValueError(
                f"checkpoint {folder.name} was saved by {manifest.world_size} ranks, this run has {world}: "
                f"use {manifest.world_size} ranks"
            )
        if rank_file(rank) not in manifest.files:
            raise ValueError(f"checkpoint {folder.name} has no rank {rank}")
        shared, local = (read_tree(folder / n, manifest.files[n]) for n in (SHARED, rank_file(rank)))
        if not isinstance(shared, dict) or not isinstance(local, dict):
            raise Broken("the trees of a checkpoint are dictionaries")
    except Broken as e:
        raise Broken(f"checkpoint {folder.name} is broken: {e}") from e
    return Restored(manifest.step, folder, shared, local, [], manifest.world_size)


def _folders(root: Path) -> list[Path]:
    """Folders that claim to be checkpoints, newest first."""
    return sorted(
        (f for f in root.glob("step-*") if f.name[5:].isdecimal()), key=lambda f: int(f.name[5:]), reverse=True
    )


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _sync(folder: Path) -> None:
    """Waits until a renaming in `folder` is on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems cannot
            os.fsync(handle)
    finally:
        os.close(handle)


_met: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()
"""How often all ranks of a process group have met to save, and to restore."""


def _meet(doing: str) -> None:
    """Waits for all ranks in the default group's store: a collective of one rank alone would meet others' of training.

    Leaves nothing behind there, also when it gives up, so that a later save of all ranks finds it as new.
    """
    store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
    world, group = _world(), dist.group.WORLD
    if store is None or group is None or world == 1:
        return
    met = _met.setdefault(group, Counter())
    key = f"birder/{doing}/{met[doing]}"
    if store.add(key, 1) == world:
        store.set(f"{key}/all", "1")
    limit, began = store.timeout.total_seconds(), time.monotonic()  # type: ignore[attr-defined] # torch's stubs lack it
    try:
        if not _comes(store, f"{key}/all", min(ALONE_S, limit)):
            said = ALONE.format(doing=doing, calls=CALLS[doing], missing=world - store.add(key, 0), world=world)
            warnings.warn(said, RuntimeWarning, stacklevel=3)
            if not _comes(store, f"{key}/all", limit - (time.monotonic() - began)):
                raise RuntimeError(said)
    except BaseException:
        store.add(key, -1)
        raise
    met[doing] += 1
    if store.add(f"{key}/left", 1) == world:
        for name in (key, f"{key}/all", f"{key}/left"):
            store.delete_key(name)


def _comes(store: dist.Store, key: str, seconds: float) -> bool:
    """Whether the key is set within that time. Raises RuntimeError where the store itself has failed."""
    until = time.monotonic() + 0.9 * seconds  # stores count in whole milliseconds, or less exactly
    try:
        store.wait([key], timedelta(seconds=max(seconds, 0.001)))
    except RuntimeError:
        if time.monotonic() < until:
            raise
        return False
    return True


def _together(doing: str, what: Callable[[], T] | None) -> list[T | None]:
    """What every rank's `what` returned. Whatever one of them raises, all raise: none is left waiting for it."""
    value: T | None = None
    error: BaseException | None = None
    try:
        value = what() if what is not None else None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # torch has errors that do not derive from Exception
        error = e
    own = None if error is None else (isinstance(error, OSError), _line(error))
    said: list[Any] = [(value, own)]
    if dist.is_initialized():
        said = [None] * _world()
        dist.all_gather_object(said, (value, own))
    for rank, (_, failure) in enumerate(said):
        if failure is not None:
            where = f" (rank {rank})" if len(said) > 1 else ""
            raise (OSError if failure[0] else RuntimeError)(f"{doing}: {failure[1]}{where}") from error
    return [part for part, _ in said]


def _line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
