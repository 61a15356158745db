"""What a run's ranks have sent, as its record has it."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from birder.comm import ByteCounter
from experiments.workloads.base import Shard, all_sum

# ---- rounds -----------------------------------------------------------------------------------------------------------

NEAR = 0.05
"""Median and mean of the bytes that are this close to each other tell the same."""


class StepTraffic:
    """What each step of one rank has sent since the last `reset`. All ranks follow the same plan, so one speaks for all.

    `end_step` is called after every step, outside of evaluation and checkpoints.
    """

    def __init__(self, counter: ByteCounter) -> None:
        self.counter = counter
        self.reset()

    def reset(self) -> None:
        """Forgets the steps so far. Call it right after the counter's own reset, or before the first step."""
        self._steps: list[tuple[int, int]] = []
        self.follow(self.counter)

    def follow(self, counter: ByteCounter) -> None:
        """Continues with another counter, or with the same one after a reset or after steps that are not to count."""
        self.counter = counter
        self._before = (counter.collectives, counter.total)

    def end_step(self) -> None:
        """Notes the collectives and bytes since the end of the step before."""
        now = (self.counter.collectives, self.counter.total)
        self._steps.append((now[0] - self._before[0], now[1] - self._before[1]))
        self._before = now

    @property
    def steps(self) -> int:
        """How many steps there were."""
        return len(self._steps)

    @property
    def sending(self) -> int:
        """In how many of them at least one collective started."""
        return sum(1 for collectives, _ in self._steps if collectives)

    @property
    def uneven(self) -> bool:
        """`uneven_from` the second half of the steps: a dense warm-up that ends before does not count."""
        return self.uneven_from(len(self._steps) // 2)

    def uneven_from(self, first: int) -> bool:
        """Whether, from that step on, the median step does not send what a step sends on average."""
        late = [sent for _, sent in self._steps[first:]]
        mean = statistics.fmean(late) if late else 0.0
        return mean > 0 and abs(statistics.median(late) - mean) > NEAR * mean


# ---- the interface's own counters -------------------------------------------------------------------------------------

VARIABLE = "BIRDER_NIC"
"""Environment variable in which launchers name the interface that leads to the other nodes."""
_RDMA = Path("/sys/class/infiniband")


def read_counters(interface: str | None) -> tuple[int, int] | None:
    """(bytes sent, bytes received) by `interface` since it exists; None where that cannot be known."""
    try:
        found = psutil.net_io_counters(pernic=True, nowrap=False)[interface or ""]
    except (OSError, KeyError):
        return None
    return found.bytes_sent, found.bytes_recv


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
        self.total = None if read_counters(self.interface) is None else (0, 0)
        """(sent, received) so far; None when the interface cannot be read."""
        self._since: tuple[int, int] | None = None

    def resume(self) -> None:
        """From here on bytes count."""
        if self.total is not None:
            self._since = read_counters(self.interface)

    def pause(self) -> None:
        """From here on bytes do not count. Without a `resume` before it nothing happens."""
        since, self._since = self._since, None
        if self.total is not None and since is not None:
            now = read_counters(self.interface)
            self.total = now and (self.total[0] + now[0] - since[0], self.total[1] + now[1] - since[1])


# ---- of a record ------------------------------------------------------------------------------------------------------

FIELDS = ("steps", "sending", "collectives", "intra", "inter", "nic_tx", "nic_rx")
"""What is summed over a run's steps: how many there were, and how many of them sent anything; collectives that this rank
started; bytes that it sent within its node and between nodes; bytes of its node's interface."""


class Traffic:
    """What one rank counts of a run, also over an interruption: a checkpoint keeps `sums`, `resume` takes them back.

    Steps count from `begin` on.
    """

    def __init__(self, counter: ByteCounter, nic: NicMeter) -> None:
        self.counter, self.nic, self.rounds = counter, nic, StepTraffic(counter)
        self._before: dict[str, int | None]
        self.resume({})
        self._counting = False

    def resume(self, sums: dict[str, int | None] | None) -> None:
        """Continues from what a checkpoint has; None: it has nothing."""
        self._before = {name: (sums or {}).get(name, 0) for name in FIELDS}

    def begin(self) -> None:
        """From here on steps count. Later calls do nothing."""
        if not self._counting:
            self._counting = True
            self.counter.reset()
            self.rounds.reset()
            self.nic.resume()

    def pause(self) -> None:
        """What the interface carries does not count until `continue_` is called."""
        self.nic.pause()

    def continue_(self) -> None:
        if self._counting:
            self.nic.resume()

    def sums(self) -> dict[str, int | None]:
        """By name in FIELDS; None for what an interface cannot tell, or could not before the interruption."""
        now: dict[str, int | None] = dict.fromkeys(FIELDS, 0)
        if self._counting:
            counter, (tx, rx) = self.counter, self.nic.total or (None, None)
            values = (self.rounds.steps, self.rounds.sending, counter.collectives, counter.intra, counter.inter, tx, rx)
            now = dict(zip(FIELDS, values, strict=True))
        both = {name: (self._before[name], now[name]) for name in FIELDS}
        return {name: None if a is None or b is None else a + b for name, (a, b) in both.items()}


def of_record(traffic: Traffic, nodes: int, shard: Shard) -> dict[str, Any]:
    """The record's `bytes_per_step`, `collectives_per_step` and `rounds_per_step`. Called on every rank."""
    sums = traffic.sums()
    known = {name: value or 0 for name, value in sums.items()}
    nic = None if None in (sums["nic_tx"], sums["nic_rx"]) else (known["nic_tx"], known["nic_rx"])
    steps = known["steps"]
    sent = per_step((known["intra"], known["inter"]), nic, nodes, steps, shard)
    if not steps:
        return {"bytes_per_step": sent}
    collectives, rounds = round(known["collectives"] / steps, 2), round(known["sending"] / steps, 4)
    return {"bytes_per_step": sent, "collectives_per_step": collectives, "rounds_per_step": rounds}


def per_step(sent: Sequence[int], nic: tuple[int, int] | None, nodes: int, steps: int, shard: Shard) -> dict[str, Any]:
    """The record's `bytes_per_step`: per node and step, nothing where there was none. Called on every rank.

    sent: this rank's bytes within its node and between nodes. nic: those of its node's interface in the same steps, None
          where they are not known.
    """
    # The ranks of a node share its interface: the first of them speaks for all.
    read = nic if os.environ.get("LOCAL_RANK", "0") == "0" else (0, 0)
    mine = [float(sent[0]), float(sent[1]), *map(float, read or (0, 0)), float(read is None)]
    intra, inter, tx, rx, unknown = all_sum(mine, shard)
    found = {"payload_intra": intra, "payload_inter": inter} | ({} if unknown else {"nic_tx": tx, "nic_rx": rx})
    return {name: round(count / (nodes * steps)) for name, count in found.items()} if steps else {}
