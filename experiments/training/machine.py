"""How busy a machine is with what is not ours, from psutil. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from launch.process import boot_id, has_own_proc

DRIFT = 0.05
"""A bound that has changed by more than this share since the dilation was measured: the rounds are repeated, once."""
BUSY = 0.05
"""Share of the cores' time, taken by others or by the hypervisor, from which a table says that the machine was busy."""


@dataclass(frozen=True)
class Reading:
    """What one rank reads at one moment.

    machine: which machine it is on. cores: that it may use. own_s: CPU seconds of this rank and of the processes that load
    its data, and of its torchrun agent where it is the first rank of that agent. busy_s, steal_s: CPU seconds of everybody
    on these cores, and those that the hypervisor kept. load: the 1-minute load average. free: bytes of memory that are
    available.
    """

    machine: str
    cores: int
    now_s: float
    own_s: float
    busy_s: float
    steal_s: float
    load: float
    free: int


def read() -> Reading:
    """This rank's reading."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    every = psutil.cpu_times(percpu=True)
    times = [every[cpu] for cpu in allowed if cpu < len(every)]
    return Reading(
        machine=boot_id(),
        cores=len(allowed),
        now_s=time.monotonic(),
        own_s=time.process_time() + _children_s() + (_agent_s() if os.environ.get("LOCAL_RANK", "0") == "0" else 0.0),
        busy_s=sum(t.user + t.system + getattr(t, "nice", 0.0) for t in times),
        steal_s=sum(getattr(t, "steal", 0.0) for t in times),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        free=psutil.virtual_memory().available,
    )


def ranks_here(readings: Sequence[Reading], rank: int) -> int:
    """How many of the ranks run on the machine of `rank`."""
    return sum(r.machine == readings[rank].machine for r in readings)


def busy(before: Sequence[Reading], after: Sequence[Reading]) -> dict[str, Any]:
    """{others, steal, load, cores} between two readings of all ranks: shares of the cores' time, of the worst machine.

    others: other programs' CPU time. load: the load average at the end; this run's own ranks are in it.
    """
    worst: dict[str, Any] = {"others": 0.0, "steal": 0.0, "load": 0.0, "cores": 0}
    taken = -1.0
    for machine in sorted({r.machine for r in after}):
        pairs = [(b, a) for b, a in zip(before, after, strict=True) if a.machine == machine]
        first, last = pairs[0]
        whole = max(1e-9, (last.now_s - first.now_s) * last.cores)
        own = sum(a.own_s - b.own_s for b, a in pairs)
        others = min(1.0, max(0.0, (last.busy_s - first.busy_s - own) / whole))
        steal = min(1.0, max(0.0, (last.steal_s - first.steal_s) / whole))
        if others + steal > taken:
            taken = others + steal
            worst = {"others": others, "steal": steal, "load": last.load, "cores": last.cores}
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in worst.items()}


def is_busy(found: dict[str, Any] | None) -> bool:
    """Whether what `busy` returned is worth saying."""
    return found is not None and found["others"] + found["steal"] > BUSY


def _children_s() -> float:
    """CPU seconds of this process's children, those that have ended included."""
    ended, found = os.times(), 0.0
    for child in psutil.Process().children(recursive=True) if has_own_proc() else ():
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            found += times.user + times.system
    return ended.children_user + ended.children_system + found


def _agent_s() -> float:
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(os.getppid()).cpu_times()
        return float(times.user + times.system)
    return 0.0
