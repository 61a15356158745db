"""EF21-SGDM: each worker sends how far its momentum is from what the others know of it. No error can pile up.

Source: "Momentum Provably Improves Error Feedback!", NeurIPS 2023 (arXiv 2305.15155), Algorithm 1; eta is 1 - beta here.
C is a compressor of birder/optim/sparse.py. Rank i, with v_i = h_i = h = 0 at first and x the same on all ranks:

    (1) v_i = beta v_i + (1 - beta) (g_i + lambda x)
    (2) c_i = C(v_i - h_i);   h_i = h_i + c_i
    (3) h = h + mean_j c_j;   x = x - lr h

h is the mean of all h_i. In EF-SGD what is not sent is added to later messages; here it is merely not known yet. One-process
reference: `EF21SGDM` in tests/helpers/reference_cser.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from birder.comm import Requests
from birder.optim.blockwise import BlockwiseSGD
from birder.optim.checks import require, require_whole
from birder.optim.contract import Plan
from birder.optim.layout import Unit


class EF21SGDM(BlockwiseSGD):
    """SGD with a momentum of which the compressed change is sent (see the module's docstring for the equations).

    lr:       of a mean of gradients: 1/(1 - momentum) times that of SGDM's sum.
    momentum: beta, in [0, 1).
    ratio:    1/ratio of the elements are sent in each step, a whole number.
    block, compressor, options: see `BlockwiseSGD`; wire must be fp32, for h and h_i have to take the same from a message.

    State: v and h_i, fp32[d], rank-local; h, fp32[d], the same on all ranks. Parameters are the same on all ranks.
    """

    carried: ClassVar[dict[str, str]] = {"momentum": "mean", "known": "mean", "common": "copy"}
    read_in_update: ClassVar[frozenset[str]] = frozenset({"lr"})

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        ratio: int = 32,
        **options: Any,
    ) -> None:
        self.ratio = require_whole("ratio", ratio)
        for name, only in {"wire": "fp32", "nesterov": False, "variant": "paper"}.items():
            require(options.setdefault(name, only) == only, name, options[name], str(only))
        super().__init__(params, lr, momentum, weight_decay, **options)

    def init_unit(self, unit: Unit) -> None:
        unit.keep("momentum", "known", "common")

    def exchange(self, unit: Unit, grad: Tensor, step: int) -> Requests[None]:
        v, known, beta = unit.state["momentum"], unit.state["known"], unit.group["momentum"]
        v.mul_(beta).add_(self.decayed(unit, grad).mul_(1 - beta))  # (1)
        sent = yield from self.send(unit, torch.sub(v, known, out=grad), self.ratio, step)
        sent.add_own(known)  # (2)
        sent.add_mean(unit.state["common"])  # (3)

    def update(self, step: int, plan: Plan) -> None:
        for unit in self.units:
            torch._foreach_sub_(unit.params, unit.views(unit.state["common"] * unit.group["lr"]))
