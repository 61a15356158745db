"""An event simulation of one step: gradients, buckets, units, the threads that encode and wait, the NIC. Imports no torch.

    gradient ready --> DDP's bucket full --> hook --> message --> NIC --> result --> update
                       (in order)            |
                                             `--> unit full --> encode thread --> NIC --> serve --> NIC --> update

A *lane* does one thing at a time, in the order in which it is asked: `hook` (the thread of backward), `encode`, `nic`,
`inside` (the link inside a node), `read`, `comm` (the thread that waits, which keeps to one unit until it is done). A
step lasts

    (1) T = max(end of backward, end of the last lane) + update

On a CPU that computes too, what sending costs its core (`SEND`) overlaps the bytes on the wire. A cluster's sums are in
cluster.py, a kernel's in costs.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from birder.predict.cluster import Cluster, Transfer
from birder.predict.costs import EXCHANGES, Costs
from birder.predict.methods import MethodSpec, Round, low_rank_numbers
from birder.predict.timeline import Gradient, Timeline

ALIGN = 32
FIRST_BUCKET_MB = 1.0
"""DDP's first bucket where its size is not given: a small one, so that communication begins early."""

CORE = ("hook", "encode", "comm", "read")
"""Lanes that compute: where `Layout.shared`, on one core with backward."""
SEND = "send"
"""Occupies the core, but what comes next in the item begins with it: bytes go out while later ones are copied or added up."""
BACKWARD = -1
"""Its number among items, where it shares a core with them: before all."""

Stage = tuple[str, float]
"""(lane, ms); without a lane it is a delay. From its first stage on `comm` an item keeps that lane to its end. An item ends
with the last of its stages, `SEND` included."""
Send = Callable[[Transfer], None]


@dataclass(frozen=True)
class Layout:
    """How gradients are cut. bucket_mb: DDP's; first_mb: of its first bucket; unit_mb: of the optimizer's units. MiB of fp32.

    gpu: encoding shares the device with backward, so that one may delay the other; on a CPU cores are assumed to be free.
    shared: they are not: backward, kernels and what sending costs have one core together, and backward gives way. So it is
    where ranks train on a CPU.
    """

    bucket_mb: float = 25.0
    first_mb: float = FIRST_BUCKET_MB
    unit_mb: float = 25.0
    gpu: bool = True
    shared: bool = False


@dataclass
class Item:
    """Gradients that travel together."""

    ready: float
    gradients: list[Gradient]
    stages: list[Stage] = field(default_factory=list)
    end: float = 0.0
    sent: float = 0.0
    nic_bytes: float = 0.0

    @cached_property
    def elements(self) -> int:
        return sum(g.numel for g in self.gradients)

    @property
    def tensor(self) -> str:
        """The last of its gradients to be ready, of those the largest."""
        return max(self.gradients, key=lambda g: (g.ready_ms, g.numel)).name


@dataclass(frozen=True)
class Step:
    """What one step takes, in ms. waits_for: the tensor whose message comes last; None where backward is the last to end.

    exposed: after the last gradient is ready. encode: what lanes but NIC and inside were busy. wire: the NIC was busy.
    """

    ms: float
    exposed_ms: float
    encode_ms: float
    wire_ms: float
    update_ms: float
    nic_bytes: float
    waits_for: str | None


def buckets(timeline: Timeline, layout: Layout) -> list[Item]:
    """DDP's buckets after it has rebuilt them: in the order in which gradients are ready, closed when they are full."""
    order = [i for layer in timeline.layers for i in reversed(layer)]
    found: list[Item] = []
    part: list[Gradient] = []
    size = 0
    for place, i in enumerate(order):
        part.append(timeline.gradients[i])
        size += 4 * timeline.gradients[i].numel
        cap = (layout.bucket_mb if found else layout.first_mb) * 2**20
        if size >= cap or place == len(order) - 1:
            ready = max(g.ready_ms for g in part)
            found.append(Item(max(ready, found[-1].ready) if found else ready, part))
            part, size = [], 0
    return found


def units(timeline: Timeline, layout: Layout) -> list[Item]:
    """The optimizer's units, last parameter first; a gradient arrives with its bucket."""
    arrives = {g.name: b.ready for b in buckets(timeline, layout) for g in b.gradients}
    parts: list[list[Gradient]] = []
    size = 0
    for g in reversed(timeline.gradients):
        numel = -(-g.numel // ALIGN) * ALIGN
        if not parts or (size + numel) * 4 > layout.unit_mb * 2**20:
            parts.append([])
            size = 0
        parts[-1].append(g)
        size += numel
    made = [Item(max(arrives[g.name] for g in part), part) for part in parts]
    return sorted(made, key=lambda item: item.ready)


def items_of(round_: Round, timeline: Timeline, layout: Layout) -> list[Item]:
    """The items of one kind of step."""
    if round_.layout == "bucket":
        return buckets(timeline, layout)
    if round_.layout == "unit":
        return units(timeline, layout)
    return [Item(max(g.ready_ms for g in timeline.gradients), list(timeline.gradients))]


def over(sent: Transfer) -> list[Stage]:
    """The stages of a collective."""
    return [("nic", sent.ms), ("", sent.late_ms)]


def program(item: Item, round_: Round, method: MethodSpec, cluster: Cluster, costs: Costs, layout: Layout) -> None:
    """Fills in the item's stages and what it sends."""

    def send(sent: Transfer, number_bytes: float = 0) -> None:
        """A collective, and what it costs a rank's cores where backward is on them. number_bytes: as in `EXCHANGES`."""
        exchange = EXCHANGES.get(int(number_bytes), "pairwise")
        sending = costs.sending_ms(exchange, sent.nbytes / cluster.ranks_per_node) if layout.shared else 0.0
        item.stages += [(SEND, sending), *over(sent)]
        item.nic_bytes += sent.nbytes if cluster.nodes > 1 else 0.0  # inside a node nothing passes a NIC

    d = float(item.elements)
    own, by_nodes = d / cluster.parts, method.hierarchical
    if round_.wire == "none":
        if work := costs.all_ms(round_.encode, own):
            item.stages.append((round_.lane, work))
    elif round_.wire == "onebit":
        _onebit(item, round_, by_nodes, cluster, costs, send)
    elif round_.wire == "lowrank":
        item.stages.append(("hook", costs.ms("copy", d)))
        work = costs.all_ms(round_.encode, d)
        for numbers in zip(*(low_rank_numbers(g.shape, round_.rank) for g in item.gradients)):  # one after the other
            item.stages.append(("comm", work / 3))
            send(cluster.all_reduce(4.0 * sum(numbers)), 4)
        item.stages.append(("comm", 0.0))
    elif round_.layout == "bucket":
        by_rank = cluster.ring or round_.coded or cluster.nodes == 1
        before = 0.0 if by_rank else cluster.inside_ms(4 * d, 2)
        item.stages += [("hook", costs.all_ms(round_.encode, own)), ("inside", before)]
        size = round_.nbytes * d
        send(cluster.coded_mean(size) if round_.coded else cluster.all_reduce(size), round_.nbytes)
        item.stages.append(("read", costs.all_ms(round_.decode, own)))
    else:
        size = round_.nbytes * d * round_.density
        flat = cluster.coded_mean if round_.coded else cluster.mean
        sent = cluster.by_nodes(size) + cluster.by_nodes(size) if by_nodes else flat(size)
        made = costs.all_ms(round_.encode, own) + (cluster.inside_ms(4 * d) if by_nodes else 0.0)
        item.stages += [("hook", costs.ms("copy", own)), (round_.lane, made)]
        send(sent, round_.nbytes if cluster.ring else 0)
        item.stages.append(("comm", costs.all_ms(round_.decode, own * round_.density)))


def _onebit(item: Item, round_: Round, by_nodes: bool, cluster: Cluster, costs: Costs, send: Send) -> None:
    d = float(item.elements)
    workers, shards = cluster.workers(by_nodes)
    part, bits = d / shards, d / 8
    if by_nodes:
        first = second = cluster.by_nodes(bits)
        tiny = cluster.by_nodes(8.0)
        before, after = cluster.inside_ms(4 * d), cluster.inside_ms(bits)
    else:
        first, second, tiny = cluster.all_to_all(bits), cluster.all_gather(bits), cluster.all_gather(8.0)
        before = after = 0.0
    scales = over(tiny) * (round_.small // 2)
    taken = costs.ms("copy", d / cluster.parts)
    if round_.screens and "screen" in costs.ns_per_byte:
        taken += costs.ms("screen", d / cluster.parts)
    item.stages += [("hook", taken), (round_.lane, before + costs.all_ms(round_.encode, part, workers))]
    if round_.phases == 2:
        send(first)
        item.stages += scales
    item.stages.append(("comm", costs.all_ms(round_.serve, part / workers, workers)))
    send(second)
    item.stages += [*scales, ("comm", after + costs.all_ms(round_.decode, part, workers))]


def run(items: Sequence[Item], burst_ms: float = 0.0, backward: Sequence[float] = ()) -> dict[str, float]:
    """Runs all items to their ends, sets `end`, and returns how long each lane was busy, and when backward ended.

    burst_ms: of the link's token bucket. backward: when it comes to each gradient and to its end, where it shares a core with
    the lanes of `CORE`: their work comes first, and items are ready so much later. Empty: it shares nothing.
    """
    free: dict[str, float] = {}
    busy: dict[str, float] = {}
    points = sorted({0.0, *backward, *(item.ready for item in items)}) if backward else []
    heap = [(points[1], BACKWARD, 1)] if len(points) > 1 else [(i.ready, number, 0) for number, i in enumerate(items)]
    heapq.heapify(heap)
    holder: int | None = None
    tokens, behind = burst_ms, 0.0
    parked: list[tuple[int, int]] = []  # (item, stage) that want the comm lane
    while heap:
        now, number, stage = heapq.heappop(heap)
        if number == BACKWARD:
            if behind:  # what the core did meanwhile
                heapq.heappush(heap, (now + behind, BACKWARD, stage))
                behind = 0.0
                continue
            for ready, item in enumerate(items):
                if item.ready == points[stage]:
                    heapq.heappush(heap, (now, ready, 0))
            if stage + 1 < len(points):
                heapq.heappush(heap, (now + points[stage + 1] - points[stage], BACKWARD, stage + 1))
            busy["backward"] = now
            continue
        item = items[number]
        if stage == len(item.stages):
            item.end = max(now, item.sent)
            if holder == number:
                holder = None
                if parked:
                    parked.sort()
                    holder, at = parked.pop(0)
                    heapq.heappush(heap, (now, holder, at))
            continue
        lane, ms = item.stages[stage]
        if lane == "comm" and holder != number:
            if holder is not None:
                parked.append((number, stage))
                continue
            holder = number
        if not lane:  # nothing is busy meanwhile
            heapq.heappush(heap, (now + ms, number, stage + 1))
            continue
        sending = lane == SEND
        if points and (sending or lane in CORE):
            lane = "core"
            behind += ms
        start = max(now, free.get(lane, 0.0))
        if lane == "nic" and burst_ms:
            tokens = min(burst_ms, tokens + start - free.get(lane, 0.0))
            saved = min(tokens, ms)
            tokens, ms = tokens - saved, ms - saved
        free[lane] = start + ms
        busy[lane] = busy.get(lane, 0.0) + ms
        item.sent = free[lane] if sending else item.sent
        heapq.heappush(heap, (start if sending else free[lane], number, stage + 1))
    return busy


def simulate(
    timeline: Timeline, cluster: Cluster, method: MethodSpec, costs: Costs, layout: Layout | None = None
) -> Step:
    """One step, the mean over the kinds of step that the method has."""
    layout = layout or Layout(gpu=timeline.gpu != "cpu")
    workers, _ = cluster.workers(method.hierarchical)
    update = costs.all_ms(method.update, timeline.elements / cluster.parts, workers)
    if method.hooked and timeline.update_ms is not None:
        update = timeline.update_ms  # the user's own optimizer
    steps = [(r.share, _step(timeline, cluster, method, r, costs, layout, update)) for r in method.rounds]

    def mean(name: str) -> float:
        return float(sum(share * getattr(step, name) for share, step in steps))

    means = {name: mean(name) for name in ("ms", "exposed_ms", "encode_ms", "wire_ms", "update_ms", "nic_bytes")}
    return Step(**means, waits_for=max(steps, key=lambda s: s[0] * s[1].exposed_ms)[1].waits_for)


def _step(
    timeline: Timeline, cluster: Cluster, method: MethodSpec, round_: Round, costs: Costs, layout: Layout, update: float
) -> Step:
    found = items_of(round_, timeline, layout)
    for item in found:
        program(item, round_, method, cluster, costs, layout)
    ready = [g.ready_ms for g in timeline.gradients]
    compute = max(timeline.step_ms, *ready)
    moments = [*ready, compute] if layout.shared else []
    busy = run(found, cluster.between.burst_ms, moments)
    compute = busy.pop("backward", compute)
    last = max(found, key=lambda item: item.end)
    end = max(compute, last.end)
    return Step(
        ms=end + update,
        exposed_ms=end - compute,
        encode_ms=sum(ms for lane, ms in busy.items() if lane not in ("nic", "inside")),
        wire_ms=busy.get("nic", 0.0),
        update_ms=update,
        nic_bytes=sum(item.nic_bytes for item in found),
        waits_for=last.tensor if last.end > compute else None,
    )
