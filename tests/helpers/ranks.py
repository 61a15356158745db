"""Runs a function on several ranks, each a process with gloo on loopback.

`run_ranks` uses the same processes for one test after the other; each call has a process group of its own. After a failure,
and after a function that left something changed behind, new processes take over. `fresh_world` starts processes for one call
alone: for tests of threads, teardown, memory and faults.
"""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing as mp
import os
import pickle
import runpy
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from launch.local import free_port

_context = mp.get_context("forkserver")
# The server imports torch once; every rank is then a fork of it.
_context.set_forkserver_preload(["tests.helpers.preload", "tests.helpers.ranks"])

ANSWER_S = 600.0
"""How long a call may take: ample on a busy machine, less than pytest gives a test."""
OTHERS_S = 30.0
"""How long the other ranks have once one has failed: its end breaks their connections."""
WATCHED = ("birder", "experiments", "launch")
"""Packages whose modules and classes a function must leave as they were."""
OF_TORCH = ("torch.distributed", "torch.distributed.distributed_c10d", "torch.nn.parallel.distributed")
"""Modules whose functions and classes it must leave; all of torch's would be ten thousand, looked at after each call."""
THREADS = 40
"""A process ends once it has so many, gloo's among them: those of groups that a test leaves behind wake up a hundred times a
second, and 200 of them take a tenth of a core."""


def restore(environment: dict[str, str]) -> None:
    """The environment as it was. What has not changed is not written: a thread of gloo's may just read it, and then dies."""
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


Job = tuple[Callable[..., Any], int, int, int, str, int, tuple[Any, ...]]


def _call(fn: Callable[..., Any], rank: int, world: int, local: int, store: str, port: int, args: tuple) -> Any:
    """fn(rank, world, *args) in a process group (port 0), or with torchrun's environment alone."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(local), GLOO_SOCKET_IFNAME="lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if port:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        return fn(rank, world, *args)
    # gloo's default is to look up the host's own name, which need not resolve.
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=300)
    )
    return fn(rank, world, *args)


def _part() -> None:
    """Ends the process group, if there still is one."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _once(pipe: Connection, job: Job) -> None:
    """The whole life of a process of `fresh_world`."""
    try:
        _answer(pipe, "ok", _call(*job))
    except BaseException:
        _answer(pipe, "error", traceback.format_exc())
        return
    if not job[5]:
        _part()


def _answer(pipe: Any, kind: str, value: Any) -> None:
    """As plain bytes: tensors would else be fetched from this process later, through a socket that may have gone by then."""
    pipe.send_bytes(pickle.dumps((kind, value)))


def _serve(pipe: Connection) -> None:
    """The life of a process of the pool: calls, until one fails or leaves something behind."""
    import torch

    gc.freeze()  # what was imported is not looked through after every call
    environment, folder = dict(os.environ), os.getcwd()
    before = _state()
    while True:
        try:
            job: Job = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings():
                value = _call(*job)
        except BaseException:
            _answer(pipe, "error", traceback.format_exc())
            return
        try:
            _part()
        except RuntimeError:  # as another rank's failure leaves it
            _answer(pipe, "last", value)
            return
        restore(environment)
        os.chdir(folder)
        gc.collect()
        after = _state()
        clean = after.items() >= before.items() and len(os.listdir("/proc/self/task")) <= THREADS
        _answer(pipe, "ok" if clean else "last", value)
        if not clean:
            return
        before = after  # modules that were imported meanwhile are watched from here on


def _state() -> dict[tuple[str, str], int]:
    """The functions and classes of the watched packages, and torch's settings."""
    import torch

    found = {
        ("torch", "dtype"): id(torch.get_default_dtype()),
        ("torch", "deterministic"): int(torch.are_deterministic_algorithms_enabled()),
        ("torch", "grad"): int(torch.is_grad_enabled()),
    }
    for name, module in list(sys.modules.items()):
        if (name.startswith(WATCHED) or name in OF_TORCH) and module is not None:
            for key, value in list(vars(module).items()):
                if isinstance(value, type) and value.__module__ == name and not name.startswith("torch"):
                    found.update({(f"{name}.{key}", k): id(v) for k, v in vars(value).items()})
                if callable(value):
                    found[name, key] = id(value)
    return found


class Pool:
    """Processes that wait for calls."""

    def __init__(self) -> None:
        self.members: list[tuple[BaseProcess, Connection]] = []

    def take(self, count: int) -> list[tuple[BaseProcess, Connection]]:
        while len(self.members) < count:
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.members.append((process, ours))
        return self.members[:count]

    def close(self) -> None:
        for process, pipe in self.members:
            pipe.close()
            process.kill()
            process.join()
        self.members = []


_pool = Pool()


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, ranks_per_node: int | None = None) -> list[Any]:
    """fn(rank, world, *args) on every rank, in a process group; the results in rank order.

    `fn` and its results must be picklable; tensors are sent as numpy by the caller's choice.
    Raises the failures of all ranks as RuntimeError.
    """
    with tempfile.TemporaryDirectory() as folder:
        members = _pool.take(world)
        try:
            for rank, (_, pipe) in enumerate(members):
                pipe.send((fn, rank, world, ranks_per_node or world, f"{folder}/store", 0, args))
            kinds, values = _answers([pipe for _, pipe in members])
        except BaseException:
            _pool.close()
            raise
        if set(kinds) != {"ok"}:
            _pool.close()
        if "error" in kinds:
            raise RuntimeError(_failures(kinds, values))
        return values


def fresh_world(
    fn: Callable[..., Any], world: int, *args: Any, ranks_per_node: int | None = None, grouped: bool = True
) -> list[Any]:
    """`run_ranks` on processes that are started for this call and end with it.

    grouped: with a process group; False: only torchrun's environment is there, and `fn` makes its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        port = 0 if grouped else free_port()
        running: list[tuple[BaseProcess, Connection]] = []
        try:
            for rank in range(world):
                ours, theirs = _context.Pipe()
                job = (fn, rank, world, ranks_per_node or world, f"{folder}/store", port, args)
                process = _context.Process(target=_once, args=(theirs, job), daemon=True)
                process.start()
                theirs.close()
                running.append((process, ours))
            kinds, values = _answers([pipe for _, pipe in running])
        finally:
            for process, pipe in running:
                process.join(5)
                process.kill()
                pipe.close()
        if "error" in kinds:
            raise RuntimeError(_failures(kinds, values))
        return values


def run_script(path: Path, world: int, *arguments: str) -> list[str]:
    """What each of `world` ranks prints that runs a script, in torchrun's environment, from the script's own folder; also the
    line with which it ends too early."""
    return fresh_world(_script, world, str(path.resolve()), arguments, grouped=False)


def _script(rank: int, world: int, path: str, arguments: tuple[str, ...]) -> str:
    os.environ["LOCAL_RANK"] = str(rank)
    os.chdir(os.path.dirname(path))
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(path))  # as Python does
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as ended:
            print(ended.code)
    return said.getvalue()


def _answers(pipes: list[Connection]) -> tuple[list[str], list[Any]]:
    """What each rank has sent, and of what kind it is."""
    until = time.monotonic() + ANSWER_S
    kinds, values = [], []
    for pipe in pipes:
        kind, value = "error", "no answer in time"
        with contextlib.suppress(EOFError):
            if pipe.poll(max(0.0, until - time.monotonic())):
                value = "died without a word"
                kind, value = pickle.loads(pipe.recv_bytes())
        if kind == "error":
            until = min(until, time.monotonic() + OTHERS_S)
        kinds.append(kind)
        values.append(value)
    return kinds, values


def _failures(kinds: list[str], values: list[Any]) -> str:
    failed = [(rank, value) for rank, (kind, value) in enumerate(zip(kinds, values, strict=True)) if kind == "error"]
    return "\n".join(f"rank {rank}: {value}" for rank, value in failed)
