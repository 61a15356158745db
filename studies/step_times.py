"""Timelines from architectures and published measurements, as a page: `python studies/step_times.py`, in some minutes.

Writes results/published/tables/step_times.md: the recorded timelines, and the throughputs that others published.
Nothing here is fitted to a row: the shares of birder/predict/gpus.py are the same for all models. Models are as they were
trained: attention not fused where the source's is not (BERT of NVIDIA's examples, and so the timelines made of them), loss
and activation function fused where they are, with the link, power limit and checkpointing that are said.
Exit status: 0 success; 2 bad input.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if not __package__:  # run as a script
    import _script  # noqa: F401

import yaml
from pydantic import BaseModel, ConfigDict

from birder.predict import Cluster, Link, Timeline, gpus
from birder.predict.answers import answer
from birder.predict.costs import HOST_US
from birder.predict.layouts import TrainingPlan
from experiments.cells import architectures, claimed, timelines
from experiments.cells.architectures import Asked
from experiments.records.record import PUBLISHED, ROOT, write_file
from experiments.report import sentences
from experiments.report.formats import number
from experiments.report.table import Column, Table
from experiments.runs import command

if TYPE_CHECKING:  # it loads torch
    from birder.predict.architecture import Work

PAGE = Path(PUBLISHED) / "tables" / "step_times.md"
TARGET = 0.15
READY = 0.10
FIRST = 36
"""Rows of the first comparison; those after them were written down before a second one."""
NARROW = "width 768: products too narrow for an A100; software of early 2023"
EXPOSED = (
    "every FSDP row on H100 is too fast: fms_blog's authors see a tenth of the step in collectives that are not hidden"
)
TF32 = "the share of TF32 was set on timelines of NVIDIA's SQuAD number; its pre-training, and others, reach far more"
WHY: tuple[tuple[str, str], ...] = (
    ("mpt 125M", NARROW),
    ("nanogpt a100", NARROW),
    ("nanogpt_8 a100", NARROW),
    ("tf32", TF32),
    ("h100", EXPOSED),
    ("fms 13B a100", "a small batch: more of FSDP's collectives is seen than is predicted"),
    (
        "timm",
        "convolutions: a GeForce runs above its data sheet's clock, and its peak, a fourth of an A100's, is easy to reach",
    ),
    ("nvidia_resnet fp32", "3x3 kernels need fewer operations than are counted (Winograd)"),
    ("nvidia_resnet fp16", "convolutions reach more of a V100's peak than its matrix products do"),
    ("nvidia_bert fp32", "the source's fine-tuning is as slow as its pre-training on sequences a third longer"),
    ("nvidia_bert fp16", "small batches: software of 2019, whose host was slower"),
)
"""(words that a row has, why): of rows that are off by more than `TARGET`. The first that fits."""
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
    unit: Literal["tokens", "samples"]
    note: str = ""


@dataclass(frozen=True)
class ComparedThroughput:
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


def shapes() -> list[Shape]:
    """results/step_times.yaml, checked."""
    return [Shape.model_validate(row) for row in yaml.safe_load(FILE.read_text(encoding="utf-8"))["rows"]]


def sources() -> dict[str, dict[str, str]]:
    """Title and place of each source."""
    return dict(yaml.safe_load(FILE.read_text(encoding="utf-8"))["sources"])


SIZES = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"),
    *("intermediate_size", "num_key_value_heads"),
)
"""What the numbers of a shape are called by transformers."""


def _config(row: Shape) -> Any:
    from transformers import AutoConfig

    own: dict[str, Any] = dict(zip(SIZES, row.gpt or row.llama or row.bert or (), strict=False))
    if row.gpt:
        own |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        own |= {"n_positions": row.seq or 1024, "activation_function": "gelu" if row.fused else "gelu_new"}
    if row.bert:
        task = "QuestionAnswering" if "SQuAD" in row.name else "PreTraining"
        own |= {"intermediate_size": 4 * own["hidden_size"], "architectures": [f"BertFor{task}"]}
    return AutoConfig.for_model("gpt2" if row.gpt else "llama" if row.llama else "bert", **own)


def gpu_of(row: Shape) -> gpus.GPU:
    """A row's GPU. Dynamic power is as f V^2, and the voltage as the frequency f: (1) f ~ P^(1/3)."""
    found = gpus.find(row.gpu)
    limited, usual = row.watts or (1.0, 1.0)
    peaks = {p: peak * (limited / usual) ** (1 / 3) for p, peak in found.tflops.items()}
    return replace(found, tflops=peaks, gb_per_s=row.gb_per_s or found.gb_per_s)


def compared(row: Shape) -> ComparedThroughput:
    """A row and its prediction: computing, communication, the update of AdamW (of SGD for images)."""
    model = f"torchvision:{row.torchvision}" if row.torchvision else f"hf:{row.name}"
    same = row.model_dump(include={"batch", "precision", "seq", "compiled", "checkpointing"})
    asked = Asked(model, attention=EAGER if row.bert else row.attention, fused_loss=row.fused, **same)
    work = architectures.work(asked, None if row.torchvision else _config(row))
    there, each = gpu_of(row), min(row.gpus, 8)
    cluster = Cluster.of_gpus(max(1, row.gpus // 8), each, Link(row.nic_gbps, LATENCY_US), there.link)
    optimizer = "sgd" if row.torchvision else "adamw"
    method = "none" if row.gpus == 1 else {2: "bf16", 4: "fp32"}[row.wide]
    t = work.timeline(there, gpus_per_node=each, optimizer=optimizer)
    found = answer(t, cluster, TrainingPlan(row.layout, row.accumulation, optimizer), [method])
    samples = row.batch * row.accumulation * (row.seq or 1 if row.unit == "tokens" else 1)
    return ComparedThroughput(row, work, 1e3 * samples / found.prediction[method].ms)


@dataclass(frozen=True)
class Recorded:
    """A timeline from the architecture next to one of results/timelines."""

    name: str
    recorded: Timeline
    work: Work

    @cached_property
    def counted(self) -> Timeline:
        return self.work.timeline(gpus.find(self.recorded.gpu))

    @property
    def waits(self) -> float:
        """Share of the counted step in which the GPU waits for the host."""
        alone = replace(self.work, host_us=(0.0, 0.0)).timeline(gpus.find(self.recorded.gpu))
        return 1 - alone.step_ms / self.counted.step_ms

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
    """Timelines of results/timelines next to those from the architecture; None: all."""
    from transformers import BertConfig

    found = []
    for name in names or timelines.names():
        t = timelines.load(name)
        precision = {"amp": "fp16"}.get(t.precision, t.precision)
        if t.model == "resnet50":
            work = architectures.work(Asked("torchvision:resnet50", t.batch_per_gpu, precision))
        else:
            asked = Asked("hf:bert", t.batch_per_gpu, precision, 384)
            if t.source:  # published, with attention as it was then; what was recorded has the present one
                asked = replace(asked, attention=EAGER)
            work = architectures.work(asked, BertConfig(architectures=["BertForQuestionAnswering"]))
        found.append(Recorded(name, t, work))
    return found


# ---- the page ---------------------------------------------------------------------------------------------------------


def why(found: ComparedThroughput) -> str:
    """Why a row is off; empty where it is not."""
    if abs(found.error) <= TARGET:
        return ""
    row = found.row
    words = {row.source, row.precision, *row.name.split(), *row.gpu.split("-")}
    return next((said for of, said in WHY if words >= set(of.split())), "?")


COLUMNS = (
    Column("model", "left", value=lambda found: found.row.name),
    Column("GPU", value=lambda found: gpus.find(found.row.gpu).label),
    Column("precision", value=lambda found: found.row.precision),
    Column("batch", value=lambda found: str(found.row.batch)),
    Column("source", value=lambda found: found.row.source),
    Column("published, 1/s", value=lambda found: f"{number(found.row.per_s)} {found.row.unit}"),
    Column("predicted, 1/s", value=lambda found: number(float(f"{found.predicted:.3g}"))),
    Column("step", value=lambda found: f"{found.error:+.0%}"),
    Column("of peak", value=lambda found: f"{found.utilization:.0%}"),
    Column("why", value=why),
)


def summary(found: Sequence[ComparedThroughput]) -> Table:
    """Errors of the step: of all, of those of the first comparison and of those after it, and by source."""
    rows = list(found)
    parts = {"all": rows, f"the first {FIRST} rows": rows[:FIRST], "rows after them": rows[FIRST:]}
    for b in found:
        parts.setdefault(sources()[b.row.source]["title"], []).append(b)
    head = ("published by", "rows", "median", "worst", f"within {TARGET:.0%}", f"within {gpus.UNSURE:.0%}")
    lines = []
    for name, part in parts.items():
        apart = [abs(b.error) for b in part]
        inside = [f"{sum(e <= limit for e in apart)} of {len(part)}" for limit in (TARGET, gpus.UNSURE)]
        lines.append([name, str(len(part)), f"{statistics.median(apart):.1%}", f"{max(apart):.0%}", *inside])
    return Table.text(head, lines)


def met(r: Recorded) -> bool:
    """Whether a timeline is within both targets."""
    return abs(r.error) <= TARGET and r.readiness <= READY


def _waiting(r: Recorded) -> str:
    if met(r):
        return ""
    published = "a rate of a large batch, scaled: no host starts the kernels of a small one so fast"
    measured = "autocast's casts are not counted, nor that convolutions were not channels-last; a slow host"
    return published if r.recorded.source else measured


OWN = (
    Column("timeline", "left", value=lambda r: r.name),
    Column("there, ms", value=lambda r: number(r.recorded.step_ms)),
    Column("from the architecture, ms", value=lambda r: number(r.counted.step_ms)),
    Column("step", value=lambda r: f"{r.error:+.1%}"),
    Column("gradients ready, at most", value=lambda r: f"{r.readiness:.1%} of the step"),
    Column("waiting for the host", value=lambda r: f"{r.waits:.0%}"),
    Column("target met", value=lambda r: "yes" if met(r) else "no"),
    Column("why not", value=_waiting),
)


def profiles() -> Table:
    """BERT-Large on V100: each profile, and what is counted for its batch."""
    from transformers import BertConfig

    own = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    own.architectures = ["BertForPreTraining"]
    asked = {p.batch: Asked("hf:bert-large", p.batch, "fp16", 128, attention=EAGER) for p in claimed.PROFILES}
    counted_for = {batch: architectures.work(a, own) for batch, a in asked.items()}
    lines = []
    for p in claimed.PROFILES:
        work = counted_for[p.batch]
        there, counted = p.forward + p.backward, work.timeline(gpus.find("v100")).step_ms
        off = counted / there - 1
        said = (
            ""
            if abs(off) <= TARGET
            else f"its host takes {1e3 * p.forward / work.forward:.0f} us for a kernel of forward"
        )
        name = f"{p.network}, {p.nodes} nodes"
        lines.append([name, str(p.batch), number(there), number(counted), f"{off:+.0%}", "no" if said else "yes", said])
    head = "profile", "batch", "there, ms", "from the architecture, ms", "forward and backward", "target met", "why not"
    return Table.text(head, lines)


def markdown() -> str:
    """Counts everything; the page."""
    there = [compared(row) for row in shapes()]
    return sentences.page(
        "step_times",
        unsure=f"{gpus.UNSURE:.0%}",
        first=FIRST,
        target=f"{TARGET:.0%}",
        ready=f"{READY:.0%}",
        host_us=[f"{us:g}" for us in HOST_US],
        summary=summary(there).grid(),
        rows=Table.of(COLUMNS, there).grid(),
        sources=sources(),
        timelines=Table.of(OWN, recorded()).grid(),
        large=profiles().grid(),
    )


@command.report_errors
def main(arguments: Sequence[str] | None = None) -> int:
    command.parser(__doc__).parse_args(arguments)
    write_file(PAGE, markdown().encode(), "the page of step times")
    print(PAGE)
    return 0


if __name__ == "__main__":
    command.start(main)
