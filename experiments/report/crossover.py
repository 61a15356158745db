"""Which method wins where: over link rates, predicted. For the page and its picture. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from birder.predict import Cluster, Link, Prediction, Timeline, sweep
from birder.predict.table import NEAR as NEAR

METHODS = ("fp32", "bf16", "powersgd4", "onebit_adam", "birder", "birder_hierarchical", "none")
GBPS = (1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0, 400.0)
LATENCY_US = 20.0
RANKS_PER_NODE = 8


def over_rates(timeline: Timeline, nodes: int, gbps: Sequence[float] = GBPS) -> list[Prediction]:
    """A prediction of `METHODS` for each rate of a node's link, Gbit/s."""
    return sweep(timeline, Cluster(nodes, RANKS_PER_NODE, Link(gbps[0], LATENCY_US)), "gbps", gbps, METHODS)
