"""What would train wrongly without a word, found at the beginning of a step or before it: one line that says what to do."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from birder.comm import Communicator, GatherRanks, Requests
from birder.comm.runtime import in_short
from birder.optim.checks import check_gradient, check_parameter
from birder.optim.contract import Plan
from birder.optim.layout import local
from birder.optim.state import MethodState, identical
from birder.optim.watch import marks

AGAIN = (
    "build DistributedDataParallel again and call birder.attach(model, optimizer) again, which keeps the state; or freeze "
    "layers after attach instead, with find_unused_parameters=True"
)
AGAIN_SHARDED = (
    "call birder.attach(model, optimizer, mesh=mesh) again, between step() and the next backward, which keeps the state; or "
    "freeze layers after attach instead"
)
TWICE = (
    "backward ran twice before step(), but with this method messages are taken during backward: to accumulate, run all "
    "passes but the last, forward and backward, under ddp.no_sync() (FSDP: model.set_requires_gradient_sync(False)); to "
    "throw a pass away (a skipped batch, a GAN's other network), run it under no_sync() too or use attach(..., overlap=False)"
)

LAYERS = "layers"
"""Stands for the layers that have no gradient, among the names of hyper-parameters."""
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


ALONE = (
    "other ranks did not come to step {step} in time: one of them left the loop, or skipped the step. p.grad is each rank's "
    "own, so let all ranks decide by what is the same on all of them, such as an averaged loss ({why})"
)
GONE = (
    "another rank has ended before step {step} was done. What it said comes first; if it ended well, give all ranks the same "
    "number of batches ({why})"
)
MISSED = (
    (re.compile("Timed out"), ALONE),
    (re.compile("closed by peer|reset by peer|Broken pipe|remote process exited", re.IGNORECASE), GONE),
)
"""What a collective raises where other ranks do not come, and what that means."""


@contextlib.contextmanager
def who_is_missing(step: int) -> Iterator[None]:
    """Around a collective of this step: what it raises where other ranks do not come becomes one line for the script."""
    try:
        yield
    except RuntimeError as error:
        for words, meaning in MISSED:
            if words.search(str(error)):
                raise RuntimeError(meaning.format(step=step, why=in_short(error))) from error
        raise


def plain_number(value: Any) -> Any:
    """A hyper-parameter as Python's numbers: what a tensor or one of numpy's prints has fewer digits, and names a device."""
    if isinstance(value, (tuple, list)):
        return tuple(map(plain_number, value))
    return float(value) if isinstance(value, (Tensor, np.generic)) else value


def _unless_on_gpu(value: Any) -> Any:
    """`plain_number`, but for a GPU's tensor, for which the host would wait."""
    return None if isinstance(value, Tensor) and value.is_cuda else plain_number(value)


class Guards(MethodState):
    """The part of `BucketOptimizer` that refuses. `_ready` names the guards in the order in which `step` asks them."""

    bind: Callable[..., None]
    _unit_mb = 25.0

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
        alone = self.comm.world_size == 1 and (self.comm.holders == 1 or not self.compressed)
        if self.attachment is not None and self.attachment.closed and not alone:
            raise RuntimeError(
                "the attachment of this optimizer was closed: call birder.attach(model, optimizer) again"
            )
        if self._in_backward and self.max_grad_norm is not None:
            raise RuntimeError(
                "max_grad_norm was set after attach, and messages are taken during backward, before it: set it first, or "
                "call birder.attach(model, optimizer) again"
            )
        self.follow_groups()
        self._check_reach()
        if not self._feeding and all(p.grad is None for p in self._where):
            self._watch.forget()
            return False
        self._check_dense()
        self._refresh_shards()
        self._check_shapes()
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

        Not under FSDP, whose ranks wait for each other in the forward pass. On a GPU the host waits once in a step for what
        they say: a GradScaler has done so before.
        """
        attached = self.attachment is not None and self.attachment.communicate
        return attached and self.compressed and not self._in_backward and self.comm.holders == 1

    def _all_ready(self) -> Requests[bool]:
        """`_ready`. Where `meets_in_step`, all ranks refuse the step if one does; elsewhere they wait until the timeout."""
        if not self.meets_in_step or self.plan(self.steps + 1) is Plan.SKIP:
            ready = self._ready()
            if ready and self.attachment is not None:
                yield from self.attachment.opening()
            return ready
        refused = None
        try:
            what = READY if self._ready() else NOTHING
        except Exception as error:
            what, refused = REFUSES, error
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
        self.attachment.opened |= what == READY
        return what == READY

    def follow_groups(self) -> None:
        """Takes hyper-parameters from the present groups, which the caller may have replaced or changed since.

        A parameter that was taken out, or put into another group, lays units out again; RuntimeError where other ranks would
        have to do so too. Every step asks: where nothing has changed, one pass without a lookup says so.
        """
        present = list(chain.from_iterable((group, *group["params"]) for group in self.param_groups))
        if identical(present, self._grouped):
            return
        group_of = {p: group for group in self.param_groups for p in group["params"]}
        taken_out = any(p not in group_of for p in self._where)
        if taken_out or any(group_of[p] is not group_of[unit.wholes[0]] for p, (unit, _) in self._where.items()):
            self._bind_again(
                "parameters were taken out of the optimizer's groups, or put into others, since it was attached: call "
                "birder.attach(model, optimizer) again, between step() and the next backward, which keeps the state"
            )
            return
        self._grouped = present
        for unit in self.units:
            unit.group = group_of[unit.wholes[0]]

    def _check_reach(self) -> None:
        """Lays units out again where a parameter was unfrozen or added, so that each with a gradient takes part.

        Raises RuntimeError where other ranks would have to do so too, and where DDP does not average a gradient.
        """
        everything = (p for group in self.param_groups for p in group["params"])
        outside = [p for p in everything if p not in self._where and p.grad is not None and p.numel()]
        if stale := [p for p in outside if not p.requires_grad]:
            self._bind_again(
                f"{self.named(stale[0])} is frozen and still has a gradient, which would move it under torch: set "
                "p.grad = None where you freeze it, or call zero_grad() without set_to_none=False"
            )
        elif outside:
            self._bind_again(
                f"{self.named(outside[0])} has a gradient but was frozen or not there when the optimizer was attached: "
                + (AGAIN_SHARDED if self._sharded else AGAIN)
            )
        apart = (p for p in self._where if p not in self._reduced and p.grad is not None)
        if self._reduced and (p := next(apart, None)) is not None:
            raise RuntimeError(
                f"DistributedDataParallel does not average the gradient of {self.named(p)}, which was frozen when the model "
                "was wrapped, or is ignored by it: " + AGAIN
            )

    def _bind_again(self, refusal: str) -> None:
        """Lays units out again. Raises RuntimeError where other ranks would have to do so too."""
        if self.comm.world_size > 1 or (self.attachment is not None and not self.attachment.closed):
            raise RuntimeError(refusal)
        self.bind(self.comm, self.pipeline, self._unit_mb)

    def _refresh_shards(self) -> None:
        """Takes FSDP's shards again: it may have put them elsewhere since (lazy initialisation, a loaded state)."""
        for unit in self.units if self._sharded else ():
            unit.params = [local(p) for p in unit.wholes]

    def _check_shapes(self) -> None:
        """Raises RuntimeError where `p.data` has another shape by now: the state is of the old one."""
        for unit in (unit for unit in self.units if unit.state):
            for p, shape in zip(unit.params, unit.shapes, strict=True):
                if p.shape != shape:
                    raise RuntimeError(
                        f"{self.named(p)} was of shape {tuple(shape)} when its state was made, and is {tuple(p.shape)} now: "
                        "build a new optimizer (and DistributedDataParallel) for it"
                    )

    def note_options(self) -> None:
        """Called when the first gradients of a step come: from now on these hyper-parameters must not change."""
        self.follow_groups()
        early = self.by_group - self.read_in_update
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

    def agreement(self, plan: Plan) -> Callable[[], Requests[None]] | None:
        """The task by which ranks compare hyper-parameters, and FSDP's replicas the layers that have gradients: DDP would
        have left one of 0 for the others. None: in this step they do not meet, or there is no other rank."""
        if self.attachment is None or not self.attachment.communicate or self.comm.world_size == 1:
            return None
        options = {k: [_unless_on_gpu(group.get(k)) for group in self.param_groups] for k in sorted(self.by_group)}
        if plan is Plan.SKIP:
            self._agreement.note(options)
            return None
        if self._sharded:
            options[LAYERS] = [(unit.index, sorted(unit.kept)) for unit in self.units]
        return functools.partial(self._agreement.compare, options, self.device)

    def check_agreement(self) -> None:
        """Raises RuntimeError on all ranks where they differed. On a GPU once the answer is there, in a later step."""
        apart = self._agreement.apart()
        if LAYERS in apart:
            raise RuntimeError(
                "replicas have gradients of different layers in this step: with FSDP all ranks have to use the same (add "
                "the output of the others, times 0, to the loss)"
            )
        if apart:
            raise RuntimeError(
                f"ranks have other values of {', '.join(apart)}: a loss and, with this method, p.grad are each rank's own, "
                "so what is computed from them differs. All-reduce the loss or the norm first"
            )

    def _weight_marks(self) -> list[int] | None:
        """`marks` of the parameters where messages are made of them, or will be in some later step; None elsewhere."""
        reads = self.reads_parameters(self.steps + 1)
        if not (reads or self.reads_at_times):
            return None
        # Versions miss p.data = x: the first step looks at bits.
        return marks((p for unit in self.units for p in unit.params), reads or not self.steps)

    def _check_weights(self) -> None:
        """Raises ValueError for a model that was converted, RuntimeError where a message was made of other parameters."""
        before, self._weights = self._weights, None
        changed = self._feeding and before is not None and before != self._weight_marks()
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
