"""Files that are written whole or not at all: a reader sees the old content or the new, never a part."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


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
