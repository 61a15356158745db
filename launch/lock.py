"""One run in a run directory at a time: two that train into it would both think that they had completed."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from launch.errors import UserError
from launch.files import read_json, write_json
from launch.words import say

LOCK, OWNER = "run.lock", "run.owner"


@contextlib.contextmanager
def attempted(path: Path) -> Iterator[bool]:
    """Whether the file `path`, made where it is missing, could be locked; if so it is, as long as this is open.

    The system lets go of the lock with the process, however that ends. True, with a line that says so, where the file system
    has no locks.
    """
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and not os.access(path.parent, os.W_OK):
            raise
        say(f"{path.parent}: files cannot be locked here ({error}); make sure that no other run uses it")
        yield True
        return
    try:
        yield True
    finally:
        lock.release()


@contextlib.contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Holds `run_dir`, which exists, while it is open. Raises UserError when another process holds it.

    Ranks that a launcher leaves behind by its own death do not live on (launch/process.py); a SLURM job does, and is found
    by its name (launch/slurm/launcher.py).
    """
    owner = run_dir / OWNER
    with attempted(run_dir / LOCK) as mine:
        if not mine:
            raise UserError(
                f"{run_dir}: this run is still running ({_who(owner)}): wait for it, end it or choose another run_name"
            )
        try:
            with contextlib.suppress(OSError):  # a full disk: the lock holds without
                write_json(owner, {"pid": os.getpid(), "host": platform.node()})
            yield
        finally:
            owner.unlink(missing_ok=True)


def is_held(run_dir: Path) -> bool:
    """Whether a process holds `run_dir`."""
    if not (run_dir / LOCK).exists():
        return False
    lock = FileLock(run_dir / LOCK)
    try:
        lock.acquire(timeout=0)
    except (Timeout, OSError, NotImplementedError):
        return True
    lock.release()
    return False


def _who(owner: Path) -> str:
    """The holder, for the terminal: no record names a host."""
    try:
        content = read_json(owner)
        return f"pid {int(content['pid'])} on host {str(content['host'])[:100]!r}".replace("'", "")
    except (ValueError, KeyError, TypeError):
        return "it has just begun"
