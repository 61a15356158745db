"""Timelines: when each gradient of a model is ready on some GPU, as small JSON files in results/timelines.

`python -m experiments.cells.timelines list`                 what there is
`python -m experiments.cells.timelines make --model resnet50 --batch 32 --precision tf32 --samples-per-s 938 --source "..."`
    spreads a published rate over the parameters by the backward work of each layer (experiments/cells/timeline_tools.py)
`python -m experiments.cells.timelines record --model resnet50 --batch 32 --precision amp`
    measures one on this machine's GPU, or on its CPU where there is none

A file holds

    name, model, gpu, precision, batch_per_gpu, gpus_per_node
    forward_ms, step_ms            end of forward, and of the whole step, after its start
    gradients                      [[parameter, shape, ready_ms after the start of the step], ...] in the model's order
    intra_node                     constants for what happens inside a node (see `IntraNode`)
    source | command               where its numbers come from: a publication, or the command that measured them
    note                           what was assumed
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository, not from this file's own folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from launch.errors import UserError

FOLDER = Path(__file__).resolve().parents[2] / "results" / "timelines"
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
    def of(elements: int, gpus: int) -> IntraNode:
        """The constants for a model of `elements` parameters on nodes of `gpus` GPUs."""
        share = (gpus - 1) / gpus
        scatter = 4 * elements * share / (BUS_GB_PER_S * 1e6)
        return IntraNode(round(scatter, 4), round(2 * scatter, 4), round(scatter / 32, 4), REASON)


@dataclass(frozen=True)
class Gradient:
    """One parameter: its name, its shape, and when its gradient is ready, in ms after the start of the step."""

    name: str
    shape: tuple[int, ...]
    ready_ms: float

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Timeline:
    """One step of one model on one GPU. See the module's docstring for the fields. Milliseconds throughout."""

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
    elements: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "elements", sum(g.numel for g in self.gradients))

    @property
    def layers(self) -> list[list[int]]:
        """Positions of the gradients that come out together, the first to be ready first."""
        found: dict[float, list[int]] = {}
        for i, g in enumerate(self.gradients):
            found.setdefault(g.ready_ms, []).append(i)
        return [found[at] for at in sorted(found)]


def load(name: str | Path) -> Timeline:
    """The timeline `name` of results/timelines, or of a file when `name` is a path. Raises UserError."""
    path = Path(name)
    if path.suffix != ".json":
        path = FOLDER / f"{name}.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no timeline {name!s}; there are: {', '.join(names()) or 'none'}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable timeline: {' '.join(str(error).split())}") from None
    return parse(content, str(path))


def names() -> list[str]:
    """All timelines of results/timelines."""
    return sorted(p.stem for p in FOLDER.glob("*.json"))


def parse(content: Any, where: str) -> Timeline:
    """A timeline from the content of its file, checked. Raises UserError that begins with `where`."""
    if not isinstance(content, dict):
        raise UserError(f"{where}: a timeline is a JSON object")
    wanted = {"name", "model", "gpu", "precision", "batch_per_gpu", "gpus_per_node", "forward_ms", "step_ms"}
    wanted |= {"gradients", "intra_node"}
    if absent := sorted(wanted - set(content)):
        raise UserError(f"{where} lacks {', '.join(absent)}")
    if unknown := sorted(set(content) - wanted - {"source", "command", "note"}):
        raise UserError(f"{where} has the unknown key {unknown[0]}")
    try:
        gradients = tuple(
            Gradient(str(n), tuple(int(s) for s in shape), float(at)) for n, shape, at in content["gradients"]
        )
        made = Timeline(**{**content, "gradients": gradients, "intra_node": IntraNode(**content["intra_node"])})
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: {error}") from None
    if problem := _problem(made):
        raise UserError(f"{where}: {problem}")
    return made


def dump(timeline: Timeline) -> str:
    """The text of a timeline's file: one gradient on each line."""
    head = {
        k: v for k, v in asdict(timeline).items() if k not in ("gradients", "elements", "name") and v not in (None, "")
    }
    lines = [json.dumps([g.name, list(g.shape), g.ready_ms]) for g in timeline.gradients]
    text = json.dumps({"name": timeline.name, **head}, indent=1, ensure_ascii=False)
    return text[:-2] + ',\n "gradients": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


def write(timeline: Timeline, path: Path) -> Path:
    """Writes a timeline's file. Raises UserError."""
    if problem := _problem(timeline):
        raise UserError(f"{timeline.name}: {problem}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dump(timeline), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    return path


def _problem(t: Timeline) -> str | None:
    times = [g.ready_ms for g in t.gradients]
    known = [g.name for g in t.gradients]
    if not t.gradients:
        return "it has no gradients"
    if len(set(known)) < len(known):
        return f"the parameter {next(n for n in known if known.count(n) > 1)} stands there twice"
    if bad := [g.name for g in t.gradients if min(g.shape, default=1) < 1]:
        return f"the shape of {bad[0]} is not positive"
    if not all(math.isfinite(x) for x in (*times, t.forward_ms, t.step_ms)):
        return "a time is not a number"
    if not 0 < t.forward_ms <= min(times) or max(times) > t.step_ms:
        return "times must obey 0 < forward_ms <= ready_ms <= step_ms"
    if t.batch_per_gpu < 1 or t.gpus_per_node < 1:
        return "batch_per_gpu and gpus_per_node must be at least 1"
    if (t.source is None) == (t.command is None):
        return "it needs either a source or the command that recorded it"
    return None


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("list", help="the timelines there are")
    make = commands.add_parser("make", help="from a published rate")
    make.add_argument("--samples-per-s", "--images-per-s", type=float, required=True, help="published, of one GPU")
    make.add_argument("--source", required=True, help="where the rate was published")
    make.add_argument("--gpu", required=True, help="e.g. A100-80GB")
    record = commands.add_parser("record", help="measured on this machine")
    record.add_argument("--steps", type=int, default=20)
    record.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    for command in (make, record):
        command.add_argument("--model", required=True, help="resnet50, bert_base or tiny")
        command.add_argument("--batch", type=int, required=True, help="samples per GPU")
        command.add_argument("--precision", choices=("fp32", "tf32", "amp"), required=True)
        command.add_argument("--gpus-per-node", type=int, default=8)
        command.add_argument("--name", help="default: model, batch, precision (and the GPU for recorded ones)")
        command.add_argument("--note", default="")
        command.add_argument("--out", type=Path, help="file to write; default: results/timelines/NAME.json")
    options = parser.parse_args(arguments)
    try:
        if options.what == "list":
            for name in names():
                t = load(name)
                print(
                    f"{name:24} {t.gpu}, batch {t.batch_per_gpu}: {t.step_ms:.1f} ms, {t.elements / 1e6:.1f} M parameters"
                )
            return 0
        from experiments.cells import timeline_tools

        made = timeline_tools.make(options) if options.what == "make" else timeline_tools.record(options)
        path = write(made, options.out or FOLDER / f"{made.name}.json")
        print(f"{path}: forward {made.forward_ms:.2f} ms, step {made.step_ms:.2f} ms, {len(made.gradients)} gradients")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
