"""What a run's ranks have sent, as its record has it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from experiments.training.nic import NicMeter
from experiments.workloads.base import Shard, all_sum


def per_step(sent: Sequence[int], nic: NicMeter, nodes: int, steps: int, shard: Shard) -> dict[str, Any]:
    """The record's `bytes_per_step`: per node and step, nothing where there was none. Called on every rank.

    sent: this rank's bytes within its node and between nodes. nic: its node's interface, in the same steps.
    """
    # The ranks of a node share its interface: the first of them speaks for all.
    read = nic.total if os.environ.get("LOCAL_RANK", "0") == "0" else (0, 0)
    mine = [float(sent[0]), float(sent[1]), *map(float, read or (0, 0)), float(read is None)]
    intra, inter, tx, rx, unknown = all_sum(mine, shard)
    found = {"payload_intra": intra, "payload_inter": inter} | ({} if unknown else {"nic_tx": tx, "nic_rx": rx})
    return {name: round(count / (nodes * steps)) for name, count in found.items()} if steps else {}
