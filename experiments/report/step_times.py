"""Timelines from architectures beside what is known, as a page: results/published/tables/step_times.md, and its part of
docs/predict.md. Made by `python experiments/predict.py --step-times`, in some minutes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from birder.predict import gpus
from birder.predict.costs import HOST_US
from experiments.cells import step_times
from experiments.cells.step_times import Beside, Recorded
from experiments.records.record import PUBLISHED, ROOT, write_file
from experiments.report.formats import number
from experiments.report.table import Table

PAGE = Path(PUBLISHED) / "tables" / "step_times.md"
DOCS = ROOT / "docs" / "predict.md"
MARKS = "<!-- step times -->", "<!-- end of step times -->"
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


def why(found: Beside) -> str:
    """Why a row is off; empty where it is not."""
    if abs(found.error) <= TARGET:
        return ""
    row = found.row
    words = {row.source, row.precision, *row.name.split(), *row.gpu.split("-")}
    return next((said for of, said in WHY if words >= set(of.split())), "?")


def _line(found: Beside) -> list[str]:
    row = found.row
    unit = "tokens" if row.unit == "tokens" else "samples"
    return [
        row.name,
        gpus.find(row.gpu).label,
        row.precision,
        str(row.batch),
        row.source,
        f"{number(row.per_s)} {unit}",
        number(float(f"{found.predicted:.3g}")),
        f"{found.error:+.0%}",
        f"{found.utilization:.0%}",
        why(found),
    ]


def rows(found: Sequence[Beside]) -> Table:
    """One line for each published throughput."""
    head = (
        "model",
        "GPU",
        "precision",
        "batch",
        "source",
        "published, 1/s",
        "predicted, 1/s",
        "step",
        "of peak",
        "why",
    )
    return Table.text(head, [_line(b) for b in found])


def summary(found: Sequence[Beside]) -> Table:
    """Errors of the step: of all, of those of the first comparison and of those after it, and by source."""
    rows = list(found)
    parts = {"all": rows, f"the first {FIRST} rows": rows[:FIRST], "rows after them": rows[FIRST:]}
    for b in found:
        parts.setdefault(step_times.sources()[b.row.source]["title"], []).append(b)
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


def _own(r: Recorded) -> list[str]:
    waiting = "" if met(r) else "a rate of a large batch, scaled: no host starts the kernels of a small one so fast"
    return [
        r.name,
        number(r.recorded.step_ms),
        number(r.counted.step_ms),
        f"{r.error:+.1%}",
        f"{r.readiness:.1%} of the step",
        f"{r.waits:.0%}",
        "yes" if met(r) else "no",
        waiting,
    ]


def own(found: Sequence[Recorded]) -> Table:
    """Timelines that there are beside those from the architecture."""
    ms = "from the architecture, ms"
    head = (
        "timeline",
        "there, ms",
        ms,
        "step",
        "gradients ready, at most",
        "waiting for the host",
        "target met",
        "why not",
    )
    return Table.text(head, [_own(r) for r in found])


def profiles() -> Table:
    """BERT-Large on V100."""
    lines = []
    for p, work in step_times.profiles():
        there, counted = p.forward + p.backward, work.timeline(gpus.find("v100")).step_ms
        off = counted / there - 1
        said = (
            ""
            if abs(off) <= TARGET
            else f"its host takes {1e3 * p.forward / work.forward:.0f} us for a kernel of forward"
        )
        name = f"{p.network}, {p.nodes} nodes"
        lines.append([name, str(p.batch), number(there), number(counted), f"{off:+.0%}", "no" if said else "yes", said])
    head = (
        "profile",
        "batch",
        "there, ms",
        "from the architecture, ms",
        "forward and backward",
        "target met",
        "why not",
    )
    return Table.text(head, lines)


def markdown(published: Sequence[Beside], recorded: Sequence[Recorded], large: Table) -> str:
    """The page."""
    listed = [f"- {key}: {s['title']} ({s['where']})" for key, s in step_times.sources().items()]
    return (
        "\n\n".join(
            [
                "# Timelines from the architecture, beside what is known",
                "Made by `python experiments/predict.py --step-times`. The shares of the data sheet's rates that GPUs reach "
                "(birder/predict/gpus.py) are the same for every model, and none is fitted to a published throughput: they "
                "were set on the timelines of the second part. All throughputs had been written down before they were "
                "compared (results/step_times.yaml). The interval of "
                f"+-{gpus.UNSURE:.0%} was chosen after the first comparison.",
                f"The first comparison had {FIRST} rows, and a median a little above the target of {TARGET:.0%}. Its rows "
                "were then read again, and are now as their sources say: fused loss and activation function (MPT), "
                "checkpointing, power and memory of the GPU (torchtitan), no compiler and the rate of the link (IBM). "
                "Collectives are now simulated as where questions are answered. Terms were added, each from a source "
                "outside of this table: the host's time for a kernel, matrix products of GPUs with few operations in a "
                "cycle, products at an H100's power limit, and fused attention on it. The last two were looked for when "
                "rows on H100 had come out too fast, which an unfused loss had hidden before.",
                "## Published throughputs",
                summary(published).grid().rstrip(),
                rows(published).grid().rstrip(),
                "\n".join(listed),
                "## The timelines that there are",
                "Those are a published rate each, spread by an assumption: forward a third, backward by operations. Targets: "
                f"{TARGET:.0%} of the step, and {READY:.0%} of it for every gradient.",
                own(recorded).grid().rstrip(),
                "BERT-Large on V100, the profile of 1-bit Adam's authors. With batch 1 the GPU waits for the host. The two "
                "clusters' hosts differ so much that no single time for a kernel is within the target of both; assumed are "
                f"{HOST_US[0]:g} us in forward and {HOST_US[1]:g} in backward.",
                large.grid().rstrip(),
            ]
        )
        + "\n"
    )


def write() -> Path:
    """Counts everything, and writes the page and its part of docs/predict.md."""
    published, recorded = [step_times.beside(row) for row in step_times.rows()], step_times.recorded()
    write_file(PAGE, markdown(published, recorded, profiles()).encode(), "the page of step times")
    text = DOCS.read_text(encoding="utf-8")
    before, _, rest = text.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    part = "\n\n".join([MARKS[0], summary(published).grid().rstrip(), own(recorded).grid().rstrip(), MARKS[1]])
    write_file(DOCS, (before + part + after).encode(), "docs/predict.md")
    return PAGE
