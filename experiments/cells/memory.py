"""Memory of this process: what it holds, and the most that it has held. Linux; elsewhere nothing is known."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import resource
from pathlib import Path

import psutil


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(psutil.Process().memory_info().rss)


def tidy() -> None:
    """Gives what has been freed back to the system."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class Memory:
    """The most memory that this process has held since the object was made, above what it held then."""

    def __init__(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            self.before = float(resident())
        except OSError:
            self.before = math.nan

    def peak(self) -> int | None:
        """Bytes; None where it cannot be measured."""
        if math.isnan(self.before):
            return None
        return round(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self.before)

    def grown(self) -> int:
        """Bytes that the process holds now above what it held then; 0 where that is not known."""
        return 0 if math.isnan(self.before) else round(resident() - self.before)
