"""What CSER, QSparse-local-SGD and EF-SGD share: a local step of SGD with momentum, and means of what a compressor chooses.

Local step of rank i, from its own gradient g_i at its own x_i (gamma: learning rate, beta: momentum, lambda: weight decay):

    paper      g = g_i + lambda x_i;  m = beta m + g;                p = gamma (beta m + g)
    released   g = g_i;               m = beta m + g + lambda x_i;   p = gamma (beta m + g)

without Nesterov p = gamma m, without momentum p = gamma g. The momentum is never communicated.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from birder.comm import Mean, Requests
from birder.optim.base import WIRES, BucketOptimizer, Unit
from birder.optim.checks import require, require_choice, require_whole
from birder.optim.sparse import COMPRESSORS, SHARED, Blocks, Largest, Sent, SentOwn, SentShared


class BlockwiseSGD(BucketOptimizer):
    """Base of the methods of the CSER paper. See the module's docstring for the local step.

    nesterov: as in the module's docstring.
    block:    elements of a block, the unit of choice of the compressor "blocks" (birder/optim/sparse.py).
    compressor: "blocks" | "random_k" | "top_k" (birder/optim/sparse.py).
    variant:  "paper" | "released": where weight decay enters, and what the subclass says besides.
    options:  wire (of updates and errors; parameters always travel as fp32), max_grad_norm, seed; see `BucketOptimizer`.

    State, rank-local: m, fp32[d], where momentum is above 0; and the subclass's own.
    """

    compressed: ClassVar[bool] = True
    carried: ClassVar[dict[str, str]] = {"momentum": "mean", "error": "mean"}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float,
        weight_decay: float,
        *,
        nesterov: bool = True,
        variant: str = "paper",
        block: int = 1024,
        compressor: str = "blocks",
        **options: Any,
    ) -> None:
        known = isinstance(compressor, str) and compressor in COMPRESSORS
        require(known, "compressor", compressor, "one of " + ", ".join(COMPRESSORS))
        self.compressor = compressor
        self.variant = require_choice("variant", variant, "paper", "released")
        self.block = require_whole("block", block)
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, defaults, **options)

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        # m is the only way by which this form of decay reaches x.
        lost = self.decay_in_momentum() and group["weight_decay"] and not group["momentum"]
        require(not lost, "momentum", 0, "above 0 for weight decay with variant='released'")

    def init_unit(self, unit: Unit) -> None:
        self.begin(unit, "momentum")

    def begin(self, unit: Unit, name: str) -> None:
        """Makes a state that only momentum needs, at 0: when it is bound, or when a script has set momentum since."""
        if unit.group["momentum"] and name not in unit.state:
            unit.state[name] = unit.zeros()

    def load_unit(self, unit: Unit, tensors: dict[str, Tensor]) -> None:
        for name in {"momentum", "decay"} & self.carried.keys():
            unit.state.pop(name, None)
            if name in tensors:
                unit.state[name] = unit.zeros()
        super().load_unit(unit, tensors)

    def decay_in_momentum(self) -> bool:
        """Whether weight decay enters m, but not g."""
        return self.variant == "released"

    def reads_parameters(self, step: int) -> bool:
        early = self.variant == "paper" or self.decay_in_momentum()
        return early and any(group["weight_decay"] for group in self.param_groups)

    # Products and sums apart from each other: fused, their rounding would depend on where in a buffer they stand.

    def decayed(self, unit: Unit, grad: Tensor) -> Tensor:
        """g of the local step, in the place of g_i."""
        if self.variant == "paper" and unit.group["weight_decay"]:
            torch._foreach_add_(unit.views(grad), torch._foreach_mul(unit.params, unit.group["weight_decay"]))
        return grad

    def local_step(self, unit: Unit, grad: Tensor) -> Tensor:
        """p of this rank's own step, in `grad`; updates m."""
        group, grad = unit.group, self.decayed(unit, grad)
        beta = group["momentum"]
        if beta:
            self.begin(unit, "momentum")
            m = unit.state["momentum"]
            m.mul_(beta).add_(grad)
            if self.decay_in_momentum() and group["weight_decay"]:
                torch._foreach_add_(unit.views(m), torch._foreach_mul(unit.params, group["weight_decay"]))
            if group["nesterov"]:
                grad.add_(m * beta)
            else:
                grad.copy_(m)
        return grad.mul_(group["lr"])

    @property
    def same_choice(self) -> bool:
        """Whether all ranks choose the same elements."""
        return self.compressor in SHARED

    def send(
        self, unit: Unit, v: Tensor, ratio: int | None, step: int, stream: int = 0, wire: torch.dtype | None = None
    ) -> Requests[Sent]:
        """C(v), 1/ratio of the elements, and its mean over ranks. ratio: None chooses nothing, and nothing is sent then.

        v: fp32[padded], not changed. stream: number of the compressor, whose draws are its own.
        """
        wire = wire or WIRES[self.wire]
        if not self.same_choice and ratio is not None:
            largest = Largest.choose(v, unit.offsets, [p.numel() for p in unit.params], ratio, wire)
            return (yield from SentOwn.exchange(largest, v.numel(), wire))
        block = self.block if self.compressor == "blocks" else 1
        draw = {"seed": self.seed, "step": step, "stream": stream}
        chosen = Blocks.choose(unit.start, unit.numel, ratio, block, **draw, device=unit.device)
        own = chosen.gather(v).to(wire).float()
        mean = (yield Mean(own, wire)) if own.numel() else own
        return SentShared(chosen, own, mean)
