"""The page's first section: will it pay for a model, a GPU and a link that are freely chosen? The command line's answers on a
grid, between which the page interpolates. No torch but for counting the models.

pay.js says what `answered.sentences` says, from the numbers here: its rule is that of `birder.predict.table.advised`.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from rich.console import Console
from rich.progress import track

from birder.predict import DEFAULT, METHODS, Cluster, Link, Timeline, gpus
from birder.predict.answers import FAR, Answer, answer
from birder.predict.layouts import DDP, TrainingPlan
from birder.predict.methods import WARM
from birder.predict.table import NEAR, NOT_COMPARED, TIE
from experiments.cells import architectures
from experiments.cells.architectures import Asked
from experiments.report import answered
from experiments.report.prediction import LATENCY_US

CURVES = ("bf16", "birder", "birder_hierarchical", "none")
"""Curves that are drawn before any is chosen."""
PRECISION = "bf16"
FEW = 16
"""So few GPUs of models are not worth the start of processes."""
COMPRESSED = tuple(m for m in DEFAULT if not (METHODS[m].dense or METHODS[m].local))
"""Those that can be advised."""


@dataclass(frozen=True)
class PayModel:
    """A model of the page: what it is called, how it is asked for, and the batches of the grid."""

    label: str
    name: str
    batches: tuple[int, ...]
    seq: int | None = None


BEGINS_WITH = "h100-sxm"
"""The GPU that the page shows first."""


@dataclass(frozen=True)
class Choice:
    """The grid. gpus: by default every one that computes in `PRECISION`."""

    models: tuple[PayModel, ...] = (
        PayModel("GPT-2 124M, 1,024 tokens", "hf:gpt2", (4, 16, 64), 1024),
        PayModel("GPT-2 medium 355M, 1,024 tokens", "hf:gpt2-medium", (2, 8, 32), 1024),
        PayModel("Llama 3.2 1B, 2,048 tokens", "hf:llama-3.2-1b", (1, 4), 2048),
        PayModel("Qwen2 0.5B, 2,048 tokens", "hf:qwen2-0.5b", (1, 8), 2048),
        PayModel("BERT-Base, 384 tokens", "hf:bert-base", (4, 32), 384),
        PayModel("ViT-B/16", "torchvision:vit_b_16", (32, 256)),
        PayModel("ResNet-50", "torchvision:resnet50", (16, 64, 256)),
    )
    gpus: tuple[str, ...] = tuple(name for name, gpu in gpus.GPUS.items() if PRECISION in gpu.tflops)
    ranks: tuple[int, ...] = (1, 4, 8)
    nodes: tuple[int, ...] = (2, 8, 64)
    gbps: tuple[float, ...] = (1, 5, 10, 25, 100, 400)


def data(choice: Choice = Choice(), studies: answered.Studies = ()) -> dict[str, Any]:
    """JSON's types. studies: `answered.verdicts`. Methods are those of the command line, by their places in `DEFAULT`.

    cells[model][batch][gpu][ranks][nodes][rate]: ms of each method, then of each of `COMPRESSED` the low end of its saving,
    then the high one; None for what needs several GPUs a node.
    gb[model][batch][ranks][nodes]: of each method, what a rank keeps; then with bf16 under HSDP, and FSDP.
    saved[model][batch]: of these, activations.
    """
    works_of = [
        [architectures.work(Asked(model.name, batch, PRECISION, model.seq)) for batch in model.batches]
        for model in choice.models
    ]
    found = iter(_each(list(itertools.chain(*works_of)), choice))
    cells = [[[next(found) for _ in choice.gpus] for _ in works] for works in works_of]
    gb, saved, first = [], [], gpus.find(choice.gpus[0])
    for works in works_of:
        kept = [(work.timeline(first), work.saved_bytes) for work in works]
        saved.append([round(work.saved_bytes / 1e9, 3) for work in works])
        gb.append([[[_memory(*of, ranks, nodes) for nodes in choice.nodes] for ranks in choice.ranks] for of in kept])
    every, places, lost = [METHODS[m] for m in DEFAULT], list(range(len(DEFAULT))), answered.lost(studies)
    some = _asked(*kept[0], first, choice.ranks[0], choice.nodes[0], choice.gbps[0])
    return {
        "models": [m.label for m in choice.models],
        "names": [m.name.partition(":")[2] for m in choice.models],
        "asks": [{"model": m.name, "seq": m.seq} for m in choice.models],
        "batches": [list(m.batches) for m in choice.models],
        "gpus": [gpus.find(g).label for g in choice.gpus],
        "gpu_names": list(choice.gpus),
        "gpu": BEGINS_WITH,
        "gpu_gb": [gpus.find(g).gb for g in choice.gpus],
        "ranks": list(choice.ranks),
        "nodes": list(choice.nodes),
        "gbps": list(choice.gbps),
        "methods": [m.label for m in every],
        "about": [m.about for m in every],
        "needs": [some.needs(m) if m.name in COMPRESSED else "" for m in every],
        "not_compared": NOT_COMPARED,
        "curves": [DEFAULT.index(m) for m in CURVES],
        "compressed": [DEFAULT.index(m) for m in COMPRESSED],
        "hierarchical": [i for i in places if every[i].hierarchical],
        "local": [i for i in places if every[i].local],
        "lost": [lost.get(m, 1.0) for m in DEFAULT],
        "kept": [answered.kept_in(m.label, studies) for m in every],
        "price": [answered.price(m.label, studies) for m in every],
        "warm": [WARM * m.warm for m in every],
        **{name: DEFAULT.index(m) for name, m in (("fp32", "fp32"), ("bf16", "bf16"), ("bound", "none"))},
        "near": NEAR,
        "tie": TIE,
        "far": FAR,
        "unsure": gpus.UNSURE,
        "gb": gb,
        "saved": saved,
        "recompute": [architectures.can_recompute(m.name) for m in choice.models],
        "cells": cells,
    }


def _each(works: list[Any], choice: Choice) -> list[Any]:
    """`_of` each of them on every GPU, by all cores: one alone takes some eight minutes. Forked, as a script cannot be
    imported again."""
    work, gpu = zip(*itertools.product(works, map(gpus.find, choice.gpus)), strict=True)
    if len(work) < FEW:
        return list(map(_of, work, gpu, itertools.repeat(choice)))
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        found, console = pool.map(_of, work, gpu, itertools.repeat(choice)), Console(stderr=True)
        shown = console.is_terminal
        return list(track(found, "predictions", len(work), console=console, transient=True, disable=not shown))


def _of(work: Any, gpu: gpus.GPU, choice: Choice) -> list[Any]:
    of = work.timeline(gpu), work.saved_bytes
    return [
        [[_cell(_asked(*of, gpu, ranks, nodes, rate)) for rate in choice.gbps] for nodes in choice.nodes]
        for ranks in choice.ranks
    ]


def _asked(t: Timeline, saved_bytes: float, gpu: gpus.GPU, ranks: int, nodes: int, gbps: float) -> Answer:
    """The question to the command line."""
    there = Cluster.of_gpus(nodes, ranks, Link(gbps, LATENCY_US), gpu.link)
    return answer(t, there, gpu=gpu, saved_bytes=saved_bytes, unsure=gpus.UNSURE)


def _cell(found: Answer) -> list[float | None]:
    p = found.prediction
    saved = {m: found.saving(m) for m in COMPRESSED if p.has(m)}
    ms = [float(f"{p[m].ms:.6g}") if p.has(m) else None for m in DEFAULT]
    return [*ms, *(round(saved[m][end], 4) if m in saved else None for end in (1, 2) for m in COMPRESSED)]


def _memory(t: Timeline, saved_bytes: float, ranks: int, nodes: int) -> list[float]:
    there = Cluster(nodes, ranks, Link(1.0))
    asked = [*((DDP, m) for m in DEFAULT), *((TrainingPlan(s).on(there), "bf16") for s in ("hsdp", "fsdp"))]
    return [round(plan.memory_gb(t, there, METHODS[m], saved_bytes), 3) for plan, m in asked]
