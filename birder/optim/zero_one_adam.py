"""0/1 Adam: 1-bit rounds and local steps from the start, with a variance that is refreshed ever more rarely, then frozen.

Source: "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam", ICLR 2023, Algorithm 1.

Worker i in every step t; T_u and T_v are the steps with a 1-bit round and with a variance round:

    (1) m_i = beta1 m_i + (1 - beta1) g_i
    (2) u_i = u_i + lr m_i                               momentum scaled, summed since the last sync
    (3) x_i = (1 - lr weight_decay) x_i - lr m_i / (sqrt(v) + eps)       t not in T_u: a local step
    t in T_u, instead of (3), with R the steps since the last sync, this one included, and x' the model of that sync:
    (4) u = 1-bit mean of u_i, with error feedback on workers and servers
    (5) m_i = u / sum_R lr
    (6) x_i = prod_R (1 - lr weight_decay) x' - u / (sqrt(v) + eps)
    (7) u_i = 0
    t in T_v:
    (8) v = beta2 v + (1 - beta2) (mean_i g_i)^2         in floats, after the model has moved

Where a caller has changed parameters since the last sync (`ParameterWatch`), (6) starts not from x', but from the mean of
what ranks have when their local steps are taken from their x_i again; it is sent in fp32.

The steps of T_u and T_v: birder/optim/zero_one_schedule.py.

The reference implementation (DeepSpeed) has other rules. Until `warmup_steps` the ranks' models are the same, and it is the
gradient that is sent:

    (9)  t in T_v:  g = mean_i g_i in floats;  v as in (8);   otherwise  g = 1-bit mean of g_i
    (10) m = beta1 m + (1 - beta1) g;   x = x - lr (m / (sqrt(v) + eps) + weight_decay x)

afterwards (1)-(7) with the decay in the buffer and none in (6):

    (2') u_i = u_i + lr (m_i + weight_decay x_i (sqrt(v) + eps))

One-process reference: tests/helpers/reference_zero_one_adam.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from birder.comm import Mean, Requests, ShardMean
from birder.optim import zero_one_schedule as schedule
from birder.optim.checks import become, pair, require_choice, require_whole
from birder.optim.contract import WIRES, Plan
from birder.optim.layout import Unit
from birder.optim.onebit import OneBitMethod


class ZeroOneAdam(OneBitMethod):
    """0/1 Adam (see the module's docstring for the equations). Between syncs the ranks' models differ.

    warmup_steps:   at least 1: until then every step is a sync and the variance is refreshed; then it is frozen. The paper
                    takes the end of the learning rate's warm-up.
    kappa:          after so many variance rounds the gap between them doubles, from 1 on.
    local_doubling: after the warm-up, the steps in which the interval between syncs doubles, from 1 on: those in which
                    the learning rate halves. (32,678 is published; 32,768 may have been meant.)
    local_limit:    the largest interval.
    variant:        old: "deepspeed" is the class `DeepSpeedZeroOneAdam`.
    options:        wire (of variance rounds), max_grad_norm, seed; see `BucketOptimizer`.

    There is no bias correction: after k variance rounds v holds 1 - beta2^k of what it estimates, and steps are
    1 / sqrt(1 - beta2^k) times Adam's. With the 153 rounds published for BERT (warmup_steps 12,500, kappa 16) that is
    2.7; where a short run has 14, 8.5: try an lr as much smaller.

    A step with lr 0 changes neither m nor u, since (5) would divide by 0.

    State: v, fp32[d], the same on all ranks; m, u and the model of the last sync, fp32[d]; rank-local the worker's error
    fp32[d] and the server's fp32[d/n]; two numbers for each unit.

    A coordinate whose variance is 0 does not move, is not learnt from and takes no part in scales. It joins in the step
    after the first variance round with a gradient there.
    """

    local_models: ClassVar[bool] = True
    carried: ClassVar[dict[str, str]] = {
        **OneBitMethod.carried,
        "m": "mean",
        "u": "mean",
        "v": "copy",
        "last": "copy",
        "sums": "copy",
    }
    warmup_counts: ClassVar[bool] = False
    aligned: ClassVar[bool] = False
    """Which of the two rules for T_u and T_v: see zero_one_schedule.py."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        warmup_steps: int,
        kappa: int = 16,
        local_doubling: int = 32678,
        local_limit: int = 16,
        variant: str = "paper",
        **options: Any,
    ) -> None:
        self.warmup_steps = require_whole("warmup_steps", warmup_steps)
        self.kappa = require_whole("kappa", kappa)
        self.local_doubling = require_whole("local_doubling", local_doubling)
        self.local_limit = require_whole("local_limit", local_limit)
        require_choice("variant", variant, "paper", "deepspeed")
        if variant != "paper":
            become(self, DeepSpeedZeroOneAdam, f"variant={variant!r}")
        super().__init__(params, {"lr": lr, "betas": pair(betas), "eps": eps, "weight_decay": weight_decay}, **options)

    # ---- the schedule ------------------------------------------------------------------------------------------------

    def synced(self, step: int) -> bool:
        """Whether all ranks have the same model after step `step`."""
        return schedule.sync(step, self.warmup_steps, self.local_doubling, self.local_limit, self.aligned)

    def has_variance_round(self, step: int) -> bool:
        return step in schedule.variance_steps(self.warmup_steps, self.kappa, self.aligned)

    def plan(self, step: int) -> Plan:
        return Plan.COMPRESSED if self.synced(step) else Plan.SKIP

    def restores(self, name: str, step: int) -> bool:
        return name != "last" and super().restores(name, step)  # it repeats the parameters

    # ---- state -------------------------------------------------------------------------------------------------------

    def init_unit(self, unit: Unit) -> None:
        unit.keep("m", "v", "u", "last")
        self.init_errors(unit)
        # Since the last sync: the sum of lr and the product of 1 - lr weight_decay. Read by the host, so kept there.
        unit.state["sums"] = torch.tensor([0.0, 1.0], dtype=torch.float64, device="cpu")

    def joins(self, p: Tensor, kept: dict[str, Tensor], passed: int) -> dict[str, Tensor]:
        self._joined = True
        # Ranks have met in it since, and the sums are of its whole unit: both begin again.
        return {name: t for name, t in kept.items() if name not in ("u", "sums")} if passed else kept

    def bind(self, *args: Any, **kwargs: Any) -> None:
        """As `BucketOptimizer.bind`. What joins between two syncs has no x' in `last`: the next one averages models."""
        self._joined = False
        super().bind(*args, **kwargs)
        if self._joined and self._apart:
            self.watch.restore(self.units, True)

    # ---- the step ----------------------------------------------------------------------------------------------------

    def exchange(self, unit: Unit, grad: Tensor, step: int) -> Requests[None]:
        """(1), (2) and the step's rounds: `unit.result` is what those in floats and in one bit have given."""
        self.note_lost(unit, grad, step)
        mean = signs = None
        if self.has_variance_round(step):
            mean = yield Mean(grad, WIRES[self.wire])
        self._accumulate(unit, grad)
        if self.synced(step):
            signs = yield from self.onebit_mean(unit, (yield ShardMean(unit.state["u"])))  # (4)
        unit.result = mean, signs

    def _accumulate(self, unit: Unit, grad: Tensor) -> None:
        """(1) and (2), and what (5) and (6) need of the learning rates."""
        state, lr = unit.state, float(unit.group["lr"])
        if not lr:
            return
        state["m"].lerp_(grad, 1.0 - unit.group["betas"][0])
        mask = self.support(unit).mask
        if mask is not None:
            state["m"].mul_(mask)
        self.add_step(unit, state["u"])
        state["sums"][0] += lr
        state["sums"][1] *= self.kept(unit)

    def update(self, step: int, plan: Plan) -> Requests[None]:
        """(3), or (5) to (8)."""
        meets = plan is not Plan.SKIP
        changed = self._apart and (yield from self.watch.anywhere(self.comm, self.units, meets))
        for unit in self.units:
            mean, signs = unit.result
            if not meets:  # (3)
                if not self._apart:
                    unit.state["last"].copy_(self.flat_parameters(unit))
                self.move(unit)
                self.watch.note(unit)
                continue
            yield from self._sync(unit, signs, changed, step)
            if mean is not None:
                self.update_variance(unit, mean)

    def move(self, unit: Unit) -> None:
        lr, decay = float(unit.group["lr"]), unit.group["weight_decay"]
        if decay:
            torch._foreach_mul_(unit.params, 1.0 - lr * decay)
        self._subtract(unit, unit.state["m"], lr)

    def _sync(self, unit: Unit, signs: Tensor, changed: bool, step: int) -> Requests[None]:
        """(5)-(7). Nothing in it depends on the rank: after it all ranks have the same m and x, bit for bit."""
        u, start = unit.state["u"], unit.state["last"]
        rate, kept = unit.state["sums"].tolist()
        if changed:
            start, kept = (yield Mean(self._steps_taken_back(unit))), self.kept(unit)
        self.write_mean(unit, u, signs)
        if self._apart:
            torch._foreach_copy_(unit.params, unit.views(start))
        if kept != 1.0:
            torch._foreach_mul_(unit.params, kept)
        self._subtract(unit, u, 1.0)
        if rate:
            self.note_far(unit, u, lr=rate, step=step)
            unit.state["m"].copy_(u).div_(rate)
        u.zero_()
        self.watch.forget(unit)
        unit.state["sums"].copy_(torch.tensor([0.0, 1.0], device="cpu"))

    def _steps_taken_back(self, unit: Unit) -> Tensor:
        """This rank's x, with its local steps since the last sync added to it again: fp32[padded]."""
        now = unit.zeros()
        self.add_step(unit, now)  # this step's part of u has not moved x
        return self.flat_parameters(unit).add_(self._quotient(unit, unit.state["u"] - now))

    def _subtract(self, unit: Unit, numerator: Tensor, rate: float) -> None:
        """x = x - rate numerator / (sqrt(v) + eps), within the support."""
        torch._foreach_add_(unit.params, unit.views(self._quotient(unit, numerator)), alpha=-rate)

    def _quotient(self, unit: Unit, numerator: Tensor) -> Tensor:
        """numerator / (sqrt(v) + eps), 0 outside the support."""
        step = numerator / self.denominator(unit)
        mask = self.support(unit).mask
        if mask is not None:
            step.masked_fill_(~mask, 0.0)  # not a product: 0 / 0 when eps is 0
        return step

    def denominator(self, unit: Unit) -> Tensor:
        return unit.state["v"].sqrt().add_(unit.group["eps"])

    def update_variance(self, unit: Unit, mean: Tensor) -> None:
        """(8). The mean is the same on all ranks, and so is the new support."""
        beta2 = unit.group["betas"][1]
        unit.state["v"].mul_(beta2).addcmul_(mean, mean, value=1.0 - beta2)

    # ---- what the reference implementation does otherwise ----------------------------------------------------------

    def add_step(self, unit: Unit, total: Tensor) -> None:
        """Adds what (2) takes up in this step."""
        total.add_(unit.state["m"], alpha=float(unit.group["lr"]))

    def kept(self, unit: Unit) -> float:
        """What this step's weight decay leaves of x in (6)."""
        return 1.0 - float(unit.group["lr"]) * unit.group["weight_decay"]


class DeepSpeedZeroOneAdam(ZeroOneAdam):
    """0/1 Adam by the reference implementation's rules (see the module's docstring for the equations)."""

    warmup_counts: ClassVar[bool] = True
    aligned: ClassVar[bool] = True

    def reads_parameters(self, step: int) -> bool:
        """(2') does, behind the warm-up; a script that changes them is refused before."""
        return any(group["weight_decay"] for group in self.param_groups)

    def exchange(self, unit: Unit, grad: Tensor, step: int) -> Requests[None]:
        if step > self.warmup_steps:
            if step == self.warmup_steps + 1:  # errors change their unit, from gradient to buffer
                unit.state["worker_error"].zero_()
                unit.state["server_error"].zero_()
            yield from super().exchange(unit, grad, step)
        elif self.has_variance_round(step):
            unit.result = (yield Mean(grad, WIRES[self.wire])), None
        else:
            unit.result = None, (yield from self.onebit_mean(unit, (yield ShardMean(grad))))  # (9)

    def update(self, step: int, plan: Plan) -> Requests[None]:
        if step > self.warmup_steps:
            yield from super().update(step, plan)
            return
        for unit in self.units:
            mean, signs = unit.result
            if mean is not None:
                self.update_variance(unit, mean)
            else:
                mean = unit.zeros()
                self.write_mean(unit, mean, signs)
            unit.state["m"].lerp_(mean, 1.0 - unit.group["betas"][0])
            self.move(unit)  # (10)

    def add_step(self, unit: Unit, total: Tensor) -> None:
        super().add_step(unit, total)
        if rate := float(unit.group["lr"]) * unit.group["weight_decay"]:
            total.addcmul_(self.flat_parameters(unit), self.denominator(unit), value=rate)  # (2')

    def kept(self, unit: Unit) -> float:
        return 1.0
