"""What the papers' claims of speed come to in the predictor, each with its assumptions. No torch.

Nothing is fitted and nothing measured: bytes, link rates, and how long a GPU computes, which is stated. Kernels run at 70 %
of the memory's bandwidth (birder/predict/costs.py), collectives are rings and all-to-alls at the full rate of the link.

    bert_large    forward, backward and step of 1-bit Adam's profile (below): V100, batch 64 in 4
                  parts, an fp16 all-reduce or one fused 1-bit message after backward
    wrn_40_8      Wide ResNet, 35.8 M parameters; how long a V100 computes is not published, and is solved for
    bert_xl       34 layers of 2,560 units, 2.76 B parameters; 6 operations a parameter and token, at a share of an A100's
                  peak
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from birder.predict import METHODS, Cluster, Costs, Gradient, IntraNode, Layout, Link, MethodSpec, Timeline, simulate
from birder.predict.methods import Round
from experiments.records.record import ROOT

# ---- 1-bit Adam's profile of BERT-Large with Adam: its Table 1, read in a summary, so "secondary" in results/paper ----

HIDDEN, LAYERS, FEED, WORDS, PLACES = 1024, 24, 4096, 30522, 512


@dataclass(frozen=True)
class StepProfile:
    """A row of the profile, ms: forward, all-reduce, rest of backward, optimizer's step."""

    network: str
    nodes: int
    batch: int
    forward: float
    all_reduce: float
    backward: float
    update: float


def _profiles() -> Iterator[StepProfile]:
    """The published rows of more than one node."""
    tables = json.loads((ROOT / "results" / "paper" / "onebit_adam.json").read_text(encoding="utf-8"))["tables"]
    for network, nodes, _, batch, _, accumulation, *ms, _ in tables[0]["rows"]:
        if nodes > 1:
            yield StepProfile(network, nodes, batch * accumulation, *ms)


PROFILES = tuple(_profiles())
SHAPES = tuple[tuple[str, tuple[int, ...]], ...]
"""Parameters with their shapes, in the model's order. What is of one dimension stands together: (6, h) are six vectors."""


def _attention(h: int) -> SHAPES:
    return tuple((name, (h, h)) for name in ("query", "key", "value", "output"))


def _layers(prefix: str, count: int, parts: SHAPES) -> SHAPES:
    """So many layers of the same parts."""
    return tuple((f"{prefix}{i}.{name}", shape) for i in range(count) for name, shape in parts)


def evenly(
    name: str, gpu: str, shapes: SHAPES, forward: float, backward: float, precision: str, batch: int = 1, **about: Any
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
    embeddings = (("embeddings.word", (WORDS, h)), ("embeddings.position", (PLACES, h)))
    norms = (("embeddings.type", (2, h)), ("embeddings.norm", (2, h)))
    feed = (("in", (f, h)), ("in.bias", (f,)), ("out", (h, f)), ("vectors", (3, h)))
    layers = _layers("layer.", LAYERS, (*_attention(h), ("attention.vectors", (6, h)), *feed))
    last = (("pooler", (h, h)), ("head", (h, h)), ("head.vectors", (4, h)), ("head.bias", (WORDS,)), ("next", (2, h)))
    shapes = (*embeddings, *norms, *layers, *last)
    about: dict[str, Any] = {"precision": "fp16", "batch": batch, "source": "1-bit Adam, Table 1", "update_ms": update}
    return evenly("bert_large", "v100", shapes, forward, backward, **about)


# ---- what a step takes ------------------------------------------------------------------------------------------------

LATENCY_US = 20.0
WHOLE = Layout(1e6, 1e6, 1e6)
"""One message after backward, as in the profile of 1-bit Adam's paper."""
XL = {"hidden": 2560, "layers": 34, "words": 30522}
PEAK_TFLOPS = 312.0
"""Of an A100 in bf16 or fp16, from its maker's data sheet."""
V100_TFLOPS = {False: 15.7, True: 125.0}
"""Of a V100-SXM2 in fp32 and, its tensor cores, in fp16, from its maker's data sheet."""


def wrn_40_8() -> SHAPES:
    """WRN-40-8 of 100 classes. Imports torch."""
    import torch

    from experiments.workloads import cifar_models

    with torch.device("meta"):
        return tuple((n, tuple(p.shape)) for n, p in cifar_models.build("wrn_40_8", 3, 100).named_parameters())


def bert_xl() -> SHAPES:
    """A BERT with 2.76 B parameters."""
    h = XL["hidden"]
    layers = _layers("", XL["layers"], (*_attention(h), ("in", (4 * h, h)), ("out", (h, 4 * h)), ("vectors", (13, h))))
    return (("words", (XL["words"], h)), ("places", (514, h)), *layers, ("head", (h, h)))


def even(name: str, gpu: str, shapes: SHAPES, compute_ms: float) -> Timeline:
    """A third of the computing forward, the rest backward, in which gradients come evenly, the last parameter's first."""
    return evenly(name, gpu, shapes, compute_ms / 3, 2 * compute_ms / 3, precision="stated", source="stated")


def ms(t: Timeline, cluster: Cluster, method: MethodSpec) -> float:
    """A step, kernels at the rates assumed for the timeline's GPU."""
    return simulate(t, cluster, method, Costs.of_gpu(t.gpu)).ms


# ---- CSER: how fast a GPU must be -------------------------------------------------------------------------------------


def cser(gradient_ratio: int, model_ratio: int, reset_every: int, nbytes: float = 4.0) -> MethodSpec:
    """CSER with these ratios; nbytes: of a value that is sent."""

    def means(share: float, density: float) -> Round:
        kernels = ("eager", "eager", "copy")
        return Round(share, density=density, nbytes=nbytes, encode=kernels, decode=("copy",), layout="unit")

    ordinary, reset = 1 / gradient_ratio, 1 / gradient_ratio + 1 / model_ratio
    rounds = means(1 - 1 / reset_every, ordinary), means(1 / reset_every, reset)
    return replace(METHODS["cser"], rounds=rounds)


def slowest(factor: float, speedup: Callable[[float], float]) -> float | None:
    """The longest forward and backward, in ms, with which `speedup` of it is still `factor`; None where it never is."""
    low, high = 0.01, 1e4
    if speedup(low) < factor:
        return None
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if speedup(middle) >= factor else (low, middle)
    return low


def least_ms(data: str, images: int, tflops: float) -> float:
    """Forward and backward of CSER's model for `data`, of so many images, at the peak of a GPU: nothing is faster.

    Multiplications and additions alone, counted by torch without computing anything.
    """
    import torch
    import torchvision
    from torch.utils.flop_counter import FlopCounterMode

    from experiments.workloads import cifar_models

    small = data == "CIFAR-100"
    side = 32 if small else 224
    with torch.device("meta"), FlopCounterMode(display=False) as counted:
        model = cifar_models.build("wrn_40_8", 3, 100) if small else torchvision.models.resnet50()
        model(torch.empty(images, 3, side, side)).sum().backward()
    return float(counted.get_total_flops()) / (tflops * 1e12) * 1e3


def cser_needs(shapes: SHAPES, factor: float, ratios: Sequence[tuple[int, int, int]], half: bool) -> list[float | None]:
    """For each (R_C2, R_C1, H) what `slowest` finds on 8 machines of one V100 at 10 Gbit/s. half: values of 16 bits."""
    cluster = Cluster(8, 1, Link(10.0, LATENCY_US))
    dense = METHODS["fp16" if half else "fp32"]

    def find(setting: tuple[int, int, int]) -> float | None:
        method = cser(*setting, nbytes=2.0 if half else 4.0)

        def speedup(compute: float) -> float:
            t = even("cser", "v100", shapes, compute)
            return ms(t, cluster, dense) / ms(t, cluster, method)

        return slowest(factor, speedup)

    return [find(setting) for setting in ratios]


# ---- 1-bit Adam and 0/1 Adam: whole runs of BERT-Large ----------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Mean step of a whole run, in ms: Adam with fp16 all-reduce, 1-bit Adam with its dense steps, 0/1 Adam."""

    adam: float
    onebit: float
    zero_one: float


def bert_large_run(cluster: Cluster, steps: int, onebit_warmup: int, zero_one: tuple[int, int, int]) -> Run:
    """zero_one: (variance rounds, 1-bit rounds, steps without any) of the schedule. Nothing overlaps with backward."""
    profile = next(p for p in PROFILES if (p.network, p.nodes, p.batch) == ("Ethernet", 16, 64))
    t = bert_large(profile.forward, profile.backward, profile.update, profile.batch)
    dense = simulate(t, cluster, METHODS["fp16"], Costs(), WHOLE).ms
    compressed = ms(t, cluster, METHODS["deepspeed"])
    local = ms(t, cluster, replace(METHODS["deepspeed"], rounds=(Round(wire="none", encode=("eager",) * 4),)))
    share = onebit_warmup / steps
    floats, bits, without = (count / steps for count in zero_one)
    # As published a variance round comes on top of that step's 1-bit round.
    mean = bits * compressed + floats * (dense - local) + without * local
    return Run(dense, share * dense + (1 - share) * compressed, mean)


# ---- SLAMB: 1,024 GPUs ------------------------------------------------------------------------------------------------


def xl_compute_ms(sequences: int, tokens: int, reached: float) -> float:
    """Forward and backward of one GPU's share of a batch: 6 operations for each parameter and token."""
    elements = sum(math.prod(shape) for _, shape in bert_xl())
    return 6 * elements * sequences * tokens / (reached * PEAK_TFLOPS * 1e12) * 1e3


def efficiency(method: str, compute_ms: float, latency_us: float = LATENCY_US) -> float:
    """Step of one node of 8 A100 over that of 128 at 100 Gbit/s, with the same work for each GPU.

    latency_us: of a hop of the ring through all ranks; 0 is a collective whose latency is hidden, as a tree's is nearly.
    """
    t = even("bert_xl", "a100-80gb", bert_xl(), compute_ms)
    link = Link(100.0, latency_us)
    one, many = (ms(t, Cluster(n, 8, link), METHODS[method]) for n in (1, 128))
    return one / many
