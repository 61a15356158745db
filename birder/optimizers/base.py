"""`BucketOptimizer`: what all optimizers here share, from dense SGD to 1-bit methods."""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from birder import kernels
from birder.comm import Alone, Communicator, Pipeline
from birder.optimizers.layout import Unit, make_units, round_up

WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Data types that a dense all-reduce can carry."""


class Plan(enum.Enum):
    """What is communicated in a step."""

    SKIP = "nothing: a step on this rank alone"
    DENSE = "the gradient, by all-reduce"
    COMPRESSED = "the method's own message"

    @property
    def own(self) -> bool:
        """Whether the method takes the local gradient itself (`exchange`), instead of having it averaged."""
        return self is not Plan.DENSE


def require(ok: bool, name: str, value: Any, wanted: str) -> None:
    """Raises ValueError, in one line, unless `ok`."""
    if not ok:
        raise ValueError(f"{name} must be {wanted}, got {value}")


def require_whole(name: str, value: Any, minimum: int = 1) -> None:
    """Raises ValueError unless `value` is a whole number, `minimum` or more. True is none."""
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
    require(ok, name, value, f"a whole number >= {minimum}")


class BucketOptimizer(torch.optim.Optimizer):
    """Base of all optimizers of this package.

    A subclass says what is communicated in a step (`plan`), keeps its state in flat fp32 buffers for each `Unit`
    (`init_unit`), and updates the parameters (`update`). One that compresses also turns a unit's local gradient into
    messages and exchanges them (`exchange`); in a SKIP step `exchange` is called all the same, and sends nothing.

    `birder.attach(ddp_model, optimizer)` connects it to DDP. Without `attach` it works on `p.grad` as any optimizer
    does; a 1-bit method is then one worker that is its own server.

    What `p.grad` holds after backward under DDP: in a DENSE step the average gradient, as always. In any other step
    **this rank's own gradient**, not averaged: the message has been taken from it during backward, and the update is
    kept by the optimizer. Changing `p.grad` then has no effect, unless `attach(..., overlap=False)`: then the message is
    taken from `p.grad` inside `step`.

    max_grad_norm: clips by the global norm inside `step`. In DENSE steps that is the norm of the average gradient. In
        COMPRESSED steps nobody has the average; every rank scales its gradient by the same factor
        min(1, max_grad_norm / sqrt(mean over ranks of |g_i|^2)), and communication starts after backward. In SKIP steps
        every rank clips by the norm of its own gradient.

    Elements of a local gradient that are not finite count as 0 in all but DENSE steps: no message of one rank can spoil
    the state of another, and ranks take the same decisions.

    Raises ValueError for arguments out of range.
    """

    compressed: ClassVar[bool] = False
    """Whether the method sends messages of its own in some of its steps."""
    local_models: ClassVar[bool] = False
    """Whether parameters may differ between ranks after a step. `averaged` is then what to evaluate."""
    screens: ClassVar[bool] = False
    """Whether the method's own arithmetic takes gradients that are not finite for 0."""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        wire: str = "fp32",
        max_grad_norm: float | None = None,
        seed: int = 0,
    ) -> None:
        require(wire in WIRES, "wire", repr(wire), "one of " + ", ".join(WIRES))
        require(max_grad_norm is None or max_grad_norm > 0, "max_grad_norm", max_grad_norm, "positive or None")
        require(isinstance(seed, int) and 0 <= seed < 2**64, "seed", seed, "an integer in [0, 2^64)")
        self.wire = wire
        self.max_grad_norm = max_grad_norm
        self.seed = seed
        self.steps = 0
        """Completed steps. A step that a GradScaler skips does not count."""
        self.units: list[Unit] = []
        self.comm: Communicator = Alone()
        self.pipeline = Pipeline()
        self._bound = False
        self._feeding = False
        self._where: dict[Tensor, tuple[Unit, int]] = {}
        super().__init__(params, defaults)
        for group in self.param_groups:
            self.check_group(group)

    # ---- what a method defines -------------------------------------------------------------------------------------

    def check_group(self, group: dict[str, Any]) -> None:
        """Raises ValueError when a hyper-parameter of the group is out of range."""
        require(group["lr"] >= 0, "lr", group["lr"], "at least 0")
        require(group["weight_decay"] >= 0, "weight_decay", group["weight_decay"], "at least 0")

    def plan(self, step: int) -> Plan:
        """What step number `step` (from 1) communicates. Depends on `step` alone, or ranks would wait for each other."""
        return Plan.DENSE

    def init_unit(self, unit: Unit) -> None:
        """Fills `unit.state`. All ranks make the same keys; shapes may depend on `self.comm`."""

    def exchange(self, unit: Unit, grad: Tensor, step: int) -> Iterator[None] | None:
        """From the unit's local gradient, fp32[padded], to `unit.result`. May overwrite `grad`.

        Called in COMPRESSED steps and in SKIP steps; in the latter it must not communicate. Runs on the pipeline: maybe on
        another thread, while backward goes on. Parameters do not change meanwhile. As a generator it yields once, before it
        begins to wait for the wire: the next unit is then encoded meanwhile (birder/comm/pipeline.py).
        """
        raise TypeError(f"{type(self).__name__} does not compress")

    def after_units(self, step: int) -> None:
        """Runs on the pipeline after the last unit, in all but DENSE steps."""

    def update(self, step: int, plan: Plan) -> None:
        """Updates parameters and state, from `p.grad` in DENSE steps, from `unit.result` in the others."""
        raise TypeError(f"{type(self).__name__} defines no update")

    # ---- binding ---------------------------------------------------------------------------------------------------

    def bind(self, comm: Communicator | None = None, pipeline: Pipeline | None = None, unit_mb: float = 25.0) -> None:
        """Fixes units, communicator and pipeline, and allocates all state. `attach` calls this; at most once.

        Raises RuntimeError when called again, ValueError for `unit_mb` <= 0.
        """
        if self._bound:
            raise RuntimeError("this optimizer is bound already: attach it once, before its first step")
        require(unit_mb > 0, "unit_mb", unit_mb, "positive")
        self.comm = comm or Alone()
        self.pipeline = pipeline or Pipeline()
        self.units = make_units(self.param_groups, int(unit_mb * 2**20))
        for unit in self.units:
            unit.padded = round_up(unit.numel, self.comm.multiple)
            for i, p in enumerate(unit.params):
                self._where[p] = (unit, i)
            self.init_unit(unit)
        self._bound = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. Raises RuntimeError once the optimizer is bound: units are fixed then."""
        if getattr(self, "_bound", False):
            raise RuntimeError("add parameter groups before attach and before the first step")
        super().add_param_group(param_group)

    def _ensure_bound(self) -> None:
        if not self._bound:
            self.bind()

    def digest(self, *more: Any) -> int:
        """A 63-bit digest of what all ranks must agree on: class, shapes, hyper-parameters, steps done, and `more`."""
        plain = (bool, int, float, str, type(None))
        options = sorted((k, v) for k, v in vars(self).items() if isinstance(v, plain) and not k.startswith("_"))
        groups = [
            [(k, v) for k, v in group.items() if k != "params"] + [[tuple(p.shape) for p in group["params"]]]
            for group in self.param_groups
        ]
        text = repr((type(self).__name__, options, groups, more))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    # ---- feeding gradients -----------------------------------------------------------------------------------------

    def feed(self, params: list[Tensor], grads: list[Tensor]) -> None:
        """Takes gradients that are ready during backward; a unit that is complete is submitted to the pipeline.

        Raises RuntimeError when a parameter is fed twice in a step.
        """
        if not self._feeding:
            self._open_units()
        arrived: dict[int, list[tuple[int, Tensor | None]]] = {}
        for p, g in zip(params, grads, strict=True):
            if p in self._where:
                unit, i = self._where[p]
                arrived.setdefault(unit.index, []).append((i, g))
        for index, pairs in arrived.items():
            self._put(self.units[index], pairs, None)

    def _open_units(self) -> None:
        self._feeding = True
        for unit in self.units:
            unit.waiting = set(range(len(unit.params)))
            unit.result = None
            if unit.grad is None:
                unit.grad = unit.zeros()

    def _put(self, unit: Unit, pairs: list[tuple[int, Tensor | None]], factor: Tensor | None) -> None:
        """Takes the gradients of some of the unit's parameters, by position, together; None counts as 0."""
        if not unit.waiting.issuperset(i for i, _ in pairs):
            self._feeding = False
            raise RuntimeError(
                "backward ran twice before step(): with a 1-bit method accumulate gradients under ddp.no_sync(), "
                "and synchronise only in the last backward"
            )
        assert unit.grad is not None
        grad, step = unit.grad, self.steps + 1
        there = [(g, unit.offsets[i]) for i, g in pairs if g is not None]
        missing = [unit.view(grad, i) for i, g in pairs if g is None]
        if there:
            kernels.take(grad, *map(list, zip(*there, strict=True)), factor=factor, screen=not self.screens)
        if missing:
            torch._foreach_zero_(missing)
        self.adjust_gradients([unit.params[i] for i, _ in pairs], [unit.view(grad, i) for i, _ in pairs], unit.group)
        unit.waiting.difference_update(i for i, _ in pairs)
        if not unit.waiting:
            self.pipeline.submit(functools.partial(self.exchange, unit, grad, step), unit.index)

    def adjust_gradients(self, params: list[Tensor], slots: list[Tensor], group: dict[str, Any]) -> None:
        """Chance to change the copied gradients in place, e.g. for coupled weight decay."""

    def _exchange_all(self, step: int) -> None:
        """Sees to it that every unit of this step has been exchanged."""
        factor = None
        fed = self._feeding
        if not fed:
            self._open_units()
            if self.max_grad_norm is not None:
                alone = self.plan(step) is Plan.SKIP
                factor = self._clip_factor() if alone else self._common_clip_factor(self.max_grad_norm)
        for unit in self.units:
            if unit.waiting:  # after feeding: what DDP does not reduce, the same on every rank
                left = [(i, None if fed else unit.params[i].grad) for i in sorted(unit.waiting)]
                self._put(unit, left, factor)
        self.pipeline.submit(functools.partial(self.after_units, step))
        self._feeding = False
        self.pipeline.wait()

    def _local_norm(self) -> Tensor:
        grads = [p.grad for u in self.units for p in u.params if p.grad is not None]
        device = self.units[0].device if self.units else torch.device("cpu")
        if not grads:
            return torch.zeros((), device=device)
        return torch.nn.utils.get_total_norm(grads).to(device=device, dtype=torch.float32)

    def _clip_factor(self) -> Tensor:
        assert self.max_grad_norm is not None
        return (self.max_grad_norm / (self._local_norm() + 1e-6)).clamp(max=1.0)

    def _common_clip_factor(self, limit: float) -> Tensor:
        norm = (self.comm.total(self._local_norm().square()) / self.comm.world_size).sqrt()
        return (limit / (norm + 1e-6)).clamp(max=1.0)

    # ---- the step --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update. `closure` re-evaluates the model and returns the loss, as in torch.

        Raises RuntimeError when a GradScaler drives an optimizer whose hook was not told of it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if hasattr(self, "found_inf"):
            raise RuntimeError(
                "a GradScaler is in use, but messages were taken during backward: use attach(..., overlap=False)"
            )
        self._ensure_bound()
        step = self.steps + 1
        plan = self.plan(step)
        trace = self.pipeline.trace
        if plan.own:
            with trace.span("exposed"):
                self._exchange_all(step)
        elif self.max_grad_norm is not None:
            factor = self._clip_factor()
            torch._foreach_mul_([p.grad for u in self.units for p in u.params if p.grad is not None], factor)
        with trace.span("apply"):
            self.update(step, plan)
        trace.end_step()
        self.steps = step
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # torch.amp.GradScaler asks this. While messages are taken during backward it is answered with yes, which makes
        # the scaler hand over its scale, by which `step` can tell that there is one. Otherwise the scaler does its
        # ordinary work: unscale p.grad, skip the step on overflow.
        return self._feeding

    # ---- models that differ between ranks ---------------------------------------------------------------------------

    def flat_parameters(self, unit: Unit) -> Tensor:
        """The unit's parameters as they are now, in a new flat buffer: fp32[padded]."""
        flat = unit.zeros()
        for view, p in zip(unit.views(flat), unit.params, strict=True):
            view.copy_(p.detach())
        return flat

    @torch.no_grad()
    def average_parameters(self) -> None:
        """Replaces the parameters by their mean over all ranks. Every rank calls it."""
        for unit in self.units:
            mean = self.comm.mean(self.flat_parameters(unit))
            for view, p in zip(unit.views(mean), unit.params, strict=True):
                p.copy_(view)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the parameters are the mean over all ranks: what to evaluate and to keep. Every rank enters it.

        Where parameters are the same on all ranks it does nothing. Its bytes are not counted.
        """
        if not self.local_models or self.comm.world_size == 1:
            yield
            return
        saved = [[p.detach().clone() for p in unit.params] for unit in self.units]
        counted = self.comm.counter.snapshot()
        self.average_parameters()
        self.comm.counter.restore(counted)
        try:
            yield
        finally:
            with torch.no_grad():
                for unit, values in zip(self.units, saved, strict=True):
                    torch._foreach_copy_(unit.params, values)

    # ---- state -----------------------------------------------------------------------------------------------------

    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank (without the gradient buffers)."""
        return sum(t.numel() * t.element_size() for u in self.units for t in u.state.values())

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """This rank's state: {"steps", "signature", "units": [{name: flat tensor}], "param_groups", "state": {}}.

        Of 1-bit methods it differs from rank to rank: every rank saves and loads its own. Tensors are not copied.
        """
        self._ensure_bound()
        return {
            "steps": self.steps,
            "signature": list(self.comm.signature),
            "units": [dict(u.state) for u in self.units],
            "state": {},
            "param_groups": super().state_dict()["param_groups"],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Restores what `state_dict` returned on the same rank; call it after `attach`.

        Raises ValueError when it was saved with another number of workers or another layout of parameters.
        """
        self._ensure_bound()
        saved, mine = tuple(state_dict["signature"]), self.comm.signature
        if self.compressed and saved != mine:
            raise ValueError(
                f"state of {type(self).__name__} was saved with {saved[0]} workers x {saved[1]} shards, "
                f"this run has {mine[0]} x {mine[1]}: resume with the same number of nodes and ranks"
            )
        units = state_dict["units"]
        if len(units) != len(self.units):
            raise ValueError(f"the saved state has {len(units)} units, this optimizer has {len(self.units)}")
        for unit, tensors in zip(self.units, units, strict=True):
            self.load_unit(unit, tensors)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for unit in self.units:  # torch replaces the group dicts
            unit.group = next(g for g in self.param_groups if any(p is unit.params[0] for p in g["params"]))
        self.steps = int(state_dict["steps"])

    def load_unit(self, unit: Unit, tensors: dict[str, Tensor]) -> None:
        """Copies saved tensors into the unit's state."""
        if set(tensors) != set(unit.state):
            raise ValueError(f"the saved state holds {sorted(tensors)}, this optimizer keeps {sorted(unit.state)}")
        for name, tensor in tensors.items():
            if tensor.shape != unit.state[name].shape:
                raise ValueError(
                    f"saved {name} of unit {unit.index} has {tensor.numel()} elements, this run has "
                    f"{unit.state[name].numel()}: resume with the same model, unit size and number of ranks"
                )
            unit.state[name].copy_(tensor)
