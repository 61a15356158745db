"""Files that are made from records alone: brought up to date, or compared with what lies on disk. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from experiments.records.record import write_file
from experiments.report import figure


def write(files: Mapping[Path, bytes]) -> list[Path]:
    """Brings files up to date: path -> content. Returns their paths, in order."""
    for path in differing(files):
        write_file(path, files[path], "plot" if path.suffix == ".png" else "page")
    return sorted(files)


def differing(files: Mapping[Path, bytes]) -> list[Path]:
    """Those that are missing on disk, or show something else there."""
    return sorted(path for path, content in files.items() if not _same(path, content))


def _same(path: Path, content: bytes) -> bool:
    """The same text, or a plot of the same data: another version of matplotlib draws other bytes."""
    if not path.is_file():
        return False
    found = path.read_bytes()
    return figure.digest(found) == figure.digest(content) if path.suffix == ".png" else found == content
