"""All nodes on this machine: one torchrun agent per node, GPUs and cores divided among them."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
from dataclasses import dataclass, field

from launch import environment, failure
from launch.base import Launcher
from launch.errors import UserError
from launch.probe import visible_gpus
from launch.spec import RunSpec
from launch.supervise import Agent, supervise
from launch.words import count, say


@dataclass(kw_only=True, eq=False, repr=False)
class LocalLauncher(Launcher):
    """N nodes as N torchrun agents on the loopback interface of this machine."""

    device: str = "auto"
    port: int = field(init=False, default=0)
    """Of the rendezvous; 0: not chosen yet."""

    def check(self, spec: RunSpec) -> None:
        gpus, ranks = len(visible_gpus()), self.nodes * self.ranks_per_node
        if self.device == "cuda" and not gpus:
            raise UserError("cluster.device=cuda needs a GPU and finds none: set cluster.device=cpu")
        if self.device == "cuda" and self.backend == "auto" and gpus < ranks:
            raise UserError(f"{ranks} ranks share {count(gpus, 'GPU')}: that needs cluster.backend=gloo")
        if self.device == "cuda" and gpus < ranks:
            say(f"{ranks} ranks share {count(gpus, 'GPU')}: times mean nothing in this run")
        if self.backend == "nccl" and gpus < ranks:
            raise UserError(
                f"backend nccl needs {ranks} GPUs, one per rank, and finds {gpus}: set cluster.backend=gloo"
            )
        if self.backend != "gloo" and self.device == "auto" and 0 < gpus < ranks:
            say(f"{ranks} ranks and {count(gpus, 'GPU')}: all run on the CPU")
        self.port = free_port()

    def command(self, spec: RunSpec, node_rank: int) -> list[str]:
        endpoint = f"127.0.0.1:{self.port}"
        return self.torchrun(spec, endpoint=endpoint, is_host=int(node_rank == 0), local_addr="127.0.0.1")

    def environment(self, node_rank: int) -> dict[str, str]:
        """Environment of one node's agent and so of its ranks."""
        ranks = self.nodes * self.ranks_per_node
        env, gpus = environment.fresh(os.environ, ranks), visible_gpus()
        if len(gpus) >= ranks and self.device != "cpu":
            first = node_rank * self.ranks_per_node
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first : first + self.ranks_per_node])
        elif gpus and self.device != "cuda":
            env["CUDA_VISIBLE_DEVICES"] = ""  # ranks that share a GPU would time each other, not themselves
        env |= environment.of_node(node_rank, "lo" if sys.platform == "linux" else "lo0") | self.torchrun_environment()
        # torchrun closes all inherited files except the standard ones; rank 0 finds the user's terminal as its stdin.
        return env | {"BIRDER_TERMINAL": "stdin"}

    def run(self, spec: RunSpec) -> None:
        agents = [Agent(self.command(spec, k), self.environment(k)) for k in range(self.nodes)]
        if cause := supervise(agents, spec.path, terminal=terminal_fd(), heartbeat_timeout_s=self.heartbeat_timeout_s):
            failure.report(cause)


def free_port() -> int:
    """A TCP port of the loopback interface that nobody uses, below those that the system gives to connections meanwhile."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise UserError("no free port on 127.0.0.1: end other programs or wait a minute")


def terminal_fd() -> int:
    """The file that the user reads: standard output, or nothing when it is closed."""
    try:
        os.fstat(1)
    except OSError:
        return subprocess.DEVNULL
    return 1
