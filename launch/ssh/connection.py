"""Many ssh connections at once: short questions, and long ones that hold a host's ranks."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch import probe, process
from launch.hosts import Host

# Never a question; a host that is off is found within seconds, before a run and during it.
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3", "ControlMaster=no")
_PATIENCE_S = 60.0  # for an answer to a question
_GRACE_S = 20.0  # for a host to end its ranks: torchrun has 5 s, and what it leaves 5 more


class Connections:
    """ssh to a list of hosts, which go by their number.

    options: further arguments of ssh.
    """

    def __init__(self, hosts: Sequence[Host], options: Sequence[str]) -> None:
        self.hosts = hosts
        self.options = options

    def command(self, node: int, command: str) -> list[str]:
        """The command line here that has the shell of host `node` run `command`."""
        host = self.hosts[node]
        options = [word for option in _OPTIONS for word in ("-o", option)]
        port = ["-p", str(host.port)] if host.port else []
        return ["ssh", "-T", *options, *self.options, *port, "--", host.destination, command]

    def ask(self, python: str, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The answers of all hosts to launch/probe.py's questions; {"error": one line} where there is none."""
        commands = [f"{shlex.quote(python)} - {shlex.quote(json.dumps(request))}" for request in requests]
        with tempfile.TemporaryDirectory() as folder:
            outputs = [Path(folder) / str(node) for node in range(len(commands))]
            ended = self.run(dict(enumerate(commands)), outputs, Path(probe.__file__))
            return [_answer(python, outputs[node], *ended[node]) for node in range(len(commands))]

    def run(
        self, commands: dict[int, str], outputs: Sequence[Path], stdin: Path = Path(os.devnull)
    ) -> dict[int, tuple[int | None, str]]:
        """Runs a short command on each of some hosts at once, its output in `outputs[node]`.

        Returns exit statuses (None: not within a minute) and the last line that each wrote to standard error.
        """
        running: dict[int, subprocess.Popen] = {}
        said: dict[int, Any] = {}
        try:
            for node, command in commands.items():
                said[node] = tempfile.TemporaryFile()  # noqa: SIM115 closed below
                with open(stdin, "rb") as source, open(outputs[node], "wb") as output:
                    running[node] = process.attached(
                        self.command(node, command), stdin=source, stdout=output, stderr=said[node]
                    )
            deadline = time.monotonic() + _PATIENCE_S
            codes: dict[int, int | None] = {}
            for node, asked in running.items():
                try:
                    codes[node] = asked.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    codes[node] = None
            for file in said.values():
                file.seek(0)
            return {k: (code, last_line(said[k].read().decode(errors="replace"))) for k, code in codes.items()}
        finally:
            for asked in running.values():
                asked.kill()
                asked.wait()
            for file in said.values():
                file.close()


def _answer(python: str, output: Path, code: int | None, said: str) -> dict[str, Any]:
    if code is None:
        return {"error": f"no answer within {_PATIENCE_S:.0f} s"}
    if code == 255:
        return {"error": f"cannot be reached: {said or 'ssh gives no reason'}"}
    if code in (126, 127):
        return {"error": f"no Python at {python}: set cluster.python"}
    # A shell's start-up files may have printed something before.
    with contextlib.suppress(IndexError, ValueError):
        return dict(json.loads(output.read_text(errors="replace").splitlines()[-1]))
    return {"error": said or f"no answer from {python}"}


def close(running: list[subprocess.Popen]) -> None:
    """Ends the hosts' standard input, waits until their ranks have ended, then ends what is left of the connections."""
    for connection in running:
        assert connection.stdin is not None
        with contextlib.suppress(OSError):
            connection.stdin.close()
    deadline = time.monotonic() + _GRACE_S
    for connection in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            connection.wait(max(0.0, deadline - time.monotonic()))
    process.end(running, others=list)


def unpack(path: Path, targets: dict[str, Path]) -> None:
    """Unpacks the tar of launch/ssh/remote.py: members FOLDER/... go below targets[FOLDER], others are left out."""
    with tarfile.open(path) as tar:
        for member in tar:
            folder, *parts = Path(member.name).parts
            if not member.isfile() or folder not in targets or ".." in parts:
                continue
            target = targets[folder].joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            source = tar.extractfile(member)
            assert source is not None
            with source, open(partial := target.with_name(f".{target.name}.tmp"), "wb") as file:
                shutil.copyfileobj(source, file)
            os.replace(partial, target)


def last_line(text: str) -> str:
    """The last line of `text` that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
