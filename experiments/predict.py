"""Will compression pay? `python experiments/predict.py timeline=resnet50_b32_tf32 cluster.nodes=8 cluster.gbps=10`

A step's time under every method, predicted from a timeline, a link and the costs of kernels (docs/predict.md).

    timeline=NAME                       of results/timelines, or a file's path
    model=resnet50 batch=32 gpu=a100    the timeline there is of that model, batch and GPU; precision=tf32 or amp
    model=package.module:function       any torch module: function(batch) returns (module, loss), loss a function without
                                        arguments. Its timeline is recorded on this machine; gpu_rate=20 gpu=a100: the GPU
                                        that is meant computes 20 times as fast
    cluster=NAME                        of conf/predict/cluster: paper, ethernet_25g, infiniband_100g; and each of its keys:
    cluster.nodes, cluster.ranks_per_node, cluster.gbps, cluster.latency_us, cluster.inside_gb_per_s
    methods=birder,bf16                 these rows only

Defaults are in conf/predict, all keys in docs/configuration.md.

    --sweep gbps | nodes                a table and a plot over link rates, or over nodes up to 1,024
    --crossover                         below which link rate each method pays
    --evaluate                          every replayed cell, and every comparison in turns, beside its prediction:
                                        results/published/tables/predict.md
    --fit                               fits what --evaluate predicts with, from the records of replayed cells (minutes)
    --validate                          real training on emulated links beside its prediction: 1.5 hours, quiet machine;
                                        a part: --validate resnet50 nodes=2,4 gbps=2.5,10

Exit status: 0; 2 bad input; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

if not __package__:  # run as a script
    import _script  # noqa: F401

from birder.predict import NVLINK, Cluster, Costs, Layout, Link, Timeline, crossover, predict, sweep
from experiments.cells import timelines
from experiments.config import question
from experiments.records import record
from experiments.runs import command
from launch.errors import UserError

SWEEPS: dict[str, tuple[float, ...]] = {
    "gbps": (0.5, 1, 2, 3, 5, 7, 10, 15, 25, 40, 100, 200, 400),
    "nodes": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
}
SHOWN = (
    "fp32",
    "bf16",
    "powersgd4",
    "onebit_adam",
    "birder",
    "birder_hierarchical",
    "birder_one_phase_hierarchical",
    "none",
)
"""Methods of a sweep when none are named."""


@dataclass(frozen=True)
class Question:
    """What is asked, by key of conf/predict."""

    timeline: str | None
    model: str | None
    batch: int
    gpu: str
    precision: str
    gpu_rate: float
    steps: int
    methods: list[str] | None
    cluster: Cluster


def ask(pairs: Sequence[str]) -> Question:
    """From key=value pairs. Raises UserError for unknown keys and values of the wrong type or out of range."""
    asked = question.ask(pairs)
    there = asked.pop("cluster")
    between, inside = Link(there["gbps"], there["latency_us"]), replace(NVLINK, gbps=8 * there["inside_gb_per_s"])
    return Question(**asked, cluster=Cluster(there["nodes"], there["ranks_per_node"], between, inside))


def timeline_of(q: Question) -> Timeline:
    """The timeline that is meant, recorded now where a module is named. Raises UserError."""
    if q.timeline:
        return _scaled(timelines.load(q.timeline), q)
    if not q.model:
        raise UserError("say timeline=NAME or model=NAME: " + ", ".join(timelines.names()))
    if ":" in q.model:
        from experiments.cells import timeline_tools

        return _scaled(timeline_tools.record_module(q.model, q.batch, q.steps), q)
    known = [timelines.load(name) for name in timelines.names()]
    fits = [
        t
        for t in known
        if t.model == q.model
        and t.batch_per_gpu == q.batch
        and t.precision == q.precision
        and _plain(t.gpu).startswith(_plain(q.gpu))
    ]
    if not fits:
        there = ", ".join(f"{t.model} batch={t.batch_per_gpu} precision={t.precision} gpu={t.gpu}" for t in known)
        raise UserError(f"no timeline of {q.model}, batch {q.batch}, {q.precision}, {q.gpu}; there are: {there}")
    return _scaled(fits[0], q)


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _scaled(t: Timeline, q: Question) -> Timeline:
    if q.gpu_rate == 1:
        return t
    return replace(t.scaled(1 / q.gpu_rate, f"{q.gpu_rate:g} times as fast as it was recorded: stated"), gpu=q.gpu)


def costs_of(t: Timeline) -> Costs:
    """Of the timeline's device: assumed for a GPU, measured here for a CPU. Raises UserError."""
    if t.gpu == "cpu":
        from birder.predict import measure_kernels

        return measure_kernels("cpu")
    try:
        return Costs.of_gpu(t.gpu)
    except ValueError as error:
        raise UserError(str(error)) from None


def answer(q: Question, options: argparse.Namespace) -> None:
    """Prints what is asked for."""
    t = timeline_of(q)
    costs, layout = costs_of(t), Layout(gpu=t.gpu != "cpu")
    try:
        if options.sweep:
            from experiments.report import prediction_plots

            found = sweep(t, q.cluster, options.sweep, SWEEPS[options.sweep], q.methods or SHOWN, costs, layout)
            print(prediction_plots.sweep_table(found, options.sweep))
            path = options.out or Path(f"predict_{t.name}_{options.sweep}.png")
            print(f"plot {prediction_plots.draw_sweep(found, options.sweep, path)}")
        elif options.crossover:
            found_rates = crossover(t, q.cluster, q.methods, costs, layout)
            for name, rate in found_rates.items():
                print(f"{name:32} {'never' if rate is None else f'below {rate:.3g} Gbit/s'}")
        else:
            print(predict(t, q.cluster, q.methods, costs, layout))
    except ValueError as error:
        raise UserError(str(error)) from None


def evaluate(results: str) -> None:
    """Writes results/published/tables/predict.md and the plot of the paper's speedups. Raises UserError."""
    from experiments.records.record import read_all, write_file
    from experiments.report import crossover_plot, prediction, prediction_plots, trained

    outcomes = prediction.evaluate(read_all(results), prediction.load(results))
    if not outcomes:
        raise UserError(f"no replayed cell in {results}/records: run make paper-table or make bench")
    parts = [prediction.markdown(outcomes), trained.markdown(results), prediction_plots.published()]
    page = "\n\n".join(filter(None, parts)) + "\n"
    path = Path(results) / "tables" / "predict.md"
    write_file(path, page.encode(), "the table of predictions")
    print(f"{path}: {len(outcomes)} cells")
    print(prediction_plots.draw_paper(Path(results) / "plots" / "predict_paper.png"))
    path = Path(results) / "plots" / "predict_crossover.png"
    write_file(path, crossover_plot.picture(), "the plot")
    print(path)
    for name in ("resnet50_b32_tf32", "bert_base_b12_tf32"):
        t = timelines.load(name)
        found = sweep(t, ask([]).cluster, "nodes", SWEEPS["nodes"], SHOWN, costs_of(t))
        print(prediction_plots.draw_sweep(found, "nodes", Path(results) / "plots" / f"predict_{name}_nodes.png"))


def fit(results: str) -> None:
    """Writes results/predict/machines.json."""
    from experiments.cells import fit as fits
    from experiments.cells import predicted
    from experiments.records.record import read_all, write_file
    from experiments.report import prediction

    records = read_all(results)
    kernels, pairs = predicted.kernel_rates(records), prediction.cases(records)
    if not kernels or not pairs:
        raise UserError(
            f"{results}/records lacks replayed cells or the kernel benchmark: run make paper-table and make bench"
        )
    machines: dict[str, dict[str, dict[str, float]]] = {}
    for link in predicted.START:
        here = [p for p in pairs if p[0].link == link]
        for model in sorted({of.model for of, _ in here}):
            others = [p for p in here if p[0].model != model]
            if others:
                machines.setdefault(link, {})[model] = dict(fits.fit(others, link, kernels).values)
                print(f"{link}, {model}: fitted to {len(others)} cells of other models", flush=True)
    path = Path(results) / prediction.FOLDER / prediction.FILE
    write_file(path, prediction.dump(machines).encode(), "what was fitted")
    print(path)


@command.told
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line's work and exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="*", metavar="key=value")
    parser.add_argument("--sweep", choices=tuple(SWEEPS))
    parser.add_argument("--crossover", action="store_true")
    parser.add_argument("--out", type=Path, help="file of a sweep's plot")
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--results", default=str(record.PUBLISHED))
    options = parser.parse_args(arguments)
    if options.fit:
        fit(options.results)
    elif options.evaluate:
        evaluate(options.results)
    elif options.validate:
        from experiments import compare
        from experiments.runs import validation

        validation.run(options.question, lambda overrides: compare.compare(overrides, None))
    else:
        answer(ask(options.question), options)
    return 0


if __name__ == "__main__":
    command.start(main)
