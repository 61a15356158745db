"""QSparse-local-SGD: local steps; what was not sent is withheld from the model, and added to the next message.

Sources: "CSER: Communication-efficient SGD with Error Reset", NeurIPS 2020, Algorithm 1; "Qsparse-local-SGD: Distributed SGD
with Quantization, Sparsification and Local Computations", NeurIPS 2019. C is a compressor of birder/compress/sparse.py, p_i
the local step of birder/optimizers/blockwise.py; e_i = 0 at first, z is the point common to all ranks, x_i = z at first:

    (1) x_i = x_i - p_i
    (2) every H steps:   e_i = e_i + (x_i - z);   c_i = C(e_i);   z = z + mean_j c_j;   x_i = z;   e_i = e_i - c_i

A synchronisation of an interval in which a caller has changed parameters (`ParameterWatch`) sends e_i whole, in fp32: then
z = mean_j (z + e_j) and e_i = 0, so that loaded weights are kept.

One-process reference: `QSparseLocalSGD` in tests/helpers/reference_cser.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from birder.comm import Mean, Requests
from birder.optimizers.blockwise import BlockwiseSGD
from birder.optimizers.checks import require_whole
from birder.optimizers.contract import Plan
from birder.optimizers.layout import Unit


class QSparseLocalSGD(BlockwiseSGD):
    """QSparse-local-SGD (see the module's docstring for the equations).

    ratio:      1/ratio of the elements are sent at a synchronisation, a whole number.
    sync_every: H.
    nesterov, block, variant, compressor, options: see `BlockwiseSGD`.

    State, rank-local: m, fp32[d], where momentum is above 0; e, fp32[d]. The same on all ranks: z, fp32[d]. Parameters
    differ between ranks except after a synchronisation: `averaged` is what to evaluate.

    Raises ValueError for arguments out of range.
    """

    local_models: ClassVar[bool] = True
    carried: ClassVar[dict[str, str]] = {**BlockwiseSGD.carried, "common": "copy"}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        ratio: int = 4,
        sync_every: int = 8,
        nesterov: bool = True,
        variant: str = "paper",
        block: int = 1024,
        compressor: str = "blocks",
        **options: Any,
    ) -> None:
        self.ratio, self.sync_every = require_whole("ratio", ratio), require_whole("sync_every", sync_every)
        super().__init__(params, lr, momentum, weight_decay, nesterov, block, variant, compressor, **options)

    def plan(self, step: int) -> Plan:
        return Plan.COMPRESSED if step % self.sync_every == 0 else Plan.SKIP

    def restores(self, name: str, step: int) -> bool:
        return name != "common"  # it repeats the parameters

    def init_unit(self, unit: Unit) -> None:
        super().init_unit(unit)
        unit.state["error"] = unit.zeros()
        unit.state["common"] = unit.zeros()

    def exchange(self, unit: Unit, grad: Tensor, step: int) -> Requests[None]:
        e, z = unit.state["error"], unit.state["common"]
        p = self.local_step(unit, grad)
        begins = (step - 1) % self.sync_every == 0
        if begins:  # every model is at the common point now
            z.copy_(self.flat_parameters(unit))
            if self.sync_every > 1:
                self.watch.note(unit, z)
        if self.plan(step) is Plan.SKIP:
            unit.result = p
            return
        x = z.clone() if begins else self.flat_parameters(unit)  # read once: the caller may change it meanwhile
        self.watch.look(unit, x)
        x.sub_(p)  # (1)
        e.add_(x.sub_(z))  # (2)
        sent = yield from self.send(unit, e, self.ratio, step)
        sent.clear(e)
        if self.sync_every > 1:
            sent.add_mean(z)
        else:  # x is z, and may have been changed since it was read
            sent.put_mean(grad.zero_())
            unit.result = grad

    def update(self, step: int, plan: Plan) -> Requests[None]:
        syncs = plan is not Plan.SKIP
        for unit in self.units:
            self.watch.look(unit, late=syncs)
        whole = syncs and self.sync_every > 1 and (yield from self.watch.anywhere(self.comm, self.units))
        for unit in self.units:
            if plan is Plan.SKIP:
                torch._foreach_sub_(unit.params, unit.views(unit.result))
                self.watch.note(unit)
            elif self.sync_every == 1:
                torch._foreach_add_(unit.params, unit.views(unit.result))
            else:
                e, z = unit.state["error"], unit.state["common"]
                if whole:
                    z.copy_((yield Mean(z + e)))
                    e.zero_()
                torch._foreach_copy_(unit.params, unit.views(z))
                self.watch.forget(unit)
            unit.result = None
