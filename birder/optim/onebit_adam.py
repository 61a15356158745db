"""1-bit Adam: Adam with full-precision warm-up, then 1-bit momentum with error feedback under a frozen variance.

Source: "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", ICML 2021.

Warm-up, t <= T:   g = mean_i g_i by dense all-reduce; Adam.
Afterwards, with v frozen at v_T, C(z) = (|z|_2 / sqrt(d)) sgn(z) and sgn(0) = +1:

    (1) z_i = beta1 m + (1 - beta1) g_i + e_i            worker i; m is the common momentum of the step before
    (2) send C(z_i);  e_i = z_i - C(z_i)
    (3) a = mean_i C(z_i) + s                            server of a chunk
    (4) m = C(a), sent to all;  s = a - C(a)
    (5) x = x - lr (m / (sqrt(v_T) + eps) + weight_decay x)

One-process reference: `OneBitAdam` in tests/helpers/reference.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

from birder import kernels
from birder.comm import Requests, ShardMean
from birder.optim.adam import adam_moments
from birder.optim.checks import pair, require_flag, require_whole
from birder.optim.contract import Plan
from birder.optim.layout import Unit, with_gradient
from birder.optim.onebit import OneBitMethod


class OneBitAdam(OneBitMethod):
    """1-bit Adam (see the module's docstring for the equations).

    warmup_steps:    T, at least 1: dense steps before the variance is frozen; usually 15-25 % of all steps.
    bias_correction: divide m by 1-beta1^t and v by 1-beta2^min(t,T), as Adam does; the authors' blog and code have none.
    options:         wire (of the warm-up), max_grad_norm, seed; see `BucketOptimizer`.

    State: m and v, fp32[d], the same on all ranks; rank-local the worker's error fp32[d] and the server's fp32[d/n].

    A coordinate whose variance is 0 when it is frozen (no gradient on any rank in the warm-up) does not move any more and
    takes no part in scales: divided by eps, its +-scale would explode. Scales are one for each unit and worker, and one
    for each chunk of a unit on the server's side.
    """

    carried: ClassVar[dict[str, str]] = {**OneBitMethod.carried, "m": "copy", "v": "copy"}
    on_shards: ClassVar[bool] = True
    read_in_update: ClassVar[frozenset[str]] = frozenset({"lr", "eps", "weight_decay"})

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        warmup_steps: int,
        bias_correction: bool = True,
        **options: Any,
    ) -> None:
        self.warmup_steps = require_whole("warmup_steps", warmup_steps)
        self.bias_correction = require_flag("bias_correction", bias_correction)
        super().__init__(params, {"lr": lr, "betas": pair(betas), "eps": eps, "weight_decay": weight_decay}, **options)

    def plan(self, step: int) -> Plan:
        return Plan.DENSE if step <= self.warmup_steps else Plan.COMPRESSED

    def init_unit(self, unit: Unit) -> None:
        unit.keep("m", "v")
        self.init_errors(unit)

    def exchange(self, unit: Unit, grad: Tensor, step: int) -> Requests[None]:
        self.note_lost(unit, grad, step)
        beta1, m = unit.group["betas"][0], unit.state["m"][self.support(unit).shard]
        unit.result = yield from self.onebit_momentum_mean(unit, (yield ShardMean(grad)), m, beta1)  # (1)-(4)

    def update(self, step: int, plan: Plan) -> None:
        for unit in self.units:
            group = unit.group
            lr, (beta1, beta2) = group["lr"], group["betas"]
            if plan is Plan.COMPRESSED:
                self.write_mean(unit, unit.state["m"], unit.result)
                params, m, v = unit.params, unit.state_views("m"), unit.state_views("v")
            else:
                params, grads, m, v = with_gradient(unit, "m", "v")
                if not params:
                    continue
                adam_moments(m, v, grads, beta1, beta2)
            first, correction = 1.0, 1.0
            if self.bias_correction:
                first, correction = 1 - beta1**step, (1 - beta2 ** min(step, self.warmup_steps)) ** 0.5
            if plan is Plan.COMPRESSED:
                self.note_far(unit, unit.state["m"], lr=first, correction=correction, step=step)
            keep = 1 - lr * group["weight_decay"]
            kernels.move_adam(params, m, v, rate=lr / first, correction=correction, eps=group["eps"], keep=keep)  # (5)
