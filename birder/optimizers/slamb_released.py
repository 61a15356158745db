"""SLAMB in the two forms of the code released with it, where they differ from (1)-(7) of birder/optimizers/slamb.py.

v2, the fused form: in (4) eps is added to the uncorrected root, and (7) comes in steps t with t mod H = 1.

v1, the plain form: the mask goes through the int(1/k) chunks of a fixed random permutation, chunk t mod int(1/k) in step t;
(7) as in v2; (4) includes weight_decay x, so that the norms see it, and

    (5') phi1 = |x|/|r|, phi0 = |x|/|r|, both 1 where a norm is 0
    (6') x_i = x_i - lr clamp(s phi1 + (1 - s) phi0) (s + (1 - s)/sqrt(n)) r;   tensors of one dimension: - lr phi1 r

One-process reference: tests/helpers/reference_slamb.py with these forms.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from birder.compress.masks import cyclic_chunks
from birder.optimizers.layout import Unit
from birder.optimizers.slamb import SLAMB


class SLAMBv2(SLAMB):
    """What `SLAMB(form="v2")` makes."""

    first_sync: ClassVar[int] = 1

    def scaled_eps(self, eps: float, root: float) -> float:
        return eps


class SLAMBv1(SLAMB):
    """What `SLAMB(form="v1")` makes."""

    first_sync: ClassVar[int] = 1

    def init_ages(self, unit: Unit) -> None:
        unit.state["chunk"] = unit.zeros(dtype=torch.uint8 if self.chunks <= 256 else torch.int16)
        for p, offset, view in zip(unit.params, unit.offsets, unit.views(unit.state["chunk"]), strict=True):
            if not self.is_dense(p):
                start = unit.start + offset
                chunks = cyclic_chunks(p.numel(), self.chunks, seed=self.seed, start=start, device=unit.device)
                view.copy_(chunks.view(p.shape))

    def choose(self, unit: Unit, i: int, step: int, view: Tensor) -> None:
        torch.eq(unit.view(unit.state["chunk"], i), step % self.chunks, out=view)

    def grow_older(self, unit: Unit, mask: Tensor) -> None:
        """tau follows from the number of the chunk."""

    def freshness(self, unit: Unit, i: int, step: int) -> Tensor:
        chunk = unit.view(unit.state["chunk"], i).int()
        # Before its first turn an element is as old as the run.
        return self.look_up(self.chunks, chunk.neg_().add_(step).remainder_(self.chunks).clamp_(max=step))

    def move(self, unit: Unit, i: int, p: Tensor, step: int) -> None:
        lr, decay = unit.group["lr"], unit.group["weight_decay"]
        r, x = self._direction(unit, i, step), p.float()
        if decay:
            r.add_(x * decay)
        if self.is_dense(p):
            rate = self._ratio(x, r, 1.0)  # (5')
            if p.dim() > 1:
                rate.clamp_(self.min_coeff, self.max_coeff)
            rate.mul_(lr)
        else:
            fresh = unit.view(unit.result, i)
            phi1, phi0 = self._ratio(x * fresh, r * fresh, 1.0), self._ratio(x * ~fresh, r * ~fresh, 1.0)
            s = self.freshness(unit, i, step)
            phi = (s * phi1 + (1 - s) * phi0).clamp_(self.min_coeff, self.max_coeff)
            rate = phi.mul_(s * lr + (1 - s) * (lr / self.comm.world_size**0.5))
        p.sub_(r.mul_(rate))  # (6')


FORMS: dict[str, type[SLAMB]] = {"v1": SLAMBv1, "v2": SLAMBv2}
