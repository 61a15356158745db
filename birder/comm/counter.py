"""Counts what is sent, where it is sent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ByteCounter:
    """Payload bytes sent by this rank since the last `reset`, and the number of collectives it took part in.

    intra: to ranks on the same node; inter: to ranks on other nodes. Headers of the transport are not included.
    """

    intra: int = 0
    inter: int = 0
    collectives: int = 0

    def sent(self, nbytes: int, *, same_node: bool) -> None:
        if same_node:
            self.intra += nbytes
        else:
            self.inter += nbytes

    @property
    def total(self) -> int:
        return self.intra + self.inter

    def reset(self) -> None:
        self.intra = self.inter = self.collectives = 0
