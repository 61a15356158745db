"""Where a record comes from: commit, machine and versions, without the machine's name."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "numpy", "numba", "triton", "torchvision", "transformers", "datasets", "hydra-core")


def git_state(root: Path = ROOT) -> dict[str, Any]:
    """{sha, dirty} of the checkout at `root`; both None outside of one. Dirty: a tracked file differs, or the code has a file
    that is not tracked.

    Results are left out: publishing one experiment does not change the code that the next one measures.
    """
    nothing: dict[str, Any] = {"sha": None, "dirty": None}
    # In a hook of another repository these name that one.
    environment = {k: v for k, v in os.environ.items() if k not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")}

    def git(*args: str) -> str:
        command = ["git", "-C", str(root), *args]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.strip()

    try:
        # A copy without .git inside some other repository must not pass for that repository's commit.
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return nothing
        changes = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)results")
        code = [f"{folder}/*.py" for folder in ("birder", "experiments", "launch")]
        added = git("ls-files", "--others", "--exclude-standard", "--", *code)
        return {"sha": git("rev-parse", "HEAD"), "dirty": bool(changes or added)}
    except (OSError, subprocess.SubprocessError):
        return nothing


_BEGAN: dict[str, Any] = {}


def begin() -> None:
    """Remembers the commit that this process runs: until its record is made, another one may be checked out."""
    if not _BEGAN:
        _BEGAN.update(git_state())


def code() -> dict[str, Any]:
    """`git_state` as `begin` found it; of a process that has not called that, now."""
    return dict(_BEGAN) or git_state()


def hardware(device: str | None = None) -> dict[str, Any]:
    """{device, cpu, cores, memory_gb, gpus} of this machine, without its name."""
    gpus = _gpus()
    return {
        "device": device or ("cuda" if gpus else "cpu"),
        "cpu": _cpu() or platform.machine() or None,
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "gpus": gpus,
    }


def software() -> dict[str, Any]:
    """Versions of Python and of the packages that decide what a run does; only those that are installed."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _cpu() -> str | None:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        return found and found[1].strip()
    return None


def _gpus() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
