"""What a node of many GPUs sends, and what happens inside it, by arithmetic alone. Imports no torch."""

from __future__ import annotations

from birder.predict.timeline import Timeline

BUCKET_MB = 25.0
"""Size of DDP's buckets and of the methods' units; a replay of a `fraction` of the elements scales it alike."""


def bucket_delay_ms(timeline: Timeline) -> float:
    """What the all-reduce inside a node adds to dense methods: the time of one bucket, the rest runs beside backward."""
    share = min(1.0, BUCKET_MB * 2**20 / (4 * timeline.elements))
    return timeline.intra_node.all_reduce_ms * share


def nic_bytes(method: str, elements: int, nodes: int, gpus: int, *, ring: bool = True) -> float:
    """Bytes that one node's NIC sends per step, without padding and scales. method: fp32, bf16, flat, hierarchical, none."""
    if nodes == 1 or method == "none":
        return 0.0
    share = (nodes - 1) / nodes
    if method in ("fp32", "bf16"):
        return 2 * share * elements * (4 if method == "fp32" else 2)
    bits = elements / 8
    if method == "hierarchical":
        return 2 * share * bits
    n = nodes * gpus
    return bits * (gpus * share + ((n - 1) / n if ring else gpus * share))
