"""`TrainingPlan`: how a model is laid out over the ranks, what a step takes then, and whether it fits. Imports no torch.

    ddp     every rank has the whole model; 1-bit methods flat, or with nodes as workers
    hsdp    sharded over the g ranks of a node, replicated over nodes: FSDP gathers parameters and reduce-scatters the
            gradient inside, between nodes go the shards: dense, or in 1 bit. On one node it is fsdp, with one rank a node ddp
    fsdp    sharded over all ranks: no replica, nothing to compress

With A micro-batches of an accumulation only the last one's gradients are sent:

    (1) ready = (A-1) step + ready,  step = A step

FSDP's collectives overlap computing, the next layer's while this one computes. A phase takes the longer of the two:

    (2) forward  = max(forward, gather)          gather: of all parameters in 16 bits (or the precision's 4 bytes)
    (3) backward = max(backward, gather + scatter)

over the links inside the node, or for fsdp over the NIC. FSDP gathers in every micro-batch. fsdp scatters in every one, as
in a plain loop; hsdp in the last one alone (`set_requires_gradient_sync(False)` until then), which a method that sends
during backward needs and Accelerate does. What a rank keeps in memory, d parameters that are trained, frozen ones of f
bytes, s shards:

    (4) ((4 + 4 + state) d + f)/s + 2 bytes a parameter in 16 bits [with shards of two layers] + activations + `CONTEXT_GB`

with 4 d for 4 d/s where HSDP keeps whole gradients until the last micro-batch.

Gradients and DDP's buckets are taken to be the same tensors (`gradient_as_bucket_view=True`). An optimizer of this package
gathers them once more, in its units, and keeps `HELD` d/s bytes in all to send them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from birder.predict.cluster import Cluster, Link
from birder.predict.methods import RUN_STEPS, MethodSpec, find, over
from birder.predict.timeline import Timeline

CONTEXT_GB = 1.5
"""CUDA, NCCL and what the allocator cannot use: assumed."""
HALVES = ("bf16", "fp16", "amp")
HELD = 4.375
"""Bytes per parameter of a unit's gradient, of the bits that are sent and received, and of the result."""
FREE = Link(1e9)
LAYERS_AT_ONCE = 2
WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4, "none": 0}
"""Bytes of an element of the gradient that FSDP scatters; hooks of DDP, as of fp8, are not for FSDP."""
STATE = {"adamw": 8.0, "sgd": 4.0}
"""Bytes per parameter that the user's own optimizer keeps."""


@dataclass(frozen=True)
class TrainingPlan:
    """sharding, accumulation: as above. optimizer: the user's own, with hooks. run_steps: of the whole run: over it
    is spread what a method sends ever more rarely."""

    sharding: Literal["ddp", "hsdp", "fsdp"] = "ddp"
    accumulation: int = 1
    optimizer: str = "adamw"
    run_steps: int = RUN_STEPS

    def __post_init__(self) -> None:
        for name in ("accumulation", "run_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def on(self, cluster: Cluster) -> TrainingPlan:
        """The plan that this one is there: HSDP has replicas on several nodes alone, and shards over several ranks."""
        if self.sharding != "hsdp" or min(cluster.nodes, cluster.ranks_per_node) > 1:
            return self
        return replace(self, sharding="fsdp" if cluster.nodes == 1 else "ddp")

    def shards(self, cluster: Cluster) -> int:
        return {"ddp": 1, "hsdp": cluster.ranks_per_node, "fsdp": cluster.ranks}[self.sharding]

    def timeline(self, t: Timeline, cluster: Cluster, width: int = 4) -> Timeline:
        """A step's computing with its micro-batches, and FSDP's collectives where they take longer: (1), (2), (3).

        width: bytes of an element of the gradient that FSDP scatters; 0: nothing is sent at all.
        """
        if self.sharding == "ddp" and self.accumulation == 1:
            return t
        forward, backward = t.forward_ms, t.step_ms - t.forward_ms
        sends = width and self.sharding != "ddp"
        gather, scatter = self._gathered(t, cluster, width) if sends else (0.0, 0.0)
        longer = max(forward, gather) / forward
        slower = max(backward, gather + scatter) / backward if backward else 1.0
        one = forward * longer + backward * slower
        earlier = forward * longer + max(backward, gather) if self.sharding == "hsdp" else one
        before = (self.accumulation - 1) * earlier

        def moved(ms: float) -> float:
            return before + forward * longer + max(0.0, ms - forward) * slower

        return replace(
            t,
            forward_ms=before + forward * longer,
            step_ms=before + one,
            gradients=tuple(replace(g, ready_ms=moved(g.ready_ms)) for g in t.gradients),
            update_ms=None if t.update_ms is None else t.update_ms / self.shards(cluster),
        )

    def _gathered(self, t: Timeline, cluster: Cluster, width: int) -> tuple[float, float]:
        wide = 2 if t.precision in HALVES else 4
        if self.sharding == "hsdp":
            return cluster.inside_ms(wide * t.whole), cluster.inside_ms(width * t.elements)
        return cluster.sharded(wide * t.whole).ms, cluster.sharded(width * t.elements).ms

    def between(self, cluster: Cluster) -> Cluster:
        """What the replicas' messages have of the cluster: under HSDP what goes over links inside a node is FSDP's."""
        if self.sharding != "hsdp":
            return cluster
        return replace(cluster, ring=False, inside=FREE, parts=self.shards(cluster))

    def choose(self, names: Sequence[str] | None, cluster: Cluster) -> list[MethodSpec]:
        """Methods by name; None: `DEFAULT` without those that cannot run so. Raises ValueError for one that cannot."""
        found, own = find(names, cluster.nodes, cluster.ranks_per_node), self.on(cluster)
        if names and (refused := [m for m in found if not own.takes(m)]):
            why = "needs replicas" if own.sharding == "fsdp" else "needs the whole model, or nodes as workers"
            where = " on one node" if own.sharding != self.sharding else ""
            raise ValueError(f"{refused[0].name} {why}: not with sharding={self.sharding}{where}")
        return [over(m, self.run_steps) for m in found if own.takes(m)]

    def takes(self, method: MethodSpec) -> bool:
        """Whether a method can run so: FSDP needs replicas to compress between, and one model for all ranks."""
        if self.sharding == "ddp":
            return True
        if self.sharding == "fsdp":
            return method.name in WIDTHS
        return method.name in WIDTHS or (method.hierarchical and not method.local)

    def memory_gb(self, t: Timeline, cluster: Cluster, method: MethodSpec, saved_bytes: float) -> float:
        """(4), in GB. saved_bytes: activations of one micro-batch."""
        shards = self.shards(cluster)
        half = 2.0 if t.precision in HALVES else 0.0
        frozen = 4.0 * sum(t.frozen) if t.frozen_bytes is None else t.frozen_bytes
        whole = half * (t.elements + (sum(t.frozen) if frozen > half * sum(t.frozen) else 0))
        if shards > 1:
            whole = (half or 4.0) * LAYERS_AT_ONCE * max(*(g.numel for g in t.gradients), *t.frozen, 0)
        held = 0.0 if method.hooked else HELD
        gradient = 4 if self.sharding == "hsdp" and self.accumulation > 1 else 4 / shards
        kept = ((4 + held) / shards + gradient + self.state(method, cluster)) * t.elements + frozen / shards
        return (kept + whole + saved_bytes) / 1e9 + CONTEXT_GB

    def state(self, method: MethodSpec, cluster: Cluster) -> float:
        """Bytes that optimizer and hook keep per parameter of the model on one rank, the user's own optimizer included.
        Where FSDP shards it is all of it, not the errors alone."""
        own = STATE[self.optimizer] if method.hooked else 0.0
        workers = cluster.workers(method.hierarchical) if self.sharding == "ddp" else (cluster.nodes, 1)
        return (own + method.state(*workers)) / self.shards(cluster)


DDP = TrainingPlan()
