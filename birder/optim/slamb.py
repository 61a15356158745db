"""SLAMB: LAMB whose momentum is averaged over ranks on a random part of the elements only; the rest is used unchanged.

Source: "SLAMB: Accelerated Large Batch Training with Sparse Communication", ICML 2023, and the code released with it.

On rank i, with its own gradient g_i, in step t (products and quotients of vectors are element-wise):

    (1) m_i = beta1 m_i + (1 - beta1) g_i;   v_i = beta2 v_i + (1 - beta2) g_i^2
    (2) M_t: about k d elements, the same on all ranks. Small tensors and those of one dimension are in it whole.
        On M_t m_i = mean_j m_j. Elsewhere m_i stays: what was not sent is sent later.
    (3) tau = 0 on M_t, otherwise tau + 1;   s = beta3^tau
    (4) r = (m_i / (1 - beta1^t)) / (sqrt(v_i / (1 - beta2^t)) + eps)
    (5) for every tensor, with x and r restricted to M_t for phi1 and to the rest for phi0:
        phi1 = |x|/|r| clamped to [min_coeff, max_coeff];   phi0 = |x|/|r| clamped to [0, max_coeff]
    (6) x_i = x_i - lr (s phi1 + (1 - s) phi0 / sqrt(n)) (r + weight_decay x_i)
    (7) every H steps, after (6): x_i = mean_j x_j

Where a norm in (5) is 0, phi1 = 1 and phi0 = 0.

The code released with it differs in two forms. v2, the fused one: in (4) eps is added to the uncorrected root, and (7) comes
in steps t with t mod H = 1. v1, the plain one: the mask goes through the int(1/k) chunks of a fixed random permutation, chunk
t mod int(1/k) in step t; (7) as in v2; (4) includes weight_decay x, so that the norms see it, and

    (5') phi1 = |x|/|r|, phi0 = |x|/|r|, both 1 where a norm is 0
    (6') x_i = x_i - lr clamp(s phi1 + (1 - s) phi0) (s + (1 - s)/sqrt(n)) r;   tensors of one dimension: - lr phi1 r

One-process reference: tests/helpers/reference_slamb.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from birder import kernels
from birder.comm import Mean, Requests
from birder.comm.late import Late
from birder.kernels.philox import LANES, ORDER_STREAM, uniform16
from birder.optim.base import WIRES, BucketOptimizer, Plan, Unit
from birder.optim.checks import become, pair, require_choice, require_flag, require_number, require_whole
from birder.optim.watch import Counted, looked_at

SMALLEST = 2.0**-15
"""Smallest share of elements sent in a step."""
RESOLUTION = 1 << 16
"""A share of the elements is rounded to a multiple of 1/RESOLUTION."""


class SLAMB(BucketOptimizer):
    """SLAMB (see the module's docstring for the equations). Parameters differ between ranks but for after (7).

    lr, betas, eps, weight_decay: as in LAMB. eps must be above 0.
    beta3:       what a step without being averaged leaves of an element's weight as a fresh one, in [0, 1].
    fraction:    k, the share of elements sent in a step, in [2^-15, 1].
    sync_every:  H, steps from one averaging of the parameters to the next.
    sync_phase:  they are averaged in steps t with t mod H = sync_phase mod H. None: 0; 1 in the released code's forms.
    dense_below: tensors of fewer elements are sent whole, as are those of one dimension.
    form:        old: "v1" and "v2" are the classes `SLAMBv1` and `SLAMBv2`.
    unseen:      what an element does of which v_i is 0, because only other ranks have had a gradient there. "step": (4) as it
                 stands; the step is of size m_i/eps. "hold" (this project's): r is 0 there.
    min_coeff, max_coeff: bounds of layer-wise ratios.
    bias_correction: divide by 1 - beta^t in (4).
    options:     wire (of the momentum), max_grad_norm, seed (of the masks); see `BucketOptimizer`.

    State, rank-local: m and v, fp32[d], and tau, uint8[d] (int16 where 8 bits could be too few); `SLAMBv1` has instead of
    tau the number of each element's chunk, uint8[d] (int16 beyond 256 chunks), from which tau follows. Between steps also the
    mask of the next one, bool[d], drawn ahead so that the host need not wait for the number of its elements.
    """

    compressed: ClassVar[bool] = True
    local_models: ClassVar[bool] = True
    carried: ClassVar[dict[str, str]] = {"m": "mean", "v": "mean", "tau": "copy", "chunk": "copy"}
    read_in_update: ClassVar[frozenset[str]] = frozenset({"lr", "eps", "weight_decay"})
    first_sync: ClassVar[int] = 0
    """sync_phase where none is given."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        beta3: float = 0.93,
        fraction: float = 0.1,
        sync_every: int = 100,
        sync_phase: int | None = None,
        dense_below: int = 9000,
        form: str = "paper",
        unseen: str = "step",
        min_coeff: float = 0.01,
        max_coeff: float = 1000.0,
        bias_correction: bool = True,
        **options: Any,
    ) -> None:
        self.beta3 = require_number("beta3", beta3, "in [0, 1]", high=1.0)
        self.fraction = require_number("fraction", fraction, "in [2^-15, 1]", SMALLEST, 1.0)
        self.sync_every = require_whole("sync_every", sync_every)
        self.dense_below = require_whole("dense_below", dense_below, 0)
        require_choice("form", form, "paper", "v1", "v2")
        self.unseen = require_choice("unseen", unseen, "step", "hold")
        self.max_coeff = require_number("max_coeff", max_coeff)
        self.min_coeff = require_number("min_coeff", min_coeff, f"from 0 to max_coeff = {max_coeff}", high=max_coeff)
        self.bias_correction = require_flag("bias_correction", bias_correction)
        if form != "paper":
            become(self, FORMS[form], f"form={form!r}")
        self.sync_phase = self.first_sync if sync_phase is None else require_whole("sync_phase", sync_phase, 0)
        self.chunks = int(1 / fraction + 1e-9)  # 1/(1/49) is a little less than 49
        self._unseen = Counted()
        self._ahead: dict[tuple[int, int], tuple[Tensor, Late]] = {}
        self._powers: dict[torch.device, Tensor] = {}
        super().__init__(params, {"lr": lr, "betas": pair(betas), "eps": eps, "weight_decay": weight_decay}, **options)

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        require_number("eps", group["eps"], "above 0", above=True)

    def syncs(self, step: int) -> bool:
        """Whether parameters are averaged at the end of step number `step` (from 1)."""
        return step % self.sync_every == self.sync_phase % self.sync_every

    def apart_after(self, step: int) -> bool:
        return not self.syncs(step)

    def is_dense(self, p: Tensor) -> bool:
        """Whether the tensor is sent whole in every step."""
        return p.dim() <= 1 or p.numel() < self.dense_below

    @property
    def tau_limit(self) -> int:
        """tau stops here: where beta3^tau is negligible against 1 in fp32, or fewer than one wait in a billion is so long."""
        few = self.beta3**255 < 2**-24 or (1 - self.fraction) ** 255 < 1e-9
        return 255 if few else 32767

    def init_unit(self, unit: Unit) -> None:
        unit.keep("m", "v")
        self.init_ages(unit)

    def mask(self, unit: Unit, step: int) -> Tensor:
        """M_t of (2): bool[padded], the same on all ranks."""
        mask = unit.zeros(dtype=torch.bool)
        for i, (p, view) in enumerate(zip(unit.params, unit.views(mask), strict=True)):
            if self.is_dense(p):
                view.fill_(True)
            else:
                self.choose(unit, i, step, view)
        return mask

    def exchange(self, unit: Unit, grad: Tensor, step: int) -> Requests[None]:
        m, v, (beta1, beta2) = unit.state["m"], unit.state["v"], unit.group["betas"]
        v.mul_(beta2).add_(grad.square().mul_(1 - beta2))  # (1)
        m.mul_(beta1).add_(grad.mul_(1 - beta1))
        mask, count = self._mask_and_count(unit, step)
        chosen = torch.nonzero_static(mask, size=count).view(-1)
        if count:  # the same on all ranks
            m.index_copy_(0, chosen, (yield Mean(m.index_select(0, chosen), WIRES[self.wire])))  # (2)
        self.grow_older(unit, mask)  # tau of (3)
        unit.result = mask
        if self.unseen == "step" and not self._unseen.warned and looked_at(step):
            self._unseen.note(unit, (m != 0).logical_and_(v == 0))

    def check_step(self, step: int) -> None:
        self._unseen.warn(
            self,
            "have had a gradient on other ranks alone, so this rank moves them by m/eps, which can diverge: "
            'unseen="hold" leaves them where they are',
        )

    def _mask_and_count(self, unit: Unit, step: int) -> tuple[Tensor, int]:
        """M_t and its elements. Drawn a step ahead, so that nobody waits for their number."""
        drawn = self._ahead.pop((unit.index, step), None)
        mask, count = drawn or self._draw(unit, step)
        self._ahead[unit.index, step + 1] = self._draw(unit, step + 1)
        return mask, count.read()[0]

    def _draw(self, unit: Unit, step: int) -> tuple[Tensor, Late]:
        mask = self.mask(unit, step)
        return mask, Late(mask.sum())

    def forget_derived(self) -> None:
        self._ahead.clear()
        self._unseen.clear()

    def look_up(self, ages: int, age: Tensor) -> Tensor:
        """beta3^age for whole numbers below `ages`, fp32 in the shape of `age`."""
        if age.device not in self._powers:
            powers = [self.beta3**k for k in range(ages)]
            self._powers[age.device] = torch.tensor(powers, dtype=torch.float32, device=age.device)
        return self._powers[age.device].index_select(0, age.reshape(-1).int()).view(age.shape)

    def update(self, step: int, plan: Plan) -> Requests[None]:
        for unit in self.units:
            absent = self._absent(unit)
            for i, p in enumerate(unit.params):
                if i not in absent:
                    self.move(unit, i, p, step)
        if self.syncs(step):
            yield from self.average_parameters()  # (7)

    @staticmethod
    def _absent(unit: Unit) -> set[int]:
        return {i for i in unit.kept if unit.wholes[i].grad is None}

    def _still(self, step: int) -> list[tuple[Unit, int, Tensor | None]]:
        """In (7) ranks meet in what they have moved since the last one: its value is not put back, its state is."""
        meeting = self.units if self.syncs(step) else []
        return [*super()._still(step), *((unit, i, None) for unit in meeting for i in self._absent(unit) & unit.moved)]

    def direction(self, unit: Unit, i: int, step: int) -> Tensor:
        """r of (4) for parameter i, in a new tensor."""
        beta1, beta2 = unit.group["betas"]
        first, root = (1 - beta1**step, (1 - beta2**step) ** 0.5) if self.bias_correction else (1.0, 1.0)
        eps = self.scaled_eps(unit.group["eps"], root)
        v = unit.view(unit.state["v"], i)
        r = unit.view(unit.state["m"], i).div(v.sqrt().add_(eps)).mul_(root / first)
        return r.masked_fill_(v == 0, 0.0) if self.unseen == "hold" else r

    # ---- where the released code's forms differ ------------------------------------------------------------------------

    def init_ages(self, unit: Unit) -> None:
        """The state from which `freshness` follows."""
        unit.state["tau"] = unit.zeros(dtype=torch.uint8 if self.tau_limit == 255 else torch.int16)

    def choose(self, unit: Unit, i: int, step: int, view: Tensor) -> None:
        """Writes M_t of (2) for parameter i into `view`, bool in its shape."""
        start, limit = unit.start + unit.offsets[i], round(self.fraction * RESOLUTION)
        mask = kernels.random_mask(view.numel(), limit, seed=self.seed, step=step, start=start, device=unit.device)
        view.copy_(mask.view(view.shape))

    def grow_older(self, unit: Unit, mask: Tensor) -> None:
        """tau of (3)."""
        tau = unit.state["tau"]
        tau.add_(tau < self.tau_limit).mul_(~mask)

    def freshness(self, unit: Unit, i: int, step: int) -> Tensor:
        """s of (3) for parameter i, fp32 in its shape."""
        return self.look_up(self.tau_limit + 1, unit.view(unit.state["tau"], i))

    def scaled_eps(self, eps: float, root: float) -> float:
        """What is added to sqrt(v), with root = sqrt(1 - beta2^t): by (4) eps is added to the corrected root."""
        return eps * root

    def move(self, unit: Unit, i: int, p: Tensor, step: int) -> None:
        """(5) and (6) of parameter i."""
        lr, decay, low, high = unit.group["lr"], unit.group["weight_decay"], self.min_coeff, self.max_coeff
        r, x = self.direction(unit, i, step), p.float()
        if self.is_dense(p):
            rate = self.ratio(x, r, 1.0).clamp_(low, high).mul_(lr)
        else:
            fresh = unit.view(unit.result, i)
            phi1 = self.ratio(x * fresh, r * fresh, 1.0).clamp_(low, high)  # (5)
            phi0 = self.ratio(x * ~fresh, r * ~fresh, 0.0).clamp_(0.0, high)
            s = self.freshness(unit, i, step)
            rate = s * (phi1 * lr) + (1 - s) * (phi0 * (lr / self.comm.world_size**0.5))
        if decay:
            r.add_(x * decay)
        p.sub_(r.mul_(rate))  # (6)

    @staticmethod
    def ratio(x: Tensor, r: Tensor, otherwise: float) -> Tensor:
        """|x|/|r|, fp32[]; `otherwise` where one of them is 0."""
        x_norm, r_norm = torch.linalg.vector_norm(x), torch.linalg.vector_norm(r)
        return torch.where((x_norm > 0) & (r_norm > 0), x_norm / r_norm, otherwise)


class SLAMBv1(SLAMB):
    """SLAMB by the released code's plain form: chunks of a fixed permutation in the place of (2); (5') and (6')."""

    first_sync = 1

    def init_ages(self, unit: Unit) -> None:
        unit.state["chunk"] = unit.zeros(dtype=torch.uint8 if self.chunks <= 256 else torch.int16)
        for p, offset, view in zip(unit.params, unit.offsets, unit.views(unit.state["chunk"]), strict=True):
            if not self.is_dense(p):
                start = unit.start + offset
                chunks = cyclic_chunks(p.numel(), self.chunks, seed=self.seed, start=start, device=unit.device)
                view.copy_(chunks.view(p.shape))

    def load_unit(self, unit: Unit, tensors: dict[str, Tensor]) -> None:
        """As saved, unless there were more chunks, of which some would never have their turn."""
        mine = unit.state["chunk"]
        if "chunk" in tensors and int(tensors["chunk"].max()) >= self.chunks:
            tensors = tensors | {"chunk": mine}
        super().load_unit(unit, tensors)

    def choose(self, unit: Unit, i: int, step: int, view: Tensor) -> None:
        torch.eq(unit.view(unit.state["chunk"], i), step % self.chunks, out=view)

    def grow_older(self, unit: Unit, mask: Tensor) -> None:
        """tau follows from the number of the chunk."""

    def freshness(self, unit: Unit, i: int, step: int) -> Tensor:
        chunk = unit.view(unit.state["chunk"], i).int()
        # Before its first turn an element is as old as the run.
        return self.look_up(self.chunks, chunk.neg_().add_(step).remainder_(self.chunks).clamp_(max=step))

    def move(self, unit: Unit, i: int, p: Tensor, step: int) -> None:
        lr, decay, low, high = unit.group["lr"], unit.group["weight_decay"], self.min_coeff, self.max_coeff
        r, x = self.direction(unit, i, step), p.float()
        if decay:
            r.add_(x * decay)
        if self.is_dense(p):
            rate = self.ratio(x, r, 1.0)  # (5')
            if p.dim() > 1:
                rate.clamp_(low, high)
            rate.mul_(lr)
        else:
            fresh = unit.view(unit.result, i)
            phi1, phi0 = self.ratio(x * fresh, r * fresh, 1.0), self.ratio(x * ~fresh, r * ~fresh, 1.0)
            s = self.freshness(unit, i, step)
            phi = (s * phi1 + (1 - s) * phi0).clamp_(low, high)
            rate = phi.mul_(s * lr + (1 - s) * (lr / self.comm.world_size**0.5))
        p.sub_(r.mul_(rate))  # (6')


class SLAMBv2(SLAMB):
    """SLAMB by the released code's fused form: as the paper's, but in (4) eps is added to the uncorrected root."""

    first_sync = 1

    def scaled_eps(self, eps: float, root: float) -> float:
        return eps


FORMS: dict[str, type[SLAMB]] = {"v1": SLAMBv1, "v2": SLAMBv2}


def cyclic_chunks(numel: int, chunks: int, *, seed: int, start: int, device: torch.device) -> Tensor:
    """A random permutation of a tensor's elements cut into `chunks` parts, whose sizes differ by 1 at most.

    Returns the part of each element, 0 .. chunks-1, as uint8[numel], or int16 when there are more than 256 parts. The
    permutation sorts 32-bit draws; equal ones stay in the order of elements.
    """
    draw: dict[str, Any] = {"seed": seed, "stream": ORDER_STREAM, "start": start, "device": device}
    high, low = (uniform16(-(-numel // LANES) * LANES, step=half, **draw)[:numel] for half in (0, 1))
    order = torch.argsort((high << 16) | low, stable=True)
    part = torch.arange(numel, dtype=torch.int64, device=device).mul_(chunks).div_(max(numel, 1), rounding_mode="floor")
    out = torch.empty(numel, dtype=torch.uint8 if chunks <= 256 else torch.int16, device=device)
    return out.index_copy_(0, order, part.to(out.dtype))
