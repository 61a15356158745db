"""`measure_link` and `measure_kernels`: what this cluster's collectives and this device's kernels cost."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from birder import kernels
from birder.comm import ByteCounter, Collectives, Topology, finish
from birder.comm.collectives import backend_for
from birder.comm.groups import part
from birder.predict.cluster import Link
from birder.predict.costs import BYTES, Costs
from birder.predict.recording import clock_of, topology_of

SIZES = (4 * 2**10, 64 * 2**10, 2**20, 8 * 2**20)
"""Bytes of the tensors that `measure_link` sends."""
ROUNDS = 5
COLD = 2**25
"""Elements of fp32 that are written before a kernel is timed: in a training step its data are not in a cache."""


@dataclasses.dataclass(frozen=True)
class Links:
    """What `measure_link` found: between nodes (None with one node) and inside (None with one rank per node)."""

    between: Link | None
    inside: Link | None
    times: tuple[tuple[str, str, int, float], ...] = ()
    """(where, collective, bytes of the tensor, ms): what was measured."""


def measure_link(
    group: dist.ProcessGroup | None = None, topology: Topology | None = None, sizes: tuple[int, ...] = SIZES
) -> Links:
    """Latency and rate of all-reduce, all-to-all and all-gather over `sizes`, inside and between nodes apart.

    Every rank of `group` (the whole world where it is None) calls it, and gets the same. All ranks of a node send at once, so
    the rate between nodes is that of the NIC. The rate is that of the largest all-reduce, its spread that of the rounds;
    latency is that of the smallest size. Raises ValueError for a topology of another number of ranks.
    """
    world = group or dist.group.WORLD
    assert world is not None
    ranks = dist.get_process_group_ranks(world)
    topology = topology or topology_of(world)
    if topology.world_size != len(ranks):
        raise ValueError(f"the topology has {topology.world_size} ranks, the process group {len(ranks)}")
    local, mine = topology.ranks_per_node, dist.get_rank(world)
    device = _device(world)
    found: dict[str, Link | None] = {"between": None, "inside": None}
    times: list[tuple[str, str, int, float]] = []
    by_node = [ranks[first : first + local] for first in range(0, len(ranks), local)]
    for where, members in (("inside", by_node), ("between", list(map(list, zip(*by_node))))):
        if len(members[0]) > 1:
            own = part(world, members[mine // local if where == "inside" else mine % local])
            link, sharing = Collectives(own, topology, ByteCounter()), local if where == "between" else 1
            found[where], taken = _measure(link, device, sizes, sharing, world)
            times += [(where, *one) for one in taken]
    return Links(found["between"], found["inside"], tuple(times))


def _device(group: dist.ProcessGroup) -> torch.device:
    """Of messages: the GPU, where the group has NCCL for it, however the group's back end was asked for."""
    if torch.cuda.is_available() and backend_for(group, torch.device("cuda")) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _measure(
    link: Collectives,
    device: torch.device,
    sizes: tuple[int, ...],
    sharing: int,
    world: dist.ProcessGroup,
) -> tuple[Link, list[tuple[str, int, float]]]:
    """The link, and the ms of each collective and size. sharing: ranks that send over it at once."""
    n = link.size
    medians: dict[tuple[str, int], float] = {}
    rates: list[float] = []
    for nbytes in sizes:
        floats = torch.zeros(nbytes // 4, device=device)
        rows = torch.zeros(n, nbytes // n, dtype=torch.uint8, device=device)
        tasks: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda t=floats: dist.all_reduce(t, group=link.group),  # type: ignore[misc]
            "all_to_all": lambda t=rows: finish(link.all_to_all(t)),  # type: ignore[misc]
            "all_gather": lambda t=rows: finish(link.all_gather(t[0])),  # type: ignore[misc]
        }
        for name, task in tasks.items():
            spent = _agreed([ms_of(task, device) for _ in range(ROUNDS + 1)][1:], world, device)
            medians[name, nbytes] = statistics.median(spent)
            if name == "all_reduce" and nbytes == max(sizes):
                sent = sharing * 2 * (n - 1) / n * nbytes
                rates = sorted(sent * 8 / (ms * 1e6) for ms in spent)
    rate = statistics.median(rates)
    small = min(sizes)
    hop = 1e3 * medians["all_reduce", small] / (2 * (n - 1))
    message = 1e3 * medians["all_gather", small] / (n - 1)
    found = Link(
        gbps=rate,
        latency_us=min(hop, message),
        message_us=max(0.0, message - hop) / sharing,
        spread=min(0.5, (rates[-1] - rates[0]) / 2 / rate),
        source=f"measured: {n} ranks, {dist.get_backend(link.group)}",
    )
    return found, [(name, nbytes, ms) for (name, nbytes), ms in medians.items()]


def _agreed(spent: list[float], world: dist.ProcessGroup, device: torch.device) -> list[float]:
    """The slowest rank's time of each round."""
    slowest = torch.tensor(spent, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=world)
    return [float(x) for x in slowest]


def ms_of(task: Callable[[], Any], device: torch.device) -> float:
    """What a task takes on its device."""
    clock = clock_of(device)
    began = clock.mark()
    task()
    return clock.ms(began, clock.mark())


def measure_kernels(device: torch.device | str = "cpu", elements: int = 2**21, rounds: int = 5) -> Costs:
    """ns per byte of every kernel on `device`, and what it takes to start one. Takes a second.

    elements: of the tensors, rounded to what kernels want. Medians over `rounds`, caches cold. Passes that are not kernels of
    this package (casts, the update of SGD and Adam) are measured as torch does them. Raises ValueError for fewer than 1,024
    elements or no round.
    """
    if elements < 1024 or rounds < 1:
        raise ValueError(f"measure_kernels needs 1024 elements and 1 round at least, got {elements} and {rounds}")
    where = torch.device(device)
    elements -= elements % 1024
    names = [name for name in KERNELS if where.type != "cuda" or name != "screen"]
    made, flush = tensors(elements, where), torch.zeros(COLD, device=where)

    def ms(name: str, on: dict[str, Tensor], cold: Tensor | None = None) -> float:
        return _median(lambda: KERNELS[name](kernels, on), where, rounds, cold)

    rates = {name: ms(name, made, flush) * 1e6 / (elements * BYTES[name](WORKERS)) for name in names}
    tiny = tensors(1024, where)
    call = statistics.median(ms(name, tiny) * 1e3 for name in names)
    rates[""] = rates["low_rank"] = rates["eager"]
    rates["unpack_rows"] = rates["eager"]
    return Costs(rates, call, source=f"measured on this {where.type}")


def _median(task: Callable[[], Any], device: torch.device, rounds: int, flush: Tensor | None = None) -> float:
    task()  # compiled and warm
    taken = []
    for _ in range(rounds):
        if flush is not None:
            flush.fill_(1.0)
        taken.append(ms_of(task, device))
    return statistics.median(taken)


# ---- kernels, and torch's passes next to them --------------------------------------------------------------------------

WORKERS = 4
"""Workers whose bits a server's kernels take."""
DRAW: dict[str, Any] = {"seed": 1, "step": 7, "start": 0}
LAW: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "scale": 1.0, "eps": 1e-8, "hold": False}


def tensors(elements: int, device: torch.device) -> dict[str, Tensor]:
    """What `KERNELS` work on. elements: a multiple of 8 `WORKERS`."""
    random = torch.Generator(device).manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(elements, generator=random, device=device)

    def bits(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, generator=random, device=device, dtype=torch.uint8)

    made = {"g": normal(), "m": normal().mul_(0.1), "p": normal(), "e": normal()}
    made |= {"b": made["m"].abs() + 0.1, "v": normal().square_(), "half": made["g"].to(torch.bfloat16)}
    made |= {"rows": bits(WORKERS, elements // 8), "packed": bits(elements // 8)}
    made |= {"scale": torch.ones((), device=device), "errors": torch.zeros(elements, device=device)}
    for name, each in (("messages", elements), ("results", elements // WORKERS)):
        made[name] = bits(WORKERS, kernels.message_bytes(each))
        kernels.scales_of(made[name]).fill_(1.0)
    return made


def _sgdm(m: Tensor, g: Tensor, p: Tensor) -> None:
    torch._foreach_mul_([m], 0.9)
    torch._foreach_add_([m], [g])
    torch._foreach_add_([p], [m], alpha=-1e-9)


def _adam(m: Tensor, g: Tensor, v: Tensor, p: Tensor) -> None:
    torch._foreach_lerp_([m], [g], 0.1)
    torch._foreach_mul_([v], 0.999)
    torch._foreach_addcmul_([v], [g], [g], value=1e-3)
    root = torch._foreach_sqrt([v])
    torch._foreach_add_(root, 1e-8)
    torch._foreach_addcdiv_([p], [m], root, value=-1e-9)


KERNELS: dict[str, Callable[[Any, dict[str, Tensor]], object]] = {
    "encode": lambda k, t: k.encode(t["g"], t["m"], t["b"], beta=0.95, eps=0.0, hold=False, worker=1, **DRAW),
    "reduce_bits": lambda k, t: k.reduce_bits(t["rows"], **DRAW),
    "modulate_adam": lambda k, t: k.modulate_adam(t["g"], t["m"], t["v"], t["errors"], t["b"], **LAW),
    "serve_sigma": lambda k, t: k.serve_sigma(t["rows"], t["errors"], gamma=2.0),
    "owned": lambda k, t: k.owned(t["packed"], n=WORKERS, worker=1, **DRAW),
    "apply_bits": lambda k, t: k.apply_bits([t["p"]], [0], t["packed"], lr=1e-9, decay=0.0, active=None),
    "add_momentum": lambda k, t: k.add_momentum(t["e"], t["g"], t["m"], beta=0.9, mask=None),
    "add_message": lambda k, t: k.add_message(t["e"], t["g"], None),
    "split_signs": lambda k, t: k.split_signs(t["e"], t["scale"], None),
    "add_average": lambda k, t: k.add_average(t["e"], t["messages"], None),
    "write_signs": lambda k, t: k.write_signs(t["e"], t["results"], None),
    "move_adam": lambda k, t: k.move_adam([t["p"]], [t["m"]], [t["v"]], rate=1e-9, correction=1.0, eps=1e-8, keep=1.0),
    "copy": lambda k, t: t["e"].copy_(t["g"]),
    "cast": lambda k, t: t["g"].to(torch.bfloat16).div_(4),
    "widen": lambda k, t: t["e"].copy_(t["half"]),
    "scale": lambda k, t: t["e"].mul_(1.0),
    "screen": lambda k, t: torch.nan_to_num_(t["e"], nan=0.0, posinf=0.0, neginf=0.0),
    "sgdm": lambda k, t: _sgdm(t["m"], t["g"], t["p"]),
    "adam": lambda k, t: _adam(t["m"], t["g"], t["v"], t["p"]),
    "eager": lambda k, t: torch.add(t["g"], t["m"], out=t["e"]),
}
"""One call of each, by the functions of the given module, on `tensors`."""
