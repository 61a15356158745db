"""Runs a function on several ranks, each a process with gloo on loopback."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_context = mp.get_context("forkserver")
# The server imports torch once; every rank is then a fork of it.
_context.set_forkserver_preload(["tests.helpers.preload", "tests.helpers.ranks"])


def _rank_main(
    pipe: Any, fn: Callable[..., Any], rank: int, world: int, local: int, store: str, port: int, args: tuple[Any, ...]
) -> None:
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(local), GLOO_SOCKET_IFNAME="lo")
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if port:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            pipe.send(("ok", fn(rank, world, *args)))
            return
        # gloo's default is to look up the host's own name, which need not resolve.
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=90)
        )
        pipe.send(("ok", fn(rank, world, *args)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        pipe.send(("error", traceback.format_exc()))


def run_ranks(
    fn: Callable[..., Any], world: int, *args: Any, ranks_per_node: int | None = None, grouped: bool = True
) -> list[Any]:
    """fn(rank, world, *args) on every rank; the results in rank order. Raises the first rank's failure as RuntimeError.

    grouped: with a process group; False: only torchrun's environment is there, and `fn` makes its own.
    `fn` and its results must be picklable; tensors are sent as numpy by the caller's choice.
    """
    with tempfile.TemporaryDirectory() as folder:
        running = []
        port = 0 if grouped else free_port()
        for rank in range(world):
            ours, theirs = _context.Pipe(duplex=False)
            target = (theirs, fn, rank, world, ranks_per_node or world, f"{folder}/store", port, args)
            process = _context.Process(target=_rank_main, args=target, daemon=True)
            process.start()
            theirs.close()
            running.append((process, ours))
        results: list[Any] = []
        errors: list[str] = []
        for rank, (_process, pipe) in enumerate(running):
            try:
                kind, value = pipe.recv() if pipe.poll(120) else ("error", "no answer within 120 s")
            except EOFError:
                kind, value = "error", "died without a word"
            if kind == "error":
                errors.append(f"rank {rank}: {value}")
                if len(errors) == 1:  # the others may be waiting for this one
                    for p, _ in running:
                        p.join(2)
            results.append(value)
        for process, _ in running:
            process.join(5)
            if process.is_alive():
                process.kill()
        if errors:
            raise RuntimeError("\n".join(errors))
        return results


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
