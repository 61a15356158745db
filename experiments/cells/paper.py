"""The cells of the paper's cluster: models, methods, links, and how each is scaled down. Imports neither torch nor hydra."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

EXP = "paper"
"""What records of the table call their experiment. They have no group, so no other table takes them up."""

MODELS = {
    "resnet50_b32": "ResNet-50, batch 32 per GPU",
    "resnet50_b128": "ResNet-50, batch 128 per GPU",
    "bert_base_b12": "BERT-Base on SQuAD, sequence length 384, batch 12 per GPU",
    "bert_base_b3": "BERT-Base on SQuAD, sequence length 384, batch 3 per GPU",
}
"""Timelines are named <model>_<rate>."""
DEFAULT_MODELS = ("resnet50_b32", "resnet50_b128", "bert_base_b12")
RATES = {"tf32": "TF32", "amp": "AMP"}
LINKS = {"9.4": "9.4 Gbit/s, what TCP gets of 10 GbE", "7.2": "7.2 Gbit/s, what NCCL's sockets typically reach"}
NODES = (1, 2, 4, 8)
GPUS = 8
MBIT = 36.0
"""Token-bucket rate of every node's link, Mbit/s. Low, so that encoding on a CPU takes a small share of a step."""


@dataclass(frozen=True)
class Method:
    """A row of the table.

    traffic:   what the NIC carries, as `replay.nic_bytes` names it.
    fraction:  share of the elements that is replayed. The link stands for its full rate all the same: the smaller the
               fraction, the smaller the dilation. Methods that send much are replayed faster so; those that send many small
               messages need the time, for what a message costs here does not shrink.
    steps:     timed steps.
    """

    label: str
    optimizer: dict[str, Any]
    wire: str
    traffic: str
    fraction: float
    steps: int
    overlap: bool = True
    one_bucket: bool = False


SGDM = {"_target_": "birder.SGDM", "lr": 1e-3}
BIRDER = {"_target_": "birder.Birder", "lr": 1e-3}
METHODS = {
    "fp32": Method("fp32 DDP", {**SGDM, "wire": "fp32"}, "fp32", "fp32", 1 / 48, 2),
    "bf16": Method("bf16 DDP", {**SGDM, "wire": "bf16"}, "bf16", "bf16", 1 / 32, 2),
    # As its reference implementation: after backward, one fused buffer, no overlap. The compression stage alone.
    "onebit_adam": Method(
        "1-bit Adam, flat",
        {"_target_": "birder.OneBitAdam", "lr": 1e-3, "warmup_steps": 1},
        "1bit",
        "flat",
        1 / 16,
        3,
        overlap=False,
        one_bucket=True,
    ),
    "birder": Method("Birder, flat", BIRDER, "1bit", "flat", 1 / 16, 2),
    "birder_hierarchical": Method("Birder, hierarchical", BIRDER, "1bit", "hierarchical", 1 / 8, 2),
    "none": Method("no communication", {**SGDM, "wire": "fp32"}, "none", "none", 1 / 8, 2),
    # No row of the table: what the check without overlap is made of.
    "fp32_serial": Method("fp32 DDP, one bucket", {**SGDM, "wire": "fp32"}, "fp32", "fp32", 1 / 48, 2, one_bucket=True),
}
ROWS = tuple(name for name in METHODS if name != "fp32_serial")


@dataclass(frozen=True)
class Cell:
    """One measurement. link: a key of LINKS; None where nothing crosses it (one node, no communication)."""

    model: str
    rate: str
    nodes: int
    link: str | None
    method: str

    @property
    def id(self) -> str:
        """Name of its record: a new measurement replaces the old one."""
        model = self.model.rpartition("/")[2]  # a model may be the path of a timeline's file, up to its rate
        return "-".join([EXP, model, self.rate, f"n{self.nodes}", self.link or "any", self.method])

    @property
    def timeline(self) -> str:
        return f"{self.model}_{self.rate}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def cell(model: str, rate: str, nodes: int, link: str, method: str) -> Cell:
    """The cell that a place of the table shows."""
    return Cell(model, rate, nodes, None if nodes == 1 or method == "none" else link, method)


def cells(
    nodes: int, models: Sequence[str], rates: Sequence[str], links: Sequence[str], methods: Sequence[str]
) -> list[Cell]:
    """What is to be measured on `nodes` nodes, each once. Cells that share a model and a method stand together."""
    return list(dict.fromkeys(_cells(nodes, models, rates, links, methods)))


def _cells(
    nodes: int, models: Sequence[str], rates: Sequence[str], links: Sequence[str], methods: Sequence[str]
) -> Iterator[Cell]:
    for architecture in dict.fromkeys(architecture_of(m) for m in models):
        for method in methods:
            for model in (m for m in models if architecture_of(m) == architecture):
                for rate in rates:
                    # The check without overlap needs no more than one link and one rate.
                    once = method == "fp32_serial"
                    if once and (nodes == 1 or rate != rates[0]):
                        continue
                    for link in links[:1] if once else links:
                        yield cell(model, rate, nodes, link, method)


def architecture_of(model: str) -> str:
    """The part of a model's name that says its parameters: resnet50_b32 -> resnet50."""
    return model.rpartition("_b")[0]


def dilation(cell: Cell, goodput_mbit_per_s: float) -> float:
    """How much slower than the cluster a cell runs over a link of this measured rate: wished rate / measured rate.

    Only a fraction of the elements is sent, so the link needs only that fraction of the rate.
    """
    gbit = float(cell.link or next(iter(LINKS)))
    return METHODS[cell.method].fraction * gbit * 1000 / goodput_mbit_per_s
