"""What every entry point imports first where it is run as a script: `python experiments/run.py`, from whatever folder.

Imports then come from the repository, not from this folder. `--version` is answered here, before anything is loaded. A Python
that is too old, or that lacks a package, is one line and exit status 2. Until the program is loaded, Ctrl-C ends it without a
word (`experiments.runs.command.start` has it heard again).

Needs no package, and must be readable to older Pythons too.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST = (3, 11)
OURS = ("birder", "experiments", "launch", "studies")

sys.path[0] = str(ROOT)

from launch import interrupt  # noqa: E402
from launch.words import say  # noqa: E402


def version() -> str:
    """What this clone is: version and commit, and the Python that runs it."""
    import subprocess
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    try:
        asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
        commit = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = "unknown"
    return f"{project['name']} {project['version']}, commit {commit}, Python {sys.version.split()[0]}"


def say_what_is_missing(kind, error, trace):  # type: ignore[no-untyped-def]
    """`sys.excepthook`: one line for a package that is not installed, a traceback for everything else."""
    package = (getattr(error, "name", None) or "").partition(".")[0]
    if not issubclass(kind, ModuleNotFoundError) or not package or package in OURS:
        sys.__excepthook__(kind, error, trace)
        return
    lacks(package)


def lacks(package):  # type: ignore[no-untyped-def]
    """Ends the program with one line: what to do where a package is not installed. Examples call it too."""
    say(
        f"error: {sys.executable} has no package '{package}': run `make setup` in {ROOT}, then use .venv/bin/python "
        "instead of python",
        sys.stderr,
    )
    raise SystemExit(2)


interrupt.ends_silently()
if sys.version_info < OLDEST:
    say(f"error: Python 3.11 or later is needed, this is {sys.version.split()[0]} ({sys.executable})", sys.stderr)
    raise SystemExit(2)
if "--version" in sys.argv[1:]:
    print(version())
    raise SystemExit(0)
sys.excepthook = say_what_is_missing
