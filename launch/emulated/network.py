"""Nodes as network namespaces: `eth0` of every node is joined to one bridge and shaped in both directions.

Everything here runs inside the private network, mount and PID namespaces that launch/emulated/sandbox.py makes, as their
root: the machine's own interfaces are out of reach, and all that is made here goes when the sandbox's last process goes.

    node 0                        sandbox                          node 1
    eth0 10.77.100.100 --[tbf]-->  node0 |                 | node1  <--[tbf]-- eth0 10.77.100.101
                       <--[tbf]--        | bridge `switch` |        --[tbf]-->
                                             10.77.0.1
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

BRIDGE, BRIDGE_ADDRESS = "switch", "10.77.0.1"
PREFIX = 16
NIC = "eth0"
MAX_NODES = 250
GOODPUT = 0.945
"""Share of the set rate that TCP carries: 1448 bytes of each frame of 1514, and acknowledgements."""

_FIRST_FD = 100  # the sandbox's first process holds the namespace of node k open as file 100 + k
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class NetworkError(Exception):
    """A command that builds or changes the network failed. The message is its own, in one line."""


def address(node: int) -> str:
    """IPv4 address of a node. As text, in which order torchrun numbers nodes, addresses sort as their nodes do."""
    return f"10.77.{100 + node // 100}.{100 + node % 100}"


def namespace(node: int) -> str:
    """Path of a node's network namespace, for every process in the sandbox."""
    # /proc may be that of the machine (where a private one is forbidden) and know the first process by another number.
    return f"/proc/{os.environ.get('BIRDER_SANDBOX', '1')}/fd/{_FIRST_FD + node}"


def enter(node: int) -> list[str]:
    """Put before a command, it runs that command on `node`."""
    return ["nsenter", f"--net={namespace(node)}", "--"]


def build(nodes: int, mbit_per_s: float | None) -> None:
    """Makes the bridge and `nodes` nodes, each link shaped to `mbit_per_s` per direction (None: not shaped).

    Only for the first process of a sandbox, which keeps the namespaces alive. Raises NetworkError.
    """
    os.environ["BIRDER_SANDBOX"] = os.readlink("/proc/self")
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    for node in range(nodes):
        _libc("unshare", _CLONE_NEWNET)
        made = os.open("/proc/self/ns/net", os.O_RDONLY)
        os.dup2(made, _FIRST_FD + node, inheritable=False)
        os.close(made)
        _libc("setns", home, _CLONE_NEWNET)
    os.close(home)
    for command in commands(nodes, mbit_per_s):
        run(command)


def commands(nodes: int, mbit_per_s: float | None) -> list[list[str]]:
    """What `build` runs once the namespaces are there."""
    made = [
        ["ip", "link", "set", "lo", "up"],
        ["ip", "link", "add", BRIDGE, "type", "bridge", "stp_state", "0", "forward_delay", "0"],
        # No IPv6 addresses: their discovery is traffic that nobody asked for.
        ["ip", "link", "set", BRIDGE, "addrgenmode", "none"],
        ["ip", "address", "add", f"{BRIDGE_ADDRESS}/{PREFIX}", "dev", BRIDGE],
        ["ip", "link", "set", BRIDGE, "up"],
    ]
    for node in range(nodes):
        port = _port(node)
        made += [
            ["ip", "link", "add", port, "type", "veth", "peer", "name", NIC, "netns", namespace(node)],
            ["ip", "link", "set", port, "master", BRIDGE, "addrgenmode", "none"],
            ["ip", "link", "set", port, "up"],
            [*enter(node), "ip", "link", "set", "lo", "up"],
            [*enter(node), "ip", "link", "set", NIC, "addrgenmode", "none"],
            [*enter(node), "ip", "address", "add", f"{address(node)}/{PREFIX}", "dev", NIC],
            [*enter(node), "ip", "link", "set", NIC, "up"],
        ]
        if mbit_per_s is not None:
            made += shape_commands(node, mbit_per_s)
    return made


def shape(node: int, mbit_per_s: float) -> None:
    """Sets the rate of a node's link, Mbit/s per direction. Raises NetworkError."""
    for command in shape_commands(node, mbit_per_s):
        run(command)


def shape_commands(node: int, mbit_per_s: float) -> list[list[str]]:
    """What `shape` runs: a token bucket where the node sends, and one where the bridge sends to it."""
    bytes_per_s, burst = mbit_per_s * 1e6 / 8, burst_bytes(mbit_per_s)
    # What may wait: every other node's full congestion window where all send to one.
    limit = max(250_000, int(bytes_per_s * 0.05)) + burst
    tbf = ["root", "tbf", "rate", f"{round(mbit_per_s * 1e6)}bit", "burst", f"{burst}b", "limit", f"{limit}b"]
    return [
        [*enter(node), "tc", "qdisc", "replace", "dev", NIC, *tbf],
        ["tc", "qdisc", "replace", "dev", _port(node), *tbf],
    ]


def burst_bytes(mbit_per_s: float) -> int:
    """What passes a link of this rate at once after a pause: the depth of its token bucket."""
    # Large enough for one segment of 64 KB as TCP hands it down, and for 2 ms between two turns of the bucket.
    return max(80_000, int(mbit_per_s * 1e6 / 8 * 0.002))


def set_cable(node: int, state: str) -> None:
    """Pulls the cable of a node ("down") or puts it back ("up"). Raises NetworkError."""
    run(["ip", "link", "set", _port(node), state])


@contextmanager
def inside(node: int) -> Iterator[None]:
    """This thread is on `node` while it is open: sockets made here stay there."""
    home, there = os.open("/proc/thread-self/ns/net", os.O_RDONLY), os.open(namespace(node), os.O_RDONLY)
    try:
        _libc("setns", there, _CLONE_NEWNET)
        try:
            yield
        finally:
            _libc("setns", home, _CLONE_NEWNET)
    finally:
        os.close(home)
        os.close(there)


def run(command: Sequence[str]) -> None:
    """Runs one command. Raises NetworkError with what it says."""
    try:
        done = subprocess.run(list(command), capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise NetworkError(f"{command[0]}: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"status {done.returncode}"]
        raise NetworkError(f"{' '.join(command)}: {said[0]}")


def _port(node: int) -> str:
    """The bridge's end of a node's link."""
    return f"node{node}"


def _libc(function: str, *arguments: int) -> None:
    if getattr(_LIBC, function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise NetworkError(f"{function}: {os.strerror(number)}")
