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

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from birder import kernels
from birder.comm import AllGather, AllToAll, GatherShards, GatherWorkers, Requests, ShardMean
from birder.kernels import weyl
from birder.optimizers.base import BucketOptimizer
from birder.optimizers.checks import require_choice, require_flag, require_fraction, require_number
from birder.optimizers.contract import Plan
from birder.optimizers.layout import Unit
from birder.optimizers.modulator import CARRIED, Modulator, columns, packed
from birder.optimizers.seen import SeenMap


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
    bits:      how Q draws. "independent": anew in each step, the paper's. "weyl": this project's; every bit has the same
               probability, and errors cancel over steps instead of adding up (birder/kernels/weyl.py). "sigma_delta": this
               project's; nothing is drawn, q = sgn(u + e) with an error e that is kept, on workers and servers
               (birder/optimizers/modulator.py, with gamma = 1). "none": no bits, the mean of u is applied as it is. It
               sends (n-1) floats for each coordinate: for comparisons of accuracy only.
    reduce:    how (5) is done. "two_phase": the paper's, all-to-all and all-gather. "one_phase": this project's variant; the
               same distribution for every coordinate from one all-gather of half the bytes (birder/kernels/one_phase.py).
    options:   max_grad_norm, seed; see `BucketOptimizer`.

    State, rank-local: m and b, fp32[d] (with hierarchical communication and intra="gradient": fp32[d / ranks per node]).
    With bits="sigma_delta" also e, fp32[d / ranks per node], and s of the server, fp32[d/n].

    A coordinate whose gradient has been 0 on every rank in every step so far does not move. Ranks agree on which these
    are: a flag for every 1024 coordinates is united in each step, and where a flag is up also a bit for each coordinate,
    until every coordinate of the unit has been seen.

    Gradients that are not finite count as 0. Raises ValueError for arguments out of range.
    """

    compressed: ClassVar[bool] = True
    carried: ClassVar[dict[str, str]] = {"m": "mean", "b": "mean", **CARRIED, "active": "copy"}
    on_shards: ClassVar[bool] = True
    handles_nonfinite: ClassVar[bool] = True
    read_in_update: ClassVar[frozenset[str]] = frozenset({"lr"})
    seen_by: ClassVar[str] = "b"

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
        require_choice("idle", idle, "decay", "hold")
        require_choice("intra", intra, "gradient", "u")
        require_choice("reduce", reduce, "two_phase", "one_phase")
        require_choice("bits", bits, "independent", "weyl", "sigma_delta", "none")
        require_flag("decoupled", decoupled)
        self.decoupled, self.idle, self.intra, self.reduce, self.bits = decoupled, idle, intra, reduce, bits
        defaults = {"lr": lr, "beta": beta, "weight_decay": weight_decay, "eps": eps, "beta2": beta2}
        super().__init__(params, defaults, **options)
        self._modulator = Modulator(gamma=1.0, reduce=reduce, errors="fp32", start="uniform", seed=self.seed)

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        require_fraction("beta", group["beta"])
        if group["beta2"] is not None:
            require_number("beta2", group["beta2"], "in [0, 1) or None", high=1.0, below=True)
        require_number("eps", group["eps"])

    def plan(self, step: int) -> Plan:
        return Plan.COMPRESSED

    def reads_parameters(self, step: int) -> bool:
        return not self.decoupled and any(group["weight_decay"] for group in self.param_groups)

    def init_unit(self, unit: Unit) -> None:
        comm = self.comm
        kept = unit.padded // (comm.shards if self.intra == "gradient" else 1)
        unit.state["m"] = unit.zeros(kept)
        unit.state["b"] = unit.zeros(kept)
        self.init_seen(unit)
        if self.bits == "sigma_delta":
            self._modulator.init_unit(unit, comm)
            return
        bits = unit.padded // comm.shards // 8
        unit.buffers = {
            "bits": unit.bytes(bits),  # of this rank's shard
            "rows": unit.bytes(bits),  # what the workers have sent: [workers, c]
            "chunk": unit.bytes(bits // comm.workers),  # of the server
            "result": unit.bytes(unit.padded // 8),
        }

    def adjust_gradients(self, params: list[Tensor], slots: list[Tensor], group: dict[str, Any]) -> None:
        if not self.decoupled and group["weight_decay"]:
            torch._foreach_add_(slots, params, alpha=group["weight_decay"])

    def exchange(self, unit: Unit, grad: Tensor, step: int) -> Requests[None]:
        averages = self._averages(unit.group, step)
        if self.bits == "none":
            unit.result = yield from self._exchange_floats(unit, grad, averages)
        elif self.bits == "sigma_delta":
            u = yield from self._shard_ratio(unit, grad, averages)
            encoding = self._modulator.encoding(unit, self.comm, step)
            kernels.modulate(u, unit.state[self._modulator.name], **encoding)
            unit.result = yield from self._modulator.exchange(unit, self.comm, step)
        else:
            unit.result = yield from self._exchange_bits(unit, grad, averages, step)

    def _exchange_bits(self, unit: Unit, grad: Tensor, averages: dict[str, Any], step: int) -> Requests[Tensor]:
        comm, buffers = self.comm, unit.buffers
        size = unit.padded // comm.shards
        runs = unit.numbered(comm.shard * size, size)  # one, but with FSDP
        workers, servers, owners = self._draws(step)
        m, b, bits = unit.state["m"], unit.state["b"], buffers["bits"]
        if self.intra == "gradient" or comm.shards == 1:
            g = yield ShardMean(grad)
            for at, start in runs:  # (1)-(4)
                draw = {**workers, "start": start}
                kernels.encode(g[at], m[at], b[at], **averages, **draw, out=bits[packed(at)])
        else:
            u = yield from self._shard_ratio(unit, grad, averages)
            for at, start in runs:  # (4)
                kernels.binarize(u[at], **workers, start=start, out=bits[packed(at)])
        rows, chunk = buffers["rows"], buffers["chunk"]
        if self.reduce == "one_phase":
            n = comm.workers
            for at, start in runs:
                mine = bits[packed(at)]
                kernels.owned(mine, n=n, worker=comm.worker, start=start, **owners, out=chunk[packed(at, n)])
            rows = yield GatherWorkers(chunk, rows)
            for at, start in runs:
                kernels.assemble(columns(rows, packed(at, n)), start=start, **owners, out=bits[packed(at)])
            return (yield GatherShards(bits, buffers["result"]))  # (5)
        rows = yield AllToAll(bits, rows)
        served = size // comm.workers
        for at, start in unit.numbered(comm.shard * size + comm.worker * served, served):
            kernels.reduce_bits(columns(rows, packed(at)), start=start, **servers, out=chunk[packed(at)])
        return (yield AllGather(chunk, buffers["result"]))  # (5)

    def _shard_ratio(self, unit: Unit, grad: Tensor, averages: dict[str, Any]) -> Requests[Tensor]:
        """(1) to (3): this worker's u of this rank's shard, fp32[padded/shards]. Valid until the next request."""
        m, b = unit.state["m"], unit.state["b"]
        if self.intra == "gradient" or self.comm.shards == 1:
            return kernels.ratio((yield ShardMean(grad)), m, b, **averages)
        u = yield ShardMean(kernels.ratio(grad, m, b, **averages))  # mean over the node
        return u if self.bits == "none" else u.clamp_(-1.0, 1.0)

    def _exchange_floats(self, unit: Unit, grad: Tensor, averages: dict[str, Any]) -> Requests[Tensor]:
        """The workers' mean of u, added up in their order: fp32[padded]."""
        u = yield from self._shard_ratio(unit, grad, averages)
        total, *others = (yield GatherWorkers(u.clone())).unbind()  # the next unit may use the buffer
        total = total.clone()
        for other in others:
            total.add_(other)
        return (yield GatherShards(total.div_(self.comm.workers)))

    def _averages(self, group: dict[str, Any], step: int) -> dict[str, Any]:
        """What `kernels.ratio` is told of (1) to (3), or of (2') and (3') with both corrections in two numbers."""
        beta, beta2, eps, hold = group["beta"], group["beta2"], group["eps"], self.idle == "hold"
        if beta2 is None:
            return {"beta": beta, "eps": eps, "hold": hold}
        reached = 1.0 - beta2**step
        return {"beta": beta, "beta2": beta2, "scale": reached / (1.0 - beta**step), "eps": eps * reached, "hold": hold}

    def _draws(self, step: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Where the random numbers of a step come from: those of workers, of servers, and of owners in one phase."""
        comm, drawn = self.comm, {"seed": self.seed, "step": step}
        if self.bits == "independent":
            return {**drawn, "worker": comm.worker}, drawn, drawn
        once = {"seed": self.seed, "step": weyl.STEP}
        apart: dict[str, int] = {} if self.reduce == "one_phase" else {"worker": comm.worker, "workers": comm.workers}
        return (
            {**once, "worker": 0, "shift": weyl.turned(step, **apart)},
            {**once, "shift": weyl.turned(step, by=weyl.ROOT)},
            {**once, "turn": step % comm.workers},
        )

    def update(self, step: int, plan: Plan) -> None:
        for unit in self.units:
            lr, active = unit.group["lr"], unit.state.get("active")
            decay = lr * unit.group["weight_decay"] if self.decoupled else 0.0
            if self.bits == "none":
                for p, u in zip(unit.params, unit.views(unit.result), strict=True):
                    p.mul_(1.0 - decay).sub_(u, alpha=lr)
                continue
            kernels.apply_bits(unit.params, unit.offsets, unit.result, lr=lr, decay=decay, active=active)  # (6)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("beta2", None)  # state that was saved before there was one
