"""CSER and M-CSER: SGD whose ranks apply what was not sent to their own model, and reset that error every H steps.

Source: "CSER: Communication-efficient SGD with Error Reset", NeurIPS 2020. C1 and C2 are two compressors
(birder/optim/sparse.py) with ratios R_C1 and R_C2; p_i is the local step (birder/optim/blockwise.py).

    PSync(v_i, C)     r_i = v_i - C(v_i);   v'_i = mean_j C(v_j) + r_i                        (Algorithm 3)

Implementation I, rank i, with e_i = 0 at first (Algorithm 2; with momentum Algorithm 4):

    (1) p'_i, r_i = PSync(p_i, C2)
    (2) x_i = x_i - p'_i;   e_i = e_i - r_i
    (3) every H steps:   e'_i, s_i = PSync(e_i, C1);   x_i = x_i + e'_i - e_i;   e_i = s_i

z = x_i - e_i is the same on all ranks: z = z - mean_j C2(p_j), and in (3) z = z + mean_j C1(e_j). It is z that is kept here,
at first x, and e_i = x_i - z: whatever the caller does to x_i (clips it, loads another) is then a part of e_i, and averaged.
With top_k, after such a change, (3) is followed by x_i = z = mean_j x_j, sent in fp32 (watch.py).

Implementation II is the same in exact arithmetic when all ranks choose the same coordinates, as they do with all compressors
but top_k, and keeps no z:

    (4) p'_i as in (1);   x_i = x_i - p'_i
    (5) every H steps:   x_i = PSync(x_i, C1)

The released code's variant synchronises nothing but the model:

    (6) x_i = x_i - p_i;   x_i = PSync(x_i, C1) every H steps, PSync(x_i, C2) in all others

One-process reference: `CSER` in tests/helpers/reference_cser.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from birder.comm import Mean, Requests
from birder.optim.blockwise import BlockwiseSGD
from birder.optim.checks import require, require_choice, require_whole
from birder.optim.contract import Plan
from birder.optim.layout import Unit
from birder.optim.sparse import Sent

MODEL, GRADIENT = 1, 2
"""Streams of the draws of C1 and C2."""


def _sent(gradient_ratio: float | None) -> int | None:
    """R_C2; None where updates are not sent."""
    none = gradient_ratio is None or (isinstance(gradient_ratio, float) and gradient_ratio == math.inf)
    return None if none else require_whole("gradient_ratio", gradient_ratio)


def overall_ratio(gradient_ratio: float | None, model_ratio: int, reset_every: int, variant: str = "paper") -> float:
    """R_C, how many times fewer elements are sent than by SGD: 1/(1/R_C2 + 1/(R_C1 H)).

    gradient_ratio: R_C2; None or infinite: C2 sends nothing. With R_C2 = 1 there is no error, and no reset is sent.
    variant:        "released": on every H-th step C1 takes the place of C2, so 1/((1 - 1/H)/R_C2 + 1/(R_C1 H)).
    Raises ValueError for what `CSER` does not take.
    """
    gradient_ratio = _sent(gradient_ratio)
    require_whole("model_ratio", model_ratio)
    require_whole("reset_every", reset_every)
    require_choice("variant", variant, "paper", "released")
    ordinary = 0.0 if gradient_ratio is None else 1.0 / gradient_ratio
    if variant == "paper" and ordinary == 1.0:
        return 1.0
    share = 1.0 - 1.0 / reset_every if variant == "released" else 1.0
    return 1.0 / (ordinary * share + 1.0 / (model_ratio * reset_every))


class CSER(BlockwiseSGD):
    """CSER, and with momentum M-CSER (see the module's docstring for the equations).

    gradient_ratio: R_C2, a whole number; None or infinity: updates are not synchronised (CSEA, CSER-PL, local SGD).
    model_ratio:    R_C1, a whole number.
    reset_every:    H.
    implementation: "I" keeps z, "II" does not. Of no meaning with variant="released".
    nesterov, block, variant, compressor, options: see `BlockwiseSGD`. top_k wants implementation I of the paper's variant.

    State: m, fp32[d], rank-local, where momentum is above 0; with implementation I also z, fp32[d], the same on all ranks.
    Parameters differ between ranks: `averaged` is what to evaluate.
    """

    local_models: ClassVar[bool] = True
    reads_at_times: ClassVar[bool] = True
    carried: ClassVar[dict[str, str]] = {"momentum": "mean", "common": "copy"}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        gradient_ratio: float | None = 64,
        model_ratio: int = 4,
        reset_every: int = 16,
        implementation: str = "I",
        **options: Any,
    ) -> None:
        self.gradient_ratio = _sent(gradient_ratio)
        self.model_ratio = require_whole("model_ratio", model_ratio)
        self.reset_every = require_whole("reset_every", reset_every)
        self.implementation = require_choice("implementation", implementation, "I", "II")
        super().__init__(params, lr, momentum, weight_decay, **options)
        # What averages parts of the models themselves (5), (6) needs the same part on all ranks.
        wanted = "blocks or random_k with implementation='II' or variant='released'"
        require(self.same_choice or self.keeps_common, "compressor", self.compressor, wanted)

    @property
    def keeps_common(self) -> bool:
        """Whether z is part of the state."""
        return self.variant == "paper" and self.implementation == "I"

    def resets(self, step: int) -> bool:
        """Whether C1 acts in this step. With R_C2 = 1 every update is sent whole, and there is nothing to reset."""
        return step % self.reset_every == 0 and not (self.variant == "paper" and self.gradient_ratio == 1)

    def reads_parameters(self, step: int) -> bool:
        return super().reads_parameters(step) or self.resets(step)

    def plan(self, step: int) -> Plan:
        return Plan.COMPRESSED if self.gradient_ratio is not None or self.resets(step) else Plan.SKIP

    def restores(self, name: str, step: int) -> bool:
        return name != "common" or step > 1  # it is made of the parameters in the first step

    def init_unit(self, unit: Unit) -> None:
        super().init_unit(unit)
        if self.keeps_common:
            unit.state["common"] = unit.zeros()

    def joins(self, p: Tensor, kept: dict[str, Tensor], passed: int) -> dict[str, Tensor]:
        return {"common": p.detach()} | kept  # z is at first x

    def exchange(self, unit: Unit, grad: Tensor, step: int) -> Requests[None]:
        p = self.local_step(unit, grad)
        resets = self.resets(step)
        if self.variant == "released":
            ratio, stream = (self.model_ratio, MODEL) if resets else (self.gradient_ratio, GRADIENT)
            sent = None if ratio is None else (yield from self._send_model(unit, p, ratio, step, stream))
            unit.result = [p], sent  # (6)
            return
        if self.keeps_common and step == 1:
            # Read in `update` where that will do: by then the caller may have changed it.
            z = unit.state["common"]
            z.copy_(self.flat_parameters(unit)) if self.resets(1) else z.zero_()
        sent = yield from self.send(unit, p, self.gradient_ratio, step, GRADIENT)
        sent.add_own(p, -1)  # r
        sent.add_mean(p)  # (1): p'
        if self.keeps_common:
            sent.add_mean(unit.state["common"], -1)  # (2)
        changes = [p]
        model: Sent | None = None
        if resets and self.keeps_common:
            changes.append((yield from self._reset(unit, p, step)))  # (3)
        elif resets:
            model = yield from self._send_model(unit, p, self.model_ratio, step, MODEL)  # (5)
        unit.result = changes, model

    def _reset(self, unit: Unit, p: Tensor, step: int) -> Requests[Tensor]:
        """e - e' of (3), fp32[padded]."""
        z = unit.state["common"]
        e = self.flat_parameters(unit).sub_(p).sub_(z)
        sent = yield from self.send(unit, e, self.model_ratio, step, MODEL)
        sent.add_mean(z)
        change = e.zero_()
        sent.add_own(change)
        sent.add_mean(change, -1)
        return change

    def _send_model(self, unit: Unit, p: Tensor, ratio: int, step: int, stream: int) -> Requests[Sent]:
        """Of PSync(x - p, C) all but its last sum."""
        x = self.flat_parameters(unit).sub_(p)
        # As fp32 whatever `wire` is: rounded to half precision, steps smaller than 2^-8 x would be lost.
        return (yield from self.send(unit, x, ratio, step, stream, torch.float32))

    def update(self, step: int, plan: Plan) -> Requests[None]:
        # Whether all models are averaged whole, after a reset, because any rank's caller has changed parameters.
        whole = self._watches and (yield from self.watch.anywhere(self.comm, self.units, self.resets(step)))
        for unit in self.units:
            changes, model = unit.result
            if self.keeps_common and step == 1 and not self.resets(1):
                unit.state["common"].add_(self.flat_parameters(unit))
            for change in changes:
                torch._foreach_sub_(unit.params, unit.views(change))
            if model is not None:
                x = self.flat_parameters(unit)
                model.add_own(x, -1)  # what the caller has added since it was read stays
                model.add_mean(x)
                torch._foreach_copy_(unit.params, unit.views(x))
            if whole:
                z = unit.state["common"].copy_((yield Mean(self.flat_parameters(unit))))
                torch._foreach_copy_(unit.params, unit.views(z))
            if self._watches:
                self.watch.note(unit)
            unit.result = None

    @property
    def _watches(self) -> bool:
        """Whether loaded weights want more than (3): ranks that choose differently would share them out unevenly."""
        return self.keeps_common and not self.same_choice
