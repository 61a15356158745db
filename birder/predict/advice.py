"""`advise`: will it pay? Three lines in a user's own script.

advice = birder.predict.advise(ddp, step)
print(advice)
advice.at(link_gbps=10, nodes=16, ranks_per_node=8)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from birder.comm import Topology
from birder.predict.cluster import NVLINK, Cluster, Link
from birder.predict.costs import Costs
from birder.predict.measuring import Links, measure_kernels, measure_link
from birder.predict.methods import METHODS
from birder.predict.recording import record, topology_of
from birder.predict.simulation import FIRST_BUCKET_MB, Layout, simulate
from birder.predict.table import Prediction, crossover, digits, predict
from birder.predict.timeline import Timeline

HOOKS: dict[Callable[..., Any], str] = {
    default_hooks.allreduce_hook: "fp32",
    default_hooks.bf16_compress_hook: "bf16",
    default_hooks.fp16_compress_hook: "fp16",
}
"""PyTorch's hooks, and the methods of `METHODS` that they are."""


@dataclass(frozen=True)
class Advice:
    """What was measured here, and what follows from it. Printed: the prediction for this very cluster.

    now: the method of `METHODS` under which the step was recorded; None where it is none of them.
    """

    timeline: Timeline
    links: Links
    costs: Costs
    cluster: Cluster
    layout: Layout
    now: str | None = None

    @property
    def expected_ms(self) -> float | None:
        """The step as it was recorded, predicted; None where its method is not known."""
        if self.now is None or self.timeline.wall_ms is None:
            return None
        return simulate(self.timeline, self.cluster, METHODS[self.now], self.costs, self.layout).ms

    @property
    def beyond_ms(self) -> float:
        """How much longer the recorded step took than is predicted for it; 0.0 where that is not known."""
        if (expected := self.expected_ms) is None or self.timeline.wall_ms is None:
            return 0.0
        return self.timeline.wall_ms - expected

    @property
    def here(self) -> Prediction:
        """The prediction for the cluster that it was measured on."""
        return self.at()

    def at(
        self,
        link_gbps: float | None = None,
        nodes: int | None = None,
        ranks_per_node: int | None = None,
        methods: Sequence[str] | None = None,
        *,
        latency_us: float | None = None,
    ) -> Prediction:
        """The same model on another cluster; what is not given stays.

        Raises ValueError for numbers that are not positive, and for a link's where there is one node.
        """
        there = self._cluster(link_gbps, nodes, ranks_per_node, latency_us)
        return predict(self.timeline, there, methods, self.costs, self.layout, self.beyond_ms)

    def crossover(
        self, nodes: int, ranks_per_node: int | None = None, baseline: str = "bf16"
    ) -> dict[str, float | None]:
        """Gbit/s between `nodes` nodes below which each method starts to pay; see `birder.predict.crossover`."""
        there = self._cluster(None, nodes, ranks_per_node, None)
        return crossover(
            self.timeline, there, None, self.costs, self.layout, baseline=baseline, beyond_ms=self.beyond_ms
        )

    def _cluster(self, gbps: float | None, nodes: int | None, ranks: int | None, latency_us: float | None) -> Cluster:
        link = self.cluster.between
        if gbps is not None:
            link = replace(link, gbps=gbps, spread=0.0, source="stated")
        if latency_us is not None:
            link = replace(link, latency_us=latency_us)
        c = self.cluster
        nodes, ranks = c.nodes if nodes is None else nodes, c.ranks_per_node if ranks is None else ranks
        if nodes == 1 and (gbps is not None or latency_us is not None):
            raise ValueError(
                "one node has no link to others that could have this rate or latency: give nodes=, 2 or more"
            )
        return replace(c, nodes=nodes, ranks_per_node=ranks, between=link)

    def __str__(self) -> str:
        return "\n".join(filter(None, [str(self.here), self._measured()]))

    def _measured(self) -> str:
        wall, expected, more = self.timeline.wall_ms, self.expected_ms, self.beyond_ms
        if not wall:
            return ""
        said = f"measured now, with the communication there is: {digits(wall)} ms a step"
        if self.now is None or expected is None:
            return said
        said += f"; simulated for it ({METHODS[self.now].label}): {digits(expected)} ms. "
        if more > 0:
            return said + f"The other {digits(more, 3)} ms are added to every method that communicates."
        return said + f"Intervals reach {digits(-more, 3)} ms lower."


def advise(
    ddp_model: DistributedDataParallel, step: Callable[[], Any], steps: int = 20, *, bucket_mb: float | None = None
) -> Advice:
    """Records the timeline of `step`, measures links and kernels, and predicts. Every rank calls it; all get the same.

    ddp_model, step, steps: as in `record`. bucket_mb: `bucket_cap_mb` where DDP was given one.
    """
    timeline = record(ddp_model, step, steps)
    links = measure_link(ddp_model.process_group)
    device = next(ddp_model.parameters()).device
    found: list[Any] = [measure_kernels(device)]
    group = ddp_model.process_group
    dist.broadcast_object_list(found, src=dist.get_process_group_ranks(group)[0], group=group)
    gpu = device.type == "cuda"
    cluster = _measured_cluster(topology_of(group), links, gpu)
    mb = bucket_mb or 25.0
    layout = Layout(mb, mb if bucket_mb else FIRST_BUCKET_MB, gpu=gpu, shared=not gpu)
    return Advice(timeline, links, found[0], cluster, layout, _running(ddp_model))


def _measured_cluster(topology: Topology, links: Links, gpu: bool) -> Cluster:
    """Of GPUs as every question asks about them; on CPUs gloo's, whose dense all-reduces go by nodes."""
    between = links.between or Link(10.0, 20.0, source="10 Gbit/s, assumed: there is one node here")
    asked = Cluster.of_gpus(topology.nodes, topology.ranks_per_node, between, links.inside or NVLINK)
    return asked if gpu else replace(asked, ring=False, borders=False)


def _running(ddp_model: DistributedDataParallel) -> str | None:
    """How gradients are averaged: by one of `METHODS`, or None: by another hook, or they are not of fp32."""
    hooks = getattr(ddp_model, "_comm_hooks", None)
    if hooks is None or any(p.dtype != torch.float32 for p in ddp_model.parameters()):
        return None
    return next((name for hook, name in HOOKS.items() if hook is hooks[-1][0]), None) if hooks else "fp32"
