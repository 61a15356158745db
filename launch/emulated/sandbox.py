"""A private machine for emulated nodes: network, mount and process namespaces that end with their first process."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

_NAMESPACES = ["--net", "--mount", "--pid", "--fork", "--kill-child"]
_AS_ROOT_OF_ITS_OWN = ["--user", "--map-root-user"]
# What a sandbox needs, tried on interfaces that go with the probe.
_PROBE = (
    "ip link add probe0 type veth peer name probe1 && ip link add probe2 type bridge "
    "&& tc qdisc add dev probe0 root tbf rate 100mbit burst 100kb limit 1mb"
)


@functools.cache
def probe() -> tuple[tuple[str, ...] | None, str]:
    """The command that makes a sandbox here, to be put before the first command inside; or None and, in one line, why not.

    Found by trying, once per process: no list of kernels and container settings knows better.
    """
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


def collect_orphans(ours: Iterable[int]) -> None:
    """Collects children that have ended, save `ours`, whose exit statuses somebody waits for."""
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in ours:
                return  # the next call sees the others
            os.waitpid(ended.si_pid, 0)
