"""Muon: steps of matrices are made orthogonal, everything else is AdamW's. A dense baseline.

Sources: "Muon: An optimizer for hidden layers in neural networks", K. Jordan et al., 2024. The factor 0.2 sqrt(max(A, B)), by
which AdamW's learning rate serves both, is of "Muon is Scalable for LLM Training", arXiv 2502.16982. For a matrix x of A x B
with the mean gradient g:

    (1) m = mu m + (1 - mu) g;   u = mu m + (1 - mu) g          (without Nesterov's form u = m)
    (2) X = u / |u|_F;   5 times:   S = X X^T,   X = a X + (b S + c S S) X      a, b, c = 3.4445, -4.7750, 2.0315
    (3) x = x - lr weight_decay x - lr 0.2 sqrt(max(A, B)) X

(2) brings all singular values near 1. References: torch.optim.Muon, and (2) on the singular values of a decomposition
(tests/distributed/test_muon.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from birder.optim.adam import AdamW, Tensors
from birder.optim.checks import pair, require, require_flag
from birder.optim.layout import Unit

A, B, C, ITERATIONS = 3.4445, -4.7750, 2.0315, 5


class Muon(AdamW):
    """Muon for groups with muon=True, AdamW for the others (see the module's docstring for the equations).

        Muon(Muon.groups(model), lr=1e-3)

    lr, weight_decay: of both. betas, eps: of AdamW. momentum: mu. nesterov: as in (1).
    muon:    of a group, whose parameters must then have two dimensions or more; those behind the first count as one.
    options: wire, max_grad_norm; see `BucketOptimizer`.

    State, the same on all ranks: m, fp32[d]; of AdamW's groups also v. (2) is computed in bf16 on GPUs, in fp32 elsewhere. It
    needs whole matrices: FSDP is refused.
    """

    on_shards: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        **options: Any,
    ) -> None:
        adam = {"lr": lr, "betas": pair(betas), "eps": eps, "weight_decay": weight_decay}
        more = {"muon": options.pop("muon", True), "momentum": momentum, "nesterov": nesterov}
        super(AdamW, self).__init__(params, adam | more, **options)

    @staticmethod
    def groups(model: nn.Module, groups: Iterable[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
        """The model's parameters as groups for `Muon`: its hidden matrices, and the rest.

        The rest: embeddings, an output layer that `get_output_embeddings()` of the model, or of one inside a wrapper, names,
        what has less than two dimensions. groups: to be divided in the place of all trainable parameters.
        """
        layers = [m for m in model.modules() if isinstance(m, nn.Embedding)]
        named = [getattr(m, "get_output_embeddings", lambda: None)() for m in model.modules()]
        layers += [m for m in named if m is not None]
        ends = {p for layer in layers for p in layer.parameters()}
        found = []
        for group in groups or [{"params": [p for p in model.parameters() if p.requires_grad]}]:
            given = group["params"]
            own = [given] if isinstance(given, Tensor) else list(given)  # an iterator gives its parameters once
            kinds = [p.ndim >= 2 and p not in ends for p in (e[1] if isinstance(e, tuple) else e for e in own)]
            for muon in (True, False):
                some = [e for e, kind in zip(own, kinds, strict=True) if kind is muon]  # e: a parameter, maybe named
                if some:
                    found.append({**group, "params": some, "muon": muon})
        return found

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        require_flag("muon", group["muon"])
        small = [p for p in group["params"] if p.ndim < 2] if group["muon"] else []
        require(not small, "muon", True, "False for parameters of less than two dimensions: use Muon.groups(model)")

    def init_unit(self, unit: Unit) -> None:
        super().init_unit(unit)
        if unit.group["muon"]:
            del unit.state["v"]

    def moments(self, unit: Unit) -> tuple[str, str]:
        if unit.group["muon"] == ("v" in unit.state):
            raise RuntimeError(
                f"muon={unit.group['muon']} of a group that has trained with {not unit.group['muon']}: make a new optimizer"
            )
        return "m", "m" if unit.group["muon"] else "v"

    def move(self, group: dict[str, Any], params: Tensors, grads: Tensors, m: Tensors, v: Tensors, step: int) -> None:
        if not group["muon"]:
            super().move(group, params, grads, m, v, step)
            return
        lr, mu = float(group["lr"]), group["momentum"]
        for p, g, buf in zip(params, grads, m, strict=True):
            buf.lerp_(g, 1 - mu)  # (1)
            u = torch.lerp(g, buf, mu) if group["nesterov"] else buf
            step_of = orthogonal(u.flatten(1)).view_as(p)  # (2)
            longest = max(p.shape[0], p[0].numel())
            p.mul_(1 - lr * group["weight_decay"]).sub_(step_of, alpha=lr * 0.2 * longest**0.5)  # (3)


def orthogonal(u: Tensor) -> Tensor:
    """(2): fp32[A, B] -> fp32[A, B]."""
    wide = u if u.shape[0] <= u.shape[1] else u.T
    x = wide.to(torch.bfloat16 if u.is_cuda else torch.float32)
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        s = x @ x.T
        x = torch.addmm(x, torch.addmm(s, s, s, beta=B, alpha=C), x, beta=A)
    return (x if wide is u else x.T).to(torch.float32)
