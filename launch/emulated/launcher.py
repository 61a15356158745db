"""Nodes on this machine as network namespaces, joined by links with the rate of a real network, or a dilated one."""

from __future__ import annotations

import functools
import math
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from launch import environment, failure, link_file, process
from launch.emulated import inside, network, sandbox
from launch.environment import cores
from launch.errors import UserError
from launch.failure import Cause
from launch.files import read_json, read_log, write_json
from launch.local import LocalLauncher, terminal_fd
from launch.spec import RunSpec
from launch.words import count, say


@dataclass(kw_only=True, eq=False, repr=False)
class EmulatedLauncher(LocalLauncher):
    """N nodes, each a network namespace with one torchrun agent, on a bridge with links that are shaped both ways.

    Time here runs `dilation` times slower than on the machines that are emulated: links are set to link_gbps / dilation, so
    that computing and communicating keep their proportion. Where the system allows no such network the nodes talk over
    plain loopback: one line says so and why, and so does `<run_dir>/link.json`. A single node needs no network.
    """

    link_gbps: float = 10.0
    dilation: float | str = "auto"
    max_total_gbps: float | None = None

    @property
    def shapes(self) -> bool:
        return self.nodes > 1 and why_not() is None

    @property
    def mbit_per_s(self) -> float:
        """The rate of the token buckets."""
        assert not isinstance(self.dilation, str)
        return self.link_gbps * 1000 / self.dilation

    def check(self, spec: RunSpec) -> None:
        super().check(spec)
        if self.shapes:
            self._check_rate()
        elif self.nodes > 1:
            say_once(
                f"No emulated network here ({why_not()}): nodes talk over plain loopback, their link is not shaped."
            )

    def _check_rate(self) -> None:
        if self.nodes > network.MAX_NODES:
            raise UserError(f"cluster.nodes={self.nodes}: one machine emulates at most {network.MAX_NODES}")
        if self.dilation == "auto":
            if not self.late:
                raise UserError(
                    "cluster.dilation=auto needs a measurement, which was not made: set cluster.dilation=20"
                )
            return
        check_capacity(self.nodes, self.link_gbps, self.mbit_per_s, self.max_total_gbps)

    def command(self, spec: RunSpec, node_rank: int) -> list[str]:
        agent = self._agent(spec, node_rank)
        return [*network.enter(node_rank), *agent] if self.shapes else agent

    def _agent(self, spec: RunSpec, node_rank: int) -> list[str]:
        """One node's agent, without the command that takes it to its node."""
        if not self.shapes:
            return super().command(spec, node_rank)
        endpoint, own = f"{network.address(0)}:{self.port}", network.address(node_rank)
        return self.torchrun(spec, endpoint=endpoint, is_host=int(node_rank == 0), local_addr=own)

    def environment(self, node_rank: int) -> dict[str, str]:
        env = super().environment(node_rank)
        if self.shapes:
            env |= environment.of_node(node_rank, network.NIC)
            # NCCL knows GPUs of one machine when it sees them and would send around the link. With more than one rank
            # per node that costs speed within the node as well; within and between cannot be distinguished here.
            env |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_HOSTID": f"node{node_rank}"}
            if env.get("WANDB_MODE") != "disabled":
                env["WANDB_MODE"] = "offline"  # no way leads out of the emulated network
        return env

    def preview(self, spec: RunSpec) -> str:
        if not self.shapes:
            return super().preview(spec)
        commands = [
            self._sandbox(spec),
            *network.commands(self.nodes, None if self.late else self.mbit_per_s),
            *(self.command(spec, k) for k in range(self.nodes)),
        ]
        return "\n".join(map(shlex.join, commands))

    def _sandbox(self, spec: RunSpec) -> list[str]:
        command, why = sandbox.probe()
        assert command is not None, why
        return [*command, self.python, str(Path(inside.__file__).resolve()), str(spec.path / "plan.json")]

    def run(self, spec: RunSpec) -> None:
        if not self.shapes:
            note = "one node: no link" if self.nodes == 1 else f"not shaped: {why_not()}"
            link_file.write(spec.path, link_file.of(note=note))
            return super().run(spec)
        for left in (inside.CONTROL, inside.CONTROL_DONE, inside.OUTCOME, link_file.FILE):
            (spec.path / left).unlink(missing_ok=True)  # of an earlier run that is resumed
        environments = [self.environment(k) for k in range(self.nodes)]
        common = dict(set.intersection(*(set(env.items()) for env in environments)))
        own = [{name: value for name, value in env.items() if name not in common} for env in environments]
        rate = None if self.late else self.mbit_per_s
        plan = {
            "run_dir": str(spec.path.resolve()),
            "nodes": self.nodes,
            "mbit_per_s": rate,
            "heartbeat_timeout_s": self.heartbeat_timeout_s,
            "link": link_file.of(
                kind="emulated",
                shaped=True,
                set_mbit_per_s=rate,
                link_gbps=self.link_gbps,
                dilation=None if self.dilation == "auto" else float(self.dilation),
            ),
            # The rest of the environment, keys among it, is inherited and never written to a file.
            "agents": [{"command": self._agent(spec, k), "environment": own[k]} for k in range(self.nodes)],
        }
        write_json(spec.path / "plan.json", plan)
        if cause := self._supervise(spec, common):
            failure.report(cause)
        return None

    def _supervise(self, spec: RunSpec, environment: dict[str, str]) -> Cause | None:
        """Runs the sandbox to its end: None, or why it failed. Nothing of it is left when this returns or raises."""
        running: list[subprocess.Popen] = []
        log = spec.path / "logs" / "sandbox.log"
        first: list[int] = []
        try:
            with process.stop_signals():
                running.append(process.start(self._sandbox(spec), environment, log, stdin=terminal_fd()))
                process.wait_for_first_failure(running)
        finally:
            with process.undisturbed():
                # The kernel ends everything inside with the first process, whose own end is the end of it all.
                first += sandbox.processes(running[0].pid).values() if running else []
                process.end(running, others=lambda: first)
        if outcome := read_json(spec.path / inside.OUTCOME):
            cause = outcome["cause"]
            return Cause(**cause) if cause else None
        code = running[0].returncode
        how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
        reason = f"the sandbox of the emulated nodes {how} before it could say why; see {log}"
        return Cause(reason, read_log(log)[-4000:])


def check_capacity(nodes: int, link_gbps: float, mbit_per_s: float, max_total_gbps: float | None) -> None:
    """Raises UserError for links of `mbit_per_s`, standing for `link_gbps`, that this machine cannot carry."""
    each = capacity_gbps(nodes, cores()) if max_total_gbps is None else max_total_gbps / nodes
    if mbit_per_s > each * 1000 * (1 + 1e-9):
        least = math.ceil(link_gbps / each)
        machine = count(cores(), "core")
        raise UserError(
            f"links of {mbit_per_s / 1000:.3g} Gbit/s are more than this machine ({machine}) can carry for "
            f"{nodes} nodes at once, {each:.3g} Gbit/s each: set cluster.dilation={least} or more"
        )


def capacity_gbps(nodes: int, cores: int) -> float:
    """What each of `nodes` emulated nodes can send and receive at once on so many cores, Gbit/s.

    Measured on 2 cores: 5, 2.5 and 1 for 2, 4 and 8 nodes. A core moves 5 Gbit/s from one node to another, 4 where more than
    two nodes share it; one node's traffic cannot use more than two cores.
    """
    per_core = 5.0 if nodes <= 2 * cores else 4.0
    return per_core * min(2.0, cores / nodes)


def why_not() -> str | None:
    """Why this machine can have no emulated network, in one line; None where it can."""
    return sandbox.probe()[1] or None


say_once = functools.cache(say)
"""Prints a line that a comparison of many runs need not repeat."""
