"""Counts what is sent, where it is sent."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass
class ByteCounter:
    """Payload bytes sent by this rank since the last `reset`, and the number of collectives it took part in.

    intra: to ranks on the same node; inter: to ranks on other nodes. Headers of the transport are not included.
    """

    intra: int = 0
    inter: int = 0
    collectives: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def collective(self, intra: int, inter: int) -> None:
        """One more collective, in which this rank sends so many bytes."""
        with self._lock:  # two threads of a pipeline may send
            self.intra += intra
            self.inter += inter
            self.collectives += 1

    @property
    def total(self) -> int:
        return self.intra + self.inter

    def reset(self) -> None:
        with self._lock:
            self.intra = self.inter = self.collectives = 0
