"""Counts what is sent, where it is sent."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
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
    _here: threading.local = field(default_factory=threading.local, repr=False, compare=False)

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Inside, what this thread sends is not counted: it is no payload. Other threads go on counting."""
        before, self._here.uncounted = not self._counting(), True
        try:
            yield
        finally:
            self._here.uncounted = before

    def _counting(self) -> bool:
        return not getattr(self._here, "uncounted", False)

    def sent(self, nbytes: int, *, same_node: bool) -> None:
        if not self._counting():
            return
        with self._lock:  # two threads of a pipeline may send
            if same_node:
                self.intra += nbytes
            else:
                self.inter += nbytes

    def collective(self) -> None:
        """One more collective."""
        if self._counting():
            with self._lock:
                self.collectives += 1

    @property
    def total(self) -> int:
        return self.intra + self.inter

    def reset(self) -> None:
        self.intra = self.inter = self.collectives = 0
