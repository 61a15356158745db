"""A cluster that is reached over ssh: one torchrun agent per host, looked after by launch/ssh/remote.py.

Every host is tied to one ssh connection, which is started here and ends with this process; launch/ssh/remote.py ends the
host's ranks when the connection ends. Nothing needs to be installed besides the repository and its environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch import environment, failure, link_file, probe, process
from launch.base import ROOT, Launcher
from launch.errors import UserError, refused
from launch.failure import RunFailed
from launch.files import read_json, read_log
from launch.hosts import parse
from launch.local import terminal_fd
from launch.spec import RunSpec
from launch.ssh import connection
from launch.ssh.connection import Connections
from launch.ssh.remote import BEGUN
from launch.words import count, say


class SshLauncher(Launcher):
    """N hosts, each with the repository in the same folder and an environment of the same versions.

    A variable of `env` that is null is taken from the environment here and shown nowhere.
    """

    def __init__(
        self,
        *,
        hosts: str | Sequence[str],
        nodes: int | None = None,
        python: str | None = None,
        directory: str | None = None,
        interface: str | None = None,
        port: int | None = None,
        ssh_options: str | Sequence[str] = (),
        env: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        self.hosts = parse(hosts)
        if nodes is not None and nodes != len(self.hosts):
            raise UserError(
                f"cluster.nodes={nodes}, but cluster.hosts names {len(self.hosts)}: leave cluster.nodes out, or name as many"
            )
        super().__init__(nodes=len(self.hosts), **arguments)
        self.python = python or sys.executable
        self.directory = str(directory or ROOT)
        self.interface = interface
        self.port = port
        options = shlex.split(ssh_options) if isinstance(ssh_options, str) else [str(o) for o in ssh_options]
        self.connections = Connections(self.hosts, options)
        self.env = dict(env or {})
        # Found by `check`, for every host.
        self.routes: list[dict[str, Any]] = []
        self.shared: list[bool] = []
        self.hide_gpus = False

    def check(self, spec: RunSpec) -> None:
        if shutil.which("ssh") is None:
            raise UserError("cluster=ssh needs the ssh command: install openssh-client")
        if missing := [name for name, value in self.env.items() if value is None and name not in os.environ]:
            raise UserError(f"cluster.env.{missing[0]}=null takes {missing[0]} from the environment, which has none")
        looks = self._look(spec)
        here = probe.look(str(ROOT))
        self._refuse([self._misfit(look, here, looks[0]) for look in looks])
        self.shared = [look["shared"] for look in looks]
        saves = int(spec.config.get("checkpoint", {}).get("every", 0)) > 0
        resumes = spec.config.get("resume") == "auto" and any(spec.path.glob("checkpoints/step-*"))
        if (saves or resumes) and not all(self.shared):
            apart = ", ".join(str(h) for h, shared in zip(self.hosts, self.shared, strict=True) if not shared)
            other = (
                "checkpoint.every=0" if saves and not resumes else "another run_name, which begins at the first step"
            )
            raise UserError(
                f"checkpoints need a folder that all hosts share, and {spec.run_dir} is not shared with {apart}: "
                f"set output_dir to a shared folder, or {other}"
            )
        self.hide_gpus = any(look["gpus"] < self.ranks_per_node for look in looks)
        if self.hide_gpus and self.backend != "gloo" and any(look["gpus"] for look in looks):
            say("some hosts have fewer GPUs than ranks: all ranks run on the CPU")
        self.routes = self._find_routes([look["address"] for look in looks], [look["client"] for look in looks])

    def command(self, spec: RunSpec, node_rank: int) -> list[str]:
        """The ssh command of one node. Only after `check`, which finds the addresses."""
        first, own = self.routes[0], self.routes[node_rank]
        host = f"[{first['address']}]" if ":" in first["address"] else first["address"]
        endpoint = f"{host}:{first['port']}"
        torchrun = self.torchrun(spec, endpoint=endpoint, is_host=int(node_rank == 0), local_addr=own["address"])
        torchrun[-2] = str(Path(self.directory) / self.worker.relative_to(ROOT))
        env = [f"{name}={value}" for name, value in self.environment(node_rank).items()]
        agent = [self.python, "-m", "launch.ssh.remote", "run", str(node_rank), spec.run_dir]
        return self.connections.command(node_rank, self._in_directory("env", *env, *agent, *torchrun))

    def environment(self, node_rank: int) -> dict[str, str]:
        """What is set for one node's ranks on the command line."""
        env = environment.of_node(node_rank, self.routes[node_rank]["interface"])
        if self.hide_gpus:
            env["CUDA_VISIBLE_DEVICES"] = ""  # ranks that share a GPU would time each other, not themselves
        env |= {"BIRDER_TERMINAL": "stdin", **self.torchrun_environment()}
        return env | {name: str(value) for name, value in self.env.items() if value is not None}

    def run(self, spec: RunSpec) -> None:
        say("hosts: " + ", ".join(f"{k} {host}" for k, host in enumerate(self.hosts)))
        link_file.write(spec.path, link_file.of(kind="network"))
        (spec.path / "logs").mkdir(exist_ok=True)
        shutil.rmtree(spec.path / "agents", ignore_errors=True)
        running: list[subprocess.Popen] = []
        earlier, completed = _records(spec), False
        try:
            with process.stop_signals():
                for node in range(self.nodes):
                    running.append(self._start(node, spec))
                failed = process.wait_for_first_failure(running)
            completed = failed is None
        finally:
            with process.undisturbed():
                connection.close(running)
            # Where the folder of the run is shared, that of the results need not be.
            elsewhere = completed and _records(spec) == earlier
            problems = self._gather(spec, elsewhere)
        if failed is not None:
            failure.report(self._explain(spec, failed))
        if problems:
            for node, problem in problems.items():
                say(f"{self.hosts[node]}: {problem}", sys.stderr)
            raise RunFailed(
                f"the run is complete, but its files could not be fetched from {count(len(problems), 'host')}"
            )

    def _start(self, node: int, spec: RunSpec) -> subprocess.Popen:
        with open(_ssh_log(spec, node), "ab") as log:
            command = self.command(spec, node)
            started = process.attached(command, stdin=subprocess.PIPE, stdout=terminal_fd(), stderr=log)
        files = [] if self.shared[node] else [spec.file, spec.path / link_file.FILE]
        passed_on = {name: os.environ[name] for name, value in self.env.items() if value is None}
        request: dict[str, Any] = {"files": {f.name: f.read_text() for f in files}, "environment": passed_on}
        request["heartbeat_timeout_s"] = self.heartbeat_timeout_s
        assert started.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its exit status will tell
            started.stdin.write(json.dumps(request).encode() + b"\n")
            started.stdin.flush()
        return started

    def _explain(self, spec: RunSpec, failed: int) -> failure.Cause:
        """The first cause of a failure, from what all hosts have left. Names the host to the user, never in records."""
        files = {node: spec.path / "agents" / f"node{node}.json" for node in range(self.nodes)}
        reports = {node: report for node, file in files.items() if (report := read_json(file)) is not None}
        silent = [node for node in (failed, *range(self.nodes)) if node not in reports]
        lost = f"node {silent[0]}: the connection to it was lost" if silent else ""
        killed = [rank for node in sorted(reports) for rank in reports[node]["vanished"]]
        code = reports.get(failed, {}).get("code") or 1
        cause = failure.explain(spec.path, killed, failed, code, lost=lost)
        if (named := re.search(r"\bnode (\d+)\b", cause.reason)) and (node := int(named[1])) < self.nodes:
            said = "" if node in reports else connection.last_line(read_log(_ssh_log(spec, node)).rpartition(BEGUN)[2])
            say(f"node {node} is {self.hosts[node]}" + (f": {said}" if said else ""), sys.stderr)
        return cause

    def _look(self, spec: RunSpec) -> list[dict[str, Any]]:
        """What `probe.look` finds on every host, or {"error": line}."""
        existing = spec.path
        while not existing.exists():
            existing = existing.parent
        token = existing / f".birder-{secrets.token_hex(8)}"
        request = {"do": "look", "directory": self.directory, "run_dir": spec.run_dir, "token": str(token)}
        try:
            with refused(f"cannot write to {existing}", OSError, way_on="set output_dir=FOLDER"):
                token.touch()
                return self.connections.ask(self.python, [request] * self.nodes)
        finally:
            token.unlink(missing_ok=True)

    def _misfit(self, look: dict[str, Any], here: dict[str, Any], first: dict[str, Any]) -> str:
        """What keeps a host from taking part, in one line; empty when nothing does."""
        if "error" in look:
            return look["error"]
        if not look["directory"]:
            return f"no folder {self.directory}: put the repository there, or set cluster.directory"
        found = []
        if look["commit"] != here["commit"]:
            found.append(f"commit {_short(look['commit'])} in {self.directory}, here {_short(here['commit'])}")
        elif look["changes"] != here["changes"]:
            found.append(f"other uncommitted changes in {self.directory} than here")
        if look["python"] != here["python"]:
            found.append(f"Python {look['python']}, here {here['python']}")
        # Builds for GPU and CPU differ after the plus: this machine need not have the hosts' kind, but they must agree.
        if _release(look["torch"]) != _release(here["torch"]):
            found.append(f"torch {look['torch']}, here {here['torch']}")
        elif look["torch"] != first.get("torch", look["torch"]):
            found.append(f"torch {look['torch']}, the first host has {first['torch']}")
        if look["writable"] is not None:
            found.append(f"{look['writable']} cannot be written to")
        if self.backend == "nccl" and look["gpus"] < self.ranks_per_node:
            found.append(f"{look['gpus']} GPUs for {self.ranks_per_node} ranks")
        return "; ".join(found)

    def _find_routes(self, addresses: list[str], clients: list[str]) -> list[dict[str, Any]]:
        """Interface and address of every host, and a port on the first one. Raises UserError."""
        requests = []
        for node in range(self.nodes):
            # A host that is this machine may have been reached over its loopback interface: no peer for others.
            others = [a for k, a in enumerate(addresses) if k != node and not a.startswith(("127.", "::1"))]
            peers = [*others, clients[node]]
            port = self.port if node == 0 else None
            requests.append({"do": "route", "peers": peers, "interface": self.interface, "port": port})
        routes = self.connections.ask(self.python, requests)
        self._refuse([route.get("error", "") for route in routes])
        return routes

    def _refuse(self, problems: list[str]) -> None:
        """Raises UserError if any host has a problem, after one line for each."""
        for host, problem in zip(self.hosts, problems, strict=True):
            if problem:
                say(f"{host}: {problem}", sys.stderr)
        if number := sum(map(bool, problems)):
            raise UserError(f"{number} of {self.nodes} hosts cannot take part: nothing was started")

    def _gather(self, spec: RunSpec, elsewhere: bool) -> dict[int, str]:
        """Brings here what the run has left on hosts that do not share this folder. Returns why, for each that fails.

        elsewhere: whether its record is on a host, of those too that share the folder.
        """
        results = Path(spec.config["results_dir"])
        arguments = ["gather", spec.run_dir, str(results), spec.id]
        command = self._in_directory(self.python, "-m", "launch.ssh.remote", *arguments)
        nodes = [k for k in range(self.nodes) if elsewhere or not self.shared[k]]
        with tempfile.TemporaryDirectory() as folder:
            outputs = [Path(folder) / f"{node}.tar" for node in range(self.nodes)]
            problems: dict[int, str] = {}
            for node, (code, said) in self.connections.run(dict.fromkeys(nodes, command), outputs).items():
                try:
                    if code != 0:
                        raise OSError(said or f"ssh ended with status {code}")
                    targets = {"results": results} if self.shared[node] else {"results": results, "run": spec.path}
                    connection.unpack(outputs[node], targets)
                except (OSError, tarfile.TarError) as error:
                    problems[node] = str(error)
        return problems

    def _in_directory(self, *command: str) -> str:
        return f"cd {shlex.quote(self.directory)} && exec {shlex.join(command)}"


def _records(spec: RunSpec) -> dict[Path, int]:
    """The records of the run that are here, and when each was written: a resumed run may have one of its earlier start."""
    found = (Path(spec.config["results_dir"]) / "records").glob(f"{spec.id}*.json")
    return {path: path.stat().st_mtime_ns for path in found}


def _ssh_log(spec: RunSpec, node: int) -> Path:
    return spec.path / "logs" / f"ssh{node}.log"


def _release(version: str | None) -> str:
    return str(version).partition("+")[0]


def _short(commit: str | None) -> str:
    return commit[:10] if commit else "none"
