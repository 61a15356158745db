"""The templates of `pages`: documents, pages of a results folder, and sentences, which `say` fills in. All text that is not a
number. What the numbers decide is in captions.py. No torch."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from birder.predict.table import digits
from experiments.records.record import ResultRecord
from experiments.report import formats
from launch.words import count

FOLDER = Path(__file__).with_name("pages")
EMULATED = {"loopback", "emulated", "netns", "veth"}
"""Kinds of link that connect nodes which are all on one machine."""
FORMATS = ("number", "percent", "times", "fraction", "metric_gap")
"""Of formats.py, what sentences.j2 calls."""
MODELS = {
    "resnet50": "ResNet-50",
    "bert_squad_base": "BERT-Base",
    "bert_base": "BERT-Base",
    "methods": "All methods on one task",
}
"""What is trained, where an experiment or a timeline is not called by it."""


def environment(trim: bool = True) -> Environment:
    """What a template names and nobody gives is an error. trim: a line that is a block alone leaves no line behind."""
    return Environment(
        loader=FileSystemLoader(FOLDER),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=trim,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def page(name: str, **given: Any) -> str:
    """A page of a results folder, tables/<name>.md, of what its template is given. It ends with one line break."""
    return _pages().get_template(f"results/tables/{name}.md.j2").render(**given).rstrip() + "\n"


_pages = functools.cache(environment)


@functools.cache
def _texts() -> Any:
    """The macros of sentences.j2, by their names."""
    made = environment(trim=False)
    made.filters |= {"count": count, "digits": digits, "times": formats.times}
    made.globals |= {name: getattr(formats, name) for name in FORMATS}
    made.globals |= {"caveats": caveats, "hardware": hardware, "machines": machines, "what": trained}
    return made.get_template("sentences.j2").module


def say(text: str, **given: Any) -> str:
    """A text of sentences.j2 with its arguments, on one line."""
    return _line(getattr(_texts(), text)(**given))


def lines(text: str, **given: Any) -> list[str]:
    """The same of a text of several paragraphs, one for each that says anything; they end with ¶."""
    paragraphs = map(_line, getattr(_texts(), text)(**given).split("¶"))
    return [paragraph for paragraph in paragraphs if paragraph]


def _line(text: str) -> str:
    return re.sub(r" ([.,:;])(?= |$)", r"\1", " ".join(text.split()))


def trained(r: ResultRecord) -> str:
    """What is trained, and its batch, in words, for a picture."""
    batch = (r.config.get("train") or {}).get("batch_per_rank")
    return MODELS.get(r.exp, r.exp) + (f", batch {batch} per rank" if batch else "")


def hardware(r: ResultRecord) -> str:
    """The machine in words."""
    h = r.hardware
    gpus = h.get("gpus") or []
    kinds = [f"{gpus.count(g)} x {g}" for g in dict.fromkeys(gpus)] if h.get("device") != "cpu" else []
    return ", ".join([*kinds, f"{h.get('cores')} cores ({h.get('cpu') or 'unknown CPU'})", f"{h.get('memory_gb')} GiB"])


def machines(records: Iterable[ResultRecord]) -> str:
    """All of their machines in words, each once."""
    return "; ".join(dict.fromkeys(map(hardware, records)))


def caveats(records: Sequence[ResultRecord]) -> str:
    """What these runs are not: emulated nodes, unshaped links, synthetic data, a quick scale."""
    done = [r for r in records if r.status == "completed"] or list(records)
    rates = [r.link["mbit_per_s"] for r in done if r.link["mbit_per_s"]]
    synthetic = any(r.data["synthetic"] for r in done)
    said = say("caveats_of", r=done[0], rates=rates, synthetic=synthetic, emulated=done[0].link["kind"] in EMULATED)
    return said.removesuffix(";")
