"""Reads an offline W&B run back, the record file (LevelDB's log format) and the tables next to it; and a printed table."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7
FIRST_HEADER = 7
"""Bytes at the beginning of the file that name the format."""
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file. A record may span blocks; what is left of a block after its last record is zeros."""
    content = path.read_bytes()
    assert content[:4] == b":W&B"
    place, parts = FIRST_HEADER, b""
    while place + HEADER <= len(content):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + HEADER])
        if kind == 0:
            place += BLOCK - place % BLOCK
            continue
        parts += content[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (FULL, LAST):
            yield parts
            parts = b""


@dataclass
class Run:
    """An offline run as it would be sent."""

    folder: Path
    group: str = ""
    job: str = ""
    name: str = ""
    exit_code: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    system: int = 0

    def table(self, name: str) -> dict[str, Any]:
        """{columns, data} of a logged table."""
        (logged,) = [row[name] for row in self.history if name in row]
        return json.loads((self.folder / "files" / logged["path"]).read_text())

    def images(self) -> list[Path]:
        """Logged pictures."""
        logged = [
            v for row in self.history for v in row.values() if isinstance(v, dict) and v.get("_type") == "image-file"
        ]
        return [self.folder / "files" / v["path"] for v in logged]


def read(folder: Path) -> Run:
    """The only W&B run below `folder`."""
    from wandb.proto import wandb_internal_pb2 as protocol

    (path,) = folder.rglob("*.wandb")
    run = Run(path.parent)
    for content in records(path):
        record = protocol.Record()
        record.ParseFromString(content)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.group, run.job, run.name = record.run.run_group, record.run.job_type, record.run.display_name
            run.config |= _items(record.run.config.update)
        elif kind == "history":
            run.history.append(_items(record.history.item))
        elif kind == "summary":
            run.summary |= _items(record.summary.update)
        elif kind == "stats":
            run.system += 1
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    return run


def _items(items: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in items:
        *outer, last = item.nested_key or [item.key]
        inner = found
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = json.loads(item.value_json)
    return found


def columns(rows: list[list[str]]) -> list[str]:
    """The text of each column from top to bottom, without spaces: a narrow terminal folds cells into several lines."""
    return ["".join("".join(column).split()) for column in zip(*rows, strict=True)]


def shown_table(text: str) -> list[list[str]]:
    """The lines of the table that was printed, as cells."""
    return [line[1:-1].replace("┃", "│").split("│") for line in text.splitlines() if line[:1] in ("│", "┃")]
