"""AdamW and BertAdam: the uncompressed baselines. References: torch.optim.AdamW, and tests/distributed/test_dense.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from birder.comm import Requests
from birder.comm.runtime import asking
from birder.optim.base import BucketOptimizer, Plan
from birder.optim.checks import pair, require_number
from birder.optim.layout import Unit, fusible, norms, with_gradient

Tensors = list[Tensor]


def adam_moments(m: list[Tensor], v: list[Tensor], grads: list[Tensor], beta1: float, beta2: float) -> None:
    """m = beta1 m + (1-beta1) g;  v = beta2 v + (1-beta2) g^2, in place, tensor by tensor."""
    beta1, beta2 = float(beta1), float(beta2)  # torch takes tensors as well
    torch._foreach_lerp_(m, grads, 1 - beta1)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, grads, grads, 1 - beta2)


def roots(v: Tensors, eps: float, correction: float = 1.0) -> Tensors:
    """sqrt(v) / correction + eps, tensor by tensor, in new memory."""
    found = list(torch._foreach_sqrt(v))
    if correction != 1.0:
        torch._foreach_div_(found, correction)
    torch._foreach_add_(found, eps)
    return found


class DenseAdam(BucketOptimizer):
    """What methods with Adam's two moments and a dense all-reduce of the gradient share.

    State: m and v, fp32[d], the same on all ranks. A parameter without gradient is left alone, and the step does not count
    for it, as in torch: once there is one, also the number of steps that each parameter has missed, int64 on the CPU.
    """

    carried: ClassVar[dict[str, str]] = {"m": "copy", "v": "copy", "missed": "copy"}
    by_tensor: ClassVar[frozenset[str]] = frozenset({"missed"})
    on_shards: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    def init_unit(self, unit: Unit) -> None:
        unit.keep("m", "v")

    def update(self, step: int, plan: Plan) -> Requests[None]:
        for unit in self.units:
            params, grads, m, v = with_gradient(unit, *self.moments(unit))
            there = [i for i, p in enumerate(unit.wholes) if p.grad is not None]
            if len(there) < len(unit.wholes):
                missed = unit.state.setdefault("missed", self._none_missed(unit))
                missed += 1
                missed[there] -= 1
            missed_by = unit.state["missed"][there].tolist() if "missed" in unit.state else [0] * len(there)
            for late in sorted(set(missed_by)):
                chosen = [k for k, count in enumerate(missed_by) if count == late]
                some = [[row[k] for k in chosen] for row in (params, grads, m, v)]
                yield from asking(self.move(unit.group, some[0], some[1], some[2], some[3], step - late))

    def moments(self, unit: Unit) -> tuple[str, str]:
        """The states that `move` is given as m and v."""
        return "m", "v"

    def joins(self, p: Tensor, kept: dict[str, Tensor], passed: int) -> dict[str, Tensor]:
        missed = kept.get("missed", torch.zeros((), dtype=torch.int64, device="cpu"))
        return kept | {"missed": missed + passed}

    @staticmethod
    def _none_missed(unit: Unit) -> Tensor:
        return torch.zeros(len(unit.params), dtype=torch.int64, device="cpu")

    def load_unit(self, unit: Unit, tensors: dict[str, Tensor]) -> None:
        unit.state.pop("missed", None)
        if "missed" in tensors:
            unit.state["missed"] = self._none_missed(unit)
        super().load_unit(unit, tensors)

    def complete_state(self, unit: Unit) -> dict[str, Tensor]:
        return {"missed": self._none_missed(unit)} | unit.state

    def move(
        self, group: dict[str, Any], params: Tensors, grads: Tensors, m: Tensors, v: Tensors, step: int
    ) -> Requests[None] | None:
        """The method: step number `step` (from 1) of parameters with their mean gradients and moments, in place."""
        raise NotImplementedError


class AdamW(DenseAdam):
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
        super().__init__(params, {"lr": lr, "betas": pair(betas), "eps": eps, "weight_decay": weight_decay}, **options)

    def move(self, group: dict[str, Any], params: Tensors, grads: Tensors, m: Tensors, v: Tensors, step: int) -> None:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]  # torch takes a tensor as well
        if fusible(params, grads):  # in one pass
            count = torch.full((), float(step), dtype=torch.float32, device="cpu")  # whatever the script's defaults are
            torch._fused_adamw_(
                params, grads, m, v, [], [count] * len(params), lr=lr, beta1=beta1, beta2=beta2,
                weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=False,
            )  # fmt: skip
            return
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        adam_moments(m, v, grads, beta1, beta2)
        denominator = roots(v, group["eps"], (1 - beta2**step) ** 0.5)
        torch._foreach_addcdiv_(params, m, denominator, -lr / (1 - beta1**step))


class BertAdam(DenseAdam):
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
        adam = {"lr": lr, "betas": pair(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, adam | {"tensor_clip": tensor_clip}, **options)

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        require_number("tensor_clip", group["tensor_clip"], "positive or None", above=True, none=True)

    def move(
        self, group: dict[str, Any], params: Tensors, grads: Tensors, m: Tensors, v: Tensors, step: int
    ) -> Requests[None]:
        if group["tensor_clip"] is not None:
            factors = (group["tensor_clip"] / ((yield from norms(self.comm, grads)) + 1e-6)).clamp(max=1.0)
            grads = list(torch._foreach_mul(grads, list(factors.unbind())))
        adam_moments(m, v, grads, *group["betas"])
        denominator = roots(v, group["eps"])
        lr = float(group["lr"])
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_addcdiv_(params, m, denominator, -lr)
