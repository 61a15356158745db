"""What documents can say: every figure of a page is the answer of one of these, from records alone. No torch.

A template calls the methods of `Facts` by name: `{{ steps("resnet50", 4).versus("Birder", "fp32") }}`. What no record holds
is a LookupError, which names what was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from experiments.cells import suite as suites
from experiments.cells import timelines
from experiments.cells.suite import Place
from experiments.config import reference
from experiments.records.record import ResultRecord, read_all
from experiments.report import (
    accuracy,
    accuracy_page,
    captions,
    claims,
    claims_page,
    formats,
    methods_table,
    metrics,
    prediction,
    published,
    replay_check,
    replay_sections,
    replay_verdicts,
    replayed,
    resize,
    speedup,
    trained,
    volume,
)
from experiments.report import spread as spreads
from experiments.report.accuracy import AccuracyTable, Cell
from experiments.report.claims_measured import newest
from experiments.report.formats import mean_sd, number, percent, size, times
from experiments.report.methods_table import Line
from experiments.report.paired import difference
from experiments.report.replayed import Results
from experiments.report.speedup import Row, SpeedupTable


def only(found: Sequence[Any], asked: str) -> Any:
    """The only one. Raises LookupError for none and for several."""
    if len(found) != 1:
        raise LookupError(f"{len(found)} records or tables answer to {asked}")
    return found[0]


def minutes(records: Sequence[ResultRecord]) -> float:
    """How long the comparisons of these records took: each from its name's time to its last record."""
    groups: dict[str, list[datetime]] = {}
    for r in records:
        name = (r.group or r.turns.get("world") or "").partition(", ")[0]
        if name:
            groups.setdefault(name, []).append(datetime.strptime(r.time[:19], "%Y-%m-%dT%H:%M:%S"))
    began = {name: datetime.strptime(name[:15], "%Y%m%d-%H%M%S") for name in groups}
    return sum((max(ends) - began[name]).total_seconds() for name, ends in groups.items()) / 60


def _key(r: ResultRecord, key: str) -> Any:
    """What a run's configuration says under a dotted key."""
    value: Any = r.config
    for part in key.split("."):
        value = value[part]
    return value


class Steps:
    """A table of step times; methods by their labels, baselines by what they send: fp32, bf16, none."""

    def __init__(self, table: SpeedupTable) -> None:
        self.table = table
        self.first = table.records[0]

    def row(self, label: str) -> Row:
        found: Row = only([row for row in self.table.rows if row.label == label], f"{label!r} in {self.table.slug}")
        return found

    def labels(self) -> list[str]:
        """Of all rows, the fastest first."""
        return [row.label for row in sorted(self.table.rows, key=lambda row: row.seconds or 0.0)]

    def ms(self, label: str) -> str:
        return number(metrics.step_ms(self.row(label).record))

    def spread(self, label: str) -> str:
        return speedup.step_time(self.row(label))

    def versus(self, label: str, wire: str) -> str:
        return self.table.versus(self.row(label), wire)

    def times(self, label: str, wire: str) -> str:
        return times(self.table.speedup(self.row(label), wire))

    def of_bound(self, label: str) -> str:
        return captions.share(self.table.compared(self.row(label), "none"), label == "no communication")

    def payload(self, label: str) -> str:
        return speedup.payload(self.row(label))

    def nic(self, label: str) -> str:
        return size(self.row(label).record.bytes_per_step["nic_tx"])

    @property
    def dilation(self) -> str:
        return number(self.first.link["dilation"])

    @property
    def nodes(self) -> int:
        return self.first.nodes

    @property
    def cores(self) -> int:
        return int(self.first.hardware["cores"])

    @property
    def batch(self) -> int:
        """Samples of a rank in a step."""
        return accuracy.batch_of(self.first)

    @property
    def said(self) -> str:
        """Whether compression pays."""
        found = captions.compression(self.table)
        if found is None:
            raise LookupError(f"{self.table.slug} compares nothing with fp32")
        return found

    def config(self, key: str) -> Any:
        return _key(self.first, key)

    @property
    def imitated(self) -> int:
        """Samples of a GPU in a step of the timeline that the dilation compares this machine with."""
        return timelines.load(str(self.first.config["timeline"])).batch_per_gpu

    @property
    def link(self) -> str:
        """Gbit/s that the links stand for."""
        return f"{self.first.link['link_gbps']:g}"

    @property
    def minutes(self) -> str:
        return str(math.ceil(minutes(self.table.records)))

    def arithmetic(self) -> float:
        """By what share a dense row misses arithmetic at most."""
        checks = speedup.arithmetic.of_runs([row.record for row in self.table.rows])
        return max(abs(c.difference) for c in checks)


class Study:
    """A table of accuracies; methods by their labels, at their best rate or at one that is named: "Birder@0.006"."""

    def __init__(self, table: AccuracyTable, results: Path) -> None:
        self.table = table
        self.results = results

    def cell(self, name: str) -> Cell:
        label, _, rate = name.partition("@")
        asked = f"{name!r} in {self.table.title!r}"
        if rate:
            found: Cell = only([c for c in self.table.cells if c.label == label and c.lr == float(rate)], asked)
            return found
        best: Cell = only([c for c in self.table.chosen if c.label == label], asked)
        return best

    def score(self, name: str, metric: str | None = None) -> str:
        return mean_sd(*self.cell(name).summary(metric))

    def mean(self, name: str, digits: int = 1) -> str:
        value = self.cell(name).mean
        if value is None:
            raise LookupError(f"{name} has no mean in {self.table.title!r}")
        return f"{value:.{digits}f}"

    def seed(self, name: str, seed: int, digits: int = 0) -> str:
        """The metric of one seed."""
        return f"{self.cell(name).by_seed[seed]:.{digits}f}"

    def lr(self, name: str) -> str:
        return f"{self.cell(name).lr:g}"

    def n(self, name: str) -> str:
        return self.cell(name).count()

    def gap(self, name: str, base: str | None = None, unit: str | None = None) -> str:
        """The paired difference to `base`, the stated baseline if None, as tables have it: "-0.1 [-0.6, 0.4] points"."""
        theirs = self.table.baseline if base is None else self.cell(base)
        if theirs is None:
            raise LookupError(f"{self.table.title!r} has no baseline")
        return self._gap(name, theirs, unit)

    def beyond(self, name: str, other: Study, base: str, unit: str | None = None) -> str:
        """The same to a method of another study with the same seeds."""
        return self._gap(name, other.cell(base), unit)

    def _gap(self, name: str, theirs: Cell, unit: str | None) -> str:
        relative = self.table.parity is not None and self.table.parity.relative
        found = difference(self.cell(name).by_seed, theirs.by_seed, relative)
        if found is None:
            raise LookupError(f"{name} and {theirs.label} share no seed in {self.table.title!r}")
        scale = 100 if relative else 1
        shown = f"{scale * found.value:+.1f}"
        if found.low is not None and found.high is not None:
            shown += f" [{scale * found.low:.1f}, {scale * found.high:.1f}]"
        return shown + (" %" if relative else f" {unit}" if unit else "")

    def verdict(self, name: str) -> str:
        return self.table.verdict(self.cell(name))

    def is_baseline(self, name: str) -> bool:
        return self.cell(name) is self.table.baseline

    def labels(self) -> list[str]:
        """Of all methods, the best first."""
        return [c.label for c in sorted(self.table.chosen, key=lambda c: -self.table.sign * (c.mean or 0.0))]

    def config(self, key: str) -> Any:
        return _key(self.table.cells[0].records[0], key)

    def first(self, name: str) -> ResultRecord:
        """A method's run with its first seed."""
        return self.cell(name).valid[0]

    @property
    def steps(self) -> str:
        """Optimizer steps of a run: what a curve ends with."""
        r = self.table.cells[0].valid[0]
        if r.curve is None:
            raise LookupError(f"{r.id} has no curve")
        return (self.results / r.curve).read_text(encoding="utf-8").splitlines()[-1].partition(",")[0]

    @property
    def margin(self) -> str:
        if self.table.parity is None:
            raise LookupError(f"{self.table.title!r} states no margin")
        return self.table.parity.text()

    @property
    def workers(self) -> int:
        r = self.table.cells[0].records[0]
        return r.nodes * r.ranks_per_node

    @property
    def shape(self) -> str:
        """Nodes and ranks of each."""
        r = self.table.cells[0].records[0]
        return f"{r.nodes} x {r.ranks_per_node}"

    @property
    def in_all(self) -> int:
        """Samples of all workers in a step."""
        return self.workers * accuracy.batch_of(self.table.cells[0].records[0])


class Replay:
    """A replayed suite. A place is (model, rate, nodes, link)."""

    def __init__(self, results: Results) -> None:
        self.results = results

    def ms(self, method: str, model: str, nodes: int, link: str, rate: str | None = None) -> str:
        found = self.results.ms(Place(model, rate, nodes, link), method)
        if found is None:
            raise LookupError(f"{method} of {model} on {nodes} nodes, {link}")
        return number(found)

    def best(self, method: str, base: str, model: str, rate: str | None, link: str) -> str:
        """The largest speedup over the numbers of nodes."""
        found = self.results.best((model, rate, link), method, base)
        if found is None:
            raise LookupError(f"{method} against {base} of {model}, {rate}, {link}")
        return times(found)

    def at(self, method: str, base: str, model: str, nodes: int, link: str, rate: str | None = None) -> str:
        return self.results.versus(Place(model, rate, nodes, link), method, base)

    def ratio(self, method: str, base: str, model: str, nodes: int, link: str, rate: str | None = None) -> float:
        found = self.results.speedup(Place(model, rate, nodes, link), method, base)
        if found is None:
            raise LookupError(f"{method} against {base} of {model} on {nodes} nodes, {link}")
        return found

    def state(self, method: str, model: str) -> str:
        """Of the optimizer, as a multiple of Adam's."""
        return replay_sections.state(self.results, model, method)

    @property
    def checks(self) -> list[float]:
        """Differences of dense rows to arithmetic."""
        return [abs(c.difference) for c in replay_check.rows(self.results)]

    @property
    def minutes(self) -> str:
        return str(math.ceil(minutes([r for r in self.results.records.values() if r.turns])))

    @property
    def fastest(self) -> list[str]:
        """Who is fastest at every place."""
        return replay_verdicts.fastest(self.results)

    @property
    def reproduced(self) -> list[str]:
        """Which assumptions give the paper's factors."""
        return replay_verdicts.reproduced(self.results)


class Methods:
    """The table of all methods on one task, by label."""

    def __init__(self, table: methods_table.MethodsTable) -> None:
        self.table = table

    @property
    def nodes(self) -> int:
        """On which steps were timed."""
        return self.table.timed[0].nodes

    def line(self, label: str) -> Line:
        found: Line = only([x for x in self.table.lines if x.label == label], f"{label!r} of all methods")
        return found

    def rows(self) -> list[str]:
        """Labels, those whose metric is best first; last those that have none."""
        sign = 1 if self.table.scores.higher_is_better else -1
        ends = {x.label: x.best.mean for x in self.table.lines if x.best is not None and x.best.mean is not None}
        rest = [x.label for x in self.table.lines if x.label not in ends]
        return [*sorted(ends, key=lambda label: -sign * ends[label]), *rest]

    def score(self, label: str) -> str:
        best = self.line(label).best
        return formats.DASH if best is None else mean_sd(*best.summary(None))

    def n(self, label: str) -> str:
        best = self.line(label).best
        return formats.DASH if best is None else best.count()

    def share(self, label: str) -> str:
        return formats.fraction(self.table.payload_ratio(self.line(label)))

    def rounds(self, label: str) -> str:
        r = self.line(label).record
        return formats.DASH if r is None else percent(r.rounds_per_step)

    def ms(self, label: str) -> str:
        timed = self.line(label).timed
        return formats.DASH if timed is None or timed.seconds is None else number(1000 * timed.seconds)


class Facts:
    """All records of a results folder, read once."""

    def __init__(self, results: Path) -> None:
        self.results = results

    @cached_property
    def records(self) -> list[ResultRecord]:
        return read_all(self.results)

    def filters(self) -> dict[str, Callable[..., str]]:
        return {f.__name__: f for f in (number, times, percent, size)}

    def words(self) -> dict[str, Any]:
        """By name what a template can call."""
        told = {name: getattr(self, name) for name in vars(type(self)) if not name.startswith("_")}
        return {name: value for name, value in told.items() if callable(value) and name not in ("filters", "words")} | {
            "level": f"{100 * metrics.LEVEL:g} %",
            "close": f"{100 * claims.CLOSE:g} %",
            "near": f"{100 * claims.NEAR:g} %",
        }

    # ---- step times ---------------------------------------------------------------------------------------------------

    def steps(self, exp: str, nodes: int, cluster: str = "emulated") -> Steps:
        if cluster == "emulated":
            found = newest(self.records, exp)
        else:
            found = speedup.build([r for r in self.records if r.exp == exp and r.cluster == cluster])
        asked = f"{exp} on {nodes} nodes, cluster {cluster}"
        return Steps(only([t for t in found if t.records[0].nodes == nodes], asked))

    def repeated(self, folder: str, nodes: int, method: str, wire: str) -> dict[str, Any]:
        """Of all comparisons of a study: how many, how many of them beside another program, the least and the most gained."""
        found = spreads.runs(read_all(self.results / folder), "resnet50", nodes)
        gains = sorted(run.ratios()[method, wire] for run in found)
        return {
            "count": len(found),
            "busy": sum(run.busy for run in found),
            "least": times(gains[0]),
            "most": times(gains[-1]),
        }

    def spread(self, folder: str, nodes: int) -> str:
        """The table of a study."""
        return spreads.as_table(spreads.runs(read_all(self.results / folder), "resnet50", nodes)).markdown()

    def elements(self, timeline: str) -> str:
        """Parameters of a timeline's model."""
        return f"{timelines.load(timeline).elements / 1e6:.3g} M"

    def replay(self, suite: str) -> Replay:
        return Replay(replayed.load(suites.load(suite), self.results))

    # ---- prediction ---------------------------------------------------------------------------------------------------

    @cached_property
    def _worlds(self) -> list[ResultRecord]:
        return read_all(self.results / trained.FOLDER)

    def validation(self) -> dict[str, str]:
        """How far predictions are from all comparisons in turns."""
        found = trained.rows([*self.records, *self._worlds])
        median, p95, worst = prediction.quantiles([t.error for t in found])
        hours = minutes(self._worlds) / 60
        return {
            "rows": str(len(found)),
            "median": f"{100 * median:.1f} %",
            "p95": f"{100 * p95:.1f} %",
            "worst": f"{100 * worst:.1f} %",
            "hours": f"{hours:.1f}",
        }

    def trained_rows(self) -> str:
        """The summary of these errors."""
        return trained.summary(trained.rows([*self.records, *self._worlds])).grid()

    def replayed_rows(self) -> str:
        """The summary of the errors of replayed cells."""
        return prediction.table(prediction.evaluate(self.records, prediction.load(self.results))).grid()

    # ---- accuracy -----------------------------------------------------------------------------------------------------

    @cached_property
    def _studies(self) -> dict[str, list[list[AccuracyTable]]]:
        return accuracy_page.studies(self.records)

    @cached_property
    def _trained(self) -> list[AccuracyTable]:
        return accuracy.build(self.records)

    def study(self, *words: str) -> Study:
        """The only study on virtual workers whose title has all of `words`."""
        tables = {t.slug: t for every in self._studies.values() for group in every for t in group}
        return Study(
            only([t for t in tables.values() if all(w in t.title for w in words)], f"a study with {words}"),
            self.results,
        )

    def accuracies(self, *words: str) -> Study:
        """The same of all runs, those on real ranks among them."""
        return Study(
            only([t for t in self._trained if all(w in t.title for w in words)], f"a table with {words}"), self.results
        )

    def studies(self, exp: str) -> str:
        """The tables of all studies of an experiment."""
        return accuracy_page.tables(self._studies[exp])

    def methods(self) -> Methods:
        return Methods(only(methods_table.build(self.records), "the table of all methods"))

    # ---- papers -------------------------------------------------------------------------------------------------------

    def claims(self) -> str:
        """The table of the papers' claims."""
        return claims.grid(claims_page.collect(self.records))

    def paper(self, quantity: str, source: str) -> str:
        """A published value, with its unit."""
        value, _ = claims.paper(quantity, source)
        unit = next(e["unit"] for e in published.load() if e["quantity"].startswith(quantity) and e["value"] == value)
        return f"{value:g}" + (unit if unit == "x" else f" {unit}" if unit else "")

    def volume(self) -> dict[str, Any]:
        """0/1 Adam's schedule over its published runs: less than Adam, less than 1-bit Adam, fewer rounds."""
        setting, found = volume.Setting(), {}
        for kind in ("adam", "onebit", "rounds"):
            every = [m(setting.rounds(n, False)) for _, m in volume.readings(setting, kind) for n in volume.LENGTHS]
            show = times if kind == "adam" else percent
            found[kind] = {"least": show(min(every)), "most": show(max(every)), "each": [show(v) for v in every]}
        return {**found, "lengths": [f"{n:,}" for n in volume.LENGTHS]}

    # ---- parts of other pages -----------------------------------------------------------------------------------------

    def resized(self) -> str:
        """What a change of the number of workers costs."""
        return resize.table(resize.read(self.results / resize.FILE)).grid()

    def keys(self) -> str:
        """The table of all configuration keys."""
        return reference.tables()
