"""Birder's options that are this project's: each an exchange in the place of the paper's (birder/optim/birder.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from birder import kernels
from birder.comm import AllGather, AllToAll, Communicator, GatherShards, GatherWorkers, Requests, ShardMean
from birder.kernels import weyl
from birder.optim import bit_exchange
from birder.optim.bit_exchange import packed
from birder.optim.layout import Unit
from birder.optim.modulator import Modulator


class Birder(Protocol):
    """What these ask of `birder.Birder`."""

    comm: Communicator
    intra: str
    draws: Draws
    modulator: Modulator

    def averages(self, group: dict[str, Any], step: int) -> dict[str, Any]: ...
    def encode(self, unit: Unit, g: Tensor, step: int) -> Tensor: ...
    def serve(self, unit: Unit, rows: Tensor, step: int) -> Tensor: ...


Option = Callable[[Birder, Unit, Tensor, int], Requests[Tensor]]
"""From a unit's gradient, in step t, to what (6) applies."""


def chosen(bits: str, reduce: str, intra: str) -> Option | None:
    """None: the paper's exchange; with bits="weyl" too, whose draws alone differ."""
    if bits in ("none", "sigma_delta"):
        return floats if bits == "none" else modulated
    return one_phase if reduce == "one_phase" else of_node if intra == "u" else None


class Draws:
    """Where the random numbers of Q come from: options of the kernels. Anew in each step."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def worker(self, comm: Communicator, step: int) -> dict[str, int]:
        return {"seed": self.seed, "step": step, "worker": comm.worker}

    def server(self, step: int) -> dict[str, int]:
        return {"seed": self.seed, "step": step}

    def owner(self, comm: Communicator, step: int) -> dict[str, int]:
        """Of one phase: which worker sends which word."""
        return self.server(step)


class Weyl(Draws):
    """Drawn once, and turned in each step: thresholds are evenly spread over steps (birder/kernels/weyl.py)."""

    def __init__(self, seed: int, reduce: str) -> None:
        super().__init__(seed)
        self.alike = reduce == "one_phase"

    def worker(self, comm: Communicator, step: int) -> dict[str, int]:
        apart = {} if self.alike else {"worker": comm.worker, "workers": comm.workers}
        return {"seed": self.seed, "step": weyl.STEP, "worker": 0, "shift": weyl.turned(step, **apart)}

    def server(self, step: int) -> dict[str, int]:
        return {"seed": self.seed, "step": weyl.STEP, "shift": weyl.turned(step, by=weyl.ROOT)}

    def owner(self, comm: Communicator, step: int) -> dict[str, int]:
        return {"seed": self.seed, "step": weyl.STEP, "turn": step % comm.workers}


def ratio(birder: Birder, unit: Unit, grad: Tensor, step: int) -> Requests[Tensor]:
    """(1) to (3): this worker's u of this rank's shard, fp32[padded/shards]. Valid until the next request."""
    m, b, averages = unit.state["m"], unit.state["b"], birder.averages(unit.group, step)
    if birder.intra == "gradient" or birder.comm.shards == 1:
        return kernels.ratio((yield ShardMean(grad)), m, b, **averages)
    return (yield ShardMean(kernels.ratio(grad, m, b, **averages)))  # the mean over the node


def encoded(birder: Birder, unit: Unit, grad: Tensor, step: int) -> Requests[Tensor]:
    """(1) to (4), of u's mean over the node with intra="u"."""
    if birder.intra == "gradient" or birder.comm.shards == 1:
        return birder.encode(unit, (yield ShardMean(grad)), step)
    bits, draws = unit.buffers["bits"], birder.draws.worker(birder.comm, step)
    u = (yield from ratio(birder, unit, grad, step)).clamp_(-1.0, 1.0)
    for at, start in unit.shard_runs(birder.comm):
        kernels.binarize(u[at], **draws, start=start, out=bits[packed(at)])
    return bits


def of_node(birder: Birder, unit: Unit, grad: Tensor, step: int) -> Requests[Tensor]:
    """intra="u": every rank keeps full moments, and a node sends the mean of its ranks' u."""
    bits = yield from encoded(birder, unit, grad, step)
    rows = yield AllToAll(bits, unit.buffers["rows"])
    return (yield AllGather(birder.serve(unit, rows, step), unit.buffers["result"]))  # (5)


def one_phase(birder: Birder, unit: Unit, grad: Tensor, step: int) -> Requests[Tensor]:
    """reduce="one_phase": (5) by one all-gather of a worker's share of words (birder/kernels/one_phase.py)."""
    yield from encoded(birder, unit, grad, step)
    return (yield from bit_exchange.one_phase(unit, birder.comm, birder.draws.owner(birder.comm, step)))  # (5)


def modulated(birder: Birder, unit: Unit, grad: Tensor, step: int) -> Requests[Tensor]:
    """bits="sigma_delta": (4) and (5) by the sigma-delta quantizer (birder/optim/modulator.py)."""
    u = yield from ratio(birder, unit, grad, step)
    if birder.intra == "u" and birder.comm.shards > 1:
        u.clamp_(-1.0, 1.0)
    modulator = birder.modulator
    kernels.modulate(u, unit.state[modulator.name], **modulator.encoding(unit, birder.comm, step))
    return (yield from modulator.exchange(unit, birder.comm, step))


def floats(birder: Birder, unit: Unit, grad: Tensor, step: int) -> Requests[Tensor]:
    """bits="none": the workers' mean of u, added up in their order: fp32[padded]."""
    u = yield from ratio(birder, unit, grad, step)
    total, *others = (yield GatherWorkers(u.clone())).unbind()  # the next unit may use the buffer
    total = total.clone()
    for other in others:
        total.add_(other)
    return (yield GatherShards(total.div_(birder.comm.workers)))
