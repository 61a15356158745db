"""What documents can say: every figure of a page is the answer of one of these, from records alone. No torch.

A template calls the methods of `Facts` by name, and methods of the tables that they return:
`{{ study("digits", "8 workers").gap("Birder") }}`. What no record holds is a LookupError, which names what was asked for.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from birder.predict import Cluster, Link, Prediction, predict
from experiments.cells import suite as suites
from experiments.cells import timelines
from experiments.config import question, reference
from experiments.records.record import ROOT, ResultRecord, read_all
from experiments.report import (
    accuracy_page,
    arithmetic,
    captions,
    claims,
    gaps,
    methods_table,
    metrics,
    prediction,
    replay_page,
    replay_words,
    replayed,
    sentences,
    speedup_table,
    volume,
)
from experiments.report import spread as spreads
from experiments.report.accuracy import AccuracyTable
from experiments.report.comparison import Cell
from experiments.report.formats import DASH, mean_sd, number, percent, size, times
from experiments.report.metrics import difference
from experiments.report.replayed import Results
from experiments.report.speedup import SpeedupTable, newest
from experiments.report.table import Table

MAKE = {
    "model": "MODEL",
    "gpu": "GPU",
    "batch": "BATCH",
    "seq": "SEQ",
    "precision": "PRECISION",
    "cluster.nodes": "NODES",
    "cluster.ranks_per_node": "RANKS",
    "cluster.gbps": "GBPS",
}
"""Keys of a question that `make predict` has a variable for."""
COMMAND = 72
"""Characters of a line of a command: a page does not scroll."""


def only(found: Sequence[Any], asked: str) -> Any:
    """The only one. Raises LookupError for none and for several."""
    if len(found) != 1:
        raise LookupError(f"{len(found)} records or tables answer to {asked}")
    return found[0]


def minutes(records: Sequence[ResultRecord]) -> int:
    """How long the comparisons of these records took, in whole minutes: each from its name's time to its last record."""
    ends: dict[str, datetime] = {}
    for r in records:
        if name := (r.group or r.turns.get("world") or "").partition(", ")[0]:
            end = datetime.strptime(r.time[:19], "%Y-%m-%dT%H:%M:%S")
            ends[name] = max(end, ends.get(name, end))
    took = sum((end - datetime.strptime(name[:15], "%Y%m%d-%H%M%S")).total_seconds() for name, end in ends.items())
    return math.ceil(took / 60)


class StudyFacts:
    """A table of accuracies; methods by their labels, at their best rate or at one that is named: "Birder@0.006".

    The name alone of a method with several variants is the one that stands for it (`one_of_each`).
    """

    def __init__(self, table: AccuracyTable, results: Path) -> None:
        self.table = table
        self.results = results
        self.first, self.workers, self.batch = table.first, table.setting.workers, table.setting.batch

    def cell(self, name: str) -> Cell:
        label, _, rate = name.partition("@")
        mine = [c for c in self.table.cells if c.lr == float(rate)] if rate else self.table.chosen
        exact = [c for c in mine if c.label == label]
        exact = exact or [c for c in self.table.one_of_each if c in mine and c.method == label]
        found: Cell = only(exact, f"{name!r} in {self.table.title!r}")
        return found

    def score(self, name: str) -> str:
        return mean_sd(*self.cell(name).summary(None))

    def seeds(self, name: str) -> str:
        """The metric of each seed."""
        return ", ".join(f"{value:.0f}" for value in self.cell(name).by_seed.values())

    def lr(self, name: str) -> str:
        return f"{self.cell(name).lr:g}"

    def gap(self, name: str, base: str | None = None, unit: str = "") -> str:
        """The paired difference to `base`, the stated baseline if None, as tables have it: "-0.1 [-0.6, 0.4] points"."""
        return self.beyond(name, self, base, unit)

    def beyond(self, name: str, other: StudyFacts, base: str | None, unit: str = "") -> str:
        """The same to a method of another study with the same seeds."""
        theirs = other.table.held_against if base is None else other.cell(base)
        found = theirs and difference(self.cell(name).by_seed, theirs.by_seed, self.table.relative)
        if not found:
            raise LookupError(f"{name} shares no seed with {base or 'a baseline'} in {other.table.title!r}")
        return found.text(self.table.relative, digits=1) + f" {unit}" * bool(unit)

    def verdict(self, name: str) -> str:
        return self.table.verdict(self.cell(name))

    @property
    def steps(self) -> str:
        """Optimizer steps of a run: what a curve ends with."""
        return (self.results / str(self.first.curve)).read_text(encoding="utf-8").splitlines()[-1].partition(",")[0]

    def shown(self) -> Table:
        """Its table: a row for each method."""
        return accuracy_page.section([self.table])


def _broken(words: Sequence[str]) -> str:
    """A command in lines of at most `COMMAND` characters, where no word is longer."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) < COMMAND:
            lines[-1] += f" {word}"
        else:
            lines.append(f"    {word}")
    return " \\\n".join(lines)


def _misses(checks: Iterable[arithmetic.Check]) -> list[float]:
    return [100 * abs(c.difference) for c in checks]


OTHERS: dict[str, Any] = {
    **{f.__name__: f for f in (number, times, percent, size, minutes)},
    "shown": speedup_table.as_table,
    "versus": captions.versus,
    "compression": captions.compression,
    # By what percentage a dense row of these tables misses arithmetic at most; the same of each dense cell of a suite.
    "off_arithmetic": lambda tables: number(max(_misses(c for t in tables for c in arithmetic.of_runs(t.records)))),
    "checks": lambda results: _misses(replay_words.checks(results)),
    # The blocks of a section of a suite's page; the step times of a model over nodes.
    "said": lambda results, kind: replay_page.SECTIONS[kind](results, results.suite.report.sections[0]),
    "cells": lambda results, model, link: replay_page.grid(results, results.suite.across((model, None, link)), ""),
    "placed": replay_words.placed,
    "block": "```{}\n{}\n```".format,
    "timeline": timelines.load,
    "keys": reference.tables,
    "cited": claims.cited,
    "ACCURATE": claims.ACCURATE,
    "volume": lambda kind: [value for value, _ in volume.measured(volume.VolumeSchedules(), kind)],
}
"""Functions that need no records."""


class Facts:
    """All records of a results folder, read once."""

    def __init__(self, results: Path) -> None:
        self.results = results

    @cached_property
    def _records(self) -> claims.Records:
        return claims.Records(read_all(self.results))

    def words(self) -> dict[str, Any]:
        """What a template can call: methods of this class, `OTHERS`, and the shares by which things are decided."""
        mine = {name: getattr(self, name) for name in dir(type(self)) if not name.startswith("_") and name != "words"}
        shares = {"level": metrics.LEVEL, "close": claims.CLOSE, "near": captions.NEAR}
        return {**mine, **OTHERS, **{name: f"{100 * share:g} %" for name, share in shares.items()}}

    # ---- step times ---------------------------------------------------------------------------------------------------

    def steps(self, exp: str, nodes: int, cluster: str = "emulated") -> SpeedupTable:
        """The latest table of an experiment on so many nodes."""
        of = [r for r in self._records if r.exp == exp and r.cluster == cluster and r.nodes == nodes]
        found: SpeedupTable = only(newest(of, exp, cluster), f"{exp} on {nodes} nodes, cluster {cluster}")
        return found

    def expected(self, timeline: str, nodes: int, ranks: int, gbps: float) -> Prediction:
        """Steps of a real cluster, predicted: nodes x ranks of the timeline's GPU, `gbps` between nodes."""
        cluster = Cluster.of_gpus(nodes, ranks, Link(gbps, prediction.LATENCY_US))
        return predict(timelines.load(timeline), cluster, methods=prediction.METHODS)

    def example(self, title: str) -> dict[str, str]:
        """A worked example of docs/predict_examples.md by its title: its command, with make, and what is answered first."""
        listed = yaml.safe_load((question.FOLDER / "examples.yaml").read_text(encoding="utf-8"))["examples"]
        asked = dict(pair.split("=", 1) for one in listed if one["title"] == title for pair in one["ask"])
        named = [f"{MAKE[key]}={shlex.quote(value)}" for key, value in asked.items() if key in MAKE]
        others = " ".join(f"{key}={value}" for key, value in asked.items() if key not in MAKE)
        page = (ROOT / "docs" / "predict_examples.md").read_text(encoding="utf-8").partition(f"## {title}\n")[2]
        said = page.partition("```text\n")[2].partition("\n\n")[0]
        words = ["make predict", *named, *([f"ARGS={shlex.quote(others)}"] if others else [])]
        return {"command": _broken(words), "said": said}

    def _runs(self, folder: str, nodes: int) -> list[SpeedupTable]:
        return spreads.runs(read_all(self.results / folder), "resnet50", nodes)

    def repeated(self, folder: str, nodes: int, method: str, wire: str) -> dict[str, Any]:
        """Of all comparisons of a study: how many, how many next to another program, the least and the most gained."""
        found = self._runs(folder, nodes)
        gains = [spreads.ratios(run)[method, wire] for run in found]
        busy = sum(map(spreads.busy, found))
        return {"count": len(found), "busy": busy, "least": times(min(gains)), "most": times(max(gains))}

    def spread(self, folder: str, nodes: int) -> str:
        """The table of a study."""
        return spreads.as_table(self._runs(folder, nodes)).markdown()

    def replay(self, suite: str) -> Results:
        return replayed.load(suites.load(suite), self.results)

    def hook_costs(self) -> str:
        """By what share a step on one GPU grows with each method's hook, where nothing is sent: a column for each model."""
        rows = self.replay("bench").kernels["cuda"].config["bench"]["hooks"]
        models = list(dict.fromkeys((r["model"], r["batch"]) for r in rows))
        grown = {
            (r["method"], r["model"], r["batch"]): f"{100 * r['overhead']:+.0f} %" for r in rows if "overhead" in r
        }
        names = {"resnet50": "ResNet-50, {} images", "bert_base": "BERT-Base, batch {}"}
        methods = [m for m in dict.fromkeys(r["method"] for r in rows) if not m.startswith("DDP without")]
        found = [[m, *(grown.get((m, *model), DASH) for model in models)] for m in methods]
        return Table.text(["method", *(names[model].format(batch) for model, batch in models)], found).grid()

    # ---- prediction ---------------------------------------------------------------------------------------------------

    def trained_rows(self) -> str:
        """How far predictions are from all interleaved comparisons, those of the validation among them."""
        records = [*self._records, *read_all(self.results / prediction.VALIDATION)]
        return prediction.trained_summary(prediction.trained_rows(records)).grid()

    def table_of(self, page: str, heading: str) -> str:
        """The first table below a heading of a page in the tables folder."""
        lines = (self.results / "tables" / f"{page}.md").read_text(encoding="utf-8").partition(f"## {heading}\n")[2]
        whole = itertools.dropwhile(lambda line: not line.startswith("|"), lines.splitlines())
        return "\n".join(itertools.takewhile(lambda line: line.startswith("|"), whole))

    def links_needed(self) -> str:
        """Under which links the paper's speedups come out."""
        models = ("resnet50", "bert_base")
        quoted = {m: claims.cited(f"maximum speedup, {sentences.MODELS[m]}, testbed", "Birder") for m in models}
        factors = {m: float(found["value"]) for m, found in quoted.items()}
        return prediction.links_needed(factors, nodes=8).grid()

    def on_gpus(self) -> str:
        """How far forward and backward from the architecture are from what was recorded on a GPU here, a row each."""
        lines = self.table_of("step_times", "The timelines that there are").splitlines()
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        places = [rows[0].index(name) for name in ("timeline", "there, ms", "from the architecture, ms", "step")]
        seen = [[row[place] for place in places] for row in rows[2:] if row[0].endswith("_h100")]
        return Table.text(["timeline", "measured, ms", "predicted, ms", "difference"], seen).grid()

    def replayed_rows(self) -> str:
        """The summary of the errors of replayed cells."""
        return prediction.table(prediction.load(self.results)).grid()

    # ---- accuracy -----------------------------------------------------------------------------------------------------

    @cached_property
    def _studies(self) -> gaps.Studies:
        return accuracy_page.studies(self._records)

    def study(self, *words: str, virtual: bool = True) -> StudyFacts:
        """The only table whose title has all of `words`; virtual: among the studies on virtual workers alone.

        Of a setting's studies the first one, unless a word says against which baseline.
        """
        every = [t for tables in self._studies.values() for t in tables] if virtual else self._records.tables
        found = [t for t in every if all(w in t.title for w in words)]
        found = [t for t in found if not t.against] or found
        return StudyFacts(only(found, f"a table of accuracies with {', '.join(words)}"), self.results)

    def studies(self, exp: str) -> str:
        """The tables of all studies of an experiment."""
        return accuracy_page.tables(self._studies[exp])

    def methods(self) -> Table:
        """All methods on one task."""
        return methods_table.as_table(only(methods_table.build(self._records), "the table of all methods"))

    # ---- papers and parts of other pages ------------------------------------------------------------------------------

    def evidence(self, name: str, *claimed: Any, **given: Any) -> list[dict[str, Any]]:
        """What was found of a paper's claim (`claims.evidence`)."""
        return claims.evidence(self._records, name, *claimed, **given)
