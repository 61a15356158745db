"""1-bit Adam's compression stage as its reference implementation (DeepSpeed) does it, for times only.

DeepSpeed itself is not needed: what is re-created is the order and the cost of its work, from its published code:

- nothing happens during backward: the message is made inside `step`, from one fused buffer of all parameters;
- separate passes of eager tensor operations over it: momentum, addition of the error, norm, signs, error, packing;
- four collectives one after the other: all-to-all of the bits, all-gather of the scales, all-gather of the server's bits, and
  of its scales.

Its own backend sends with NCCL or MPI and packs with CuPy; here messages travel as those of all methods do (`Collectives`),
and NumPy packs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from birder import OneBitAdam
from birder.comm import AllGather, AllToAll, GatherWorkers, Requests
from birder.optim.contract import Plan
from birder.optim.layout import Unit


class FusedOneBitAdam(OneBitAdam):
    """1-bit Adam with the eager, fused, serial collective. Attach it with overlap=False and one unit of everything."""

    def exchange(self, unit: Unit, grad: Tensor, step: int) -> Requests[None]:
        state, comm = unit.state, self.comm
        beta1 = unit.group["betas"][0]
        m = state["m"]
        m.mul_(beta1).add_(grad, alpha=1 - beta1)
        z = m + state["worker_error"]
        scale = _split(z, state["worker_error"])
        rows, scales = (yield AllToAll(_pack(z))), (yield GatherWorkers(scale.view(1))).view(-1)
        parts = _unpack(rows).mul_((scales / comm.workers).unsqueeze(1))
        a = parts.sum(0).add_(state["server_error"])
        scale = _split(a, state["server_error"])
        bits, scales = (yield AllGather(_pack(a))), (yield AllGather(scale.view(1)))
        m.copy_(_unpack(bits.view(comm.workers, -1)).mul_(scales.unsqueeze(1)).view(-1))

    def update(self, step: int, plan: Plan) -> None:
        if plan is not Plan.COMPRESSED:
            super().update(step, plan)
            return
        for unit in self.units:
            lr, eps = unit.group["lr"], unit.group["eps"]
            for p, m, v in zip(unit.params, unit.views(unit.state["m"]), unit.views(unit.state["v"]), strict=True):
                p.add_(m / (v.sqrt() + eps), alpha=-lr)


def _split(z: Tensor, error: Tensor) -> Tensor:
    """The scale of z; error = z - scale sgn(z)."""
    scale = torch.linalg.vector_norm(z) / z.numel() ** 0.5
    signs = (z >= 0).float().mul_(2).sub_(1)
    error.copy_(z - scale * signs)
    return scale


def _pack(z: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits((z >= 0).numpy()))


def _unpack(bits: Tensor) -> Tensor:
    """uint8[n, c] -> fp32[n, 8c] of -1 and +1."""
    return torch.from_numpy(np.unpackbits(bits.numpy(), axis=1)).float().mul_(2).sub_(1)
