"""How good predictions are, as a page: `python studies/predicted.py [--results FOLDER]`.

Writes tables/predict.md of a results folder (default: results/published) and plots/predict_*.png from records alone. The page
has replayed cells and real training with their predictions, published step times, and what the paper's speedups need.
Exit status: 0 success; 2 bad input.

Nobody here measured the published times: they are the profile of experiments/cells/claimed.py and the throughputs of its
authors' blog, read off charts (5 % either way). Assumptions:

    gradients   fp16: 2 bytes for each of BERT-Large's 336 M parameters, sent
                after backward, because the profile's parts add up
    computing   forward, backward and the optimizer's step are the row's;
                only communication is predicted
    Ethernet    4 V100 a node, 4.1 Gbit/s: measured by the authors with iperf
                on their 40 GbE
    InfiniBand  8 V100 a node, 32 Gbit/s: the authors say "near 32"
    one node    not predicted: the link inside was not published
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a script
    import _script  # noqa: F401

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from birder.predict import METHODS, Cluster, Costs, Layout, Link, Prediction, Timeline, simulate, sweep
from birder.predict.table import NEAR
from experiments import predict
from experiments.cells import timelines
from experiments.cells.claimed import PROFILES, bert_large
from experiments.records.record import PUBLISHED, read_all, write_file
from experiments.report import figure, prediction, prediction_plots, sentences
from experiments.report.formats import number
from experiments.report.metrics import OPEN
from experiments.report.prediction_plots import COLOURS, MARK, rate_axis, tints
from experiments.report.table import Table
from experiments.runs import command
from launch.errors import UserError
from studies import validate

CLAIMS = {"resnet50_b32_tf32": ("ResNet-50", 2.5), "bert_base_b12_tf32": ("BERT-Base", 6.3)}
"""The timeline whose shape is taken, the model's name, the largest speedup over fp32 that the paper's abstract states."""
NODES, RANKS, GPU = 8, 8, "A100"
COMPUTE_MS = (5.0, 300.0)
RATES_GBPS = (1.0, 40.0)
GRID = 28
PROFILE = ("", "published, ms", "ring, ms", "difference", "hierarchical, ms", "difference")
THROUGHPUTS = ("", "published, ms", "predicted, ms", "difference")
MARKS = 7.5
"""Size of what is written at the marks of the paper's plot, points."""
FORMS = {"birder": "-", "birder_hierarchical": "--"}

GBPS = {"Ethernet": 4.1, "InfiniBand": 32.0}
GPUS = {"Ethernet": 4, "InfiniBand": 8}


# ---- replayed cells ---------------------------------------------------------------------------------------------------


def worst(cells: pd.DataFrame, count: int = 10) -> Table:
    """The cells that are furthest off, with the likely reason."""
    furthest = cells.loc[cells.error.abs().sort_values(ascending=False, kind="stable").index[:count]]
    rows = [
        [str(name), number(o.predicted_ms), number(o.measured_ms), f"{o.error:+.1%}", o.why]
        for name, o in furthest.iterrows()
    ]
    return Table.text(["cell", "predicted, ms", "replayed, ms", "difference", "why"], rows)


def real(results: Path) -> list[str]:
    """Tables of real training, in a results folder and in its folder of the validation; none without any."""
    folders = [folder for folder in (results, results / prediction.VALIDATION) if folder.is_dir()]
    found = prediction.trained_rows([r for folder in folders for r in read_all(folder)])
    return [prediction.trained_summary(found).grid(), validate.table(found).grid()] if found else []


# ---- published step times ---------------------------------------------------------------------------------------------


RATES: tuple[tuple[str, str, int, float], ...] = (
    ("Ethernet", "fp16", 8, 45),
    ("Ethernet", "fp16", 16, 88),
    ("Ethernet", "fp16", 32, 131),
    ("Ethernet", "deepspeed", 8, 245),
    ("Ethernet", "deepspeed", 16, 452),
    ("Ethernet", "deepspeed", 32, 870),
    ("InfiniBand", "fp16", 16, 545),
    ("InfiniBand", "fp16", 32, 852),
    ("InfiniBand", "deepspeed", 16, 915),
    ("InfiniBand", "deepspeed", 32, 1710),
)
"""(network, method, GPUs, samples/s): the blog's charts; compression stage, batch 16 per GPU, 4 GPUs a node."""


@dataclass(frozen=True)
class ComparedStep:
    """One published number, in ms, and what is predicted for it. by_nodes: with a hierarchical all-reduce."""

    what: str
    published: float
    predicted: float
    by_nodes: float | None = None


def _step(t: Timeline, network: str, nodes: int, gpus: int, method: str, ring: bool) -> float:
    cluster = Cluster(nodes, gpus, Link(GBPS[network]), inside=Link(1e6), ring=ring)
    layout = Layout(1e6, 1e6, 1e6) if METHODS[method].dense else Layout()
    costs = Costs.of_gpu("v100") if not METHODS[method].dense else Costs()
    return simulate(t, cluster, METHODS[method], costs, layout).ms


def profiles() -> list[ComparedStep]:
    """The profile's all-reduce, predicted from bytes and the measured rate alone."""
    found = []
    for p in PROFILES:
        t = bert_large(p.forward, p.backward, p.update, p.batch)
        compute = p.forward + p.backward + p.update
        ring, nodes = (_step(t, p.network, p.nodes, GPUS[p.network], "fp16", kind) - compute for kind in (True, False))
        found.append(
            ComparedStep(f"{p.network}, {p.nodes} x {GPUS[p.network]}, batch {p.batch}", p.all_reduce, ring, nodes)
        )
    return found


def throughputs() -> list[ComparedStep]:
    """Steps of the blog's throughputs. Computing is that of the profile's rows with batch 16."""
    found = []
    for network, method, gpus, per_s in RATES:
        forward, backward, update = (36.4, 61.4, 75.8) if network == "Ethernet" else (33.0, 57.8, 58.1)
        t = bert_large(forward, backward, update, 16)
        label = "Adam" if method == "fp16" else "1-bit Adam"
        ms = _step(t, network, gpus // 4, 4, method, True)
        found.append(ComparedStep(f"{network}, {gpus} GPUs, {label}", 1e3 * 16 * gpus / per_s, ms))
    return found


def compared(head: Sequence[str], found: Sequence[ComparedStep]) -> Table:
    """One line for each published number: it, and each prediction with how far it is off."""
    rows = []
    for b in found:
        each = [(number(ms), f"{ms / b.published - 1:+.0%}") for ms in (b.predicted, b.by_nodes) if ms is not None]
        rows.append([b.what, number(b.published), *itertools.chain(*each)])
    return Table.text(head, rows)


# ---- what the paper's speedups need -----------------------------------------------------------------------------------


def claims(name: str, form: str, grid: int = GRID) -> tuple[Any, Any, Any]:
    """(compute in ms, Gbit/s, speedup[gbps, compute] of Birder over fp32) on 64 GPUs, the timeline's shape scaled in time."""
    whole = timelines.load(name)
    costs = Costs.of_gpu(whole.gpu)
    compute = np.geomspace(*COMPUTE_MS, grid)
    rates = np.geomspace(*RATES_GBPS, grid)
    found = np.empty((grid, grid))
    for column, ms in enumerate(compute):
        t = whole.scaled(ms / whole.step_ms)
        for row, gbps in enumerate(rates):
            cluster = Cluster.of_gpus(NODES, RANKS, Link(float(gbps), 20.0))
            fp32, own = (simulate(t, cluster, METHODS[m], costs).ms for m in ("fp32", form))
            found[row, column] = fp32 / own
    return compute, rates, found


def draw_paper(path: Path, grid: int = GRID) -> Path:
    """The set of (compute per step, link rate) under which the paper's speedups come out; batches that there are as marks."""
    drawn: list[Any] = []
    with figure.styled():
        picture = figure.blank(10, 4.4)
        for axes, (name, (label, claim)) in zip(picture.subplots(1, 2), CLAIMS.items(), strict=True):
            for form, line in FORMS.items():
                compute, rates, found = claims(name, form, grid=grid)
                for level, tint in ((1.5, "#888888"), (claim, "#aa3377")):
                    axes.contour(compute, rates, found, levels=[level], colors=[tint], linestyles=line)
                    axes.plot([], [], line, color=tint, label=f"{level:g}x, {METHODS[form].label}")
                drawn.append([name, form, found.round(3).tolist()])
            axes.grid(visible=False)
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlabel("forward and backward, ms")
            axes.set_ylabel("link of a node, Gbit/s")
            # Above what is written along the top.
            axes.set_title(f"{label}: the paper's {claim:g}x", loc="left", pad=10 * MARKS)
            for axis in (axes.xaxis, axes.yaxis):
                figure.plain(axis)
            _marks(axes, timelines.load(name).model)
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
        point = "The published speedups come out below and to the left of the red lines: slow links, little computing"
        setting = f"{NODES} nodes of {RANKS} GPUs, Birder over fp32 DDP; a timeline with its times scaled. Predicted."
        figure.head(picture, point, setting)
        write_file(path, figure.png(picture, drawn, MARK), "the plot")
    return path


def _marks(axes: Axes, family: str) -> None:
    """Batches and precisions of the timelines of the paper's GPU along the top; what TCP gives of 10 GbE along the right."""
    top, right = axes.get_xaxis_transform(), axes.get_yaxis_transform()
    for t in (t for t in map(timelines.load, timelines.names()) if t.model == family and t.gpu.startswith(GPU)):
        axes.axvline(t.step_ms, color="#4477aa", linewidth=0.6)
        look: dict[str, Any] = {"fontsize": MARKS, "color": "#4477aa", "rotation": 90, "ha": "center", "va": "bottom"}
        axes.text(t.step_ms, 1.01, f"batch {t.batch_per_gpu}, {t.precision.upper()}", transform=top, **look)
    for rate, text in ((10.0, "10 GbE"), (7.2, "7.2: NCCL's\nsockets")):
        axes.axhline(rate, color="#228833", linewidth=0.6)
        axes.text(1.01, rate, text, transform=right, fontsize=MARKS, color="#228833", va="center")


def ranges(found: Sequence[Prediction]) -> list[tuple[str, float]]:
    """(method or `OPEN`, the last rate of the sweep at which it wins, Gbit/s), in the order of the sweep."""
    every = [(p.winner or OPEN, p.cluster.between.gbps) for p in found]
    return [list(same)[-1] for _, same in itertools.groupby(every, key=lambda at: at[0])]


def sentence(found: Sequence[Prediction]) -> str:
    """Birder, hierarchical wins up to 100 Gbit/s, then DDP bf16."""
    labels = {OPEN: OPEN, **{row.name: row.method.label for row in found[0].rows}}
    every = ranges(found)
    parts = [f"{labels[name]} up to {rate:g} Gbit/s" for name, rate in every[:-1]]
    last = labels[every[-1][0]]
    return ", then ".join([*parts, last]) if parts else f"{last} at every rate"


def crossovers() -> bytes:
    """A PNG: speedups over fp32 DDP on 8 nodes of 8 GPUs, a panel for each model, a line for each method."""
    drawn: list[Any] = []
    gains = []
    with figure.styled():
        made = figure.blank(10, 4.0)
        grid = made.subplots(1, 2, sharey=True)
        for axes, (name, (label, _)) in zip(grid, CLAIMS.items(), strict=True):
            t = timelines.load(name)
            found = prediction.over_rates(t, NODES)
            methods = [row.method for row in found[0].rows if row.name != "fp32"]
            for method, tint in zip(methods, tints([m.name for m in methods]), strict=True):
                y = [round(p.speedup(method.name)[0], 3) for p in found]
                look: dict[str, Any] = {"linestyle": ":"} if method.name == "none" else {"marker": "o", "markersize": 3}
                look |= {"linewidth": 4} if method.name == "onebit_adam" else {}  # Birder lies upon it
                axes.plot(prediction.GBPS, y, color=tint, label=method.label, **look)
                drawn.append([name, method.name, y])
            axes.axhline(1, color=COLOURS["fp32"], linewidth=0.8)
            rate_axis(axes, prediction.GBPS)
            axes.set_yscale("log")
            figure.plain(axes.yaxis)
            axes.set_title(
                f"{label}, batch {t.batch_per_gpu}; fastest:\n{textwrap.fill(sentence(found), 56)}",
                loc="left",
            )
            drawn.append(ranges(found))
            won = max((m for m in methods if m.name != "none"), key=lambda m: found[0].speedup(m.name)[0])
            gains.append(f"{won.label} {found[0].speedup(won.name)[0]:.1f}x ({label})")
        grid[0].set_ylabel("times as fast as DDP in fp32")
        figure.key(made, 3)
        slowest = f"{prediction.GBPS[0]:g} Gbit/s"
        point = f"The slower the link, the more compression wins: at {slowest} {' and '.join(gains)}"
        setting = (
            f"{NODES} nodes of {prediction.RANKS_PER_NODE} A100, TF32, {prediction.LATENCY_US:g} µs a message. Predicted, "
            "not measured on GPUs; accuracy not considered. "
            f"Where DDP bf16 is named no method gains {100 * NEAR:g} % over it."
        )
        figure.head(made, point, setting)
        return figure.png(made, drawn, MARK)


# ---- the page ---------------------------------------------------------------------------------------------------------


def page(results: Path) -> str:
    """tables/predict.md. Raises UserError where no cell has a prediction."""
    cells = prediction.load(results)
    if cells.empty:
        raise UserError(f"{results / prediction.FILE} holds no prediction of a cell that is recorded there")
    emulated, loopback = (cells[cells.link == link] for link in ("emulated", "loopback"))
    groups = emulated.groupby(["suite", "method"])
    by_method = [prediction.of_cells(f"{suite}, {name}", part) for (suite, name), part in groups]
    return sentences.page(
        "predict",
        cells=prediction.table(cells).grid(),
        by_method=Table.text(prediction.HEAD, by_method).grid(),
        worst=worst(emulated).grid(),
        worst_loopback=worst(loopback).grid(),
        trained=real(results),
        profile=compared(PROFILE, profiles()).grid(),
        throughputs=compared(THROUGHPUTS, throughputs()).grid(),
    )


@command.report_errors
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__)
    parser.add_argument("--results", type=Path, default=PUBLISHED)
    results = parser.parse_args(arguments).results
    path, plots = results / "tables" / "predict.md", results / "plots"
    write_file(path, page(results).encode(), "the table of predictions")
    print(path)
    print(draw_paper(plots / "predict_paper.png"))
    write_file(plots / "predict_crossover.png", crossovers(), "the plot")
    print(plots / "predict_crossover.png")
    for name in CLAIMS:
        t = timelines.load(name)
        there, costs = predict.cluster_of(predict.ask([])), predict.costs_of(t)
        found = sweep(t, there, "nodes", predict.SWEEPS["nodes"], predict.SHOWN, costs)
        print(prediction_plots.draw_sweep(found, "nodes", plots / f"predict_{name}_nodes.png"))
    return 0


if __name__ == "__main__":
    command.start(main)
