"""`Timeline`: when each gradient of a model is ready on some device, as a small JSON file. Imports no torch.

A file holds

    name, model, gpu, precision, batch_per_gpu, gpus_per_node
    forward_ms, step_ms            end of forward, and of the whole step, after its start
    gradients                      [[parameter, shape, ready_ms after the start of the step], ...] in the model's order
    intra_node                     constants for what happens inside a node (see `IntraNode`)
    source | command               where its numbers come from: a publication, or the command that measured them
    note                           what was assumed
    update_ms, wall_ms             where they were measured: the optimizer's step, and a whole step with its communication
    frozen, frozen_bytes           of parameters that are not trained: how many elements each has; bytes of all (4 an element)
"""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

BUS_GB_PER_S = 230.0
REASON = (
    "8 A100 on NVSwitch: 230 GB/s of bus bandwidth in NCCL's large collectives, an assumption; a reduce-scatter or an "
    "all-gather moves 7/8 of the tensor for each GPU, an all-reduce twice that"
)


@dataclass(frozen=True)
class IntraNode:
    """What collectives over the GPUs of one node take for the whole model, in milliseconds: stated, not measured.

    reduce_scatter_ms: of the fp32 gradient; all_reduce_ms: of the fp32 gradient; all_gather_ms: of one bit per element.
    """

    reduce_scatter_ms: float
    all_reduce_ms: float
    all_gather_ms: float
    reason: str

    @staticmethod
    def of(elements: int, gpus: int, gb_per_s: float = BUS_GB_PER_S, reason: str = REASON) -> IntraNode:
        """The constants for a model of `elements` parameters on nodes of `gpus` GPUs, at a rate in GB/s."""
        share = (gpus - 1) / gpus
        scatter = 4 * elements * share / (gb_per_s * 1e6)
        return IntraNode(round(scatter, 4), round(2 * scatter, 4), round(scatter / 32, 4), reason)


@dataclass(frozen=True)
class Gradient:
    """One parameter: its name, its shape, and when its gradient is ready, in ms after the start of the step."""

    name: str
    shape: tuple[int, ...]
    ready_ms: float

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Timeline:
    """One step of one model on one device. See the module's docstring for the fields. Milliseconds throughout."""

    name: str
    model: str
    gpu: str
    precision: str
    batch_per_gpu: int
    gpus_per_node: int
    forward_ms: float
    step_ms: float
    gradients: tuple[Gradient, ...]
    intra_node: IntraNode
    source: str | None = None
    command: str | None = None
    note: str = ""
    update_ms: float | None = None
    wall_ms: float | None = None
    frozen: tuple[int, ...] = ()
    frozen_bytes: int | None = None
    elements: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "elements", sum(g.numel for g in self.gradients))

    @property
    def whole(self) -> int:
        """Elements of all parameters, those that are not trained among them."""
        return self.elements + sum(self.frozen)

    @cached_property
    def layers(self) -> list[list[int]]:
        """Positions of the gradients that come out together, the first to be ready first."""
        found: dict[float, list[int]] = {}
        for i, g in enumerate(self.gradients):
            found.setdefault(g.ready_ms, []).append(i)
        return [found[at] for at in sorted(found)]

    def scaled(self, factor: float, note: str = "") -> Timeline:
        """The same model on a device that takes `factor` times as long. Raises ValueError for a factor <= 0."""
        if not factor > 0:
            raise ValueError(f"a timeline is scaled by a positive factor, not {factor:g}")
        return replace(
            self,
            forward_ms=self.forward_ms * factor,
            step_ms=self.step_ms * factor,
            gradients=tuple(replace(g, ready_ms=g.ready_ms * factor) for g in self.gradients),
            note="; ".join(filter(None, [self.note, note])),
            update_ms=None if self.update_ms is None else self.update_ms * factor,
            wall_ms=None,
        )


def read(path: str | Path) -> Timeline:
    """The timeline of a file. Raises ValueError, in one line, for content that is none, OSError for no file."""
    text = Path(path).read_bytes()
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not a readable timeline: {' '.join(str(error).split())}") from None
    return parse(content, str(path))


def parse(content: Any, where: str) -> Timeline:
    """A timeline from the content of its file, checked. Raises ValueError that begins with `where`."""
    if not isinstance(content, dict):
        raise ValueError(f"{where}: a timeline is a JSON object")
    known = {f.name: f for f in fields(Timeline) if f.init}
    if absent := sorted(name for name, f in known.items() if f.default is MISSING and name not in content):
        raise ValueError(f"{where} lacks {', '.join(absent)}")
    if unknown := sorted(set(content) - set(known)):
        raise ValueError(f"{where} has the unknown key {unknown[0]}")
    try:
        gradients = tuple(
            Gradient(str(n), tuple(int(s) for s in shape), float(at)) for n, shape, at in content["gradients"]
        )
        own = {"gradients": gradients, "frozen": tuple(int(n) for n in content.get("frozen", ()))}
        made = Timeline(**{**content, **own, "intra_node": IntraNode(**content["intra_node"])})
        _check_kinds(made)
        _check_kinds(made.intra_node)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
    if said := problem(made):
        raise ValueError(f"{where}: {said}")
    return made


KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}


def _check_kinds(made: Timeline | IntraNode) -> None:
    """Raises ValueError for a text or a number that is something else."""
    for f in fields(made):
        kind, _, optional = str(f.type).partition(" | ")
        value = getattr(made, f.name)
        if kind in KINDS and not isinstance(value, KINDS[kind]) and not (optional and value is None):
            raise ValueError(f"{f.name} must be of type {kind}, not {value!r}")


def dump(timeline: Timeline) -> str:
    """The text of a timeline's file: one gradient on each line."""
    head = {
        k: v
        for k, v in asdict(timeline).items()
        if k not in ("gradients", "elements", "name") and v not in (None, "", ())
    }
    lines = [json.dumps([g.name, list(g.shape), g.ready_ms]) for g in timeline.gradients]
    text = json.dumps({"name": timeline.name, **head}, indent=1, ensure_ascii=False)
    return text[:-2] + ',\n "gradients": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


def write(timeline: Timeline, path: Path) -> Path:
    """Writes a timeline's file. Raises ValueError for a timeline that contradicts itself, OSError."""
    if said := problem(timeline):
        raise ValueError(f"{timeline.name}: {said}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump(timeline), encoding="utf-8")
    return path


def problem(t: Timeline) -> str | None:
    """What is wrong with a timeline; None: nothing."""
    times = [g.ready_ms for g in t.gradients]
    known = [g.name for g in t.gradients]
    if not t.gradients:
        return "it has no gradients"
    if len(set(known)) < len(known):
        return f"the parameter {next(n for n in known if known.count(n) > 1)} stands there twice"
    if bad := [g.name for g in t.gradients if min(g.shape, default=1) < 1]:
        return f"the shape of {bad[0]} is not positive"
    if not all(math.isfinite(x) for x in (*times, t.forward_ms, t.step_ms, t.update_ms or 0.0, t.wall_ms or 0.0)):
        return "a time is not a number"
    if not 0 < t.forward_ms <= min(times) or max(times) > t.step_ms:
        return "times must obey 0 < forward_ms <= ready_ms <= step_ms"
    if min(t.update_ms or 0.0, t.wall_ms or 0.0) < 0:
        return "update_ms and wall_ms must not be negative"
    if min(*t.frozen, t.frozen_bytes or 0, 0) < 0:
        return "frozen and frozen_bytes must not be negative"
    if t.batch_per_gpu < 1 or t.gpus_per_node < 1:
        return "batch_per_gpu and gpus_per_node must be at least 1"
    if (t.source is None) == (t.command is None):
        return "it needs either a source or the command that recorded it"
    return None
