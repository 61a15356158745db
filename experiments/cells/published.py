"""The 1-bit Adam paper's profile of BERT-Large pre-training with Adam (its Table 1; read in a summary, so "secondary" in
results/paper), and timelines with its times. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from birder.predict import Gradient, IntraNode, Timeline

HIDDEN, LAYERS, FEED, WORDS, PLACES = 1024, 24, 4096, 30522, 512


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
