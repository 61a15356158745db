"""SGDM, AdamW and BertAdam: the uncompressed baselines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from birder.optimizers.base import BucketOptimizer, Plan, require
from birder.optimizers.layout import Unit


def with_gradient(unit: Unit, *names: str) -> tuple[list[Tensor], ...]:
    """Parameters that have a gradient, their gradients in fp32, and views of the named states."""
    chosen = [i for i, p in enumerate(unit.params) if p.grad is not None]
    params = [unit.params[i] for i in chosen]
    grads = [p.grad.to(torch.float32) for p in params]  # type: ignore[union-attr]
    return params, grads, *([unit.view(unit.state[n], i) for i in chosen] for n in names)


def adam_moments(m: list[Tensor], v: list[Tensor], grads: list[Tensor], beta1: float, beta2: float) -> None:
    """m = beta1 m + (1-beta1) g;  v = beta2 v + (1-beta2) g^2, in place, tensor by tensor."""
    torch._foreach_lerp_(m, grads, 1 - beta1)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, grads, grads, 1 - beta2)


def check_adam(group: dict[str, Any]) -> None:
    """Raises ValueError for betas or eps out of range."""
    for beta in group["betas"]:
        require(0 <= beta < 1, "betas", tuple(group["betas"]), "two numbers in [0, 1)")
    require(group["eps"] >= 0, "eps", group["eps"], "at least 0")


class SGDM(BucketOptimizer):
    """SGD with momentum, weight decay coupled (L2), as torch.optim.SGD.

    g = mean_i g_i + weight_decay x;  buf = momentum buf + g;  x = x - lr buf        (nesterov: x - lr (g + momentum buf))
    """

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

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        require(0 <= group["momentum"] < 1, "momentum", group["momentum"], "in [0, 1)")

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
            torch._foreach_mul_(bufs, group["momentum"])
            torch._foreach_add_(bufs, grads)
            if group["nesterov"]:
                bufs = list(torch._foreach_add(grads, bufs, alpha=group["momentum"]))
            torch._foreach_add_(params, bufs, alpha=-group["lr"])


class AdamW(BucketOptimizer):
    """Adam with bias correction and decoupled weight decay, as torch.optim.AdamW.

    x = x - lr weight_decay x;  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2
    x = x - lr/(1-b1^t) m / (sqrt(v)/sqrt(1-b2^t) + eps)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        **options: Any,
    ) -> None:
        """`options`: wire, max_grad_norm; see `BucketOptimizer`."""
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}, **options)

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        check_adam(group)

    def init_unit(self, unit: Unit) -> None:
        unit.state["m"] = unit.zeros()
        unit.state["v"] = unit.zeros()

    def update(self, step: int, plan: Plan) -> None:
        for unit in self.units:
            params, grads, m, v = with_gradient(unit, "m", "v")
            if not params:
                continue
            lr, (beta1, beta2), eps = unit.group["lr"], unit.group["betas"], unit.group["eps"]
            torch._foreach_mul_(params, 1 - lr * unit.group["weight_decay"])
            adam_moments(m, v, grads, beta1, beta2)
            denominator = torch._foreach_sqrt(v)
            torch._foreach_div_(denominator, (1 - beta2**step) ** 0.5)
            torch._foreach_add_(denominator, eps)
            torch._foreach_addcdiv_(params, m, denominator, -lr / (1 - beta1**step))


class BertAdam(BucketOptimizer):
    """Adam as BERT's authors used it: no bias correction, decoupled decay, each tensor's gradient clipped to norm 1.

    g = g min(1, clip/|g|) for every tensor;  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2
    x = x - lr (m / (sqrt(v) + eps) + weight_decay x)

    Differences from the released BertAdam: the schedule is outside, as a torch lr scheduler; its first step does not
    have lr 0.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 5e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        tensor_clip: float | None = 1.0,
        **options: Any,
    ) -> None:
        """tensor_clip: largest norm of each tensor's gradient, or None. `options`: see `BucketOptimizer`."""
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "tensor_clip": tensor_clip,
        }
        super().__init__(params, defaults, **options)

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        check_adam(group)
        clip = group["tensor_clip"]
        require(clip is None or clip > 0, "tensor_clip", clip, "positive or None")

    def init_unit(self, unit: Unit) -> None:
        unit.state["m"] = unit.zeros()
        unit.state["v"] = unit.zeros()

    def update(self, step: int, plan: Plan) -> None:
        for unit in self.units:
            params, grads, m, v = with_gradient(unit, "m", "v")
            if not params:
                continue
            group, (beta1, beta2) = unit.group, unit.group["betas"]
            if group["tensor_clip"] is not None:
                norms = torch._foreach_norm(grads)
                factors = [(group["tensor_clip"] / (norm + 1e-6)).clamp(max=1.0) for norm in norms]
                grads = list(torch._foreach_mul(grads, factors))
            adam_moments(m, v, grads, beta1, beta2)
            denominator = torch._foreach_sqrt(v)
            torch._foreach_add_(denominator, group["eps"])
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_addcdiv_(params, m, denominator, -group["lr"])
