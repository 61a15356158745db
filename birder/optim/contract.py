"""What a method defines, and what it may rely on. `BucketOptimizer` (base.py) is the class to derive from."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from birder.comm import Communicator, Pipeline, Requests, SingleProcess
from birder.optim.agreement import Agreement
from birder.optim.checks import USUAL, require, require_number
from birder.optim.layout import ALIGN, Unit
from birder.optim.watch import GradientWatch, ParameterWatch

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


def arguments(method: type) -> frozenset[str]:
    """Names of the arguments of the class and of its bases: other attributes are the script's own."""
    return frozenset(
        name
        for base in method.__mro__
        if base is not object and "__init__" in vars(base)  # `object`: its signature is a text to parse
        for name in inspect.signature(base).parameters
    )


class Method(torch.optim.Optimizer):
    """The contract: what a method overrides, in the order in which it is called.

    | | when | may communicate |
    |---|---|---|
    | `alignment`, `init_unit` | once, when the optimizer is attached | no |
    | `plan` | before backward, any number of times | no |
    | `exchange` | a unit is complete, during backward | in COMPRESSED steps |
    | `after_units` | after the last unit, before `update` | yes |
    | `update` | in `step()` | yes |
    | `after_update` | after `update`, during the next step | yes |

    Whatever communicates is a generator that yields requests (birder/comm/requests.py) and is sent the answers: on all ranks
    the same in the same order within one `exchange`, `after_units`, `update` or `after_update`. How these overlap
    need not be the same on all ranks (birder/comm/runtime.py).
    """

    compressed: ClassVar[bool] = False
    """Whether the method sends its own messages in some of its steps."""
    local_models: ClassVar[bool] = False
    """Whether parameters may differ between ranks after a step. `averaged` is then what to evaluate."""
    carried: ClassVar[dict[str, str]] = {}
    """The kind of each state, by name. "copy": the same on all ranks; "mean", "sum": each worker's own; "cut": the server's.
    It says what happens to it with another number of workers (birder/checkpoint/elastic.py) or shards (shards.py)."""
    on_shards: ClassVar[bool] = False
    """Whether the method works on any part of a parameter: on elements, and on norms of layout.py. Others refuse FSDP."""
    elementwise: ClassVar[bool] = False
    """Whether no element's step depends on other elements, as scales and norms do. Others refuse tensor parallelism."""
    uses_wire: ClassVar[bool] = True
    """Whether some of its messages are sent as `wire`. Others refuse all but the default."""
    by_tensor: ClassVar[frozenset[str]] = frozenset()
    """States that are a number for each parameter, in the order of `unit.params`, not for each element."""
    read_in_update: ClassVar[frozenset[str]] = frozenset()
    """Hyper-parameters that `update` alone reads: they may change between backward and `step`."""
    handles_nonfinite: ClassVar[bool] = False
    """Whether the method's own arithmetic takes gradients that are not finite for 0."""
    reads_at_times: ClassVar[bool] = False
    """Whether `reads_parameters` of some later step. A script that changes them is refused in its first step already."""

    by_group: frozenset[str]
    """Names of the hyper-parameters that each group has; the other `defaults` are one for all groups."""
    follow_groups: Callable[[], None]
    """Takes hyper-parameters from the present groups (guards.py)."""
    _bind_alone: Callable[[], None]

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        wire: str = "fp32",
        max_grad_norm: float | None = None,
        seed: int = 0,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise TypeError(f"{self.kind} has no option {', '.join(unknown)}: leave it out")
        require(isinstance(wire, str) and wire in WIRES, "wire", wire, "one of " + ", ".join(WIRES))
        require(self.uses_wire or wire == "fp32", "wire", wire, "left out: this method does not use it")
        whole = isinstance(seed, int) and not isinstance(seed, bool)
        require(whole and 0 <= seed < 2**64, "seed", seed, "an integer in [0, 2^64)")
        self.wire, self.seed = wire, seed
        self.max_grad_norm = require_number("max_grad_norm", max_grad_norm, "positive or None", above=True, none=True)
        self.disconnect()
        self.steps = 0
        self.by_group = frozenset(defaults)
        named = arguments(type(self))
        options = {name: value for name, value in vars(self).items() if name in named}
        super().__init__(params, options | defaults)  # as torch's, `defaults` make another one like this

    def disconnect(self) -> None:
        """Begins without units and peers: what a copy does not take over."""
        self.units: list[Unit] = []
        self.comm: Communicator = SingleProcess()
        self.pipeline = Pipeline()
        self._bound = False
        self._counter = torch.zeros((), dtype=torch.int64, device="cpu")
        """`steps` in what `state_dict` returns. As all other tensors there, it may be loaded in place."""
        self._feeding = False
        self._sharded = False
        self._where: dict[Tensor, tuple[Unit, int]] = {}
        self._watch = GradientWatch()
        self._agreement = Agreement()
        self._weights: list[int] | None = None
        """What tells the parameters that messages were made of from others (`marks` in watch.py)."""
        self._aside: dict[Tensor, tuple[int, dict[str, Tensor]]] = {}
        """Of parameters that are frozen or in no group: the number of steps when they were last bound, and their state."""
        self._names: dict[Tensor, str] = {}
        self._reduced: set[Tensor] = set()
        """The parameters that DDP has brought to its hook; empty before the first pass, and without DDP."""
        self._read: list[dict[str, Any]] | None = None
        """The hyper-parameters of each group that messages have been made with."""
        self._shown: dict[Tensor, dict[str, Tensor]] = {}
        """By parameter: the views of `unit.state` that are in `self.state`."""
        self._grouped: list[Any] = []
        """Every group and its parameters, as they were when units were last compared with them."""
        self._seen_state: list[Any] | None = None
        """The entries of `self.state`, and all that stands in these, as they were in the last check; None: before it."""
        self._apart = False
        """Whether the last step was of this rank alone, so that models may differ. Not by the schedule, which may change."""
        self.watch = ParameterWatch()
        """Of methods that keep a model of the last synchronisation."""
        self._within: list[Tensor] | None = None
        """Inside `averaged`: this rank's own `flat_parameters`, by unit."""
        self._stepping = False
        """Whether `step` has begun and not ended."""
        self._in_backward = False
        """Whether an attachment takes messages during backward, in steps that are not DENSE."""
        self._unstepped = False
        """Whether a backward pass has sent, or will send, messages for a step that has not come yet."""
        self._virtual = False
        """Whether `birder.VirtualRanks` steps it, and nobody else may."""
        self.attachment: Any = None
        """The `birder.hooks.attachment.Attachment` that `attach` made last."""

    @property
    def steps(self) -> int:
        """Completed steps. A step that a GradScaler skips does not count."""
        return self._steps

    @steps.setter
    def steps(self, count: int) -> None:
        self._steps = count
        self._counter.fill_(count)

    def check_group(self, group: dict[str, Any]) -> None:
        """Raises ValueError when a hyper-parameter of the group is out of range: of `USUAL`, and the method's others."""
        for name, check in USUAL.items():
            if name in self.by_group:
                check(name, group[name])

    @property
    def kind(self) -> str:
        """By what name checkpoints and other ranks know the method."""
        return type(self).__name__

    @property
    def device(self) -> torch.device:
        """Of the first unit; where nothing is trained, of the first parameter: ranks still talk on it."""
        if self.units:
            return self.units[0].device
        return next((p.device for group in self.param_groups for p in group["params"]), torch.device("cpu"))

    @property
    def alignment(self) -> int:
        """Every parameter begins, and every rank's shard of a unit ends, at a multiple of so many elements; a multiple of 32.

        For methods that work on blocks which may not cross the border between two parameters.
        """
        return ALIGN

    def plan(self, step: int) -> Plan:
        """What step number `step` (from 1) communicates. Depends on `step` alone, or ranks would wait for each other."""
        return Plan.COMPRESSED if self.compressed else Plan.DENSE

    def apart_after(self, step: int) -> bool:
        """Whether step number `step` moves parameters on each rank alone, and a later one lets ranks meet."""
        return self.plan(step) is Plan.SKIP

    def reads_parameters(self, step: int) -> bool:
        """Whether `exchange` reads parameters: they must not change before `update` then."""
        return False

    def init_unit(self, unit: Unit) -> None:
        """Fills `unit.state` and `unit.buffers`. All ranks make the same keys; shapes may depend on `self.comm`."""

    def exchange(self, unit: Unit, grad: Tensor, step: int) -> Requests[None] | None:
        """From the unit's local gradient, fp32[padded], to `unit.result`. May overwrite `grad`.

        Called in COMPRESSED and SKIP steps; in the latter it must not communicate. Runs on the pipeline, maybe on another
        thread, during backward; parameters do not change meanwhile. What follows its first request other than `ShardMean`
        overlaps the beginning of the next unit's exchange (birder/comm/runtime.py).
        """
        raise TypeError(f"{type(self).__name__} does not compress")

    def check_step(self, step: int) -> None:
        """Called at the beginning of step number `step`. Raises RuntimeError where it would go wrong without a word."""

    def before_update(self, step: int) -> Requests[None] | None:
        """The same once all ranks are there, for what they find out together: after the step's messages, before `update`."""

    def restores(self, name: str, step: int) -> bool:
        """Whether the state `name` does not change for a parameter that has no gradient in step number `step`."""
        return True

    def joins(self, p: Tensor, kept: dict[str, Tensor], passed: int) -> dict[str, Tensor]:
        """The state of a parameter that was added or unfrozen, by name; what is not named is as `init_unit` makes it.

        kept: of the time before it was frozen, {} of a new one. passed: the steps that it has not taken part in.
        """
        return kept

    def complete_state(self, unit: Unit) -> dict[str, Tensor]:
        """`unit.state`, and what the method has dropped from it because it is known by now."""
        return dict(unit.state)

    def load_unit(self, unit: Unit, tensors: dict[str, Tensor]) -> None:
        """Copies saved tensors into the unit's state."""
        if set(tensors) != set(unit.state):
            raise ValueError(f"the saved state holds {sorted(tensors)}, this optimizer keeps {sorted(unit.state)}")
        for name, tensor in tensors.items():
            mine = unit.state[name]
            if tensor.shape != mine.shape:
                raise ValueError(
                    f"saved {name} of unit {unit.index} has {tensor.numel()} elements, this run has "
                    f"{mine.numel()}: resume with the same model, unit size and number of ranks"
                )
            if tensor.dtype != mine.dtype:  # its numbers stand for others
                raise ValueError(
                    f"saved {name} is of {tensor.dtype}, this optimizer keeps {mine.dtype}: use the options that it was "
                    "saved with"
                )
        for name, tensor in tensors.items():
            unit.state[name].copy_(tensor)

    def loaded(self, options: dict[str, Any]) -> None:
        """Called when a state has been loaded that was saved with these options of the whole optimizer."""

    def forget_derived(self) -> None:
        """Drops what the method has derived from its state: the state has just been loaded, reset or laid out again."""

    def after_units(self, step: int) -> Requests[None] | None:
        """Runs on the pipeline after the last unit, in all but DENSE steps."""

    def update(self, step: int, plan: Plan) -> Requests[None] | None:
        """Updates parameters and state, from `p.grad` in DENSE steps, from `unit.result` in the others."""
        raise TypeError(f"{type(self).__name__} defines no update")

    def after_update(self, step: int) -> Requests[None] | None:
        """Runs on the pipeline after step number `step`, during the forward and backward passes of the next one.

        It ends before the next `update`, `averaged`, `state_dict` or `load_state_dict`. It may read parameters, which only
        the caller changes meanwhile, and `unit.state`; not `unit.grad`, `unit.result`, nor what the next step's `exchange`
        uses: that begins when this one's first request is on its way, or after its end where it has none.
        """
