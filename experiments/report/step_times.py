"""Timelines from architectures beside what is known, as a page: results/published/tables/step_times.md, and its part of
docs/predict.md. Made by `python experiments/predict.py --step-times`, in some minutes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from birder.predict import gpus
from experiments.cells import step_times
from experiments.cells.step_times import Beside, Recorded
from experiments.records.record import PUBLISHED, ROOT, write_file
from experiments.report.formats import number
from experiments.report.table import Table

PAGE = Path(PUBLISHED) / "tables" / "step_times.md"
DOCS = ROOT / "docs" / "predict.md"
MARKS = "<!-- step times -->", "<!-- end of step times -->"
TARGET = 0.15
WHY: tuple[tuple[str, str, str], ...] = (
    (
        "torchtitan",
        "",
        "selective checkpointing computes part of forward again, which is not counted; 500 W instead of 700",
    ),
    (
        "fms",
        "",
        "the all-reduce between 16 nodes is not in the prediction: the rate of their links is not in the source",
    ),
    ("fms_h100", "", "as the A100's"),
    ("nanogpt", "", "4 days is a round number with evaluation in it; attention was not fused yet"),
    (
        "timm",
        "",
        "convolutions: a GeForce runs above its data sheet's clock, and 3x3 kernels need fewer operations (Winograd)",
    ),
    ("nvidia_resnet", "fp32", "3x3 kernels need fewer operations than are counted (Winograd)"),
    ("nvidia_resnet", "fp16", "convolutions reach more of a V100's peak than its matrix products do"),
    ("nvidia_bert", "fp32", "the source's fine-tuning is as slow as its pre-training on sequences a third longer"),
    ("nvidia_bert", "fp16", "small batches: software of 2019, whose host was slower"),
    ("mpt 13B", "", "a small batch: more of FSDP's collectives is seen than is predicted"),
    ("mpt", "", "small widths: kernels of llm-foundry are fused by hand, the prediction is eager"),
)
"""(source, or with the model's size, precision, why): of rows that are off by more than `TARGET`."""


def why(found: Beside) -> str:
    """Why a row is off; empty where it is not."""
    if abs(found.error) <= TARGET:
        return ""
    row = found.row
    return next(
        (
            said
            for source, precision, said in WHY
            if source in (row.source, f"{row.source} {row.name.split()[-1]}") and precision in ("", row.precision)
        ),
        "?",
    )


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
    """Errors of the step: of all, and by source."""
    parts = {"all": list(found)}
    for b in found:
        parts.setdefault(step_times.sources()[b.row.source]["title"], []).append(b)
    head = ("published by", "rows", "median", "worst", f"within {TARGET:.0%}", f"within {gpus.UNSURE:.0%}")
    lines = []
    for name, part in parts.items():
        apart = [abs(b.error) for b in part]
        inside = [f"{sum(e <= limit for e in apart)} of {len(part)}" for limit in (TARGET, gpus.UNSURE)]
        lines.append([name, str(len(part)), f"{statistics.median(apart):.1%}", f"{max(apart):.0%}", *inside])
    return Table.text(head, lines)


def own(found: Sequence[Recorded]) -> Table:
    """Timelines that there are beside those from the architecture."""
    head = ("timeline", "there, ms", "from the architecture, ms", "step", "gradients ready, at most")
    return Table.text(
        head,
        [
            [
                r.name,
                number(r.recorded.step_ms),
                number(r.counted.step_ms),
                f"{r.error:+.1%}",
                f"{r.readiness:.1%} of the step",
            ]
            for r in found
        ],
    )


def profiles() -> Table:
    """BERT-Large on V100."""
    lines = [
        [f"{p.network}, {p.nodes} nodes", str(p.batch), number(there), number(counted), f"{counted / there - 1:+.0%}"]
        for p, there, counted in step_times.profiles()
    ]
    return Table.text(("profile", "batch", "there, ms", "from the architecture, ms", "forward and backward"), lines)


def markdown(published: Sequence[Beside], recorded: Sequence[Recorded], large: Table) -> str:
    """The page."""
    listed = [f"- {key}: {s['title']} ({s['where']})" for key, s in step_times.sources().items()]
    return (
        "\n\n".join(
            [
                "# Timelines from the architecture, beside what is known",
                "Made by `python experiments/predict.py --step-times`. The shares of the data sheet's rates that GPUs reach "
                "(birder/predict/gpus.py) are the same for every model. They were set on the timelines of the second part, "
                "and not changed after the first comparison with the published throughputs, which had been written down "
                f"before (results/step_times.yaml). The interval of +-{gpus.UNSURE:.0%} was chosen after it.",
                "## Published throughputs",
                summary(published).grid().rstrip(),
                rows(published).grid().rstrip(),
                "\n".join(listed),
                "## The timelines that there are",
                "Those are a published rate each, spread by an assumption: forward a third, backward by operations.",
                own(recorded).grid().rstrip(),
                "BERT-Large on V100, the profile of 1-bit Adam's authors. With batch 1 their host is what the GPU waits for.",
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
