"""How gradients come to a method: fed during backward or taken in `step()`, clipped, cleaned, and exchanged unit by unit."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from birder import kernels
from birder.comm import AcrossHolders, Requests, Total
from birder.comm.runtime import Task
from birder.optim.checks import check_gradient, check_parameter
from birder.optim.contract import Method, Plan
from birder.optim.layout import Unit, gradient, local
from birder.optim.state import parts
from birder.optim.watch import Marks, differ, marks

TWICE = (
    "backward ran twice before step(), but with this method messages are taken during backward: to accumulate, run all "
    "passes but the last, forward and backward, under ddp.no_sync() (FSDP: model.set_requires_gradient_sync(False)); to "
    "throw a pass away (a skipped batch, a GAN's other network), run it under no_sync() too or use attach(..., overlap=False)"
)


class GradientExchange(Method):
    """The part of `BucketOptimizer` that takes gradients and runs `exchange` on the pipeline."""

    def feed(self, params: list[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Takes gradients that are ready during backward; a unit that is complete is submitted to the pipeline.

        None: this rank has no gradient for the parameter. Raises RuntimeError when a parameter is fed twice in a step.
        """
        if not self._feeding:
            if self._read is None:  # no attachment has called for it
                self.note_options()
            self._open_units()
            reads = self.reads_parameters(self.steps + 1)  # versions miss p.data = x: the first step looks at bits
            if reads or self.reads_at_times:
                self._weights = self._weight_marks(reads or not self.steps)
        arrived: dict[int, list[tuple[int, Tensor | None]]] = {}
        for p, g in zip(params, grads, strict=True):
            if p in self._where:
                unit, i = self._where[p]
                arrived.setdefault(unit.index, []).append((i, g))
        for index, pairs in arrived.items():
            self._put(self.units[index], pairs, None)

    def _open_units(self) -> None:
        self._feeding = True
        self._refresh_shards()
        for unit in self.units:
            unit.waiting, unit.missing, unit.kept = set(range(len(unit.params))), set(), {}
            unit.result = None
            if unit.grad is None:
                unit.grad = unit.zeros()

    def _refresh_shards(self) -> None:
        """Takes FSDP's shards again: it may have put them elsewhere since (lazy initialisation, a loaded state)."""
        for unit in self.units if self._sharded else ():
            unit.params = [local(p) for p in unit.wholes]

    def _put(self, unit: Unit, pairs: list[tuple[int, Tensor | None]], factor: Tensor | None) -> None:
        """Takes the gradients of some of the unit's parameters, by position, together; None counts as 0."""
        if not unit.waiting.issuperset(i for i, _ in pairs):
            self._feeding = False
            raise RuntimeError(TWICE)
        assert unit.grad is not None
        grad, step = unit.grad, self.steps + 1
        there = [(g, unit.offsets[i]) for i, g in pairs if g is not None]
        unit.missing.update(i for i, g in pairs if g is None)
        missing = [unit.view(grad, i) for i, g in pairs if g is None]
        for g, _ in there:
            check_gradient(g)
        if there:
            screen = not self.handles_nonfinite
            kernels.take(grad, *map(list, zip(*there, strict=True)), factor=factor, screen=screen)
        if missing:
            torch._foreach_zero_(missing)
        self.adjust_gradients([unit.params[i] for i, _ in pairs], [unit.view(grad, i) for i, _ in pairs], unit.group)
        unit.waiting.difference_update(i for i, _ in pairs)
        if not unit.waiting:
            for i in unit.missing:
                unit.kept[i] = {name: part.clone() for name, part in parts(self, unit, i).items()}
            self._submit(functools.partial(self.exchange, unit, grad, step), unit.index)

    def _submit(self, task: Task, unit: int | None = None, whole: bool = False) -> None:
        self.pipeline.comm = self.comm  # whatever pipeline has been put there
        self.pipeline.submit(task, unit, whole)

    def note_options(self) -> None:
        """Called when the first gradients of a step come: from now on these hyper-parameters must not change."""
        self.follow_groups()
        early = self.defaults.keys() - self.read_in_update
        self._read = [copy.deepcopy({k: group[k] for k in early & group.keys()}) for group in self.param_groups]

    def _check_options(self) -> None:
        """Raises RuntimeError when a hyper-parameter was changed after messages had been made with it."""
        read, self._read = self._read, None
        changed = {
            k for old, now in zip(read or (), self.param_groups, strict=False) for k in old if now.get(k) != old[k]
        }
        if changed:
            self.pipeline.wait()
            raise RuntimeError(
                f"{', '.join(sorted(changed))} changed between backward and step(), but {type(self).__name__} uses it during "
                "backward: change it before backward or after step(), or use attach(..., overlap=False)"
            )

    def _weight_marks(self, bits: bool) -> Marks:
        return marks([p for unit in self.units for p in unit.params], bits)

    def _check_weights(self) -> None:
        """Raises ValueError for a model that was converted, RuntimeError where a message was made of other parameters."""
        before, self._weights = self._weights, None
        changed = self._feeding and before is not None and differ(before, self._weight_marks(before[1] is not None))
        if changed or any(p.dtype is not torch.float32 for p in self._where):
            self.pipeline.wait()
        for p in self._where:
            check_parameter(p)
        if changed:
            raise RuntimeError(
                f"parameters were changed between backward and step(), but {type(self).__name__} reads them during "
                "backward: change them before backward or after step(), or use attach(..., overlap=False)"
            )

    def note_gradients(self) -> None:
        """Called when a backward pass that takes messages is over: from now on changing `p.grad` would have no effect."""
        self._check_dense()
        self._watch.note(self._where)

    def _check_dense(self) -> None:
        """Raises RuntimeError for a sparse gradient. Those that messages were taken of have been looked at (`_put`)."""
        for p in self._where if not self._feeding else ():
            if p.grad is not None:
                check_gradient(p.grad)

    def _check_untouched(self) -> None:
        """Raises RuntimeError when gradients were changed after their messages had been taken."""
        if self._watch.changed():
            if self._feeding:
                self.pipeline.wait()
            raise RuntimeError(
                "gradients were changed after backward (clipped?), but messages are taken during it: clip with the "
                "optimizer's own max_grad_norm and turn the framework's clipping off, or use attach(..., overlap=False)"
            )

    def _exchange_all(self, step: int) -> Requests[None]:
        """Sees to it that every unit of this step has been exchanged."""
        factor = None
        if not self._feeding:
            self._open_units()
            if self.max_grad_norm is not None:
                squares = self._squares(finite=True)
                if self.plan(step) is Plan.SKIP:
                    squares = yield AcrossHolders(squares)
                else:
                    squares = (yield Total(squares)) / self.comm.world_size
                factor = self._clip_factor(squares)
        for unit in self.units:
            if unit.waiting:  # after feeding: what no hook was called for
                self._put(unit, [(i, gradient(unit.wholes[i])) for i in sorted(unit.waiting)], factor)
        self._submit(functools.partial(self.after_units, step), whole=True)
        self._feeding = False
        yield from self.pipeline.waiting()

    # ---- parameters without a gradient --------------------------------------------------------------------------------

    def _still(self, plan: Plan) -> list[tuple[Unit, int, Tensor]]:
        """Parameters that have no gradient on any rank, and their values: they do not change, as in torch.

        After backward DDP has left a gradient on all ranks where one of them had any. A parameter that has moved in a SKIP
        step takes part in the next step that is none all the same, with a gradient of 0: its ranks have to meet again.
        """
        return [
            (unit, i, unit.params[i].detach().clone())
            for unit in self.units
            for i in unit.kept
            if unit.wholes[i].grad is None and (plan is Plan.SKIP or i not in unit.moved)
        ]

    def _keep_still(self, still: list[tuple[Unit, int, Tensor]], step: int) -> None:
        """Undoes what the step has made of these parameters and of their states."""
        for unit, i, value in still:
            unit.params[i].copy_(value)
            now = parts(self, unit, i)
            for name, old in unit.kept[i].items():
                if name in now and self.restores(name, step):
                    now[name].copy_(old)

    def _note_moves(self, plan: Plan) -> None:
        for unit in self.units:
            unit.kept = {}
            if plan is Plan.SKIP:
                unit.moved.update(i for i, p in enumerate(unit.wholes) if p.grad is not None)
            else:
                unit.moved.clear()

    def _clip_gradients(self) -> Requests[None]:
        """Clips `p.grad`, the average gradient of a DENSE step, by its norm."""
        squares = yield AcrossHolders(self._squares(finite=False))
        torch._foreach_mul_(self._gradients(), self._clip_factor(squares))

    def _gradients(self) -> list[Tensor]:
        return [g for unit in self.units for p in unit.wholes if (g := gradient(p)) is not None]

    def _squares(self, finite: bool) -> Tensor:
        """The sum of squares of this rank's gradients, fp64[1]. finite: without the elements that count as 0."""
        total = torch.zeros(1, dtype=torch.float64, device=self.device)
        for g in self._gradients():
            kept = torch.nan_to_num(g, nan=0.0, posinf=0.0, neginf=0.0) if finite else g
            # In fp64: the squares of fp32 numbers above 1e19 are infinite in fp32.
            total += torch.linalg.vector_norm(kept, dtype=torch.float64).square().to(total.device)
        return total

    def _clip_factor(self, squares: Tensor) -> Tensor:
        """By what gradients of this sum of squares are multiplied: fp32[]."""
        assert self.max_grad_norm is not None
        return (self.max_grad_norm / (squares.view(()).sqrt() + 1e-6)).clamp(max=1.0).float()
