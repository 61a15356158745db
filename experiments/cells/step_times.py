"""Timelines from architectures beside what is known: the recorded timelines, and the throughputs that others published.

Nothing here is fitted to a row: the shares of birder/predict/gpus.py are the same for all models. Models are as they were
trained: attention not fused where the source's is not (BERT of NVIDIA's examples, and so the timelines made of them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ConfigDict

from birder.predict import Cluster, Link, Timeline, gpus
from birder.predict.layouts import Plan
from experiments.cells import architectures, published, timelines
from experiments.cells.architectures import Asked
from experiments.records.record import ROOT

if TYPE_CHECKING:  # it loads torch
    from birder.predict.architecture import Work

FILE = ROOT / "results" / "step_times.yaml"
EAGER = "eager"
NIC = Link(1600.0, 5.0)
"""Between the nodes of published runs on several: eight NICs of 200 Gbit/s, as the sources say or nearly."""


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
    checkpointing: str | None = None
    compiled: bool = False
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
            embd_pdrop=0.0, attn_pdrop=0.0,
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


def beside(row: Shape) -> Beside:
    """A row and its prediction: computing, FSDP's collectives, the update of AdamW (of SGD for images)."""
    asked = Asked(
        f"torchvision:{row.torchvision}" if row.torchvision else f"hf:{row.name}",
        row.batch,
        row.precision,
        row.seq,
        row.compiled,
        attention=EAGER if row.bert else "sdpa",
    )
    work = architectures.work(asked, None if row.torchvision else _config(row))
    gpu = gpus.find(row.gpu)
    each = min(row.gpus, 8)
    inside = Link(8 * gpu.inside_gb_per_s * 230 / 300, 5.0)
    cluster = Cluster(max(1, row.gpus // 8), each, NIC, inside, borders=True)
    optimizer = "sgd" if row.torchvision else "adamw"
    plan = Plan(row.layout, row.accumulation, optimizer)
    t = plan.timeline(work.timeline(gpu, gpus_per_node=each, optimizer=optimizer), cluster)
    step_ms = t.step_ms + (t.update_ms or 0.0)
    samples = row.batch * row.accumulation * (row.seq or 1 if row.unit == "tokens" else 1)
    return Beside(row, work, 1e3 * samples / step_ms)


@dataclass(frozen=True)
class Recorded:
    """A timeline from the architecture beside one of results/timelines, or of a published profile."""

    name: str
    recorded: Timeline
    counted: Timeline

    @property
    def error(self) -> float:
        """Of forward and backward: counted over recorded, less 1."""
        return self.counted.step_ms / self.recorded.step_ms - 1

    @property
    def readiness(self) -> float:
        """How far a gradient's moment is off at most, as a share of the step."""
        found = {g.name: g.ready_ms / self.counted.step_ms for g in self.counted.gradients}
        return max(abs(found[g.name] - g.ready_ms / self.recorded.step_ms) for g in self.recorded.gradients)


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
        found.append(Recorded(name, t, work.timeline(gpus.find(t.gpu))))
    return found


def profiles() -> list[tuple[published.Profile, float, float]]:
    """(profile of BERT-Large on V100, its forward and backward in ms, counted ms), one for each batch and network."""
    from transformers import BertConfig

    own = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    own.architectures = ["BertForPreTraining"]
    counted = {}
    for batch in {p.batch for p in published.PROFILES}:
        asked = Asked("hf:bert-large", batch, "fp16", 128, attention=EAGER)
        counted[batch] = architectures.work(asked, own).timeline(gpus.find("v100")).step_ms
    return [(p, p.forward + p.backward, counted[p.batch]) for p in published.PROFILES]
