"""Timelines from architectures beside what is known: the recorded timelines, and the throughputs that others published.

Nothing here is fitted to a row: the shares of birder/predict/gpus.py are the same for all models. Models are as they were
trained: attention not fused where the source's is not (BERT of NVIDIA's examples, and so the timelines made of them), loss
and activation function fused where they are, with the link, power limit and checkpointing that are said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict

from birder.predict import Cluster, Link, Timeline, gpus
from birder.predict.answers import answer
from birder.predict.layouts import Plan
from experiments.cells import architectures, published, timelines
from experiments.cells.architectures import Asked
from experiments.records.record import ROOT

if TYPE_CHECKING:  # it loads torch
    from birder.predict.architecture import Work

FILE = ROOT / "results" / "step_times.yaml"
EAGER = "eager"
NIC_GBPS = 1600.0
"""Of a node where the source does not say: eight NICs of 200 Gbit/s."""
LATENCY_US = 5.0


class Shape(BaseModel):
    """A row of results/step_times.yaml. Keys: see there."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    source: str
    gpt: list[int] | None = None
    llama: list[int] | None = None
    bert: list[int] | None = None
    torchvision: str | None = None
    seq: int | None = None
    gpu: str
    precision: str
    batch: int
    accumulation: int = 1
    layout: Any = "ddp"
    gpus: int = 1
    checkpointing: Literal["full", "layer", "op"] | None = None
    compiled: bool = False
    attention: str = "sdpa"
    fused: bool = False
    wide: Literal[2, 4] = 4
    nic_gbps: float = NIC_GBPS
    gb_per_s: float | None = None
    watts: tuple[float, float] | None = None
    per_s: float
    unit: str
    note: str = ""


@dataclass(frozen=True)
class Beside:
    """A published throughput of one GPU and the predicted one, in the row's unit a second."""

    row: Shape
    work: Work
    predicted: float

    @property
    def error(self) -> float:
        """Of the step's time: predicted over published, less 1."""
        return self.row.per_s / self.predicted - 1

    @property
    def utilization(self) -> float:
        """Share of the peak that the published number is, by the operations counted."""
        step_s = self.row.batch * (self.row.seq or 1 if self.row.unit == "tokens" else 1) / self.row.per_s
        return self.work.tflop / step_s / gpus.find(self.row.gpu).peak(self.row.precision)


def rows() -> list[Shape]:
    """results/step_times.yaml, checked."""
    return [Shape.model_validate(row) for row in yaml.safe_load(FILE.read_text(encoding="utf-8"))["rows"]]


def sources() -> dict[str, dict[str, str]]:
    """Title and place of each source."""
    return dict(yaml.safe_load(FILE.read_text(encoding="utf-8"))["sources"])


def _config(row: Shape) -> Any:
    from transformers import BertConfig, GPT2Config, LlamaConfig

    if row.gpt:
        layers, width, heads, vocab = row.gpt
        return GPT2Config(
            n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocab, n_positions=row.seq or 1024, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, activation_function="gelu" if row.fused else "gelu_new",
        )  # fmt: skip
    if row.llama:
        layers, width, heads, vocab, inner, groups = row.llama
        return LlamaConfig(
            num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, vocab_size=vocab,
            intermediate_size=inner, num_key_value_heads=groups,
        )  # fmt: skip
    assert row.bert is not None
    layers, width, heads, vocab = row.bert
    own = BertConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, vocab_size=vocab, intermediate_size=4 * width
    )  # fmt: skip
    own.architectures = ["BertForQuestionAnswering" if "SQuAD" in row.name else "BertForPreTraining"]
    return own


def gpu_of(row: Shape) -> gpus.GPU:
    """A row's GPU. Dynamic power is as f V^2, and the voltage as the frequency f: (1) f ~ P^(1/3)."""
    found = gpus.find(row.gpu)
    limited, usual = row.watts or (1.0, 1.0)
    peaks = {p: peak * (limited / usual) ** (1 / 3) for p, peak in found.tflops.items()}
    return replace(found, tflops=peaks, gb_per_s=row.gb_per_s or found.gb_per_s)


def beside(row: Shape) -> Beside:
    """A row and its prediction: computing, communication, the update of AdamW (of SGD for images)."""
    asked = Asked(
        f"torchvision:{row.torchvision}" if row.torchvision else f"hf:{row.name}",
        row.batch,
        row.precision,
        row.seq,
        row.compiled,
        row.checkpointing,
        EAGER if row.bert else row.attention,
        row.fused,
    )
    work = architectures.work(asked, None if row.torchvision else _config(row))
    there, each = gpu_of(row), min(row.gpus, 8)
    cluster = Cluster(max(1, row.gpus // 8), each, Link(row.nic_gbps, LATENCY_US), there.link, borders=True)
    optimizer = "sgd" if row.torchvision else "adamw"
    method = "none" if row.gpus == 1 else {2: "bf16", 4: "fp32"}[row.wide]
    t = work.timeline(there, gpus_per_node=each, optimizer=optimizer)
    found = answer(t, cluster, Plan(row.layout, row.accumulation, optimizer), [method])
    samples = row.batch * row.accumulation * (row.seq or 1 if row.unit == "tokens" else 1)
    return Beside(row, work, 1e3 * samples / found.prediction[method].ms)


@dataclass(frozen=True)
class Recorded:
    """A timeline from the architecture beside one of results/timelines."""

    name: str
    recorded: Timeline
    work: Work

    @cached_property
    def counted(self) -> Timeline:
        return self.work.timeline(gpus.find(self.recorded.gpu))

    @property
    def waits(self) -> float:
        """Share of the counted step in which the GPU waits for the host."""
        return 1 - alone_ms(self.work, gpus.find(self.recorded.gpu)) / self.counted.step_ms

    @property
    def error(self) -> float:
        """Of forward and backward: counted over recorded, less 1."""
        return self.counted.step_ms / self.recorded.step_ms - 1

    @property
    def readiness(self) -> float:
        """How far a gradient's moment is off at most, as a share of the step."""
        found = {g.name: g.ready_ms / self.counted.step_ms for g in self.counted.gradients}
        return max(abs(found[g.name] - g.ready_ms / self.recorded.step_ms) for g in self.recorded.gradients)


def alone_ms(work: Work, gpu: gpus.GPU) -> float:
    """Forward and backward of a GPU whose host takes no time."""
    return replace(work, host_us=(0.0, 0.0)).timeline(gpu).step_ms


def recorded(names: Sequence[str] | None = None) -> list[Recorded]:
    """Timelines of results/timelines beside those from the architecture; None: all."""
    from transformers import BertConfig

    found = []
    for name in names or timelines.names():
        t = timelines.load(name)
        precision = {"amp": "fp16"}.get(t.precision, t.precision)
        if t.model == "resnet50":
            work = architectures.work(Asked("torchvision:resnet50", t.batch_per_gpu, precision))
        else:
            own = BertConfig()
            own.architectures = ["BertForQuestionAnswering"]
            work = architectures.work(Asked("hf:bert", t.batch_per_gpu, precision, 384, attention=EAGER), own)
        found.append(Recorded(name, t, work))
    return found


def profiles() -> list[tuple[published.Profile, Work]]:
    """Each profile of BERT-Large on V100, and what is counted for its batch."""
    from transformers import BertConfig

    own = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    own.architectures = ["BertForPreTraining"]
    counted = {}
    for batch in {p.batch for p in published.PROFILES}:
        asked = Asked("hf:bert-large", batch, "fp16", 128, attention=EAGER)
        counted[batch] = architectures.work(asked, own)
    return [(p, counted[p.batch]) for p in published.PROFILES]
