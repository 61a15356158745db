"""`BucketOptimizer`: what all optimizers here share, from dense SGD to 1-bit methods."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from birder.comm import Communicator, GatherRanks, Pipeline, Requests, SingleProcess, run
from birder.comm.runtime import asking
from birder.optim.checks import check_foreign_options, check_parameter, require_number
from birder.optim.contract import Method, Plan
from birder.optim.exchange import GradientExchange
from birder.optim.layout import lay_out_shards, make_units, round_up, sharded
from birder.optim.state import MethodState, identical, put_back, taken

AGAIN = (
    "build DistributedDataParallel again and call birder.attach(model, optimizer) again, which keeps the state; or freeze "
    "layers after attach instead, with find_unused_parameters=True"
)


NOTHING, READY, REFUSES, BACKWARD = range(4)
"""What a rank says of a step: in `step`, that it has no gradient, can take it, cannot; or that it is in a backward pass."""


def say(comm: Communicator, step: int, what: int, device: torch.device) -> Requests[list[int]]:
    """What each rank says, 16 bytes that are not counted. Raises RuntimeError on all where ranks are at different steps."""
    mine = torch.tensor([step, what], dtype=torch.int64, device=device)
    said = (yield GatherRanks(mine, counted=False)).view(-1, 2).tolist()
    if len({(s, w == BACKWARD) for s, w in said}) > 1:
        steps = [s for s, _ in said]
        where = steps if len(set(steps)) > 1 else [f"{s} ({'backward' if w == BACKWARD else 'step'})" for s, w in said]
        raise RuntimeError(
            f"ranks are at different steps, {where}: one of them skipped step(), ran out of batches or loaded another "
            "checkpoint. Make all ranks take the same steps"
        )
    return [w for _, w in said]


class BucketOptimizer(GradientExchange, MethodState):
    """Base of all optimizers of this package.

    A method overrides `plan`, `init_unit`, `update` and, where it compresses, `exchange`: birder/optim/contract.py.
    `birder.attach(ddp_model, optimizer)` connects it to DDP. Without `attach`, on one process, it works on `p.grad` as any
    optimizer does; a 1-bit method is then one worker and its server.

    `p.grad` after backward under DDP: in a DENSE step the average gradient, as always. In any other step **this rank's own
    gradient**, not averaged: the message was taken from it during backward, and the optimizer holds the update. Changing
    `p.grad` then has no effect, unless `attach(..., overlap=False)`: then `step` takes the message from `p.grad`.

    max_grad_norm: clips by the global norm inside `step`. In DENSE steps that is the norm of the average gradient. In
        COMPRESSED steps every rank scales its gradient by min(1, max_grad_norm / sqrt(mean over ranks of |g_i|^2)), and
        communication starts after backward. In SKIP steps every rank clips by the norm of its own gradient.

    Elements of a local gradient that are not finite count as 0 in all but DENSE steps, also in norms: no message of one rank
    can spoil the state of another, and ranks take the same decisions.

    Raises ValueError for arguments out of range, and for parameters that are not fp32.
    """

    _unit_mb = 25.0

    # ---- binding ---------------------------------------------------------------------------------------------------

    def bind(self, comm: Communicator | None = None, pipeline: Pipeline | None = None, unit_mb: float = 25.0) -> None:
        """Fixes units, communicator and pipeline, and allocates all state. `attach` calls this.

        Called again between two steps, on every rank, it lays the state out again: parameters that were there keep theirs.

        Raises RuntimeError within a step, ValueError for `unit_mb` <= 0 and for parameters that are not fp32.
        """
        require_number("unit_mb", unit_mb, "positive", above=True)
        saved = None
        if self._bound:
            if self._feeding:
                raise RuntimeError(
                    "gradients of a step have been taken already: attach between step() and the next backward; after a "
                    "backward pass that failed load the last checkpoint"
                )
            self.pipeline.wait()
            saved = taken(self)
            self._where, self.state, self._shown = {}, self._others(), {}
        self._sharded = any(sharded(p) for group in self.param_groups for p in group["params"])
        if self._sharded and comm is None:
            raise RuntimeError("FSDP has sharded the parameters: call birder.attach(model, optimizer, mesh=mesh)")
        self.comm = comm or SingleProcess()
        self.pipeline = pipeline or Pipeline()
        self.units = make_units(self.param_groups, int(unit_mb * 2**20), self.alignment)
        multiple = math.lcm(self.comm.multiple, self.alignment * self.comm.shards)
        for unit in self.units:
            if self._sharded:
                lay_out_shards(unit, multiple)
            unit.padded = round_up(unit.numel, multiple)
            for i, p in enumerate(unit.wholes):
                check_parameter(p)  # the model may have been converted since
                self._where[p] = (unit, i)
            self.init_unit(unit)
        self._bound, self._unit_mb, self._grouped = True, unit_mb, []
        self._reduced, self._unstepped = set(), False
        self._watch.forget()
        if saved is not None:
            put_back(self, saved)
        self._show(self.units)
        pending, self._pending = self._pending, None
        if pending is not None and pending["units"] is not None:
            self.load_state_dict(pending)

    def begin_again(self) -> None:
        """Before the first step: forgets a backward pass that failed (out of memory), to be attached anew. Else nothing."""
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
                "before its first step and before load_state_dict (Trainer, Accelerate, Lightning: birder.integrations), or "
                "optimizer.bind() to train without communication"
            )
        self.bind()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. After `attach` call `attach` again, before the group's first step; one process needs nothing more."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_foreign_options(self.kind, group, self.defaults)
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
        """A 63-bit digest of what all ranks must agree on: class, shapes, hyper-parameters, steps done, and `more`."""
        plain = (bool, int, float, str, type(None))
        options = sorted((k, v) for k, v in vars(self).items() if isinstance(v, plain) and not k.startswith("_"))
        groups = [  # what else a script keeps in its groups is its own
            [(k, group.get(k)) for k in self.defaults] + [[(tuple(p.shape), p.requires_grad) for p in group["params"]]]
            for group in self.param_groups
        ]
        text = repr((self.kind, options, groups, more))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    # ---- the step --------------------------------------------------------------------------------------------------

    @torch._disable_dynamo  # as torch's own methods: compiled, kernels and threads would be traced
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update. `closure` re-evaluates the model and returns the loss, as in torch.

        Raises RuntimeError when the optimizer is not attached and there are other ranks, and when a GradScaler drives an
        optimizer whose hook does not know of it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            run(self.comm, self.stepping())
        except BaseException:
            self.give_up()
            raise
        return loss

    def give_up(self) -> None:
        """A step has failed: what was taken is lost, and the next backward pass starts from the beginning."""
        self._feeding = False
        self._watch.forget()

    def _ready(self) -> bool:
        """Raises RuntimeError where the step would go wrong. False: no parameter has a gradient, and nothing moves."""
        self._unstepped = False
        if hasattr(self, "found_inf"):
            for handed in ("found_inf", "grad_scale"):  # the scaler leaves them there after an error
                vars(self).pop(handed, None)
            raise RuntimeError(
                "with FSDP there is no GradScaler, ranks would skip different steps: use MixedPrecisionPolicy with bfloat16"
                if self._sharded
                else "a GradScaler is in use, but messages are taken during backward: use attach(..., overlap=False)"
            )
        if not self._bound:
            self._bind_alone()
        averaged = self._sharded and not self.compressed  # FSDP has averaged a gradient before its hooks are called
        if self.attachment is not None and not averaged and torch._C._current_graph_task_id() >= 0:
            raise RuntimeError(
                "step() was called inside backward, from a gradient's hook, before other ranks' gradients are there: call it "
                "after backward"
            )
        if self.attachment is not None and self.attachment.closed and self.comm.world_size > 1:
            raise RuntimeError(
                "the attachment of this optimizer was closed: call birder.attach(model, optimizer) again"
            )
        self.follow_groups()
        self._check_reach()
        if not self._feeding and all(p.grad is None for p in self._where):
            self._watch.forget()
            return False
        self._check_dense()
        self._refresh_shards()
        self._check_options()
        self._check_fingerprint()
        self._check_untouched()
        self._check_weights()
        self._check_shown()
        self.check_step(self.steps + 1)
        return True

    @property
    def meets_in_step(self) -> bool:
        """Whether ranks exchange messages in `step` alone (overlap=False, or clipping) and can say so beforehand.

        Not on a GPU, where the host would wait, and not under FSDP, whose ranks wait for each other in the forward pass.
        """
        attached = self.attachment is not None and self.attachment.communicate
        return (
            attached
            and self.compressed
            and not self._in_backward
            and self.comm.holders == 1
            and self.device.type == "cpu"
        )

    def _all_ready(self) -> Requests[bool]:
        """`_ready`. Where `meets_in_step`, all ranks refuse the step if one does; elsewhere they wait until the timeout."""
        meets = self.meets_in_step and self.plan(self.steps + 1) is not Plan.SKIP
        ready, refused = False, None
        try:
            ready = self._ready()
        except Exception as error:
            if not meets:
                raise
            refused = error
        if not meets:
            return ready
        what = REFUSES if refused is not None else READY if ready else NOTHING
        try:
            said = yield from say(self.comm, self.steps + 1, what, self.device)
        finally:
            if refused is not None:
                raise refused
        if REFUSES in said:
            raise RuntimeError(f"rank {said.index(REFUSES)} has refused this step, and says why: no rank has taken it")
        if len(set(said)) > 1:
            raise RuntimeError(
                f"rank {said.index(NOTHING)} has no gradient at all in this step, rank {said.index(READY)} has some"
            )
        return ready

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
                yield from self._exchange_all(step)
        else:
            yield from self.pipeline.waiting()  # for `after_update` of the step before
            if self.max_grad_norm is not None:
                yield from self._clip_gradients()
        with trace.span("apply"):
            still = self._still(plan) if plan.own else []
            yield from asking(self.update(step, plan))
            self._keep_still(still, step)
            for unit in {unit.index: unit for unit, _, _ in still}.values():
                self.watch.follow(unit)
        self._note_moves(plan)
        self._show(unit for unit in self.units if unit.shown != tuple(unit.state))
        trace.end_step()
        self.steps, self._stepping = step, False
        if type(self).after_update is not Method.after_update:
            self._submit(functools.partial(self.after_update, step))

    def follow_groups(self) -> None:
        """Takes hyper-parameters from the present groups, which the caller may have replaced or changed since.

        A parameter that was taken out, or put into another group, lays units out again; RuntimeError where other ranks would
        have to do so too. Every step asks: where nothing has changed, one pass without a lookup says so.
        """
        present = list(chain.from_iterable((group, *group["params"]) for group in self.param_groups))
        if identical(present, self._grouped):
            return
        group_of = {p: group for group in self.param_groups for p in group["params"]}
        for unit in self.units:
            first, *more = [group_of.get(p) for p in unit.wholes]
            if first is None or any(group is not first for group in more):
                break
            unit.group = first
        else:
            self._grouped = present
            return
        if self.comm.world_size > 1 or self.attachment is not None:
            raise RuntimeError(
                "parameters were taken out of the optimizer's groups, or put into others, since it was attached: call "
                "birder.attach(model, optimizer) again, between step() and the next backward, which keeps the state"
            )
        self.bind(self.comm, self.pipeline, self._unit_mb)

    def _check_reach(self) -> None:
        """Lays units out again where a parameter was unfrozen or added, so that each with a gradient takes part.

        Raises RuntimeError where other ranks would have to do so too, and where DDP does not average a gradient.
        """
        everything = (p for group in self.param_groups for p in group["params"])
        outside = [p for p in everything if p not in self._where and p.grad is not None and p.numel()]
        if outside:
            if self.comm.world_size > 1 or self.attachment is not None:
                raise RuntimeError(
                    f"{self.named(outside[0])} has a gradient but was frozen or not there when the optimizer was attached: "
                    + AGAIN
                )
            self.bind(self.comm, self.pipeline, self._unit_mb)
        if self._reduced:
            apart = [p for p in self._where if p not in self._reduced and p.grad is not None]
            if apart:
                raise RuntimeError(
                    f"DistributedDataParallel does not average the gradient of {self.named(apart[0])}, which was frozen when "
                    "the model was wrapped, or is ignored by it: " + AGAIN
                )

    def holds(self, p: Tensor) -> bool:
        """Whether the parameter is one of those that the optimizer was bound with."""
        return p in self._where

    def named(self, p: Tensor) -> str:
        """How messages call a parameter: by its name in the attached model, or its shape."""
        return self._names.get(p) or f"a parameter of shape {tuple(p.shape)}"

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # torch.amp.GradScaler asks this. "Yes" makes it hand over its scale, by which `step` can tell that there is one.
        # "No" leaves it its ordinary work: unscale p.grad, skip the step on overflow.
        return self._in_backward or self._feeding or self._sharded
