"""A question to the predictor, answered in text of 80 columns: the sentences, six rows, what was assumed."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from birder.predict import gpus
from birder.predict.answers import Answer
from experiments.records.record import ResultRecord
from experiments.report import accuracy_page, gaps
from experiments.report.paired import BETTER, PARITY, WORSE

WIDTH = 80
ALL = "The whole table: --all. As data: --json. What is behind it: docs/predict.md."


def price(label: str, records: Sequence[ResultRecord]) -> str:
    """What a method costs in accuracy, by the published studies: in how many it was at parity, better, worse, or open."""
    own = label.split(",")[0].split(" (")[0]
    found = Counter(v for panel in gaps.panels(accuracy_page.studies(records)) if (v := _verdict(panel, own)))
    if not found:
        return "no study of its accuracy is published here"
    studies = sum(found.values())
    good, worse = found[PARITY] + found[BETTER], found[WORSE]
    said = f"accuracy at parity or better in {good} of {studies} studies, worse in {worse}"
    return said + (f", undecided in {studies - good - worse}" if studies > good + worse else "")


def _verdict(panel: gaps.Panel, label: str) -> str | None:
    rows = [row for row in panel.rows if row.label.split(" (")[0].startswith(label)]
    return rows[0].verdict if rows else None


def text(found: Answer, records: Sequence[ResultRecord], everything: bool = False) -> str:
    """The answer. everything: the whole table instead of six rows."""
    best = found.best
    said = found.sentences(price(best.method.label, records) if best and found.pays else "")
    parts = ["\n".join(line for one in said for line in textwrap.wrap(one, WIDTH))]
    parts.append(str(found.prediction) if everything else "\n".join(found.table()))
    parts.append("\n".join(line for one in assumed(found) for line in textwrap.wrap(one, WIDTH)))
    return "\n\n".join(parts)


def assumed(found: Answer) -> list[str]:
    """Where the numbers come from, a line each."""
    t, c, plan = found.prediction.timeline, found.prediction.cluster, found.plan
    link = (
        f"{c.between.gbps:.3g} Gbit/s between nodes, {c.between.latency_us:g} us"
        if c.nodes > 1
        else f"{c.inside.gbps / 8:.3g} GB/s inside the node"
    )
    computing = f"{t.name}: {t.elements / 1e6:.4g} M parameters, {t.step_ms:.4g} ms of forward and backward on {t.gpu}"
    if found.ends:
        computing += f" +-{gpus.UNSURE:.0%}, from the architecture and the data sheet"
    if plan.accumulation > 1:
        computing += f"; {plan.accumulation} micro-batches a step"
    lines = [computing + ".", f"{c.nodes} x {c.ranks_per_node} ranks, {link}; {plan.sharding}."]
    lines.append(f"Kernels of methods: {found.prediction.costs.source}.")
    if not all(found.fits(name) for name in found.memory):
        assert found.gpu is not None
        lines.append(f"!: more than the {found.gpu.gb:g} GB of a {found.gpu.label}.")
    return [*lines, ALL]
