"""1-bit Adam: Adam with full-precision warm-up, then 1-bit momentum with error feedback under a frozen variance.

Source: "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", ICML 2021.

Warm-up, t <= T:   g = mean_i g_i by dense all-reduce; Adam.
Afterwards, with v frozen at v_T, C(z) = (|z|_2 / sqrt(d)) sgn(z) and sgn(0) = +1:

    (1) z_i = beta1 m + (1 - beta1) g_i + e_i            worker i; m is the common momentum of the step before
    (2) send C(z_i);  e_i = z_i - C(z_i)
    (3) a = mean_i C(z_i) + s                            server of a chunk
    (4) m = C(a), sent to all;  s = a - C(a)
    (5) x = x - lr (m / (sqrt(v_T) + eps) + weight_decay x)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from birder import kernels
from birder.compress.scaled_sign import scaled_sign
from birder.optimizers.base import BucketOptimizer, Plan, require
from birder.optimizers.dense import adam_moments, check_adam, with_gradient
from birder.optimizers.layout import Unit


@dataclass
class Support:
    """The coordinates whose frozen variance is not 0, with their number in this rank's shard and chunk."""

    mask: Tensor | None  # bool[padded]; None: all of them
    shard: slice
    chunk: slice
    shard_count: int
    chunk_count: int


class OneBitAdam(BucketOptimizer):
    """1-bit Adam (see the module's docstring for the equations).

    warmup_steps:    T, at least 1: dense steps before the variance is frozen; usually 15-25 % of all steps.
    bias_correction: divide m by 1-beta1^t and v by 1-beta2^min(t,T). True is Adam as published; DeepSpeed's code has none.
    options:         wire (of the warm-up), max_grad_norm, seed; see `BucketOptimizer`.

    State: m and v, fp32[d], the same on all ranks; rank-local the worker's error fp32[d] and the server's fp32[d/n].

    A coordinate whose variance is 0 when it is frozen (no gradient on any rank in the warm-up) does not move any more and
    takes no part in scales: divided by eps, its +-scale would explode. Scales are one for each unit and worker, and one
    for each chunk of a unit on the server's side.

    Raises ValueError for arguments out of range.
    """

    compressed: ClassVar[bool] = True

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
        require(
            isinstance(warmup_steps, int) and warmup_steps >= 1, "warmup_steps", warmup_steps, "a whole number >= 1"
        )
        self.warmup_steps, self.bias_correction = warmup_steps, bias_correction
        self._support: dict[int, Support] = {}
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}, **options)

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        check_adam(group)

    def plan(self, step: int) -> Plan:
        return Plan.DENSE if step <= self.warmup_steps else Plan.COMPRESSED

    def init_unit(self, unit: Unit) -> None:
        shard = unit.padded // self.comm.shards
        unit.state["m"] = unit.zeros()
        unit.state["v"] = unit.zeros()
        unit.state["worker_error"] = unit.zeros(shard)
        unit.state["server_error"] = unit.zeros(shard // self.comm.workers)

    def support(self, unit: Unit) -> Support:
        """Where the unit's frozen variance is not 0; computed once after the warm-up."""
        if unit.index not in self._support:
            mask = unit.state["v"] > 0
            size = unit.padded // self.comm.shards
            chunk = size // self.comm.workers
            begin = self.comm.shard * size
            shard_part = slice(begin, begin + size)
            chunk_part = slice(begin + self.comm.worker * chunk, begin + (self.comm.worker + 1) * chunk)
            counts = int(mask[shard_part].sum()), int(mask[chunk_part].sum())
            self._support[unit.index] = Support(None if mask.all() else mask, shard_part, chunk_part, *counts)
        return self._support[unit.index]

    def exchange(self, unit: Unit, grad: Tensor, step: int) -> None:
        state, comm, support = unit.state, self.comm, self.support(unit)
        beta1 = unit.group["betas"][0]
        z = comm.shard_mean(grad).mul_(1.0 - beta1)  # (1)
        z.add_(state["m"][support.shard] * beta1).add_(state["worker_error"])
        bits, scale = scaled_sign(z, state["worker_error"], support.mask, support.shard, support.shard_count)  # (2)
        rows, scales = comm.scatter(bits), comm.gather_workers(scale.view(1))
        a = kernels.average_signs(rows, scales.view(-1)).add_(state["server_error"])  # (3)
        bits, scale = scaled_sign(a, state["server_error"], support.mask, support.chunk, support.chunk_count)  # (4)
        unit.result = comm.gather(bits), comm.gather(scale.view(1))

    def update(self, step: int, plan: Plan) -> None:
        for unit in self.units:
            if plan is Plan.COMPRESSED:
                self._take_momentum(unit)
                params, m, v = unit.params, unit.views(unit.state["m"]), unit.views(unit.state["v"])
            else:
                params, grads, m, v = with_gradient(unit, "m", "v")
                beta1, beta2 = unit.group["betas"]
                if params:
                    adam_moments(m, v, grads, beta1, beta2)
            if params:
                self._move(unit.group, step, params, m, v)

    def _take_momentum(self, unit: Unit) -> None:
        bits, scales = unit.result
        m, mask = unit.state["m"], self.support(unit).mask
        for row, chunk, scale in zip(m.view(scales.numel(), -1), bits.view(scales.numel(), -1), scales, strict=True):
            row.copy_(kernels.average_signs(chunk.view(1, -1), scale.view(1)))  # of one: scale times the signs
        if mask is not None:
            m.mul_(mask)

    def _move(self, group: dict[str, Any], step: int, params: list[Tensor], m: list[Tensor], v: list[Tensor]) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        denominator = torch._foreach_sqrt(v)
        rate = lr
        if self.bias_correction:
            torch._foreach_div_(denominator, (1 - beta2 ** min(step, self.warmup_steps)) ** 0.5)
            rate = lr / (1 - beta1**step)
        torch._foreach_add_(denominator, group["eps"])
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_addcdiv_(params, m, denominator, -rate)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        super().load_state_dict(state_dict)
        self._support.clear()
