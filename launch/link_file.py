"""What is known of the network between a run's nodes: <run_dir>/link.json, which launchers write and records take over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch.files import read_json, write_json

FILE = "link.json"
UNKNOWN: dict[str, Any] = {
    "kind": "loopback",
    "shaped": False,
    "measured": False,
    "mbit_per_s": None,
    "set_mbit_per_s": None,
    "link_gbps": None,
    "dilation": None,
    "off_by": None,
    "note": None,
}
"""A link of which nothing is known yet. Its keys: experiments/records/record.py."""


def of(**known: Any) -> dict[str, Any]:
    """What is known of a link, and nothing of the rest."""
    return {**UNKNOWN, **known}


def write(run_dir: Path, content: dict[str, Any]) -> None:
    """Writes the file, whole or not at all. Raises OSError."""
    write_json(run_dir / FILE, content)


def read(run_dir: Path) -> dict[str, Any]:
    """What the file says; empty where nothing has been written."""
    return dict(read_json(run_dir / FILE) or {})
