"""Bytes that crossed a node's network interface, from the interface's own counters."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "BIRDER_NIC"
"""Environment variable in which launchers name the interface that leads to the other nodes."""
_RDMA = Path("/sys/class/infiniband")
_COUNTERS = Path("/proc/self/net/dev")  # of this process's own network namespace, as /sys/class/net need not be


def read(interface: str, counters: Path = _COUNTERS) -> tuple[int, int] | None:
    """(bytes sent, bytes received) by `interface` since it exists; None where that cannot be known."""
    try:
        lines = counters.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == interface:
            fields = numbers.split()
            return int(fields[8]), int(fields[0])
    return None


def past_the_counters(backend: str, devices: Path = _RDMA) -> bool:
    """Whether messages may pass an interface's counters by: NCCL takes RDMA devices (InfiniBand, RoCE) where it finds any."""
    if backend != "nccl" or os.environ.get("NCCL_IB_DISABLE") == "1":
        return False
    return os.environ.get("NCCL_NET", "").lower() != "socket" and devices.is_dir() and any(devices.iterdir())


class NicMeter:
    """Sums an interface's bytes over the stretches between `resume` and `pause`.

    interface: its name; None where there is none to read, which leaves `total` None. Default: what the launcher named.
    blind:     messages may go another way (`past_the_counters`): `total` is None too, for 0 bytes would be a false number.
    """

    def __init__(self, interface: str | None = None, blind: bool = False) -> None:
        self.interface = None if blind else interface or os.environ.get(VARIABLE) or None
        self._sum = [0, 0]
        self._since: tuple[int, int] | None = None
        self._known = self.interface is not None and read(self.interface) is not None

    @property
    def total(self) -> tuple[int, int] | None:
        """(sent, received) so far; None when the interface cannot be read."""
        return (self._sum[0], self._sum[1]) if self._known else None

    def resume(self) -> None:
        """From here on bytes count."""
        if self._known and self.interface is not None:
            self._since = read(self.interface)

    def pause(self) -> None:
        """From here on bytes do not count. Without a `resume` before it nothing happens."""
        if self._since is None or self.interface is None:
            return
        now = read(self.interface)
        if now is None:
            self._known = False
        else:
            self._sum = [total + n - s for total, n, s in zip(self._sum, now, self._since, strict=True)]
        self._since = None
