"""LAMB: Adam's direction, its length in each tensor set by the length of the tensor itself.

Source: "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020.

With g = mean_i g_i, for every parameter tensor x by itself:

    (1) m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
    (2) r = m' / (sqrt(v') + eps) + weight_decay x          m' = m/(1-beta1^t), v' = v/(1-beta2^t)
    (3) c = phi(|x|) / |r|,  phi(z) = min(max(z, low), high);  c = 1 where |x| or |r| is 0
    (4) x = x - lr c r

One-process reference: tests/distributed/test_lamb.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from birder.comm import Communicator, Requests
from birder.optim.adam import DenseAdam, Tensors, adam_moments, roots
from birder.optim.checks import is_pair, pair, require, require_flag, require_number
from birder.optim.layout import norms


def check_lamb(group: dict[str, Any]) -> None:
    """Raises ValueError for eps or bounds of the ratio out of range."""
    # 0/0 in one coordinate without gradient would spoil the norm of its whole tensor.
    require_number("eps", group["eps"], "above 0", above=True)
    low, high = group["min_coeff"], group["max_coeff"]
    require_number("min_coeff", low)
    if high is not None:
        require_number("max_coeff", high, "above 0, at least min_coeff, or None", low, above=low == 0)


def trust_ratios(
    comm: Communicator,
    params: list[Tensor],
    updates: list[Tensor],
    group: dict[str, Any],
    phi: tuple[float, float] | None = None,
) -> Requests[Tensor]:
    """c of equation (3) for every tensor, fp32[len(params)], within [min_coeff, max_coeff] of the group."""
    x, r = (yield from norms(comm, [*params, *updates])).chunk(2)
    size = x if phi is None else x.clamp(*phi)
    c = (size / r).clamp(group["min_coeff"], group["max_coeff"])
    return torch.where((x > 0) & (r > 0), c, torch.ones_like(c))


class LAMB(DenseAdam):
    """LAMB with a dense all-reduce of the gradient (see the module's docstring for the equations).

    weight_decay:    inside of r, so that the ratio sees it.
    bias_correction: m' and v' of (2), as published. DeepSpeed's code has none: m' = m, v' = v.
    min_coeff, max_coeff: bounds of the ratio c. None as upper bound: none, as published; DeepSpeed's code: 0.01 and 10.
    phi:             (low, high), the bounds of the norm in (3). None: phi(z) = z.
    options:         wire, max_grad_norm; see `BucketOptimizer`.

    State: m and v, fp32[d], the same on all ranks. Parameters without gradient are left alone.
    """

    elementwise: ClassVar[bool] = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        min_coeff: float = 0.0,
        max_coeff: float | None = None,
        phi: tuple[float, float] | None = None,
        **options: Any,
    ) -> None:
        self.bias_correction = require_flag("bias_correction", bias_correction)
        adam = {"lr": lr, "betas": pair(betas), "eps": eps, "weight_decay": weight_decay}
        ratio = {"min_coeff": min_coeff, "max_coeff": max_coeff, "phi": pair(phi)}
        super().__init__(params, adam | ratio, **options)

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        check_lamb(group)
        phi = group["phi"]
        ordered = phi is None or (is_pair(phi) and 0 <= phi[0] <= phi[1] and phi[1] > 0)
        require(ordered, "phi", phi, "two rising numbers of 0 or more, or None")

    def move(
        self, group: dict[str, Any], params: Tensors, grads: Tensors, m: Tensors, v: Tensors, step: int
    ) -> Requests[None]:
        beta1, beta2 = group["betas"]
        adam_moments(m, v, grads, beta1, beta2)  # (1)
        first, root = (1 - beta1**step, (1 - beta2**step) ** 0.5) if self.bias_correction else (1.0, 1.0)
        r = torch._foreach_div(m, roots(v, group["eps"], root))
        if first != 1.0:
            torch._foreach_div_(r, first)
        if group["weight_decay"]:
            torch._foreach_add_(r, params, alpha=group["weight_decay"])  # (2)
        c = yield from trust_ratios(self.comm, params, list(r), group, group["phi"])  # (3)
        torch._foreach_mul_(r, list(c.unbind()))
        torch._foreach_add_(params, r, alpha=-group["lr"])  # (4)
