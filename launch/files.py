"""Files that are written whole or not at all: a reader sees the old content or the new, never a part."""

from __future__ import annotations

import codecs
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes `content` to `path` and waits for the disk. Raises OSError; `path` is then what it was before."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem[:60]}.", suffix=".tmp")
    try:
        with open(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's files are for their owner alone; ranks of another user read them too
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, content: object) -> None:
    """`write_whole` of `content` as JSON."""
    write_whole(path, json.dumps(content, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """What a file of JSON holds; None where there is none, or it is broken."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def read_log(path: Path) -> str:
    """What a log says so far; "" where there is none."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


class Tail:
    """What is added to a file from now on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = path.stat().st_size if path.exists() else 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def rest(self) -> str:
        """What has been added since the last call."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.position)
                new = file.read()
        except OSError:
            return ""  # not there yet
        self.position += len(new)
        return self.decoder.decode(new)
