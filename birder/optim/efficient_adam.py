"""Efficient-Adam: each worker's own Adam step goes up in one bit, their mean comes down so, both with error feedback.

Source: "Efficient-Adam: Communication-Efficient Distributed Adam", arXiv 2205.14473. Worker i, with all states 0 at first and
C(z) = (|z|_2 / sqrt(d)) sgn(z):

    (1) m_i = beta1 m_i + (1 - beta1) g_i;   v_i = beta2 v_i + (1 - beta2) g_i^2
    (2) p_i = lr (m_i / (1 - beta1^t)) / (sqrt(v_i / (1 - beta2^t)) + eps)
    (3) send C(p_i + e_i);  e_i = p_i + e_i - C(p_i + e_i);   the server likewise: birder/optim/onebit.py
    (4) x = x - mean - lr weight_decay x

Its text was not to be had, but for the abstract: two-way quantization and two-way error feedback of a distributed Adam with a
parameter server. C is 1-bit Adam's, so that the two can be compared. One-process reference: `EfficientAdam` in
tests/helpers/reference.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from birder import kernels
from birder.comm import AllGather, AllToAll, Requests, ShardMean
from birder.optim.checks import pair
from birder.optim.contract import Plan
from birder.optim.layout import Unit
from birder.optim.onebit import OneBitMean
from birder.optim.seen import SeenMap, there


class EfficientAdam(SeenMap, OneBitMean):
    """Efficient-Adam (see the module's docstring for the equations).

    params, lr, betas, eps, weight_decay: as in torch.optim.AdamW. options: max_grad_norm, seed; see `BucketOptimizer`.

    A coordinate whose gradient has been 0 on every rank in every step so far does not move. With a rate of 0 messages
    say nothing, and errors wait for another rate.

    State, rank-local: m_i, v_i and e_i, fp32[d]; with nodes as workers, or shards, fp32[d / ranks per node]. s: fp32[d/n].
    """

    carried: ClassVar[dict[str, str]] = {**OneBitMean.carried, "m": "mean", "v": "mean", "active": "copy"}
    on_shards: ClassVar[bool] = True
    uses_wire: ClassVar[bool] = False
    handles_nonfinite: ClassVar[bool] = True
    read_in_update: ClassVar[frozenset[str]] = frozenset({"weight_decay"})
    seen_by: ClassVar[str] = "v"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": pair(betas), "eps": eps, "weight_decay": weight_decay}, **options)

    def init_unit(self, unit: Unit) -> None:
        unit.keep("m", "v", numel=unit.padded // self.comm.shards)
        self.init_errors(unit)
        self.init_seen(unit)

    def taking_part(self, unit: Unit) -> Tensor:
        return there(unit)  # all, as in the source

    def exchange(self, unit: Unit, grad: Tensor, step: int) -> Requests[None]:
        group, m, v = unit.group, unit.state["m"], unit.state["v"]
        # In fp32, whether it is a float or a tensor: where signs of two workers cancel, its last bit may turn theirs.
        lr = torch.as_tensor(group["lr"], dtype=torch.float32, device="cpu").item()
        beta1, beta2 = group["betas"]
        g = yield ShardMean(grad)
        kernels.adam_moments(g, m, v, beta1=beta1, beta2=beta2, hold=False)  # (1)
        if lr:
            p = torch.sqrt(v).div_((1 - beta2**step) ** 0.5).add_(group["eps"])
            p = torch.div(m, p, out=p).mul_(lr / (1 - beta1**step))  # (2)
            if group["eps"] == 0:  # m / 0 would be in the scale of all, also where g^2 alone is too small for fp32
                p.masked_fill_(v == 0, 0.0)
            mean = yield from self.onebit_mean(unit, p)  # (3)
            self.write_mean(unit, grad, mean)
        else:
            # Ranks that have another rate would wait for ever for this one's messages, before all compare their rates.
            yield AllToAll(unit.buffers["bits"].zero_(), unit.buffers["rows"])
            yield AllGather(unit.buffers["chunk"].zero_(), unit.buffers["result"])
            grad.zero_()
        unit.result = grad

    def update(self, step: int, plan: Plan) -> None:
        for unit in self.units:
            if "active" in unit.state:
                unit.result.mul_(unit.state["active"])
            torch._foreach_mul_(unit.params, 1 - float(unit.group["lr"]) * unit.group["weight_decay"])
            torch._foreach_sub_(unit.params, unit.views(unit.result))  # (4)
            unit.result = None
