"""A private machine for emulated nodes: network, mount and process namespaces that end with their first process.

`python -m launch.emulated.sandbox --nodes 4 --mbit 500 -- COMMAND ...` runs COMMAND beside 4 nodes;
`launch.emulated.network.enter(k)` starts a program on one of them. Everything ends with COMMAND, or with the process that
started the sandbox.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NoReturn

if not __package__:  # run as a script: import from the repository, not from this file's own folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from launch import process
from launch.emulated import network
from launch.process import Stopped

_NAMESPACES = ["--net", "--mount", "--pid", "--fork", "--kill-child"]
_AS_ROOT_OF_ITS_OWN = ["--user", "--map-root-user"]
# What a sandbox needs, tried on interfaces that go with the probe.
_PROBE = (
    "ip link add probe0 type veth peer name probe1 && ip link add probe2 type bridge "
    "&& tc qdisc add dev probe0 root tbf rate 100mbit burst 100kb limit 1mb"
)


class NoSandbox(Exception):
    """This machine gives no sandbox. The message says in one line what is missing."""


def prefix() -> tuple[str, ...]:
    """The command that makes a sandbox here, to be put before the first command inside. Raises NoSandbox.

    Found by trying, once per process: no list of kernels and container settings knows better.
    """
    command, reason = probe()
    if command is None:
        raise NoSandbox(reason)
    return command


@functools.cache
def probe() -> tuple[tuple[str, ...] | None, str]:
    """The command that `prefix` returns, or None and the reason."""
    if sys.platform != "linux":
        return None, "network namespaces need Linux"
    # The tools of the administrator are often in no user's path.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    for tool, package in (("unshare", "util-linux"), ("nsenter", "util-linux"), ("ip", "iproute2"), ("tc", "iproute2")):
        if shutil.which(tool) is None:
            return None, f"no {tool}: install {package}"
    reasons = []
    for user in ([], _AS_ROOT_OF_ITS_OWN) if os.geteuid() == 0 else (_AS_ROOT_OF_ITS_OWN,):
        # A private /proc is refused where parts of the machine's own are hidden; the sandbox can do without.
        for proc in (["--mount-proc"], []):
            candidate = ["unshare", *user, *_NAMESPACES, *proc]
            try:
                done = subprocess.run([*candidate, "sh", "-c", _PROBE], capture_output=True, text=True, timeout=30)
            except (OSError, subprocess.SubprocessError) as error:
                reasons.append(str(error))
                continue
            if done.returncode == 0:
                return tuple(candidate), ""
            reasons.append(" ".join(done.stderr.split()) or f"unshare ended with status {done.returncode}")
    return None, reasons[-1]


def script(*arguments: str) -> list[str]:
    """This file's command line."""
    return [sys.executable, str(Path(__file__).resolve()), *arguments]


def processes(sandbox: int) -> dict[int, int]:
    """Process ids inside -> outside, of all in the sandbox whose `unshare` is process `sandbox`. For processes outside."""
    found = {}
    with contextlib.suppress(OSError):
        inside = os.readlink(f"/proc/{sandbox}/ns/pid_for_children")
        if inside == os.readlink("/proc/self/ns/pid"):
            return {}  # it has not made its namespaces yet
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, StopIteration):
                if os.readlink(entry / "ns/pid") == inside:
                    status = (entry / "status").read_text().splitlines()
                    ids = next(line for line in status if line.startswith("NSpid:"))
                    found[int(ids.split()[-1])] = int(entry.name)
    return found


def wait(watched: subprocess.Popen, poll_s: float = 0.05) -> int:
    """Waits for `watched` as the first process of a PID namespace does: orphans are collected too."""
    while (code := watched.poll()) is None:
        collect_orphans([watched.pid])
        time.sleep(poll_s)
    return code


def collect_orphans(ours: Iterable[int]) -> None:
    """Collects children that have ended, save `ours`, whose exit statuses somebody waits for."""
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in ours:
                return  # the next call sees the others
            os.waitpid(ended.si_pid, 0)


def _run_command(nodes: int, mbit: float | None, command: Sequence[str]) -> int:
    """Inside: builds the network, runs `command`, and returns its exit status."""
    running: list[subprocess.Popen] = []
    try:
        with process.stop_signals():
            network.build(nodes, mbit)
            running.append(subprocess.Popen(list(command)))
            code = wait(running[0])
    finally:
        with process.undisturbed():
            process.end(running, others=list)
    return code if code >= 0 else 128 - code


def _guarded(main: Callable[[], int]) -> int:
    """`main()`, what it raises turned into one line and an exit status."""
    try:
        return main()
    except (network.NetworkError, NoSandbox) as error:
        print(f"error: no sandbox: {error}", file=sys.stderr, flush=True)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 127
    except KeyboardInterrupt:
        return 130
    except Stopped as error:
        return error.code


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--mbit", type=float, help="rate of every node's link per direction, Mbit/s; default: no limit")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="+", help="after --: what to run")
    options = parser.parse_args(arguments)
    if options.inside:
        return _guarded(lambda: _run_command(options.nodes, options.mbit, options.command))
    return _guarded(lambda: _enter_sandbox(["--inside", *arguments]))


def _enter_sandbox(arguments: list[str]) -> NoReturn:
    """Outside: becomes the sandbox that runs this file with `arguments`."""
    command = [*prefix(), *script(*arguments)]
    process.die_with_parent(os.getppid())
    os.execvp(command[0], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
