"""What a host is like, found out on the host itself: `python - REQUEST < launch/probe.py` prints one line of JSON.

Only the standard library and no other file of the project: the host may hold another version of it, or none.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any


def look(directory: str, run_dir: str = "", token: str = "") -> dict[str, Any]:
    """Versions, GPUs and folders of this machine.

    run_dir, token: paths relative to `directory` or absolute; `token` exists where the launcher's folder is shared.
    """
    if not os.path.isdir(directory):
        return {"directory": False}
    existing = Path(directory, run_dir)
    while not existing.exists():
        existing = existing.parent
    connection = os.environ.get("SSH_CONNECTION", "127.0.0.1 0 127.0.0.1 0").split()
    return {
        "directory": True,
        "commit": _git(directory, "rev-parse", "HEAD"),
        "changes": _changes(directory),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": _torch(),
        "gpus": len(visible_gpus()),
        "shared": bool(token) and Path(directory, token).exists(),
        "writable": None if os.access(existing, os.W_OK | os.X_OK) else str(existing),
        "client": connection[0],
        "address": connection[2],
    }


def route(peers: list[str], interface: str | None = None, port: int | None = None) -> dict[str, Any]:
    """{interface, address, port}: how this machine reaches the first of `peers`, and a port of that address.

    interface: take this one instead of asking the routing table.
    port:      the one to use; None: a free one. A port that is in use, or whatever else fails, is {error}.
    """
    try:
        if interface is None:
            said = _run("ip", "-o", "route", "get", peers[0])
            device, source = re.search(r"\bdev (\S+)", said), re.search(r"\bsrc (\S+)", said)
            if not device or not source:
                return {"error": f"no route to {peers[0]}: {said}"}
            interface, address = device[1], source[1]
        else:
            found = re.search(r"\binet6? ([0-9a-fA-F.:]+)", _run("ip", "-o", "address", "show", "dev", interface))
            if not found:
                return {"error": f"the interface {interface} has no address"}
            address = found[1]
        version = ipaddress.ip_address(address).version
        with socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind((address, port or 0))
            return {"interface": interface, "address": address, "port": s.getsockname()[1]}
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or getattr(error, "strerror", None) or str(error)
        return {"error": " ".join(said.split()) + (f" (port {port})" if port else "")}


def any_gpu() -> bool:
    """Whether this machine has a GPU's driver."""
    return shutil.which("nvidia-smi") is not None or any(Path("/dev").glob("nvidia*"))


def visible_gpus() -> list[str]:
    """Identifiers of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES spells them.

    Shells and containers set that variable also where there is no GPU.
    """
    if not any_gpu():
        return []
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [g for g in listed.split(",") if g.strip() not in ("", "-1")]
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    found = [line for line in done.stdout.splitlines() if line.startswith("GPU ")]
    return [str(i) for i in range(len(found))]


def _run(*command: str) -> str:
    # The tools of the administrator are often in no user's path.
    env = {**os.environ, "PATH": os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"}
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True, env=env).stdout.strip()


def _git(directory: str, *arguments: str) -> str | None:
    try:
        return _run("git", "-C", directory, *arguments)
    except (OSError, subprocess.SubprocessError):
        return None


def _changes(directory: str) -> str | None:
    """Digest of what differs from the commit in tracked files; generated results are left out."""
    diff = _git(directory, "diff", "HEAD", "--no-color", "--no-ext-diff", "--binary", "--", ".", ":(exclude)results")
    return None if diff is None else hashlib.sha256(diff.encode()).hexdigest()


def _torch() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    answer = look(**request) if request.pop("do") == "look" else route(**request)
    print(json.dumps(answer))
