"""0/1 Adam with the rules of the reference implementation (DeepSpeed), where they differ from the paper's Algorithm 1.

Until `warmup_steps` the ranks' models are the same, and it is the gradient that is sent:

    (9)  t in T_v:  g = mean_i g_i in floats;  v as in (8);   otherwise  g = 1-bit mean of g_i
    (10) m = beta1 m + (1 - beta1) g;   x = x - lr (m / (sqrt(v) + eps) + weight_decay x)

afterwards (1)-(7) of birder/optimizers/zero_one_adam.py with the decay in the buffer and none in (6):

    (2') u_i = u_i + lr (m_i + weight_decay x_i (sqrt(v) + eps))

One-process reference: tests/helpers/reference_zero_one_adam.py with released=True.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from birder.comm import Mean, Requests, ShardMean
from birder.optimizers.contract import WIRES, Plan
from birder.optimizers.layout import Unit
from birder.optimizers.zero_one_adam import ZeroOneAdam


class DeepSpeedZeroOneAdam(ZeroOneAdam):
    """What `ZeroOneAdam(variant="deepspeed")` makes (see the module's docstring for the equations)."""

    aligned: ClassVar[bool] = True

    def sends_gradient(self, step: int) -> bool:
        """Whether the step is one of (9) and (10)."""
        return step <= self.warmup_steps

    def exchange(self, unit: Unit, grad: Tensor, step: int) -> Requests[None]:
        if step == self.warmup_steps + 1:  # errors change their unit, from gradient to buffer
            unit.state["worker_error"].zero_()
            unit.state["server_error"].zero_()
        if not self.sends_gradient(step):
            yield from super().exchange(unit, grad, step)
        elif self.has_variance_round(step):
            unit.result = (yield Mean(grad, WIRES[self.wire])), None
        else:
            unit.result = None, (yield from self.onebit_mean(unit, (yield ShardMean(grad))))  # (9)

    def _decay(self, unit: Unit, lr: float, decay: float) -> None:
        """(2')"""
        if decay:
            unit.state["u"].addcmul_(self.flat_parameters(unit), self._denominator(unit), value=lr * decay)

    def _summed_now(self, unit: Unit) -> Tensor:
        added = super()._summed_now(unit)
        rate = unit.group["lr"] * unit.group["weight_decay"]
        return added.addcmul_(self.flat_parameters(unit), self._denominator(unit), value=rate) if rate else added

    def _kept(self, unit: Unit) -> float:
        return 1.0

    def update(self, step: int, plan: Plan) -> Requests[None]:
        if not self.sends_gradient(step):
            yield from super().update(step, plan)
            return
        for unit in self.units:
            self._gradient_step(unit, *unit.result)

    def _gradient_step(self, unit: Unit, mean: Tensor | None, signs: Tensor | None) -> None:
        """(10), and of (9) what follows the exchange. All ranks do the same."""
        if mean is not None:
            self._update_variance(unit, mean)
        else:
            assert signs is not None
            mean = unit.zeros()
            self.write_mean(unit, mean, signs)
        unit.state["m"].lerp_(mean, 1.0 - unit.group["betas"][0])
        self._move(unit)
