"""`Launcher`: from a `RunSpec` to finished ranks, or to one line that says which rank failed, where and why."""

from __future__ import annotations

import contextlib
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from launch import failure, lock
from launch.errors import UserError
from launch.failure import RunFailed
from launch.spec import RunSpec
from launch.words import count, say

ROOT = Path(__file__).resolve().parents[1]
JOIN_S = 120
"""How long torchrun's agents wait for one another at the start and at a restart: a node that is gone must end the run."""


@contextlib.contextmanager
def opened(spec: RunSpec) -> Iterator[None]:
    """Holds the folder of a run, with its spec, while it is open. Raises UserError.

    Where bad input ends the run, a folder that was made for it is removed.
    """
    fresh = not spec.path.exists()
    with contextlib.ExitStack() as until_the_end:
        try:
            spec.path.mkdir(parents=True, exist_ok=True)
            until_the_end.enter_context(lock.held(spec.path))
            # A start at the same moment may have taken the folder, and left its job in it (cluster.wait=false).
            if spec.file.exists() and RunSpec.load(spec.file).id != spec.id:
                raise UserError(f"{spec.run_dir}: another run has just begun here: choose another run_name")
            failure.forget_earlier(spec.path)
            spec.save()
        except OSError as error:
            if fresh:
                failure.remove_unused(spec.path)
            raise UserError(
                f"cannot write to {spec.run_dir}: {error.strerror or error}; set output_dir=FOLDER"
            ) from error
        try:
            yield
        except UserError:
            if fresh:
                failure.remove_unused(spec.path)
            raise


@dataclass(kw_only=True, eq=False, repr=False)
class Launcher(ABC):
    """One way to start `nodes` x `ranks_per_node` ranks, one torchrun agent per node.

    Constructed from the `cluster` section of the configuration (conf/cluster/<name>.yaml). docs/configuration.md says what
    its keys mean, which are the arguments of a launcher.
    """

    nodes: int
    ranks_per_node: int
    name: str = "cluster"
    backend: str = "auto"
    max_restarts: int = 0
    collective_timeout_s: float = 300.0
    heartbeat_timeout_s: float = 30.0
    dry_run: bool = False

    worker: Path = field(init=False)
    """The program of one rank, started as `python WORKER SPEC`. Whoever makes a launcher sets it."""
    wait: bool = field(init=False, default=True)
    """Whether `run` returns only when nothing of the run is under way any more."""
    on_failure: Callable[[RunSpec, str], None] = field(init=False, default=staticmethod(lambda spec, reason: None))
    """Called for every run that started and did not end well, before `launch` raises. Must not raise."""
    python: str = field(init=False, default=sys.executable)
    late: bool = field(init=False, default=False)
    """Whoever starts ranks that ask for their links' rate themselves (`launch/emulated/inside.py`) sets it: links then begin
    without one, and a dilation may be "auto"."""

    @property
    def shapes(self) -> bool:
        """Whether the nodes of this run will have links of a set rate."""
        return False

    @abstractmethod
    def command(self, spec: RunSpec, node_rank: int) -> list[str]:
        """The command that starts the ranks of one node. Node 0 hosts the rendezvous."""

    @abstractmethod
    def check(self, spec: RunSpec) -> None:
        """Raises UserError when this run cannot be started here. Nothing has been written or started yet."""

    @abstractmethod
    def run(self, spec: RunSpec) -> None:
        """Starts every node and waits. Returns when all ranks ended well, raises RunFailed or UserError otherwise.

        Whatever happens, an interrupt included, nothing that it started is left running when it returns or raises.
        """

    def preview(self, spec: RunSpec) -> str:
        """What `dry_run` prints: the exact commands, one line per node."""
        commands = [self.command(spec, node) for node in range(self.nodes)]
        return "\n".join(map(shlex.join, commands))

    def launch(self, spec: RunSpec) -> None:
        """Runs `spec` to its end.

        Raises UserError (bad input, found here or by a worker; nothing is left behind) and RunFailed (`on_failure` has
        been printed, the failing rank's traceback has been printed).
        """
        self.check(spec)
        if self.dry_run:
            print(self.preview(spec))
            return
        with opened(spec):
            name = "" if spec.path.name == spec.id else f"{spec.id}: "
            try:
                say(f"{name}{self.shape()}, files in {spec.run_dir}")
                self.run(spec)
            except UserError:
                raise
            except RunFailed as error:
                self.on_failure(spec, str(error))
                raise
            except BaseException as error:
                why = "interrupted by Ctrl-C" if isinstance(error, KeyboardInterrupt) else str(error)
                self.on_failure(spec, why)
                # A full disk, no more processes. That nobody reads the output is the command's to say.
                if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
                    raise RunFailed(why) from error
                raise
            finally:
                if self.wait:
                    failure.remove_left(spec.path)

    def shape(self) -> str:
        """ "2 nodes x 1 rank": for the user's eyes."""
        return f"{count(self.nodes, 'node')} x {count(self.ranks_per_node, 'rank')}"

    def torchrun(self, spec: RunSpec, *, endpoint: str, is_host: int | str, local_addr: str) -> list[str]:
        """torchrun's command line for one node: c10d rendezvous at `endpoint` ("host:port"), hosted where `is_host` is 1."""
        command = [self.python, "-m", "torch.distributed.run"]
        command += ["--nnodes", str(self.nodes), "--nproc-per-node", str(self.ranks_per_node)]
        command += ["--rdzv-backend", "c10d", "--rdzv-id", spec.id, "--rdzv-endpoint", endpoint]
        command += ["--rdzv-conf", f"is_host={is_host},join_timeout={JOIN_S}", "--local-addr", local_addr]
        # Else torchrun makes a folder in the temporary folder of each node, and leaves it there.
        command += ["--log-dir", str(spec.path / failure.TORCHRUN)]
        command += ["--max-restarts", str(self.max_restarts)]
        return [*command, str(self.worker), str(spec.file)]

    def torchrun_environment(self) -> dict[str, str]:
        """What every agent's environment must hold besides the command."""
        # torchrun keeps one key-value store for all attempts, and gloo's ranks would meet the addresses that the ranks
        # before the restart left there. Without restarts the shared store is better: its port cannot be lost to others.
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if self.max_restarts > 0 else {}
