"""Which method wins where: over link rates, predicted. For the page and its picture. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from birder.predict import Cluster, Link, Prediction, Timeline, sweep
from birder.predict.table import NEAR as NEAR
from experiments.report.metrics import OPEN

METHODS = ("fp32", "bf16", "powersgd4", "onebit_adam", "birder", "birder_hierarchical", "none")
GBPS = (1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0, 400.0)
LATENCY_US = 20.0
RANKS_PER_NODE = 8


def over_rates(timeline: Timeline, nodes: int, gbps: Sequence[float] = GBPS) -> list[Prediction]:
    """A prediction of `METHODS` for each rate of a node's link, Gbit/s."""
    return sweep(timeline, Cluster(nodes, RANKS_PER_NODE, Link(gbps[0], LATENCY_US)), "gbps", gbps, METHODS)


def ranges(found: Sequence[Prediction]) -> list[tuple[str, float]]:
    """(method or `OPEN`, the last rate of the sweep at which it wins, Gbit/s), in the order of the sweep."""
    said: list[tuple[str, float]] = []
    for p in found:
        name, rate = p.winner or OPEN, p.cluster.between.gbps
        said = [*(said[:-1] if said and said[-1][0] == name else said), (name, rate)]
    return said


def sentence(found: Sequence[Prediction]) -> str:
    """Birder, hierarchical wins up to 100 Gbit/s, then DDP bf16."""
    labels = {OPEN: OPEN, **{row.name: row.method.label for row in found[0].rows}}
    every = ranges(found)
    parts = [f"{labels[name]} up to {rate:g} Gbit/s" for name, rate in every[:-1]]
    last = labels[every[-1][0]]
    return ", then ".join([*parts, last]) if parts else f"{last} at every rate"
