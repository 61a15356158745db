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
from birder.comm import AllGather, AllToAll, Collectives, GatherShards, GatherWorkers, Requests, ShardMean
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

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        require_fraction("beta", group["beta"])
        require_number("beta2", group["beta2"], "in [0, 1) or None", high=1.0, below=True, none=True)

    def reads_parameters(self, step: int) -> bool:
        return not self.decoupled and any(group["weight_decay"] for group in self.param_groups)

    @property
    def mean_of_u(self) -> bool:
        """Whether every rank keeps full moments, and a node of several ranks sends the mean of their u."""
        return self.intra == "u" and self.comm.shards > 1

    def init_unit(self, unit: Unit) -> None:
        unit.keep("m", "b", numel=unit.padded // (self.comm.shards if self.intra == "gradient" else 1))
        self.init_seen(unit)
        if self.bits == "sigma_delta":
            self.modulator.init_unit(unit, self.comm)
        else:
            unit.buffers = buffers(unit, self.comm)

    def exchange(self, unit: Unit, grad: Tensor, step: int) -> Requests[None]:
        comm = self.comm
        if not self.decoupled and unit.group["weight_decay"]:
            torch._foreach_add_(unit.views(grad), unit.params, alpha=unit.group["weight_decay"])
        if self.bits == "none":
            u = yield from self.ratio(unit, grad, step)  # (1)-(3)
            rows = yield GatherWorkers(u.clone())  # the next unit may use the buffer
            unit.result = yield GatherShards(Collectives.sum_of_rows(rows).div_(comm.workers))
        elif self.bits == "sigma_delta":
            u, modulator = (yield from self.ratio(unit, grad, step)), self.modulator
            kernels.modulate(u, unit.state[modulator.name], **modulator.encoding(unit, comm, step))  # (4)
            unit.result = yield from modulator.exchange(unit, comm, step)  # (5)
        else:
            bits = yield from self.encode(unit, grad, step)  # (1)-(4)
            if self.reduce == "one_phase":
                unit.result = yield from one_phase(unit, comm, self.draws(step, turn=step % comm.workers))  # (5)
                return
            rows = yield AllToAll(bits, unit.buffers["rows"])
            runs, draws = unit.chunk_runs(comm), self.draws(step, shift=weyl.turned(step, by=weyl.ROOT))
            chunk = each_run(kernels.reduce_bits, runs, rows, **draws, out=unit.buffers["chunk"])  # (5)
            unit.result = yield AllGather(chunk, unit.buffers["result"])

    def ratio(self, unit: Unit, grad: Tensor, step: int) -> Requests[Tensor]:
        """(1) to (3): this worker's u of this rank's shard, fp32[padded/shards]. Valid until the next request."""
        m, b, averages = unit.state["m"], unit.state["b"], self.averages(unit.group, step)
        if self.mean_of_u:
            return (yield ShardMean(kernels.ratio(grad, m, b, **averages))).clamp_(-1.0, 1.0)
        return kernels.ratio((yield ShardMean(grad)), m, b, **averages)

    def encode(self, unit: Unit, grad: Tensor, step: int) -> Requests[Tensor]:
        """(1) to (4) of this rank's shard: fp32[padded] -> uint8[padded/(8 shards)]."""
        runs, out = unit.shard_runs(self.comm), unit.buffers["bits"]
        # In one phase only one worker's bit of each coordinate is taken: workers have the same draws.
        apart = 0 if self.reduce == "one_phase" else self.comm.worker
        draws = self.draws(step, shift=weyl.turned(step, worker=apart, workers=self.comm.workers))
        draws["worker"] = 0 if self.bits == "weyl" else self.comm.worker
        if self.mean_of_u:
            u = yield from self.ratio(unit, grad, step)
            return each_run(kernels.binarize, runs, u, **draws, out=out)
        tensors = (yield ShardMean(grad)), unit.state["m"], unit.state["b"]
        return each_run(kernels.encode, runs, *tensors, **self.averages(unit.group, step), **draws, out=out)

    def draws(self, step: int, **turned: int) -> dict[str, int]:
        """Options of kernels for Q's random numbers: new ones in each step.

        With bits="weyl" they are drawn once, and `turned` in each step: thresholds are evenly spread over steps.
        """
        if self.bits == "weyl":
            return {"seed": self.seed, "step": weyl.STEP, **turned}
        return {"seed": self.seed, "step": step}

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
