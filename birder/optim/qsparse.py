"""QSparse-local-SGD: local steps; what was not sent is withheld from the model, and added to the next message.

Sources: "CSER: Communication-efficient SGD with Error Reset", NeurIPS 2020, Algorithm 1; "Qsparse-local-SGD: Distributed SGD
with Quantization, Sparsification and Local Computations", NeurIPS 2019. C is a compressor of birder/optim/sparse.py, p_i
the local step of birder/optim/blockwise.py; e_i = 0 at first, z is the point common to all ranks, x_i = z at first:

    (1) x_i = x_i - p_i
    (2) every H steps:   e_i = e_i + (x_i - z);   c_i = C(e_i);   z = z + mean_j c_j;   x_i = z;   e_i = e_i - c_i

A synchronisation of an interval in which a caller has changed parameters (`LocalSteps`) sends e_i whole, in fp32: then
z = mean_j (z + e_j) and e_i = 0, so that loaded weights are kept.

One-process reference: `QSparseLocalSGD` in tests/helpers/reference_cser.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

from birder.comm import Mean, Requests
from birder.optim.blockwise import BlockwiseSGD
from birder.optim.checks import require_whole
from birder.optim.layout import Unit
from birder.optim.local_steps import LocalSteps


class QSparseLocalSGD(LocalSteps, BlockwiseSGD):
    """QSparse-local-SGD (see the module's docstring for the equations).

    ratio:      1/ratio of the elements are sent at a synchronisation, a whole number.
    sync_every: H.
    nesterov, block, variant, compressor, options: see `BlockwiseSGD`.

    State, rank-local: m, fp32[d], where momentum is above 0; e, fp32[d]. The same on all ranks: z, fp32[d]. Parameters
    differ between ranks except after a synchronisation: `averaged` is what to evaluate.
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
        **options: Any,
    ) -> None:
        self.ratio, self.sync_every = require_whole("ratio", ratio), require_whole("sync_every", sync_every)
        super().__init__(params, lr, momentum, weight_decay, **options)

    def init_unit(self, unit: Unit) -> None:
        super().init_unit(unit)
        unit.keep("error", "common")

    def exchange(self, unit: Unit, grad: Tensor, step: int) -> Requests[None]:
        e, z = unit.state["error"], unit.state["common"]
        drift = self.drift(unit, self.local_step(unit, grad), step)  # (1)
        if drift is None:
            return
        e.sub_(drift)  # (2)
        sent = yield from self.send(unit, e, self.ratio, step)
        sent.add_own(e, -1)
        if self.always_meets:
            unit.result = z = grad.zero_()  # what z gains
        sent.add_mean(z)

    def meet(self, unit: Unit, whole: bool) -> Requests[Any]:
        if whole:
            e, z = unit.state["error"], unit.state["common"]
            z.copy_((yield Mean(z + e)))
            e.zero_()
        return unit.result
