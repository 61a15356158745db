"""What is said of records: `say` fills in a text of sentences.j2. What the numbers decide is in captions.py. No torch."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from experiments.records.record import ResultRecord
from experiments.report import templates
from experiments.report.formats import number, percent, times
from launch.words import count

EMULATED = {"loopback", "emulated", "netns", "veth"}
"""Kinds of link that connect nodes which are all on one machine."""
MODELS = {
    "resnet50": "ResNet-50",
    "bert_squad_base": "BERT-Base",
    "bert_base": "BERT-Base",
    "methods": "All methods on one task",
}
"""What is trained, where an experiment or a timeline is not called by it."""


@functools.cache
def _texts() -> Any:
    """The macros of sentences.j2, by their names."""
    made = templates.environment(trim=False)
    made.filters["count"] = count
    made.globals |= {"number": number, "percent": percent, "times": times}
    return made.get_template("sentences.j2").module


def say(text: str, **given: Any) -> str:
    """A text of sentences.j2 with its arguments, on one line."""
    line = " ".join(getattr(_texts(), text)(**given).split())
    return re.sub(r" ([.,:;])(?= |$)", r"\1", line)


def title(r: ResultRecord) -> str:
    """Experiment, shape and batch of the runs of a table."""
    return say("title", r=r, train=r.config.get("train", {}))


def trained(r: ResultRecord) -> str:
    """The same in words, for a picture: what is trained, and its batch."""
    batch = (r.config.get("train") or {}).get("batch_per_rank")
    return MODELS.get(r.exp, r.exp) + (f", batch {batch} per rank" if batch else "")


def hardware(r: ResultRecord) -> str:
    """The machine in words."""
    h = r.hardware
    gpus = h.get("gpus") or []
    kinds = [f"{gpus.count(g)} x {g}" for g in dict.fromkeys(gpus)] if h.get("device") != "cpu" else []
    return ", ".join([*kinds, f"{h.get('cores')} cores ({h.get('cpu') or 'unknown CPU'})", f"{h.get('memory_gb')} GiB"])


def honesty(records: Sequence[ResultRecord]) -> str:
    """What these runs are not: emulated nodes, unshaped links, synthetic data, a quick scale."""
    done = [r for r in records if r.status == "completed"] or list(records)
    rates = [r.link["mbit_per_s"] for r in done if r.link["mbit_per_s"]]
    synthetic = any(r.data["synthetic"] for r in done)
    said = say("honesty", r=done[0], rates=rates, synthetic=synthetic, emulated=done[0].link["kind"] in EMULATED)
    return said.removesuffix(";")
