"""EF-SGD: SGD with error feedback. What was not sent is withheld from the model, and added to the next message.

Sources: "CSER: Communication-efficient SGD with Error Reset", NeurIPS 2020; "Error Feedback Fixes SignSGD and other Gradient
Compression Schemes", ICML 2019. C is a compressor of birder/optim/sparse.py, p_i the local step of
birder/optim/blockwise.py; e_i = 0 at first, x is the same on all ranks:

    (3) e_i = e_i + p_i;   c_i = C(e_i);   x = x - mean_j c_j;   e_i = e_i - c_i
    (4) released code only, u = 0 at first:   u = beta u + lambda x;   x = x - gamma (beta u + lambda x)

One-process reference: `EFSGD` in tests/helpers/reference_cser.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from birder.comm import Requests
from birder.optim.blockwise import BlockwiseSGD
from birder.optim.checks import require_whole
from birder.optim.contract import Plan
from birder.optim.layout import Unit


class EFSGD(BlockwiseSGD):
    """SGD with momentum and error feedback (see the module's docstring for the equations).

    ratio:   1/ratio of the elements are sent in each step, a whole number.
    variant: "paper": weight decay is a part of g_i. "released": it has a separate momentum, (4), and is not sent.
    nesterov, block, compressor, options: see `BlockwiseSGD`.

    Parameters of a group with lr 0 do not move: e waits for a rate above 0.

    State, rank-local: m, fp32[d], where momentum is above 0; e, fp32[d]. With variant="released", momentum and weight decay
    also u, fp32[d], the same on all ranks. Parameters are the same on all ranks.
    """

    carried: ClassVar[dict[str, str]] = {**BlockwiseSGD.carried, "decay": "copy"}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        ratio: int = 32,
        **options: Any,
    ) -> None:
        self.ratio = require_whole("ratio", ratio)
        super().__init__(params, lr, momentum, weight_decay, **options)

    def decay_in_momentum(self) -> bool:
        return False

    def init_unit(self, unit: Unit) -> None:
        super().init_unit(unit)
        unit.state["error"] = unit.zeros()
        if self.variant == "released" and unit.group["weight_decay"]:
            self.begin(unit, "decay")

    def exchange(self, unit: Unit, grad: Tensor, step: int) -> Requests[None]:
        e = unit.state["error"]
        e.add_(self.local_step(unit, grad))  # (3)
        waits = unit.group["lr"] == 0  # frozen by its rate, as torch's parameters are: what is withheld stays so
        sent = yield from self.send(unit, torch.zeros_like(e) if waits else e, self.ratio, step)
        if not waits:
            sent.add_own(e, -1)
        unit.result = grad.zero_()
        sent.add_mean(unit.result)

    def update(self, step: int, plan: Plan) -> None:
        for unit in self.units:
            own = self._own_decay(unit) if self.variant == "released" and unit.group["weight_decay"] else None
            torch._foreach_sub_(unit.params, unit.views(unit.result))
            if own is not None:
                torch._foreach_sub_(unit.params, own)
            unit.result = None

    def _own_decay(self, unit: Unit) -> list[Tensor]:
        """(4): what weight decay takes from each parameter, for x before the step."""
        group = unit.group
        decay = [p.to(torch.float32) * group["weight_decay"] for p in unit.params]
        if group["momentum"]:
            self.begin(unit, "decay")
            u = unit.state_views("decay")
            torch._foreach_mul_(u, group["momentum"])
            torch._foreach_add_(u, decay)
            decay = torch._foreach_add(decay, torch._foreach_mul(u, group["momentum"])) if group["nesterov"] else u  # type: ignore[assignment]
        return list(torch._foreach_mul(decay, group["lr"]))
