"""The cells of the benchmark against peers: models, methods, links, and how each is scaled down. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

EXP = "bench"
"""What records of the benchmark call their experiment. They have no group, so no other table takes them up."""

MODELS = {"resnet50": "resnet50_b32_tf32", "bert_base": "bert_base_b12_tf32"}
"""Model -> the timeline that its computation replays."""
TITLES = {
    "resnet50": "ResNet-50, 25.6 M parameters, batch 32 per GPU",
    "bert_base": "BERT-Base on SQuAD, 109 M parameters, sequence length 384, batch 12 per GPU",
}
LINKS = {"emulated": "10 Gbit/s, emulated", "loopback": "loopback of this machine"}
NODES = (2, 4, 8)
GBIT = 10.0
MBIT = 36.0
"""Token-bucket rate of every emulated link, Mbit/s; why so low: docs/replay.md."""
STEPS = 3
"""Timed steps of a cell. Computation is a wait, so they differ little."""
LOOPBACK = {2: 1.0, 4: 1 / 2, 8: 1 / 4}
"""Share of a model's elements on loopback, by nodes: what memory holds."""


@dataclass(frozen=True)
class Method:
    """A row of the tables.

    optimizer: class of `birder` (or, with a dot, of this repository), and its arguments.
    wire:      what travels, as in records.
    fraction:  share of the elements that is replayed over emulated links. The less a method sends, the more of it, so that a
               step lasts about as long as others: seconds.
    hook, rank: one of PyTorch's own hooks (experiments/training/torch_hooks.py).
    whole:     keeps a selection of whole tensors in the place of a part of each: what a matrix costs depends on its shape.
    compressed: sends fewer bits than a 16-bit all-reduce.
    """

    label: str
    optimizer: dict[str, Any]
    wire: str
    fraction: float
    hook: str | None = None
    rank: int = 1
    overlap: bool = True
    one_bucket: bool = False
    whole: bool = False
    steps: int = STEPS
    compressed: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compressed", self.wire in ("1bit", "lowrank"))


SGDM = {"_target_": "birder.SGDM", "lr": 1e-3}
ADAM = {"lr": 1e-3, "warmup_steps": 1}
BIRDER = {"_target_": "birder.Birder", "lr": 1e-3}
METHODS = {
    "fp32": Method("PyTorch DDP fp32", SGDM, "fp32", 1 / 48),
    "bf16_hook": Method("PyTorch bf16 hook", SGDM, "bf16", 1 / 32, hook="bf16"),
    "fp16_hook": Method("PyTorch fp16 hook", SGDM, "fp16", 1 / 32, hook="fp16"),
    "powersgd1": Method("PowerSGD rank 1", SGDM, "lowrank", 1 / 4, hook="powersgd", rank=1, whole=True, steps=2),
    "powersgd4": Method("PowerSGD rank 4", SGDM, "lowrank", 1 / 4, hook="powersgd", rank=4, whole=True, steps=2),
    "deepspeed": Method(
        "1-bit Adam as DeepSpeed's (re-created)",
        {"_target_": "experiments.bench.peers.FusedOneBitAdam", **ADAM},
        "1bit",
        1 / 16,
        overlap=False,
        one_bucket=True,
    ),
    "onebit_adam": Method("1-bit Adam", {"_target_": "birder.OneBitAdam", **ADAM}, "1bit", 1 / 4, steps=2),
    "birder": Method("Birder two-phase", BIRDER, "1bit", 1 / 4, steps=2),
    "birder_one_phase": Method(
        "Birder one-phase (this project's)", {**BIRDER, "reduce": "one_phase"}, "1bit", 1 / 4, steps=2
    ),
    "none": Method("no communication", SGDM, "none", 1 / 4, steps=2),
}
SMALLER = {"resnet50": 1.0, "bert_base": 1 / 2}
"""A further factor on the fraction of a larger model over emulated links: its messages are long enough all the same."""


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    model: str
    link: str
    nodes: int
    method: str

    @property
    def id(self) -> str:
        """Name of its record: a new measurement replaces the old one."""
        return "-".join([EXP, self.model, self.link, f"n{self.nodes}", self.method])

    @property
    def fraction(self) -> float:
        """Share of the elements that is to be there."""
        if self.link == "loopback":
            large = self.model == "bert_base" and self.nodes > 2
            return LOOPBACK[self.nodes] * (1 / 2 if large else 1.0)
        return METHODS[self.method].fraction * SMALLER[self.model]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def dilation(cell: Cell, fraction: float, rate_mbit_per_s: float | None, wished_mbit_per_s: float) -> float:
    """How much slower a cell runs than the cluster that it stands for.

    fraction: share of the bytes that is sent. On loopback the network is what it is and only the share counts; an emulated
    link of the measured rate stands for one of the wished rate.
    """
    if cell.link == "loopback":
        return fraction
    assert rate_mbit_per_s
    return fraction * wished_mbit_per_s / rate_mbit_per_s


def cells(link: str, nodes: int, models: Sequence[str], methods: Sequence[str]) -> list[Cell]:
    """What is to be measured over one link on `nodes` nodes."""
    return list(_cells(link, nodes, models, methods))


def _cells(link: str, nodes: int, models: Sequence[str], methods: Sequence[str]) -> Iterator[Cell]:
    for model in models:
        for method in methods:
            yield Cell(model, link, nodes, method)
