"""The page's first section: will it pay for a model, a GPU and a link that are freely chosen? A grid of answers, between
which the page interpolates. No torch but for counting the models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from birder.predict import METHODS, Cluster, Link, gpus
from birder.predict.answers import DDP, answer
from birder.predict.methods import WARM
from birder.predict.table import NEAR, TIE
from experiments.cells import architectures
from experiments.cells.architectures import Asked
from experiments.report.prediction import LATENCY_US
from experiments.report.prediction import METHODS as FIXED

SHOWN = (*FIXED[:-1], "sigma_delta", "sigma_delta_hierarchical", FIXED[-1])
"""In the order in which those of equal time are advised."""
CURVES = ("bf16", "birder", "birder_hierarchical", "none")
"""Curves that are drawn before any is chosen."""
PRECISION = "bf16"


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


def data(choice: Choice = Choice(), lost: Mapping[str, float] | None = None) -> dict[str, Any]:
    """JSON's types. lost: as of birder.predict.answers.Answer.

    cells[model][batch][gpu][ranks][nodes][rate]: ms of each method of `SHOWN`, then the low ends of their savings, then the
    high ones. compressed: places of compressed methods. hierarchical: of those that need several GPUs a node.
    lost: of each method, 1 where no study is known.
    gb[model][batch]: of a rank, with bf16 DDP.
    """
    cells, gb, lost = [], [], lost or {}
    for model in choice.models:
        works = [architectures.work(Asked(model.name, batch, PRECISION, model.seq)) for batch in model.batches]
        cells.append([[_of(work, gpus.find(name), choice) for name in choice.gpus] for work in works])
        a100, some = gpus.find("a100"), Cluster(2, 8, Link(10.0))
        gb.append([round(DDP.memory_gb(w.timeline(a100), some, METHODS["bf16"], w.saved_bytes), 1) for w in works])
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
        "methods": [METHODS[m].label for m in SHOWN],
        "curves": [SHOWN.index(m) for m in CURVES],
        "compressed": [SHOWN.index(m) for m in SHOWN if not METHODS[m].dense],
        "hierarchical": [SHOWN.index(m) for m in SHOWN if METHODS[m].hierarchical],
        "lost": [lost.get(m, 1.0) for m in SHOWN],
        "bf16": SHOWN.index("bf16"),
        "bound": SHOWN.index("none"),
        "near": NEAR,
        "tie": TIE,
        "fp32": SHOWN.index("fp32"),
        "warm": [WARM * METHODS[m].warm for m in SHOWN],
        "unsure": gpus.UNSURE,
        "gb": gb,
        "cells": cells,
    }


def _of(work: Any, gpu: gpus.GPU, choice: Choice) -> list[Any]:
    t = work.timeline(gpu)
    return [
        [
            [_cell(t, Cluster.of_gpus(nodes, ranks, Link(rate, LATENCY_US), gpu.link)) for rate in choice.gbps]
            for nodes in choice.nodes
        ]
        for ranks in choice.ranks
    ]


def _cell(t: Any, cluster: Cluster) -> list[float]:
    found = answer(t, cluster, methods=SHOWN, unsure=gpus.UNSURE)
    ms = [float(f"{found.prediction[m].ms:.4g}") for m in SHOWN]
    return [*ms, *(round(found.saving(m)[end], 3) for end in (1, 2) for m in SHOWN)]
