"""A suite: models, methods, links, numbers of nodes to be replayed, and how they are reported. Read from conf/suite/*.yaml.

A cell is one measurement: a model's timeline, a number of nodes, a link, a method. Imports no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal, NamedTuple

import hydra
from pydantic import BeforeValidator, Field, model_validator

from birder.predict.timeline import Timeline
from experiments.cells import timelines
from experiments.config.data_files import DataFiles, PlainData

# ---- how it is reported: `report` of its YAML, of which experiments/report/replay_page.py makes the page --------------


class PageSection(PlainData):
    """A part of the page (experiments/report/replay_page.py). terminal: shown there too. columns: heading -> quantity."""

    kind: Literal[
        "summary", "reproduced", "fastest", "plot", "check", "predicted", "times", "memory", "details", "kernels"
    ]
    heading: str = ""
    note: str = ""
    terminal: bool = False
    timelines: bool = False
    by_place: bool = False
    columns: dict[str, str] = Field(default_factory=dict)


class Plot(PlainData):
    kind: Literal["lines", "dots"]
    file: str
    alt: str
    title: str


class Report(PlainData):
    """caveats: what the numbers are not; a clause falls away where nothing is known of what it names in {}.

    ratios:       method -> heading of the speedups over it; one that begins with "of" is a percentage.
    node_columns: numbers of nodes that have a column even when nothing was measured there.
    ours:         the method that verdicts are about.
    """

    title: str
    made_by: str
    plot: Plot
    summary: str
    caveats: tuple[str, ...]
    about: str
    ratios: dict[str, str]
    ours: str
    sections: tuple[PageSection, ...]
    node_columns: tuple[int, ...] = ()


# ---- what is replayed -------------------------------------------------------------------------------------------------

Share = Annotated[float, BeforeValidator(lambda text: float(Fraction(str(text)))), Field(gt=0, le=1)]
"""A share of a model's elements, as a number or as 1/48."""
ALONE = 2
"""Rounds of cells on one node."""


Setting = tuple[str, str | None, str]
"""Model, rate, link: places that differ in the number of nodes."""


class Place(NamedTuple):
    """Where methods are compared. rate: None in suites without rates."""

    model: str
    rate: str | None
    nodes: int
    link: str


class Measurement(NamedTuple):
    """One measurement. link: None where nothing crosses it and the suite measures that once for all links."""

    model: str
    rate: str | None
    nodes: int
    link: str | None
    method: str


class SuiteModel(PlainData):
    """timeline:     its name, with {rate}, or a path; default: <model>_{rate}.
    architecture: what models of the same parameters share; default: the model's name.
    short:        what distinguishes it from others of its architecture.
    fraction:     a further factor on the methods' fractions over emulated links.
    fractions:    method -> share of the elements, instead of its own times that factor.
    published:    the experiment under which results/paper keeps its published speedup.
    default:      measured where no models are asked for.
    """

    title: str
    timeline: str = ""
    architecture: str = ""
    short: str = ""
    fraction: Share = 1.0
    fractions: dict[str, Share] = Field(default_factory=dict)
    published: str | None = None
    default: bool = True


class SuiteLink(PlainData):
    """gbit: what the real link is called.

    goodput_mbit: Mbit/s of TCP of the real link, which an emulated one stands for; None: this machine's loopback, not shaped.
    fractions:    model -> nodes -> share of the elements, in the place of the methods' fractions.
    """

    title: str
    gbit: float | None = None
    goodput_mbit: float | None = Field(None, gt=0)
    fractions: dict[str, dict[int, Share]] = Field(default_factory=dict)


class SuiteMethod(PlainData):
    """A row of the tables.

    optimizer: class of `birder` (or, with two dots, of this repository), and its arguments.
    wire:      what travels, as in records.
    fraction:  share of every tensor's elements that is replayed over emulated links. The less a method sends, the more of it,
               so that a step lasts about as long as others: seconds. What a message costs here does not shrink with it.
    hook, rank: one of PyTorch's own hooks (experiments/training/torch_hooks.py).
    whole:     keeps a selection of whole tensors in the place of a part of each: what a matrix costs depends on its shape.
    every:     one step of so many sends anything, and one in two of the optimizer as configured here: a turn is a step of
               either kind, weighted by their numbers.
    checks:    no row, but measured with that method for the check, with one link and rate.
    gpu_bytes: memory traffic per element of encoding and update on a GPU; None: unknown, or in the timeline already.
    """

    label: str
    optimizer: dict[str, Any]
    wire: str
    fraction: Share
    hook: str | None = None
    rank: int = 1
    overlap: bool = True
    one_bucket: bool = False
    whole: bool = False
    hierarchical: bool = False
    every: int = Field(1, ge=1)
    checks: str | None = None
    gpu_bytes: float | None = None
    colour: str = "#888888"

    @property
    def kind(self) -> Any:
        """The optimizer's class. Imports torch."""
        return hydra.utils.get_class(self.optimizer["_target_"])

    @property
    def traffic(self) -> str:
        """What the NIC carries, as `timelines.nic_bytes` names it."""
        return ("hierarchical" if self.hierarchical else "flat") if self.wire == "1bit" else self.wire


class Suite(PlainData):
    """record: name of a cell's record; a new measurement replaces the old one. mbit: token-bucket rate of the emulated links.

    gpus_per_node: what one process stands for. any_link: cells that send nothing are measured once, whatever the link.
    rounds:        timed steps of every cell; cells of one model and rate take turns, a step of each in every round.
                   Intervals want four at least (experiments/report/metrics.py).
    """

    name: str
    subject: str
    record: str
    gpus_per_node: int = Field(ge=1)
    nodes: tuple[int, ...]
    mbit: float = Field(gt=0)
    rounds: int = Field(4, ge=1)
    models: dict[str, SuiteModel]
    links: dict[str, SuiteLink]
    methods: dict[str, SuiteMethod]
    report: Report
    rates: dict[str, str] = Field(default_factory=dict)
    any_link: bool = False
    kernels: bool = False

    @model_validator(mode="after")
    def _names_exist(self) -> Suite:
        named = [self.report.ours, *self.report.ratios, *(m.checks for m in self.methods.values() if m.checks)]
        named += [method for model in self.models.values() for method in model.fractions]
        if unknown := [name for name in named if name not in self.methods]:
            raise ValueError(f"no method '{unknown[0]}'; there are: {', '.join(self.methods)}")
        if bad := [name for name, m in self.methods.items() if "_target_" not in m.optimizer]:
            raise ValueError(f"methods.{bad[0]}.optimizer has no _target_")
        for (name, link), model, n in itertools.product(self.links.items(), self.models, self.nodes):
            if link.fractions and n not in link.fractions.get(model, {}):
                raise ValueError(f"links.{name}.fractions says nothing of {model} on {n} nodes")
        try:
            self.id(Measurement("model", None, 1, None, "method"))
        except (KeyError, IndexError, ValueError):
            raise ValueError("record may hold {model}, {rate}, {nodes}, {link}, {method} and no other braces") from None
        return self

    def id(self, cell: Measurement) -> str:
        """Name of a cell's record. Records have no group, so no other table takes them up."""
        return self.record.format(**{**cell._asdict(), "link": cell.link or "any"})

    def timeline(self, model: str, rate: str | None) -> Timeline:
        """What a model's computation replays. Raises UserError."""
        return timelines.load((self.models[model].timeline or f"{model}_{{rate}}").format(rate=rate))

    def rate(self, place: Place | Measurement) -> str:
        """What the rate of a place is called; empty in suites without rates."""
        return self.rates.get(place.rate or "", "")

    def architecture(self, model: str) -> str:
        return self.models[model].architecture or model

    @property
    def rows(self) -> dict[str, SuiteMethod]:
        """The methods that are rows of tables."""
        return {name: m for name, m in self.methods.items() if m.checks is None}

    def fraction(self, cell: Measurement) -> float:
        """Share of the elements that is to be there."""
        if cell.link and (by_model := self.links[cell.link].fractions):
            return by_model[cell.model][cell.nodes]
        model, method = self.models[cell.model], self.methods[cell.method]
        return model.fractions.get(cell.method, method.fraction * model.fraction)

    def rounds_on(self, nodes: int) -> int:
        """How many rounds cells have. On one node nothing crosses a link and nothing is compared: no more than ALONE."""
        return self.rounds if nodes > 1 else min(self.rounds, ALONE)

    def dilation(self, cell: Measurement, fraction: float, mbit_per_s: float) -> float:
        """How much slower a cell runs than the cluster that it stands for: fraction x wished rate / measured rate.

        fraction: share of the bytes that is sent. On loopback the network is what it is and only the share counts.
        """
        wished = self.links[cell.link or next(iter(self.links))].goodput_mbit
        return fraction if wished is None else fraction * wished / mbit_per_s

    def cell(self, place: Place, method: str) -> Measurement:
        """The cell that a place of a table shows."""
        idle = self.any_link and (place.nodes == 1 or self.methods[method].wire == "none")
        return Measurement(place.model, place.rate, place.nodes, None if idle else place.link, method)

    def places(
        self,
        models: Collection[str] | None = None,
        rates: Sequence[str] | None = None,
        links: Sequence[str] | None = None,
        nodes: Sequence[int] | None = None,
    ) -> list[Place]:
        """All places, or those of the names given; in the order of the tables."""
        wanted = [m for m in self.models if models is None or m in models]
        known: Sequence[str | None] = list(self.rates if rates is None else rates)
        every = itertools.product(wanted, known or [None])
        each = itertools.product(every, self.links if links is None else links, self.nodes if nodes is None else nodes)
        return [Place(model, rate, n, link) for (model, rate), link, n in each]

    def across(self, setting: Setting) -> list[Place]:
        """A setting's places, one for each number of nodes."""
        return [Place(setting[0], setting[1], n, setting[2]) for n in self.nodes]

    def cells(self, places: Sequence[Place], methods: Collection[str]) -> list[Measurement]:
        """What is to be measured, each once. Cells that share parameters and a method stand together."""
        found: dict[Measurement, None] = {}
        for architecture in dict.fromkeys(self.architecture(p.model) for p in places):
            mine = [p for p in places if self.architecture(p.model) == architecture]
            for name, method in self.methods.items():
                chosen = mine if name in methods else []
                if method.checks in methods:  # needs no more than one link and one rate
                    chosen = [p for p in mine if (p.rate, p.link) == (mine[0].rate, mine[0].link) and p.nodes > 1]
                found |= dict.fromkeys(self.cell(p, name) for p in chosen)
        return list(found)

    def worlds(self, cells: Sequence[Measurement]) -> dict[tuple[bool, int], list[Measurement]]:
        """(over emulated links, nodes) -> the cells that one run measures."""
        found: dict[tuple[bool, int], list[Measurement]] = {}
        for c in cells:
            emulated = c.nodes > 1 and (c.link is None or self.links[c.link].goodput_mbit is not None)
            found.setdefault((emulated, c.nodes), []).append(c)
        return found


# ---- as this machine replays it: how much of a model a cell holds, and how much slower than the cluster it runs ---------


@dataclass(frozen=True)
class Scaled:
    """A cell as this machine replays it.

    share:    of the model's elements, as the suite asks for it. sent: of the bytes, what really is.
    timeline: the model's. replayed: the part of it that is there, with the whole model's times.
    dilation: how much slower than on the cluster.
    """

    cell: Measurement
    method: SuiteMethod
    share: float
    timeline: Timeline
    replayed: Timeline
    sent: float
    dilation: float

    @property
    def key(self) -> tuple[str, float]:
        """Cells of one architecture that have it in common can share a setup."""
        return self.cell.method, self.share


def scale(suite: Suite, cell: Measurement, mbit_per_s: float) -> Scaled:
    """The cell over links that carry `mbit_per_s`. Raises UserError for a timeline that is not there."""
    method, share = suite.methods[cell.method], suite.fraction(cell)
    whole = suite.timeline(cell.model, cell.rate)
    part = timelines.select(whole, share) if method.whole else timelines.flattened(whole, share)
    sent = timelines.shares(whole, part, method.rank) if method.whole else part.elements / whole.elements
    return Scaled(cell, method, share, whole, part, sent, round(suite.dilation(cell, sent, mbit_per_s), 6))


def comparisons(cells: Sequence[Scaled]) -> list[list[Scaled]]:
    """Cells that are compared with each other, and so take turns: those of one model and rate, whatever the link."""
    found: dict[tuple[str, str | None], list[Scaled]] = {}
    for s in cells:
        found.setdefault((s.cell.model, s.cell.rate), []).append(s)
    return list(found.values())


FILES = DataFiles("suite", Suite)
names, load = FILES.names, FILES.load
