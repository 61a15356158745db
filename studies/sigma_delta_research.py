"""What else was tried in sigma-delta Adam, one option each.

The equations are those of birder/optim/sigma_delta.py. Nothing here is fused, saves bytes, or works with shards; a run tells
what an idea does to accuracy, and `method.sends` is then not true. `sweep=sigma_gpt2` has the runs.

order:     2: second-order modulation, on workers and servers: z = u + 2 e - e', e' the error before e; errors up to 2.
dead_zone: ratios u below it count as 0: such a coordinate goes to and fro.
values:    "log8": what (0) sends, and V itself, has three values to the octave, which eight bits hold with the sign.
           "factored": V of a matrix is made of the sums of its rows and columns alone, as Adafactor's.
dense:     "vectors": biases and norms move by the mean ratio in floats, as in Adam; "embeddings": the unit's largest matrix;
           "all": every coordinate, so that nothing is quantized.
windup:    workers clip ratios and errors at so many times c, not at c: what a rare large ratio asks for is sent later.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from birder import SigmaDeltaAdam, kernels
from birder.comm import AllGather, AllToAll, Requests, ShardMean, WorkerMean
from birder.kernels.reference import unpack
from birder.optim.base import Unit
from birder.optim.checks import require_choice


def log8(x: Tensor) -> Tensor:
    """The nearest of three values to the octave, with x's sign."""
    return torch.where(x == 0, x, torch.sign(x) * ((x.abs().log2() * 3).round() / 3).exp2())


class SigmaDeltaResearch(SigmaDeltaAdam):
    """See the module's docstring; two phases, flat, errors in fp32."""

    on_shards: ClassVar[bool] = False
    carried: ClassVar[dict[str, str]] = {
        **SigmaDeltaAdam.carried,
        "worker_error_before": "mean",
        "server_error_before": "cut",
    }

    def __init__(
        self,
        params: Any,
        *args: Any,
        order: int = 1,
        dead_zone: float = 0.0,
        values: str = "fp32",
        dense: str = "none",
        windup: float = 1.0,
        **options: Any,
    ) -> None:
        self.order, self.dead_zone, self.windup = order, dead_zone, windup
        self.values = require_choice("values", values, "fp32", "log8", "factored")
        self.dense = require_choice("dense", dense, "none", "vectors", "embeddings", "all")
        super().__init__(params, *args, **options)
        for name, only in (("reduce", "two_phase"), ("errors", "fp32"), ("wire", "fp32")):
            require_choice(name, getattr(self, name), only)
        require_choice("variance", self.variance, "of_mean", "shared")

    def init_unit(self, unit: Unit) -> None:
        super().init_unit(unit)
        if self.order == 2:
            unit.keep("worker_error_before", numel=unit.padded)
            unit.keep("server_error_before", numel=unit.padded // self.comm.workers)
        floats = torch.zeros(unit.padded, dtype=torch.bool, device=unit.device)
        largest = max(p.numel() for p in unit.params)
        for p, part in zip(unit.params, unit.views(floats), strict=True):
            chosen = {"none": False, "vectors": p.dim() < 2, "embeddings": p.numel() == largest, "all": True}
            part.fill_(chosen[self.dense])
        unit.buffers["floats"] = floats

    def exchange(self, unit: Unit, grad: Tensor, step: int) -> Requests[None]:
        comm, state = self.comm, unit.state
        m, v, V = state["m"], state["v"], state["shared_v"]
        (beta1, beta2), n = unit.group["betas"], comm.workers
        ratio, (scale, gamma) = self._ratio(unit.group, step), self._scale(n)
        mean = yield ShardMean(grad)
        kernels.adam_moments(mean, m, v, beta1=beta1, beta2=beta2, hold=self.idle == "hold")  # (1)
        if self.shared_at(step) == step:
            V.copy_((yield WorkerMean(self._sent(v))))
            if self.variance == "of_mean":
                signal = ((yield WorkerMean(self._sent(m))) * ratio["scale"]).square_().minimum(V)
                V.div_(n).add_(signal, alpha=1.0 - 1.0 / n)
            for part in unit.views(V) if self.values == "factored" else []:
                if part.dim() > 1:
                    matrix = part.flatten(1)
                    rows, columns = matrix.sum(1, keepdim=True), matrix.sum(0, keepdim=True)
                    matrix.copy_(rows * columns / matrix.sum().clamp(min=1e-30))
            V.copy_(self._sent(V))
        below = V.double().sqrt_().float().add_(ratio["eps"])
        u = torch.where(below > 0, m * (ratio["scale"] / scale) / torch.where(below > 0, below, 1.0), 0.0)
        u.clamp_(-self.windup, self.windup)
        u[u.abs() < self.dead_zone] = 0.0
        rows = yield AllToAll(kernels.pack_signs(self._left(unit, "worker_error", u)))
        total = (2 * unpack(rows).sum(0, dtype=torch.int64) - n).float() * (gamma * scale / n)
        bits = yield AllGather(kernels.pack_signs(self._left(unit, "server_error", total)))
        unit.result = unpack(bits).float().mul_(2).sub_(1)
        if self.dense != "none":
            floats = (yield WorkerMean(u)).mul_(scale)
            unit.result = torch.where(unit.buffers["floats"], floats, unit.result)

    def after_units(self, step: int) -> Requests[None]:
        yield from super().after_units(step)
        for unit in self.units:
            if "active" in unit.state:
                unit.result.mul_(unit.state["active"])

    def _sent(self, x: Tensor) -> Tensor:
        return log8(x) if self.values == "log8" else x

    def _left(self, unit: Unit, name: str, u: Tensor) -> Tensor:
        """u with what was owed; the sign of it is sent, and the rest becomes the error."""
        error = unit.state[name]
        if self.order == 1:
            z, most = u + error, self.windup if name == "worker_error" else 1.0
        else:
            before = unit.state[f"{name}_before"]
            z, most = u + 2 * error - before, 2.0
            before.copy_(error)
        error.copy_((z - torch.where(z >= 0, 1.0, -1.0)).clamp_(-most, most))
        return z
