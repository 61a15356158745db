"""`BucketOptimizer`: what all optimizers here share, from dense SGD to 1-bit methods. The path of a gradient, top to bottom:

fed during backward (`feed`) or taken in `step`, put into its unit (`_put`), exchanged when the unit is complete, applied.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from birder import kernels
from birder.comm import AcrossHolders, Communicator, Mean, Pipeline, Requests, SingleProcess, Total, run
from birder.comm.launcher import digest_of
from birder.comm.runtime import Task, asking
from birder.optim.agreement import Agreement
from birder.optim.by_parameter import check_whole, parts, put_back, shared_out, taken
from birder.optim.checks import (
    check_foreign_options,
    check_gradient,
    check_parameter,
    require_number,
    without_dimensions,
)
from birder.optim.contract import WIRES, Method, Plan
from birder.optim.guards import TWICE, Guards, plain_number, who_is_missing
from birder.optim.layout import Unit, gradient, lay_out_shards, local, make_units, round_up, sharded


class BucketOptimizer(Guards):
    """Base of all optimizers of this package.

    A method overrides `plan`, `init_unit`, `update` and, where it compresses, `exchange`: birder/optim/contract.py.
    `birder.attach(ddp_model, optimizer)` connects it to DDP. Without `attach`, on one process, it works on `p.grad` as any
    optimizer does; a 1-bit method is then one worker and its server.

    `p.grad` after backward under DDP: in a DENSE step the average gradient, as always. In any other step **this rank's own
    gradient**, not averaged: the message was taken from it during backward, and the optimizer holds the update. Changing
    `p.grad` then has no effect, unless `attach(..., overlap=False)`: then `step` takes the message from `p.grad`.

    wire: what floats are sent as: "fp32", "bf16" or "fp16".
    seed: of random numbers, the same on all ranks.
    max_grad_norm: clips by the global norm inside `step`. In DENSE steps that is the norm of the average gradient. In
        COMPRESSED steps every rank scales its gradient by min(1, max_grad_norm / sqrt(mean over ranks of |g_i|^2)), and
        communication starts after backward. In SKIP steps every rank clips by the norm of its own gradient.

    Elements of a local gradient that are not finite count as 0 in all but DENSE steps, also in norms: no message of one rank
    can spoil the state of another, and ranks take the same decisions.

    Raises ValueError for arguments out of range, and for parameters that are not fp32.
    """

    # ---- binding ---------------------------------------------------------------------------------------------------

    def bind(self, comm: Communicator | None = None, pipeline: Pipeline | None = None, unit_mb: float = 25.0) -> None:
        """Fixes units, communicator and pipeline, and allocates all state. `attach` calls this.

        Called again between two steps, on every rank, it lays the state out again: parameters that were there keep theirs.

        Raises RuntimeError within a step; ValueError for `unit_mb` <= 0, and for parameters that are not fp32 or on several
        devices. What was bound before then stays.
        """
        require_number("unit_mb", unit_mb, "positive", above=True)
        trained = [p for g in self.param_groups for p in g["params"] if p.requires_grad and p.numel()]
        for p in trained:
            check_parameter(p)  # the model may have been converted since
        if len(devices := sorted({str(p.device) for p in trained})) > 1:
            raise ValueError(f"parameters are on {' and '.join(devices)}: use one device for each rank")
        self._sharded = any(sharded(p) for group in self.param_groups for p in group["params"])
        if self._sharded and comm is None:
            raise RuntimeError("FSDP has sharded the parameters: call birder.attach(model, optimizer, mesh=mesh)")
        if self._feeding:
            raise RuntimeError(
                "gradients of a step have been taken already: attach between step() and the next backward; after a "
                "backward pass that failed load the last checkpoint"
            )
        check_whole(self, comm)
        self.pipeline.wait()
        again, given, saved, before = self._bound, self._given(), taken(self), self.comm
        watched, changed = self.watch.look_all(self.units)
        moved = {unit.wholes[i] for unit in self.units for i in unit.moved}
        there = set(self.state)  # of a parameter that was taken out the script may have deleted it, as for torch
        if again:
            self.state = self._others()
        self._where, self._shown = {}, {}
        self.comm = comm or SingleProcess()
        self.pipeline = pipeline or Pipeline()
        self.units = make_units(self.param_groups, int(unit_mb * 2**20), self.alignment)
        multiple = math.lcm(self.comm.multiple, self.alignment * self.comm.shards)
        for unit in self.units:
            if self._sharded:
                lay_out_shards(unit, multiple)
            unit.padded, unit.shapes = round_up(unit.numel, multiple), [p.shape for p in unit.params]
            for i, p in enumerate(unit.wholes):
                self._where[p] = (unit, i)
            unit.moved = {i for i, p in enumerate(unit.wholes) if p in moved}
            self.init_unit(unit)
        self._bound, self._unit_mb, self._grouped = True, unit_mb, []
        self._agreement = Agreement()
        self._reduced, self._unstepped = set(), False
        self._watch.forget()
        self.watch.restore(self.units, changed, watched)
        if self.steps and before.signature != self.comm.signature:
            saved = {p: shared_out(self, before, kept) for p, kept in saved.items()}
            self._aside = {p: (since, shared_out(self, before, kept)) for p, (since, kept) in self._aside.items()}
        if again or given:
            put_back(self, saved, given)
        # Nobody averages what takes no part any more: ranks would keep different values for good.
        for p in (p for p in saved if self.local_models and p not in self._where):
            x = local(p.detach())
            x.copy_(run(self.comm, Mean(x.reshape(-1), counted=False)).view(x.shape))
        left = {p: (self.steps, state) for p, state in saved.items() if p in there}
        self._aside = {p: state for p, state in (self._aside | left).items() if p not in self._where}
        self._show(self.units)
        pending, self._pending = self._pending, None
        if pending is not None and pending["units"] is not None:
            self.load_state_dict(pending)

    def begin_again(self) -> None:
        """Before the first step: forgets a backward pass that failed (out of memory), to be attached again. Else nothing."""
        if self._bound and self.steps == 0:
            earlier, self.state = self.attachment, self._others()
            self.disconnect()
            if earlier is not None:
                earlier.close()

    def _bind_alone(self) -> None:
        """Binds an optimizer that no one has attached. Raises RuntimeError where there are other ranks."""
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if world > 1:
            raise RuntimeError(
                f"this is one of {world} ranks, and the optimizer is not attached: call birder.attach(ddp_model, optimizer) "
                "before its first step and before load_state_dict (FSDP2: with mesh=; Trainer, Accelerate, Lightning: "
                "birder.integrations), or optimizer.bind() to train without communication"
            )
        self.bind()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. After `attach` call `attach` again, before the group's first step; one process needs nothing more."""
        not_given = self.defaults.keys() - self.by_group - set(param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name in not_given:
            del group[name]
        for name in self.by_group & group.keys():
            group[name] = without_dimensions(group[name])
        try:
            check_foreign_options(self.kind, group, self.by_group, self.defaults)
            self.check_group(group)
            if len(set(group["params"])) < len(group["params"]):
                raise ValueError("a parameter is twice in its group: list each of them once")
            for p in group["params"]:
                if p.requires_grad:  # what is frozen is left alone, whatever its type
                    check_parameter(p)
        except (TypeError, ValueError):
            del self.param_groups[-1]  # what is refused is not taken
            raise

    def digest(self, *more: Any) -> int:
        """A 63-bit digest of what all ranks must agree on: `settings`, steps done, and `more`."""
        return digest_of((*self.settings(), self.steps, more))

    def settings(self) -> tuple[Any, ...]:
        """Class, arguments of the whole optimizer, and of every group hyper-parameters and shapes."""
        given = {p: sorted(names) for p, names in self._given().items()}
        groups = [  # what else a script keeps in its groups is its own
            [(k, plain_number(group.get(k))) for k in sorted(self.by_group)]
            + [[(tuple(p.shape), p.requires_grad, given.get(p)) for p in group["params"]]]
            for group in self.param_groups
        ]
        return self.kind, sorted(self.shared_options.items()), groups

    # ---- gradients during backward ----------------------------------------------------------------------------------

    def feed(self, params: list[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Takes gradients that are ready during backward; a unit that is complete is submitted to the pipeline.

        None: this rank has no gradient for the parameter. Raises RuntimeError when a parameter is fed twice in a step.
        """
        arrived: dict[int, list[tuple[int, Tensor | None]]] = {}
        for p, g in zip(params, grads, strict=True):
            if p in self._where:
                unit, i = self._where[p]
                arrived.setdefault(unit.index, []).append((i, g))
        if arrived and not self._feeding:  # a bucket of others' parameters begins no step
            if self._read is None:  # no attachment has called for it
                self.note_options()
            self._open_units()
            self._weights = self._weight_marks()
        for index, pairs in arrived.items():
            self._put(self.units[index], pairs, None)

    def _open_units(self) -> None:
        self._feeding = True
        self._refresh_shards()
        for unit in self.units:
            unit.waiting, unit.kept = set(range(len(unit.params))), {}
            unit.sent, unit.result = False, None
            if unit.grad is None:
                unit.grad = unit.zeros()

    def _put(self, unit: Unit, pairs: list[tuple[int, Tensor | None]], factor: Tensor | None) -> None:
        """Takes the gradients of some of the unit's parameters, by position, together; None counts as 0."""
        if not unit.waiting.issuperset(i for i, _ in pairs):
            self._feeding = False
            raise RuntimeError(TWICE)
        assert unit.grad is not None
        grad, step = unit.grad, self.steps + 1
        there = [(g, unit.offsets[i]) for i, g in pairs if g is not None]
        unit.kept.update({i: {} for i, g in pairs if g is None})
        missing = [unit.view(grad, i) for i, g in pairs if g is None]
        for g, _ in there:
            check_gradient(g)
        if there:
            screen = not self.handles_nonfinite
            kernels.take(grad, *map(list, zip(*there, strict=True)), factor=factor, screen=screen)
        if missing:
            torch._foreach_zero_(missing)
        unit.waiting.difference_update(i for i, _ in pairs)
        # FSDP brings no gradient of a layer that was not used: replicas that use others would complete units in another
        # order. DDP's buckets come in the same order on every rank.
        for ready in self.units if self._sharded else [unit]:
            if ready.waiting:
                break
            if not ready.sent:
                assert ready.grad is not None
                ready.sent = True
                for i in ready.kept:
                    ready.kept[i] = {name: part.clone() for name, part in parts(self, ready, i).items()}
                self._submit(functools.partial(self.exchange, ready, ready.grad, step), ready.index)

    def _submit(self, task: Task, unit: int | None = None, whole: bool = False) -> None:
        self.pipeline.comm = self.comm  # whatever pipeline has been put there
        self.pipeline.submit(task, unit, whole)

    # ---- the step --------------------------------------------------------------------------------------------------

    @torch._disable_dynamo  # as torch's own methods: compiled, kernels and threads would be traced
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update. `closure` re-evaluates the model and returns the loss, as in torch.

        Raises RuntimeError when the optimizer is not attached and there are other ranks, when a GradScaler drives an
        optimizer whose hook does not know of it, and while a CUDA graph is captured.
        """
        loss = None
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self.kind} counts its steps on the host, which a CUDA graph would repeat unchanged: capture forward and "
                "backward alone, and call step() after each replay"
            )
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._virtual:
            raise RuntimeError("VirtualRanks steps this optimizer: call its step(), after the turn of every rank")
        try:
            with who_is_missing(self.steps + 1):
                run(self.comm, self.stepping())
        except BaseException:
            self.give_up()
            raise
        return loss

    def give_up(self) -> None:
        """A step has failed: what was taken is lost, and the next backward pass starts from the beginning."""
        self._feeding = False
        self._watch.forget()

    def stepping(self) -> Requests[None]:
        """One update, for a driver to perform: `step` does so at once."""
        if not (yield from self._all_ready()):
            return
        step = self.steps + 1
        plan = self.plan(step)
        trace = self.pipeline.trace
        self._stepping = True
        if plan.own:
            with trace.span("exposed"):
                yield from self._exchange_all(step, plan)
        else:
            yield from self.pipeline.waiting()  # for `after_update` of the step before
            if self.max_grad_norm is not None:
                torch._foreach_mul_(self._gradients(), (yield from self._clip_factor(plan)))
        yield from asking(self.before_update(step))
        with trace.span("apply"):
            still = self._still(step) if plan.own else []
            yield from asking(self.update(step, plan))
            # Autograd does not see what kernels write, not even torch's fused ones: it would take a graph of older values.
            torch.autograd.graph.increment_version([p for p in self._where if p.grad is not None])
            self._keep_still(still, step)
            for unit in {unit.index: unit for unit, _, _ in still}.values():
                self.watch.follow(unit)
        self._note_moves(step)
        self._show(unit for unit in self.units if unit.shown != tuple(unit.state))
        trace.end_step()
        self.steps, self._stepping = step, False
        if type(self).after_update is not Method.after_update:
            self._submit(functools.partial(self.after_update, step))

    def _exchange_all(self, step: int, plan: Plan) -> Requests[None]:
        """Sees to it that every unit of this step has been exchanged."""
        factor = None
        if not self._feeding:
            self._open_units()
            if self.max_grad_norm is not None:
                factor = yield from self._clip_factor(plan)
        for unit in self.units:
            if unit.waiting:  # after feeding: what no hook was called for
                self._put(unit, [(i, gradient(unit.wholes[i])) for i in sorted(unit.waiting)], factor)
        if (compare := self.agreement(plan)) is not None:
            self._submit(compare)
        self._submit(functools.partial(self.after_units, step), whole=True)
        self._feeding = False
        yield from self.pipeline.waiting()
        self.check_agreement()

    # ---- parameters without a gradient --------------------------------------------------------------------------------

    def _still(self, step: int) -> list[tuple[Unit, int, Tensor | None]]:
        """Parameters that have no gradient on any rank, and their values: they do not change, as in torch. None: of one that
        shares its memory with another parameter, which moves it.

        After backward DDP has left a gradient on all ranks where one of them had any. A parameter that has moved in a step
        after which ranks are apart takes part in the next other step all the same, with a gradient of 0: they have to meet.
        """
        found = [
            (unit, i)
            for unit in self.units
            for i in unit.kept
            if unit.wholes[i].grad is None and (self.apart_after(step) or i not in unit.moved)
        ]
        if not found:
            return []
        stays = {(unit.index, i) for unit, i in found}
        moving = {p.data_ptr() for u in self.units for i, p in enumerate(u.params) if (u.index, i) not in stays}
        values = [unit.params[i].detach() for unit, i in found]
        return [(*at, None if x.data_ptr() in moving else x.clone()) for at, x in zip(found, values, strict=True)]

    def _keep_still(self, still: list[tuple[Unit, int, Tensor | None]], step: int) -> None:
        """Undoes what the step has made of these parameters and of their states."""
        for unit, i, value in still:
            if value is not None:
                unit.params[i].copy_(value)
            now = parts(self, unit, i)
            for name, old in unit.kept[i].items():
                if name in now and self.restores(name, step):
                    now[name].copy_(old)

    def _note_moves(self, step: int) -> None:
        self._apart = self.apart_after(step)
        for unit in self.units:
            unit.kept = {}
            if self._apart:
                unit.moved.update(i for i, p in enumerate(unit.wholes) if p.grad is not None)
            else:
                unit.moved.clear()

    # ---- clipping ----------------------------------------------------------------------------------------------------

    def _clip_factor(self, plan: Plan) -> Requests[Tensor]:
        """By what the step's gradients are multiplied, fp32[]; in a DENSE step they are the average gradient."""
        squares = torch.zeros(1, dtype=torch.float64, device=self.device)
        for g in self._gradients():
            kept = torch.nan_to_num(g, nan=0.0, posinf=0.0, neginf=0.0) if plan.own else g
            # In fp64: the squares of fp32 numbers above 1e19 are infinite in fp32.
            squares += torch.linalg.vector_norm(kept, dtype=torch.float64).square().to(squares.device)
        if plan is Plan.COMPRESSED:
            squares = (yield Total(squares)) / self.comm.world_size
        else:
            squares = yield AcrossHolders(squares)
        return (self.max_grad_norm / (squares.view(()).sqrt() + 1e-6)).clamp(max=1.0).float()

    def _gradients(self) -> list[Tensor]:
        return [g for unit in self.units for p in unit.wholes if (g := gradient(p)) is not None]
