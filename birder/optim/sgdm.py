"""SGD with momentum: the uncompressed baseline. One-process reference: torch.optim.SGD (tests/distributed/test_dense.py)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from birder.optim.base import BucketOptimizer, Plan
from birder.optim.layout import Unit, with_gradient


class SGDM(BucketOptimizer):
    """SGD with momentum, weight decay coupled (L2), as torch.optim.SGD.

    g = mean_i g_i + weight_decay x;  buf = momentum buf + g;  x = x - lr buf        (nesterov: x - lr (g + momentum buf))
    """

    carried: ClassVar[dict[str, str]] = {"momentum": "copy"}
    on_shards: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Any,
    ) -> None:
        """`options`: wire, max_grad_norm; see `BucketOptimizer`."""
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, defaults, **options)

    def init_unit(self, unit: Unit) -> None:
        unit.state["momentum"] = unit.zeros()

    def update(self, step: int, plan: Plan) -> None:
        for unit in self.units:
            params, grads, bufs = with_gradient(unit, "momentum")
            if not params:
                continue
            group = unit.group
            if group["weight_decay"]:
                grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
            if group["momentum"]:
                torch._foreach_mul_(bufs, group["momentum"])
                torch._foreach_add_(bufs, grads)
            else:  # as in torch the buffer stays
                bufs = grads
            if group["nesterov"]:
                bufs = list(torch._foreach_add(grads, bufs, alpha=group["momentum"]))
            torch._foreach_add_(params, bufs, alpha=-group["lr"])
