"""Sigma-delta Adam: one bit per parameter each way from the first step, without dense warm-up. This project's own.

Worker i keeps Adam's moments of its own gradient g_i; V is the same on all workers. For step t from 1:

    (0) in the steps of a schedule, after (1): V by (0'), or V = mean_i v_i; t_V is the last such step
    (1) m_i = beta1 m_i + (1 - beta1) g_i;   v_i = beta2 v_i + (1 - beta2) g_i^2
    (2) u_i = clip( m_i/(1 - beta1^t) / (sqrt(V/(1 - beta2^t_V)) + eps), -c, c)
    (3) q = the +-1 that the sigma-delta quantizer makes of all u_i/c, with the gain gamma c     birder/optim/bit_exchange.py
    (4) x = x - lr q - lr weight_decay x

The local form leaves (0) out, and (2) has v_i and t in the place of V and t_V.

Adam's own v is that of the mean gradient, to which the noise of n workers adds n times less than to theirs. `of_mean`, the
default, estimates it, taking the mean momentum for the signal, and gamma is 1:

    (0') V = s^2 + (mean_i v_i - s^2) / n,   s^2 = min( (1 - beta2^t) (mean_i m_i/(1 - beta1^t))^2, mean_i v_i )

c is what one worker's bit stands for. The noise of one worker's m_i is sqrt(n (1 - beta1)/(1 + beta1)) = 0.23 sqrt(n) times
the root of this V, with Adam's beta1. c = sqrt(n)/2 has room for twice that.

One-process reference: `SigmaDelta` in tests/helpers/reference_sigma_delta.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

from birder import kernels
from birder.comm import Requests, ShardMean, WorkerMean
from birder.optim.base import WIRES, BucketOptimizer, Plan, Unit
from birder.optim.bit_exchange import CARRIED, Modulator, move
from birder.optim.checks import pair, require, require_choice, require_number
from birder.optim.seen import SeenMap


class SigmaDeltaAdam(SeenMap, BucketOptimizer):
    """Sigma-delta Adam (see the module's docstring for the equations).

    params, lr, betas, eps, weight_decay: as in torch.optim.AdamW. Every coordinate moves by exactly lr in each step.
    variance:     "of_mean": V of (0'), for which m is sent too. "shared": the mean of all v_i, half the bytes of (0).
                  "local": every worker's own v_i, so that nothing but bits is sent.
    share_growth: by what factor the steps of (0) grow, at least 1: after step k comes max(k + 1, floor(share_growth k)). 1.1:
                  each of the first ten, then 11, 12, ..., 20, 22, 24, ... 1: every step.
    wire:         what (0) sends as: "fp32" or "bf16".
    gamma:        gain of the mean of the workers' bits; None: that with which Adam's lr fits, 1 with "of_mean", else the root
                  of the number of workers. 1: with full_scale=1 the quantizer's error is bounded for all times; with another
                  V lr then wants to be larger.
    full_scale:   c, what one worker's bit stands for; larger ratios are clipped to it. None: half the root of the number of
                  workers with "of_mean", but at least 1; else 1.
    reduce:       "two_phase": all-to-all and all-gather. "one_phase": one all-gather of half the bytes.
    errors:       how the errors are kept: "fp32", or "int8" for a quarter of their memory.
    start:        how workers' errors begin: "uniform" in [-1, 1), so that workers' bits do not move in step, or "zero".
    idle:         what v does where the gradient is exactly 0 (rows of an embedding that are not in the batch): "decay" as in
                  Adam, or "hold".
    options:      max_grad_norm, seed; see `BucketOptimizer`.

    State, rank-local: m, v and V fp32[d] and the worker's error, fp32 or int8[d]; with hierarchical communication
    [d / ranks per node]. The server's error [d/n]. In one phase one error [d] instead of both.

    A coordinate whose gradient has been 0 on every rank in every step so far does not move; see birder/optim/seen.py.
    """

    compressed: ClassVar[bool] = True
    carried: ClassVar[dict[str, str]] = {
        "m": "mean",
        "v": "mean",
        "shared_v": "mean",  # the same on all workers; each holds its shard alone
        **CARRIED,
        "active": "copy",
    }
    on_shards: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True
    handles_nonfinite: ClassVar[bool] = True
    read_in_update: ClassVar[frozenset[str]] = frozenset({"lr", "weight_decay"})
    seen_by: ClassVar[str] = "v"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        variance: str = "of_mean",
        share_growth: float = 1.1,
        gamma: float | None = None,
        full_scale: float | None = None,
        reduce: str = "two_phase",
        errors: str = "fp32",
        start: str = "uniform",
        idle: str = "decay",
        wire: str = "fp32",
        **options: Any,
    ) -> None:
        self.variance = require_choice("variance", variance, "of_mean", "shared", "local")
        self.idle = require_choice("idle", idle, "decay", "hold")
        self.share_growth = require_number("share_growth", share_growth, "at least 1", low=1.0)
        # Most variances are too small for fp16, and 0 stands for a coordinate without gradient.
        require(wire != "fp16", "wire", wire, "fp32 or bf16")
        require(variance != "local" or wire == "fp32", "wire", wire, 'left out with variance="local"')
        self.gamma = require_number("gamma", gamma, "positive or None", above=True, none=True)
        self.full_scale = require_number("full_scale", full_scale, "positive or None", above=True, none=True)
        self.reduce, self.errors, self.start = reduce, errors, start
        defaults = {"lr": lr, "betas": pair(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, wire=wire, **options)
        self._modulator = Modulator(reduce=reduce, errors=errors, start=start, seed=self.seed)

    def shared_at(self, step: int) -> int:
        """t_V: the last step up to `step` in which V is shared; in the local form `step` itself."""
        return last_shared(step, float(self.share_growth)) if self.variance != "local" else step

    def _scale(self, workers: int) -> tuple[float, float]:
        """c and gamma for a number of workers."""
        of_mean, root = self.variance == "of_mean", math.sqrt(workers)
        scale = (max(1.0, root / 2) if of_mean else 1.0) if self.full_scale is None else float(self.full_scale)
        return scale, (1.0 if of_mean else root) if self.gamma is None else float(self.gamma)

    def init_unit(self, unit: Unit) -> None:
        kept = unit.padded // self.comm.shards
        unit.keep("m", "v", *(["shared_v"] if self.variance != "local" else []), numel=kept)
        self._modulator.init_unit(unit, self.comm)
        self.init_seen(unit)

    def exchange(self, unit: Unit, grad: Tensor, step: int) -> Requests[None]:
        comm, m, v, V = self.comm, unit.state["m"], unit.state["v"], unit.state.get("shared_v")
        (beta1, beta2), hold = unit.group["betas"], self.idle == "hold"
        mean = yield ShardMean(grad)
        g: Tensor | None = mean
        scale, gamma = self._scale(comm.workers)
        ratio, gain = self._ratio(unit.group, step), gamma * scale
        if V is not None and self.shared_at(step) == step:
            kernels.adam_moments(mean, m, v, beta1=beta1, beta2=beta2, hold=hold)  # (1)
            g = None
            V.copy_((yield WorkerMean(v, WIRES[self.wire])))  # (0)
            if self.variance == "of_mean":
                signal = ((yield WorkerMean(m, WIRES[self.wire])) * ratio["scale"]).square_().minimum(V)
                V.div_(comm.workers).add_(signal, alpha=1.0 - 1.0 / comm.workers)  # (0')
        error, encoding = unit.state[self._modulator.name], self._modulator.encoding(unit, comm, step, gain)
        ratio["scale"] /= scale
        kernels.modulate_adam(g, m, v, error, V, **ratio, hold=hold, **encoding)  # (1)-(3)
        unit.result = yield from self._modulator.exchange(unit, comm, step, gain)

    def _ratio(self, group: dict[str, Any], step: int) -> dict[str, float]:
        """Options of `kernels.modulate_adam` for (1) and (2), with both corrections in two numbers."""
        beta1, beta2 = group["betas"]
        reached = math.sqrt(1.0 - beta2 ** self.shared_at(step))
        scale = reached / (1.0 - beta1**step)
        return {"beta1": beta1, "beta2": beta2, "scale": scale, "eps": group["eps"] * reached}

    def update(self, step: int, plan: Plan) -> None:
        for unit in self.units:
            move(unit, unit.group["weight_decay"])  # (4)


@functools.lru_cache(maxsize=16)
def last_shared(step: int, growth: float) -> int:
    """The last step up to `step`, from 1, in which V is shared."""
    if growth == 1.0:
        return step
    last = coming = 1
    while coming <= step:
        last, coming = coming, max(coming + 1, int(coming * growth))
    return last
