"""Distributed Lion: the signs of each worker's own step go up, the vote of all workers comes down. No dense warm-up.

Source: "Communication Efficient Distributed Training with Distributed Lion", arXiv 2404.00438, Algorithm 1. Worker i:

    (1) q_i = sgn(beta1 m_i + (1 - beta1) g_i)
    (2) m_i = beta2 m_i + (1 - beta2) g_i
Server of a chunk, then every rank:
    (3) q = sgn(sum_i q_i)   (vote="majority", 1 bit down),   or   q = mean_i q_i   (vote="average", 8 bits down)
    (4) x = x - lr q - lr weight_decay x

One-process reference: `Lion` in tests/helpers/reference.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from birder import kernels
from birder.comm import AllGather, AllToAll, Requests, ShardMean
from birder.optim.base import BucketOptimizer, Plan, Unit
from birder.optim.bit_exchange import each_run, move
from birder.optim.checks import pair, require, require_choice
from birder.optim.seen import SeenMap


class Lion(SeenMap, BucketOptimizer):
    """Distributed Lion (see the module's docstring for the equations).

    lr: every coordinate moves by at most lr in a step; a third to a tenth of AdamW's, says the source of Lion.
    vote: "majority" or "average". options: max_grad_norm, seed; see `BucketOptimizer`.

    Where as many workers say +1 as -1 the majority is drawn in each step, the same on all ranks: the source has 0
    there, which one bit cannot say. A coordinate whose gradient has been 0 on every rank in every step so far does not move.

    State, rank-local: m, fp32[d]; with nodes as workers, or shards, fp32[d / ranks per node].
    Raises ValueError for vote="average" with more than 255 workers.
    """

    compressed: ClassVar[bool] = True
    carried: ClassVar[dict[str, str]] = {"m": "mean", "active": "copy"}
    on_shards: ClassVar[bool] = True
    uses_wire: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True
    read_in_update: ClassVar[frozenset[str]] = frozenset({"lr", "weight_decay"})
    seen_by: ClassVar[str] = "m"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        vote: str = "majority",
        **options: Any,
    ) -> None:
        self.vote = require_choice("vote", vote, "majority", "average")
        super().__init__(params, {"lr": lr, "betas": pair(betas), "weight_decay": weight_decay}, **options)

    def init_unit(self, unit: Unit) -> None:
        require(
            self.vote == "majority" or self.comm.workers < 256, "vote", self.vote, "majority with more than 255 workers"
        )
        unit.state["m"] = unit.zeros(unit.padded // self.comm.shards)
        self.init_seen(unit)

    def exchange(self, unit: Unit, grad: Tensor, step: int) -> Requests[None]:
        (beta1, beta2), m = unit.group["betas"], unit.state["m"]
        g = yield ShardMean(grad)
        bits = kernels.pack_signs(torch.lerp(g, m, beta1))  # (1)
        m.lerp_(g, 1.0 - beta2)  # (2)
        rows = yield AllToAll(bits)
        if self.vote == "majority":
            unit.result = yield AllGather(self._majority(unit, rows, step))  # (3)
        else:
            unit.result = yield AllGather(sums(rows).add_(len(rows)).div_(2).to(torch.uint8))  # how many say +1

    def _majority(self, unit: Unit, rows: Tensor, step: int) -> Tensor:
        """uint8[workers, c] -> uint8[c]."""
        votes = sums(rows)
        bits = kernels.pack_signs(votes)
        if len(rows) % 2 == 0:
            runs, draws = unit.chunk_runs(self.comm), {"seed": self.seed, "step": step}  # whoever serves an element
            drawn = each_run(kernels.reduce_bits, runs, rows, **draws, out=torch.empty_like(bits))
            ties = kernels.pack_signs(-votes.abs())
            bits = bits & ~ties | drawn & ties
        return bits

    def update(self, step: int, plan: Plan) -> None:
        for unit in self.units:
            if self.vote == "average":
                unit.result = unit.result.float().mul_(2 / self.comm.workers).sub_(1.0)
                if "active" in unit.state:
                    unit.result.mul_(unit.state["active"])
            move(unit, unit.group["weight_decay"])  # (4)


def sums(rows: Tensor) -> Tensor:
    """sum_i q_i, whole numbers: uint8[workers, c] -> fp32[8 c]."""
    return kernels.average_signs(
        rows, torch.full((len(rows),), float(len(rows)), dtype=torch.float32, device=rows.device)
    )
