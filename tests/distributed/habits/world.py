"""`World`: ranks that stay, each a process, and run one cell after the other. A cell that hangs costs the world alone."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from tests.helpers.ranks import restore

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(
    ["tests.helpers.preload", "tests.distributed.habits.catalogue", "tests.distributed.habits.world"]
)

COLLECTIVE_S = 30
"""A rank that waits so long for the others has been left alone."""
CELL_S = 600
"""A cell that takes so long hangs."""


def _serve(pipe: Any, rank: int, world: int, local: int, store: str) -> None:
    """Calls what the pipe brings, (module, function, arguments), and sends back ("ok", value) or ("error", traceback)."""
    import torch
    import torch.distributed as dist

    from tests.distributed.habits.script import DEVICE

    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.backends.cudnn.deterministic = True
        torch.zeros(1, device=DEVICE)  # a mesh takes the device by LOCAL_RANK where none is in use yet
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if world > 1:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(local), LOCAL_RANK=str(rank % local)
        )
        wait = timedelta(seconds=COLLECTIVE_S)
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=wait)
    environment = dict(os.environ)  # Lightning takes WORLD_SIZE out of it, Accelerate writes a port
    while True:
        module, name, args = pipe.recv()
        try:
            answer = ("ok", getattr(importlib.import_module(module), name)(rank, world, *args))
        except BaseException:
            answer = ("error", traceback.format_exc())
        restore(environment)
        pipe.send(answer)
        if getattr(answer[1], "dies", False):
            os._exit(1)


class World:
    """`size` ranks on nodes of `local`. 1 rank has no process group."""

    def __init__(self, size: int, local: int | None = None) -> None:
        self.size, self.local = size, local or size
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._ranks: list[tuple[Any, Any]] = []

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.size):
            ours, theirs = _context.Pipe()
            args = (theirs, rank, self.size, self.local, f"{self._folder.name}/store")
            process = _context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def call(self, module: str, name: str, *args: Any, timeout: float = CELL_S) -> list[tuple[str, Any]]:
        """module.name(rank, world, *args) on every rank: ("ok", value), ("error", traceback) or ("hang", "") of each.

        After anything but "ok" everywhere the next call starts new ranks.
        """
        if not self._ranks:
            self._start()
        for _, pipe in self._ranks:
            pipe.send((module, name, args))
        answers: list[tuple[str, Any]] = []
        for _, pipe in self._ranks:
            try:
                answers.append(pipe.recv() if pipe.poll(timeout) else ("hang", ""))
            except (EOFError, OSError):  # OSError: before it had read what was asked
                answers.append(("error", "died without a word"))
        if any(kind != "ok" for kind, _ in answers):
            self.close()
        return answers

    def close(self) -> None:
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


@contextlib.contextmanager
def worlds() -> Iterator[dict[tuple[int, int], World]]:
    """Worlds by (ranks, ranks on a node), made when they are asked for."""

    class Kept(dict[tuple[int, int], World]):
        def __missing__(self, key: tuple[int, int]) -> World:
            self[key] = World(*key)
            return self[key]

    kept = Kept()
    try:
        yield kept
    finally:
        for world in kept.values():
            world.close()
