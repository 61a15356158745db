"""1-bit LAMB: LAMB as full-precision warm-up, then 1-bit momentum with error feedback under frozen ratios.

Source: "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's Convergence Speed", HiPC 2022,
and its reference implementation (DeepSpeed). x is a parameter tensor; norms, maxima and coefficients are one for each.

Warm-up, t <= T, with g = mean_i g_i:

    (1) m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2;   r = m / (sqrt(v) + eps) + weight_decay x
    (2) c = |x| / |r| within [c_min, c_max], 1 where a norm is 0;   x = x - lr c r
    (3) c_avg = beta_c c_avg + (1 - beta_c) c                 where c is not 1
Once, at t = T:
    (4) s = mean over tensors of RMS(m), divided by RMS(m);   w = v
Afterwards, with v frozen at v_T and C the 1-bit mean with error feedback (birder/optim/onebit.py):
    (5) m_i = s (beta1 m + (1 - beta1) g_i)                   worker i; m is the common momentum of the step before
    (6) m' = C(m_1, ..., m_n) / s
    (7) g = (m' - beta1 m) / (1 - beta1);   m = m'            the reconstructed gradient
    (8) w = beta2 w + (1 - beta2) g^2                         the fresh variance
    (9) r0 = m / (sqrt(v_T) + eps);   r = r0 + weight_decay x
    (10) f = max (sqrt(v_T) + eps) / (sqrt(w) + eps);         f = p f + 1 - p with p = min(1, |r0|/|r|)
    (11) f within [f_min, f_max], and within [1 - theta, 1 + theta] times the f of the step before (1 at first)
    (12) x = x - lr c_avg f r

One-process reference: tests/helpers/reference_onebit_lamb.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from birder.comm import Mean, Requests, ShardMean
from birder.optim.adam import adam_moments
from birder.optim.checks import pair, require, require_fraction, require_number, require_whole
from birder.optim.contract import WIRES, Plan
from birder.optim.lamb import check_lamb, trust_ratios
from birder.optim.layout import Unit, maxima, norms
from birder.optim.onebit import OneBitMethod

VANISHED = 1e-9
"""A tensor whose momentum at the freeze is less than this share of the largest counts as one without momentum."""


class OneBitLAMB(OneBitMethod):
    """1-bit LAMB (see the module's docstring for the equations).

    warmup_steps:     T, at least 1; at least 1/(1 - coeff_beta), or c_avg is too small.
    min_coeff, max_coeff: c_min and c_max; None as upper bound: none.
    coeff_beta:       beta_c.
    factor_min, factor_max, factor_threshold: f_min, f_max and theta.
    options:          wire (of the warm-up), max_grad_norm, seed; see `BucketOptimizer`.

    State, the same on all ranks: m, v and w (`fresh`), fp32[d]; for each tensor c_avg (`coeff`), f (`factor`) and s
    (`scale`), fp32. Rank-local: the worker's error fp32[d] and the server's fp32[d/n].

    A coordinate whose variance is 0 when it is frozen does not move any more except by weight decay, and takes no part in
    scales. Nor does a tensor without momentum at that time: its s would be infinite. `scale` is 0 for such a tensor.

    The warm-up's mean is taken unit by unit in rank order, not by DDP, so that it overlaps backward as the 1-bit messages do.
    """

    carried: ClassVar[dict[str, str]] = {
        **OneBitMethod.carried,
        **dict.fromkeys(("m", "v", "fresh", "coeff", "factor", "scale"), "copy"),
    }
    on_shards: ClassVar[bool] = True
    read_in_update: ClassVar[frozenset[str]] = frozenset({"lr", "eps", "weight_decay", "min_coeff", "max_coeff"})
    by_tensor: ClassVar[frozenset[str]] = frozenset({"coeff", "factor", "scale"})

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        warmup_steps: int,
        min_coeff: float = 0.01,
        max_coeff: float | None = 10.0,
        coeff_beta: float = 0.9,
        factor_min: float = 0.5,
        factor_max: float = 4.0,
        factor_threshold: float = 0.1,
        **options: Any,
    ) -> None:
        self.warmup_steps = require_whole("warmup_steps", warmup_steps)
        self.coeff_beta = require_fraction("coeff_beta", coeff_beta)
        self.factor_min = require_number("factor_min", factor_min, "in (0, 1]", high=1.0, above=True)
        self.factor_max = require_number("factor_max", factor_max, "at least 1", low=1.0)
        self.factor_threshold = require_fraction("factor_threshold", factor_threshold)
        adam = {"lr": lr, "betas": pair(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, adam | {"min_coeff": min_coeff, "max_coeff": max_coeff}, **options)

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        check_lamb(group)
        # A ratio of exactly 1 is that of a tensor without a norm, and is left out of its average: (3).
        for name in ("min_coeff", "max_coeff"):
            require(group[name] != 1, name, group[name], "another number than 1, which stands for no ratio")

    def restores(self, name: str, step: int) -> bool:
        of_all = step == self.warmup_steps and name in ("fresh", "scale")  # (4)
        return not of_all and super().restores(name, step)

    def init_unit(self, unit: Unit) -> None:
        unit.keep("m", "v", "fresh")
        self.init_errors(unit)
        unit.keep("coeff", "factor", "scale", numel=len(unit.params))
        unit.state["factor"].fill_(1.0)

    def taking_part(self, unit: Unit) -> Tensor:
        """Where neither the unit's frozen variance nor its tensor's scale is 0."""
        mask = super().taking_part(unit)
        for part, scale in zip(unit.views(mask), unit.state["scale"], strict=True):
            part.logical_and_(scale > 0)
        return mask

    def exchange(self, unit: Unit, grad: Tensor, step: int) -> Requests[None]:
        if step <= self.warmup_steps:
            unit.result = yield Mean(grad, WIRES[self.wire])
            return
        self.note_lost(unit, grad, step)
        state, support = unit.state, self.support(unit)
        beta1 = unit.group["betas"][0]
        z = (yield ShardMean(grad)).mul_(1.0 - beta1)
        z.add_(state["m"][support.shard] * beta1)
        first, last = support.shard.start, support.shard.stop
        for p, offset, scale in zip(unit.params, unit.offsets, state["scale"], strict=True):
            # (5); a tensor may lie in several shards, and part of it in this one
            z[max(offset - first, 0) : max(min(offset + p.numel(), last) - first, 0)].mul_(scale)
        unit.result = yield from self.onebit_mean(unit, z)

    def update(self, step: int, plan: Plan) -> Requests[None]:
        for unit in self.units:
            yield from self._warm_up(unit) if step <= self.warmup_steps else self._compressed(unit)
        if step == self.warmup_steps:
            yield from self._freeze()

    def _warm_up(self, unit: Unit) -> Requests[None]:
        state, group = unit.state, unit.group
        adam_moments([state["m"]], [state["v"]], [unit.result], *group["betas"])
        r = unit.views(state["m"] / state["v"].sqrt().add_(group["eps"]))
        if group["weight_decay"]:
            torch._foreach_add_(r, unit.params, alpha=group["weight_decay"])  # (1)
        c = yield from trust_ratios(self.comm, unit.params, r, group)
        average = state["coeff"] * self.coeff_beta + c * (1 - self.coeff_beta)
        state["coeff"].copy_(torch.where(c != 1, average, state["coeff"]))  # (3)
        self._move(unit, r, c)  # (2)

    def _freeze(self) -> Requests[None]:
        """Equation (4), over all tensors that have momentum; the same on all ranks since m is."""
        sizes = []
        for unit in self.units:
            lengths = (yield from norms(self.comm, unit.state_views("m"))).double()
            roots = [p.numel() ** 0.5 for p in unit.wholes]
            sizes.append(torch.stack([length / root for length, root in zip(lengths.unbind(), roots, strict=True)]))
        everything = torch.cat([row.to(sizes[0].device) for row in sizes]) if sizes else torch.zeros(1, device="cpu")
        floor = VANISHED * everything.max()
        present = everything > floor
        mean = torch.where(present, everything, 0.0).sum() / present.sum().clamp(min=1)
        for unit, row in zip(self.units, sizes, strict=True):
            unit.state["fresh"].copy_(unit.state["v"])
            unit.state["scale"].copy_(torch.where(row > floor.to(row.device), mean.to(row.device) / row, 0.0))

    def _compressed(self, unit: Unit) -> Requests[None]:
        state, group = unit.state, unit.group
        beta1, beta2 = group["betas"]
        assert unit.grad is not None
        m, fresh, new = state["m"], state["fresh"], unit.grad  # the gradient has been sent: its buffer is free
        self.write_mean(unit, new, unit.result)
        for part, scale in zip(unit.views(new), torch.where(state["scale"] > 0, state["scale"], 1.0), strict=True):
            part.div_(scale)  # (6)
        g = (new - m * beta1).div_(1 - beta1)
        m.copy_(new)  # (7)
        fresh.mul_(beta2).addcmul_(g, g, value=1 - beta2)  # (8)
        frozen = state["v"].sqrt().add_(group["eps"])
        r = unit.views(m / frozen)
        f = yield from maxima(self.comm, unit.views(frozen.div_(fresh.sqrt().add_(group["eps"]))))
        if group["weight_decay"]:
            before = yield from norms(self.comm, r)
            torch._foreach_add_(r, unit.params, alpha=group["weight_decay"])  # (9)
            after = yield from norms(self.comm, r)
            p = torch.where(after > 0, before / after, 1.0).clamp(max=1.0)
            f = p * f + (1 - p)  # (10)
        last = state["factor"]
        f = f.clamp(self.factor_min, self.factor_max)
        f = f.clamp(last * (1 - self.factor_threshold), last * (1 + self.factor_threshold))  # (11)
        last.copy_(f)
        self._move(unit, r, state["coeff"] * f)  # (12)

    @staticmethod
    def _move(unit: Unit, r: list[Tensor], coefficients: Tensor) -> None:
        torch._foreach_mul_(r, list(coefficients.unbind()))
        torch._foreach_add_(unit.params, r, alpha=-unit.group["lr"])
