"""Birder: a 1-bit adaptive optimizer without full-precision warm-up.

Source: "Birder: Communication-Efficient 1-bit Adaptive Optimizer for Practical Distributed DNN Training", NeurIPS 2023.

Worker i, for its own gradient g_i:

    (1) m_i = beta m_i + (1 - beta) g_i
    (2) b_i = beta b_i + (1 - beta) |g_i|
    (3) u_i = m_i / b_i                              in [-1, 1], since |m_i| <= b_i
    (4) q_i = Q(u_i),  Q(u) = +1 with probability (1+u)/2, else -1
Server of a chunk, then every rank:
    (5) a = mean_i q_i;  q = Q(a)
    (6) x = x - lr q - lr weight_decay x

Of this project, and off by default: one phase for (5); thresholds of Q that are evenly spread over steps, or no Q at all, q =
mean_i u_i, to tell what the bits cost (`bits`); and with `beta2`, for step t from 1,

    (2') b_i = beta2 b_i + (1 - beta2) |g_i|
    (3') u_i = clip(m_i/(1 - beta^t) / (b_i/(1 - beta2^t)), -1, 1)

One bit for each parameter goes each way: worker to server by all-to-all, server to worker by all-gather.
One-process reference: `Birder` in tests/helpers/reference.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from birder import kernels
from birder.comm import AllGather, AllToAll, Collectives, Communicator, GatherShards, GatherWorkers, Requests, ShardMean
from birder.kernels import weyl
from birder.optim.base import BucketOptimizer, Plan, Unit
from birder.optim.bit_exchange import CARRIED, Modulator, buffers, each_run, move, one_phase
from birder.optim.checks import require_choice, require_flag, require_fraction, require_number
from birder.optim.seen import SeenMap


class Birder(SeenMap, BucketOptimizer):
    """Birder (see the module's docstring for the equations), correct from the first step.

    params, lr, weight_decay: as in torch. Every coordinate moves by exactly lr in each step, so lr is of Adam's size.
    beta:      the one averaging coefficient, in [0, 1).
    decoupled: weight decay as x -= lr weight_decay x (True), or as g += weight_decay x (False). The paper leaves it open.
    eps:       u = m/(b + eps). The paper leaves it open; 0 keeps u free of the gradient's scale.
    idle:      what b does where the gradient is exactly 0 (rows of an embedding that are not in the batch).
               "decay": equation (2), so that u keeps its last value and the coordinate drifts on.
               "hold": b stays, so that u decays with m. The same wherever gradients are not exactly 0.
    intra:     with hierarchical communication, what the reduce-scatter inside a node carries. "gradient": the node is one
               worker, moments exist only for the rank's own shard. "u": every rank keeps full moments.
    beta2:     this project's: (2') and (3') with this coefficient for b, in [0, 1). None: `beta` for both, the paper's.
    bits:      how Q draws. "independent" draws in each step: the paper's. "weyl": this project's; every bit has the same
               probability, and errors cancel over steps instead of adding up (birder/kernels/weyl.py). "sigma_delta": this
               project's; nothing is drawn, q = sgn(u + e) with an error e that is kept, on workers and servers
               (birder/optim/bit_exchange.py, with gamma = 1). "none": no bits, the mean of u is applied. It
               sends (n-1) floats for each coordinate: for comparisons of accuracy only.
    reduce:    how (5) is done. "two_phase": the paper's, all-to-all and all-gather. "one_phase": this project's variant; the
               same distribution for every coordinate from one all-gather of half the bytes (birder/kernels/reference.py).
    options:   max_grad_norm, seed; see `BucketOptimizer`.

    State, rank-local: m and b, fp32[d] (with hierarchical communication and intra="gradient": fp32[d / ranks per node]).
    With bits="sigma_delta" also e, fp32[d / ranks per node], and s of the server, fp32[d/n].

    A coordinate whose gradient has been 0 on every rank in every step so far does not move; see birder/optim/seen.py.
    """

    compressed: ClassVar[bool] = True
    carried: ClassVar[dict[str, str]] = {"m": "mean", "b": "mean", **CARRIED, "active": "copy"}
    on_shards: ClassVar[bool] = True
    uses_wire: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True
    handles_nonfinite: ClassVar[bool] = True
    read_in_update: ClassVar[frozenset[str]] = frozenset({"lr"})
    seen_by: ClassVar[str] = "b"
    _option: Option | None = None
    """What takes the place of the paper's exchange; chosen when the optimizer is bound."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        beta: float = 0.95,
        weight_decay: float = 0.0,
        *,
        decoupled: bool = True,
        eps: float = 0.0,
        idle: str = "decay",
        intra: str = "gradient",
        reduce: str = "two_phase",
        beta2: float | None = None,
        bits: str = "independent",
        **options: Any,
    ) -> None:
        self.decoupled = require_flag("decoupled", decoupled)
        self.idle = require_choice("idle", idle, "decay", "hold")
        self.intra = require_choice("intra", intra, "gradient", "u")
        self.reduce = require_choice("reduce", reduce, "two_phase", "one_phase")
        self.bits = require_choice("bits", bits, "independent", "weyl", "sigma_delta", "none")
        defaults = {"lr": lr, "beta": beta, "weight_decay": weight_decay, "eps": eps, "beta2": beta2}
        super().__init__(params, defaults, **options)
        self.modulator = Modulator(reduce=reduce, errors="fp32", start="uniform", seed=self.seed)
        self.draws = Draws(self.seed) if bits != "weyl" else Weyl(self.seed, reduce)

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        require_fraction("beta", group["beta"])
        require_number("beta2", group["beta2"], "in [0, 1) or None", high=1.0, below=True, none=True)

    def reads_parameters(self, step: int) -> bool:
        return not self.decoupled and any(group["weight_decay"] for group in self.param_groups)

    def init_unit(self, unit: Unit) -> None:
        comm = self.comm
        self._option = option(self.bits, self.reduce, self.intra if comm.shards > 1 else "gradient")
        kept = unit.padded // (comm.shards if self.intra == "gradient" else 1)
        unit.keep("m", "b", numel=kept)
        self.init_seen(unit)
        if self.bits == "sigma_delta":
            self.modulator.init_unit(unit, comm)
            return
        unit.buffers = buffers(unit, comm)

    def exchange(self, unit: Unit, grad: Tensor, step: int) -> Requests[None]:
        if not self.decoupled and unit.group["weight_decay"]:
            torch._foreach_add_(unit.views(grad), unit.params, alpha=unit.group["weight_decay"])
        if self._option is not None:
            unit.result = yield from self._option(self, unit, grad, step)
            return
        g = yield ShardMean(grad)
        bits = self.encode(unit, g, step)  # (1)-(4)
        rows = yield AllToAll(bits, unit.buffers["rows"])
        chunk = self.serve(unit, rows, step)  # (5)
        unit.result = yield AllGather(chunk, unit.buffers["result"])

    def encode(self, unit: Unit, g: Tensor, step: int) -> Tensor:
        """(1) to (4) of this rank's shard: fp32[padded/shards] -> uint8[padded/(8 shards)]."""
        tensors, options = (g, unit.state["m"], unit.state["b"]), self.averages(unit.group, step)
        options |= self.draws.worker(self.comm, step)
        return each_run(kernels.encode, unit.shard_runs(self.comm), *tensors, **options, out=unit.buffers["bits"])

    def serve(self, unit: Unit, rows: Tensor, step: int) -> Tensor:
        """(5) of the chunk that this rank serves: uint8[workers, c] -> uint8[c]."""
        runs, draws = unit.chunk_runs(self.comm), self.draws.server(step)
        return each_run(kernels.reduce_bits, runs, rows, **draws, out=unit.buffers["chunk"])

    def averages(self, group: dict[str, Any], step: int) -> dict[str, Any]:
        """Options of `kernels.ratio` for (1) to (3), or for (2') and (3') with both corrections in two numbers."""
        beta, beta2, eps, hold = group["beta"], group["beta2"], group["eps"], self.idle == "hold"
        if beta2 is None:
            return {"beta": beta, "eps": eps, "hold": hold}
        reached = 1.0 - beta2**step
        return {"beta": beta, "beta2": beta2, "scale": reached / (1.0 - beta**step), "eps": eps * reached, "hold": hold}

    def update(self, step: int, plan: Plan) -> None:
        for unit in self.units:
            move(unit, unit.group["weight_decay"] if self.decoupled else 0.0)  # (6)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("beta2", None)  # state that was saved before there was one


# ---- this project's options: each an exchange in the place of the paper's ---------------------------------------------

Option = Callable[[Birder, Unit, Tensor, int], Requests[Tensor]]
"""From a unit's gradient, in step t, to what (6) applies."""


def option(bits: str, reduce: str, intra: str) -> Option | None:
    """None: the paper's exchange; with bits="weyl" too, whose draws alone differ."""
    if bits in ("none", "sigma_delta"):
        return floats if bits == "none" else modulated
    return in_one_phase if reduce == "one_phase" else of_node if intra == "u" else None


class Draws:
    """Where the random numbers of Q come from: options of the kernels. Independent in each step."""

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
        self.same_bits = reduce == "one_phase"

    def worker(self, comm: Communicator, step: int) -> dict[str, int]:
        apart = {} if self.same_bits else {"worker": comm.worker, "workers": comm.workers}
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
    runs, draws = unit.shard_runs(birder.comm), birder.draws.worker(birder.comm, step)
    u = (yield from ratio(birder, unit, grad, step)).clamp_(-1.0, 1.0)
    return each_run(kernels.binarize, runs, u, **draws, out=unit.buffers["bits"])


def of_node(birder: Birder, unit: Unit, grad: Tensor, step: int) -> Requests[Tensor]:
    """intra="u": every rank keeps full moments, and a node sends the mean of its ranks' u."""
    bits = yield from encoded(birder, unit, grad, step)
    rows = yield AllToAll(bits, unit.buffers["rows"])
    return (yield AllGather(birder.serve(unit, rows, step), unit.buffers["result"]))  # (5)


def in_one_phase(birder: Birder, unit: Unit, grad: Tensor, step: int) -> Requests[Tensor]:
    """reduce="one_phase": (5) by one all-gather of a worker's share of words (birder/kernels/reference.py)."""
    yield from encoded(birder, unit, grad, step)
    return (yield from one_phase(unit, birder.comm, birder.draws.owner(birder.comm, step)))  # (5)


def modulated(birder: Birder, unit: Unit, grad: Tensor, step: int) -> Requests[Tensor]:
    """bits="sigma_delta": (4) and (5) by the sigma-delta quantizer (birder/optim/bit_exchange.py)."""
    u = yield from ratio(birder, unit, grad, step)
    if birder.intra == "u" and birder.comm.shards > 1:
        u.clamp_(-1.0, 1.0)
    modulator = birder.modulator
    kernels.modulate(u, unit.state[modulator.name], **modulator.encoding(unit, birder.comm, step))
    return (yield from modulator.exchange(unit, birder.comm, step))


def floats(birder: Birder, unit: Unit, grad: Tensor, step: int) -> Requests[Tensor]:
    """bits="none": the workers' mean of u, added up in their order: fp32[padded]."""
    u = yield from ratio(birder, unit, grad, step)
    rows = yield GatherWorkers(u.clone())  # the next unit may use the buffer
    return (yield GatherShards(Collectives.sum_of_rows(rows).div_(birder.comm.workers)))
