"""From the turns of a cell to the fields of its record."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

PARTS = ("encode_ms", "wire_ms", "exposed_wire_ms", "update_ms")


def together(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One node's turns (`Setup.turn`) as one: steps in their order, the state at the end, sums of the rest."""
    nics = [t["nic"] for t in turns]
    return {
        "steps": [s for t in turns for s in t["steps"]],
        "sent": sum(t["sent"] for t in turns),
        "collectives": sum(t["collectives"] for t in turns),
        "state": turns[-1]["state"],
        "nic": None if None in nics else (sum(nic[0] for nic in nics), sum(nic[1] for nic in nics)),
    }


def slowest(nodes: Sequence[dict[str, Any]], key: str) -> list[float]:
    """Of every step what it took on the node where it took longest. nodes: what `together` returned on each."""
    return [max(n["steps"][i][key] for n in nodes) for i in range(len(nodes[0]["steps"]))]


def timing(nodes: Sequence[dict[str, Any]], samples: int) -> dict[str, Any]:
    """The record's `timing`; a step is as long as that of the slowest node. samples: of all nodes.

    With so few steps there are no percentiles: min_ms and max_ms, and every step in steps_ms, in their order.
    """
    walls = slowest(nodes, "wall_ms")
    median = statistics.median(walls)
    return {
        "steps": len(walls),
        "median_ms": round(median, 3),
        "min_ms": round(min(walls), 3),
        "max_ms": round(max(walls), 3),
        "steps_ms": [round(ms, 3) for ms in walls],
        "samples_per_s": round(1000 * samples / median, 3),
        "split": {key: round(statistics.median_high(slowest(nodes, key)), 3) for key in PARTS},
    }


def sent_bytes(nodes: Sequence[dict[str, Any]]) -> dict[str, int | None]:
    """The record's `bytes_per_step`: per node and step."""
    per = len(nodes[0]["steps"]) * len(nodes)
    nics = [n["nic"] for n in nodes]
    known = all(nic is not None for nic in nics)
    return {
        "payload_intra": 0,
        "payload_inter": round(sum(n["sent"] for n in nodes) / per),
        "nic_tx": round(sum(nic[0] for nic in nics) / per) if known else None,
        "nic_rx": round(sum(nic[1] for nic in nics) / per) if known else None,
    }
