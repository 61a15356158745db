"""Will compression pay? Predicts a step's time under every method, for any model, GPU and link. No GPU is needed.

    python experiments/predict.py model=hf:gpt2-medium gpu=h100 batch=8 \\
        seq=1024 cluster.nodes=4

The model is one of:

    model=hf:NAME                    gpt2-medium, llama-3.1-8b, bert-large, ...
    model=hf:FOLDER                  a folder with transformers' config.json
    model=torchvision:resnet101
    model=package.module:function    function(batch) returns (module, loss)
    'model=params:1.3B layers=24 width=2048 vocab=50k'    a GPT of that shape
    model=resnet50 batch=32 gpu=a100       a recorded timeline
    model=package.module:function steps=10 recorded now, on this machine; with
                                     gpu_rate=20 for a GPU 20 times as fast

Nothing is downloaded. More keys: batch, seq, precision, compiled, checkpointing, accumulation, sharding=hsdp, optimizer,
local_steps, run_steps, methods=birder,bf16.

    cluster=NAME      paper, ethernet_1g, ethernet_25g, infiniband_100g, wan
    cluster.KEY=...   nodes, ranks_per_node, gbps, latency_us, nics,
                      inside_gb_per_s, oversubscription

Defaults are in conf/predict, all keys in docs/configuration.md. docs/predict.md explains the answer.
Exit status: 0 success; 2 bad input; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a script
    import _script  # noqa: F401

import yaml

from birder.predict import (
    METHODS,
    NVLINK,
    Cluster,
    Costs,
    Layout,
    Link,
    Prediction,
    Timeline,
    answers,
    crossover,
    gpus,
    sweep,
)
from birder.predict.gpus import GPU, UNSURE
from birder.predict.layouts import TrainingPlan
from birder.predict.methods import every
from birder.predict.table import digits
from experiments.cells import timelines
from experiments.config import question
from experiments.config.question import Question
from experiments.config.question import ask as ask  # passed on
from experiments.records import record
from experiments.runs import command
from launch.errors import UserError, refused

SWEEPS: dict[str, tuple[float, ...]] = {
    "gbps": (0.5, 1, 2, 3, 5, 7, 10, 15, 25, 40, 100, 200, 400),
    "nodes": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
}
CHANGING = ("seq", "compiled", "checkpointing")
"""Keys that ask for other kernels than were recorded."""
KINDS = ("hf", "torchvision", "params")
"""Models that are counted by their name; with another prefix it is a module's."""
EXAMPLES = record.ROOT / "docs" / "predict_examples.md"
STUDIES = {"--evaluate": "predicted", "--step-times": "step_times", "--validate": "validate"}
"""What were options here."""
SHOWN = (
    "fp32",
    "bf16",
    "powersgd4",
    "onebit_adam",
    "birder",
    "birder_hierarchical",
    "birder_one_phase_hierarchical",
    "sigma_delta_hierarchical",
    "none",
)
"""Methods of a sweep when none are named."""


@dataclass(frozen=True)
class AskedModel:
    """A model's timeline. gpu: its data sheet, where there is one. saved_bytes: activations, where they were counted; tokens:
    of a sample, where they were. recompute: checkpointing can still be switched on."""

    timeline: Timeline
    gpu: GPU | None = None
    saved_bytes: float | None = None
    tokens: int | None = None
    recompute: bool = False

    @property
    def unsure(self) -> float:
        return 0.0 if self.saved_bytes is None else UNSURE

    def fits(self, plan: TrainingPlan, p: Prediction, name: str) -> bool:
        """Whether the GPU has the memory for a method of a prediction, as far as that is known."""
        needed = answers.memory_of(self.timeline, p.cluster, [p[name].method], plan, self.gpu, self.saved_bytes)
        return self.gpu is None or needed.get(name, 0.0) <= self.gpu.gb


def model_of(q: Question) -> AskedModel:
    """The model that is meant: recorded, recorded now, or counted. Raises UserError."""
    if q.timeline:
        t = timelines.load(q.timeline)
        gpu = q.gpu if q.gpu_rate != 1 or _same_gpu(t.gpu, q.gpu) else t.gpu
        there = {"model": t.model, "batch": t.batch_per_gpu, "precision": t.precision, "gpu": gpu}
        q.refuse_others(f"the recorded timeline {t.name}", {**there, **dict.fromkeys([*CHANGING, "steps"])})
        return AskedModel(_scaled(t, q))
    if not q.model:
        raise UserError(
            "say model=NAME, such as hf:gpt2-medium, torchvision:resnet101 or package.module:function; or say timeline=NAME "
            "or model=NAME of one that is recorded: " + ", ".join(timelines.names())
        )
    kind, _, rest = q.model.partition(":")
    if rest and kind not in KINDS and q.steps:
        from experiments.cells import timeline_tools

        q.refuse_others("a recording of a function", dict.fromkeys((*CHANGING, "precision")))
        if q.said("gpu") and q.gpu_rate == 1:
            said = "say gpu_rate, how many times as fast it is, or leave gpu out"
            raise UserError(f"gpu={q.gpu} is not what is recorded here: {said}")
        return AskedModel(_scaled(timeline_tools.record_module(q.model, q.batch, q.steps), q))
    q.refuse_others("a model that is not a function", {"steps": None})
    return (None if rest else _recorded(q)) or _counted(q)


def _recorded(q: Question) -> AskedModel | None:
    """A timeline of results/timelines that is the very model, batch, precision and GPU."""
    precision = q.precision or "tf32"
    for t in (timelines.load(name) for name in timelines.names()):
        same = t.model == q.model and t.batch_per_gpu == q.batch and t.precision == precision
        if same and not any(getattr(q, key) for key in CHANGING) and _same_gpu(t.gpu, q.gpu):
            return AskedModel(_scaled(t, q))
    return None


def _counted(q: Question) -> AskedModel:
    """The model's architecture on the GPU's data sheet."""
    from experiments.cells import architectures

    with refused("", ValueError):
        gpu = gpus.find(q.gpu)
        precision = {"amp": "fp16", None: "bf16" if "bf16" in gpu.tflops else "fp16"}.get(q.precision, q.precision)
        gpu.peak(str(precision))
        name = architectures.named(str(q.model))
        again = q.checkpointing if isinstance(q.checkpointing, str) else "full" if q.checkpointing else None
        asked = architectures.Asked(name, q.batch, str(precision), q.seq, q.compiled, again)
        work = architectures.work(asked)
        found = work.timeline(gpu, gpus_per_node=q.cluster.ranks_per_node, optimizer=q.optimizer, faster=q.gpu_rate)
    recompute = architectures.can_recompute(name) and q.checkpointing is not True
    return AskedModel(found, gpu, work.saved_bytes, work.tokens, recompute)


def _same_gpu(recorded: str, asked: str) -> bool:
    """Whether both name one data sheet; a GPU without any is known by its name alone."""
    try:
        return gpus.find(recorded) == gpus.find(asked)
    except ValueError:
        return recorded == asked


def _scaled(t: Timeline, q: Question) -> Timeline:
    """The recording on a GPU that is `gpu_rate` times as fast: the same kind of GPU where none is said; of a CPU's, a GPU."""
    if q.gpu_rate == 1:
        return t
    gpu = q.gpu if q.said("gpu") or t.gpu == "cpu" else t.gpu
    return replace(t.scaled(1 / q.gpu_rate, f"{q.gpu_rate:g} times as fast as it was recorded: stated"), gpu=gpu)


def _refuse_unused(q: Question, over: str | None) -> None:
    """Raises UserError for a key of links that there are not. over: of a sweep."""
    for key in ("gbps", "latency_us", "nics", "oversubscription"):
        if q.cluster.nodes == 1 and not over and q.said(f"cluster.{key}"):
            raise UserError(f"cluster.{key} is of links between nodes, and there is one node: leave {key} or nodes out")
    if q.cluster.ranks_per_node == 1 and q.said("cluster.inside_gb_per_s"):
        raise UserError("cluster.inside_gb_per_s is of links inside a node, and a node has one rank: leave it out")


def cluster_of(q: Question, gpu: str = "") -> Cluster:
    """The cluster that is asked about, with the link of the GPU of that name inside a node where none is said: an A100's
    NVLink for a GPU without a data sheet."""
    c = q.cluster
    try:
        inside = gpus.find(gpu).link
    except ValueError:
        inside = NVLINK
    if c.inside_gb_per_s is not None:
        inside = replace(NVLINK, gbps=8 * c.inside_gb_per_s)
    nics = c.nics / c.oversubscription
    between = Link(c.gbps * nics, c.latency_us)
    return replace(Cluster.of_gpus(c.nodes, c.ranks_per_node, between, inside), nics=nics)


def costs_of(t: Timeline) -> Costs:
    """Of the timeline's device: assumed for a GPU, measured here for a CPU. Raises UserError."""
    if t.gpu == "cpu":
        from birder.predict import measure_kernels

        return measure_kernels("cpu")
    with refused("", ValueError):
        return Costs.of_gpu(t.gpu)


def unsaid(q: Question, m: AskedModel, c: Cluster, over: str | None) -> list[str]:
    """key=value of what moves the answer and was not typed; of a recording its model is known. over: of a sweep."""
    t = m.timeline
    keys: dict[str, Any] = {}
    if m.saved_bytes is not None:  # counted
        again = q.checkpointing if m.recompute else None
        keys = {"gpu": t.gpu, "batch": q.batch, "seq": m.tokens, "precision": t.precision, "compiled": q.compiled}
        keys |= {"checkpointing": again, "optimizer": q.optimizer}
    keys["accumulation"] = q.accumulation
    if not q.said("cluster"):
        between = ("gbps", "latency_us", "nics") if c.nodes > 1 or over else ()
        keys |= {f"cluster.{key}": getattr(q.cluster, key) for key in ("nodes", "ranks_per_node", *between)}
    if c.ranks_per_node > 1:
        keys["cluster.inside_gb_per_s"] = digits(c.inside.gbps / 8, 3)
    keys = {key: value for key, value in keys.items() if not (value is None or q.said(key) or key == f"cluster.{over}")}
    return [f"{key}={str(value).lower()}" for key, value in keys.items()]


def answer(q: Question, options: argparse.Namespace) -> None:
    """Prints what is asked for."""
    from experiments.report import answered

    _refuse_unused(q, options.sweep)
    m, plan = model_of(q), TrainingPlan(q.sharding, q.accumulation, q.optimizer, q.run_steps)
    t, there = m.timeline, cluster_of(q, m.timeline.gpu)
    costs, layout = costs_of(t), Layout(gpu=t.gpu != "cpu")
    if m.saved_bytes is not None:  # as the dense optimizer's update is
        costs = costs.times(1 / q.gpu_rate)
    with refused("", ValueError):
        names, values = q.methods, SWEEPS.get(options.sweep, ())
        if options.sweep == "nodes":
            if q.sharding == "hsdp":
                values = values[1:]  # one node has no replicas
            there = replace(there, nodes=int(values[0]))
        if options.sweep and not names:
            flat = there.ranks_per_node == 1  # as where no methods are named elsewhere
            shown = [METHODS[name] for name in SHOWN]
            names = [m.name for m in shown if plan.on(there).takes(m) and not (flat and m.hierarchical)]
        rows = plan.choose(names, there)
        taken = unsaid(q, m, there, "gbps" if options.crossover else options.sweep)
        if q.local_steps and all(every(m, q.local_steps) is m for m in rows):
            raise UserError(f"local_steps={q.local_steps} is of local SGD and DiLoCo: no row here is of either")
        if q.said("run_steps") and not any(r.growth for m in rows for r in m.rounds):
            raise UserError(f"run_steps={q.run_steps} is of Sigma-delta Adam: no row here is of it")
        if options.sweep:
            from experiments.report import prediction_plots

            found = sweep(t, there, options.sweep, values, names, costs, layout, local_steps=q.local_steps, plan=plan)
            fits = functools.partial(m.fits, plan)
            print(prediction_plots.sweep_table(found, options.sweep, fits, m.gpu))
            print(answered.taken(taken))
            path = options.out or Path(f"predict_{t.name}_{options.sweep}.png")
            print(f"plot {prediction_plots.draw_sweep(found, options.sweep, path, fits)}")
        elif options.crossover:
            found_rates = crossover(
                t, there, q.methods, costs, layout, local_steps=q.local_steps, plan=plan, unsure=m.unsure
            )
            specs = plan.choose(list(found_rates), there)
            memory = answers.memory_of(t, there, specs, plan, m.gpu, m.saved_bytes)
            for name, rate in found_rates.items():
                needed = memory.get(name, 0.0)
                over = f"; does not fit: {digits(needed, 3)} of {m.gpu.gb:g} GB" if m.gpu and needed > m.gpu.gb else ""
                print(f"{name:32} {'never' if rate is None else f'below {digits(rate, 3)} Gbit/s'}{over}")
            print(answered.taken(taken))
        else:
            studies = answered.known_verdicts(Path(options.results))
            made = answers.answer(
                t,
                there,
                plan,
                q.methods,
                costs,
                gpu=m.gpu,
                saved_bytes=m.saved_bytes,
                unsure=m.unsure,
                local_steps=q.local_steps,
                lost=answered.lost(studies),
                recompute=m.recompute,
            )
            if options.json:
                more = {"sentences": answered.sentences(made, studies), "not_said": taken}
                print(json.dumps(made.plain() | more, indent=1))
                return
            print(answered.text(made, studies, options.all, taken))


def examples(path: Path = EXAMPLES) -> Path:
    """Writes the page of worked examples: every question of conf/predict/examples.yaml with its answer."""
    from experiments.records.record import write_file

    listed = yaml.safe_load((question.FOLDER / "examples.yaml").read_text(encoding="utf-8"))
    parts = [listed["intro"].strip()]
    for one in listed["examples"]:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            main(one["ask"])
        typed = " ".join(shlex.quote(a) for a in one["ask"])
        parts += [f"## {one['title']}", one["text"].strip()]
        parts += [f"```bash\npython experiments/predict.py {typed}\n```", f"```text\n{said.getvalue().strip()}\n```"]
        parts += [one["after"].strip()] if "after" in one else []
    write_file(path, ("\n\n".join(parts) + "\n").encode(), "the page of examples")
    return path


@command.report_errors
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__)
    parser.add_argument("question", nargs="*", metavar="key=value", help="the keys above")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--all", action="store_true", help="the whole table")
    form.add_argument("--json", action="store_true", help="the answer as data")
    form.add_argument(
        "--sweep", choices=tuple(SWEEPS), metavar="OVER", help="a table and a plot over gbps (link rates) or over nodes"
    )
    form.add_argument("--crossover", action="store_true", help="below which link rate each method pays")
    form.add_argument("--examples", action="store_true", help="the page of worked examples")
    parser.add_argument("--out", type=Path, help="file of a sweep's plot")
    parser.add_argument("--results", default=str(record.PUBLISHED), help="folder of records, for the accuracy")
    given = sys.argv[1:] if arguments is None else arguments
    if moved := [STUDIES[a] for a in given if a in STUDIES]:
        raise UserError(f"this is a separate study now: python studies/{moved[0]}.py")
    options = parser.parse_intermixed_args(given)
    if options.out and not options.sweep:
        raise UserError("--out is the file of a sweep's plot: add --sweep gbps or --sweep nodes")
    if options.examples and options.question:
        raise UserError(f"--examples writes the page of conf/predict/examples.yaml: leave {options.question[0]} out")
    if options.examples:
        print(examples())
    else:
        answer(ask(options.question), options)
    return 0


if __name__ == "__main__":
    command.start(main)
