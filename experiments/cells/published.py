"""Predicted beside published step times that nobody here measured. No torch.

Source of the times: the 1-bit Adam paper's profile of BERT-Large pre-training with Adam (its Table 1; read in a summary, so
"secondary" in results/paper) and the throughputs of its authors' blog (read off charts, +-5 %). What is assumed:

    gradients     fp16, 2 bytes for each of BERT-Large's 336 M parameters, sent after backward: the profile's parts add up
    forward, backward, optimizer's step   the row's own: what is predicted is communication
    Ethernet      4 V100 a node, 4.1 Gbit/s: what its authors measured with iperf on their 40 GbE
    InfiniBand    8 V100 a node, 32 Gbit/s: "near 32" of theirs
    one node      not predicted: the link inside was not published
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from birder.predict import METHODS, Cluster, Costs, Gradient, IntraNode, Layout, Link, Timeline, simulate

HIDDEN, LAYERS, FEED, WORDS, PLACES = 1024, 24, 4096, 30522, 512
GBPS = {"Ethernet": 4.1, "InfiniBand": 32.0}
GPUS = {"Ethernet": 4, "InfiniBand": 8}


@dataclass(frozen=True)
class Profile:
    """A row of the profile, ms: forward, all-reduce, rest of backward, optimizer's step."""

    network: str
    nodes: int
    batch: int
    forward: float
    all_reduce: float
    backward: float
    update: float


PROFILES = (
    Profile("Ethernet", 16, 1, 36.65, 2205.86, 33.63, 74.96),
    Profile("Ethernet", 16, 16, 35.71, 2275.43, 60.81, 75.59),
    Profile("Ethernet", 16, 64, 137.80, 2259.36, 243.72, 74.92),
    Profile("Ethernet", 8, 16, 37.91, 2173.35, 60.71, 75.63),
    Profile("Ethernet", 4, 16, 36.94, 2133.24, 62.82, 76.85),
    Profile("Ethernet", 2, 16, 34.95, 1897.21, 61.23, 75.26),
    Profile("InfiniBand", 8, 1, 25.36, 316.18, 23.25, 58.49),
    Profile("InfiniBand", 8, 16, 32.81, 336.40, 59.99, 57.79),
    Profile("InfiniBand", 8, 64, 131.04, 339.52, 237.92, 56.91),
    Profile("InfiniBand", 4, 16, 33.45, 297.28, 56.81, 57.98),
    Profile("InfiniBand", 2, 16, 32.86, 183.74, 56.49, 58.60),
)
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
class Beside:
    """One published number, in ms, and what is predicted for it. by_nodes: with an all-reduce that works by nodes."""

    what: str
    published: float
    predicted: float
    by_nodes: float | None = None


def evenly(
    name: str,
    gpu: str,
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    forward: float,
    backward: float,
    *,
    precision: str,
    batch: int = 1,
    **about: Any,
) -> Timeline:
    """A model whose gradients come evenly over backward, the last parameter's first. Times in ms."""
    total = len(shapes)
    gradients = tuple(
        Gradient(n, shape, forward + backward * (total - place) / total) for place, (n, shape) in enumerate(shapes)
    )
    inside = IntraNode(0.0, 0.0, 0.0, "not used")
    return Timeline(name, name, gpu, precision, batch, 8, forward, forward + backward, gradients, inside, **about)


def bert_large(forward: float, backward: float, update: float, batch: int) -> Timeline:
    """BERT-Large for pre-training. Gradients come evenly over backward; the decoder's weight is the word embedding's."""
    h, f = HIDDEN, FEED
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("embeddings.word", (WORDS, h)),
        ("embeddings.position", (PLACES, h)),
        ("embeddings.type", (2, h)),
        ("embeddings.norm", (2, h)),
    ]
    for i in range(LAYERS):
        layer = f"layer.{i}"
        shapes += [(f"{layer}.{name}", (h, h)) for name in ("query", "key", "value", "output")]
        shapes += [(f"{layer}.attention.vectors", (6, h))]
        shapes += [
            (f"{layer}.in", (f, h)),
            (f"{layer}.in.bias", (f,)),
            (f"{layer}.out", (h, f)),
            (f"{layer}.vectors", (3, h)),
        ]
    shapes += [
        ("pooler", (h, h)),
        ("head", (h, h)),
        ("head.vectors", (4, h)),
        ("head.bias", (WORDS,)),
        ("next", (2, h)),
    ]
    about: dict[str, Any] = {"precision": "fp16", "batch": batch, "source": "1-bit Adam, Table 1", "update_ms": update}
    return evenly("bert_large", "v100", shapes, forward, backward, **about)


def _step(t: Timeline, network: str, nodes: int, gpus: int, method: str, ring: bool) -> float:
    cluster = Cluster(nodes, gpus, Link(GBPS[network]), inside=Link(1e6), ring=ring)
    layout = Layout(1e6, 1e6, 1e6) if METHODS[method].dense else Layout()
    costs = Costs.of_gpu("v100") if not METHODS[method].dense else Costs()
    return simulate(t, cluster, METHODS[method], costs, layout).ms


def profiles() -> list[Beside]:
    """The profile's all-reduce, predicted from bytes and the measured rate alone."""
    found = []
    for p in PROFILES:
        t = bert_large(p.forward, p.backward, p.update, p.batch)
        compute = p.forward + p.backward + p.update
        ring, nodes = (_step(t, p.network, p.nodes, GPUS[p.network], "fp16", kind) - compute for kind in (True, False))
        found.append(Beside(f"{p.network}, {p.nodes} x {GPUS[p.network]}, batch {p.batch}", p.all_reduce, ring, nodes))
    return found


def rates() -> list[Beside]:
    """Steps of the blog's throughputs. Computing is that of the profile's rows with batch 16."""
    found = []
    for network, method, gpus, per_s in RATES:
        forward, backward, update = (36.4, 61.4, 75.8) if network == "Ethernet" else (33.0, 57.8, 58.1)
        t = bert_large(forward, backward, update, 16)
        label = "Adam" if method == "fp16" else "1-bit Adam"
        ms = _step(t, network, gpus // 4, 4, method, True)
        found.append(Beside(f"{network}, {gpus} GPUs, {label}", 1e3 * 16 * gpus / per_s, ms))
    return found
