"""How good predictions are: every replayed cell beside what is predicted for it without any of its times. No torch."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.cells import predicted
from experiments.cells.predicted import Case, Machine
from experiments.records.record import PUBLISHED, ResultRecord, read_all
from experiments.report.formats import number, percent
from experiments.report.table import Table
from launch.errors import UserError

FOLDER, FILE = "predict", "machines.json"
RANGE, OLD_RANGE = ("min_ms", "max_ms"), ("p10_ms", "p90_ms")
"""Names of the fastest and slowest step in records of cells, and what older ones call the same two."""
UNSTEADY = 1.1
"""A cell whose slowest step is so many times its fastest is called unsteady."""


@dataclass(frozen=True)
class Outcome:
    """One cell. Times in ms of the cluster's clock; low and high: its fastest and slowest timed step."""

    case: Case
    predicted_ms: float
    measured_ms: float
    low_ms: float
    high_ms: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_ms / self.measured_ms - 1

    @property
    def sends(self) -> bool:
        """Whether anything leaves a node: cells that send nothing are the timeline's wait, and easy."""
        return self.case.nodes > 1 and self.case.method.name != "none"

    @property
    def steady(self) -> bool:
        return self.high_ms <= UNSTEADY * self.low_ms


@dataclass(frozen=True)
class Summary:
    """Absolute relative errors of some cells. inside: predicted within 3 % of the range of the cell's own steps."""

    cells: int
    median: float
    p95: float
    worst: float
    inside: int


def load(results_dir: str | Path) -> dict[str, dict[str, dict[str, float]]]:
    """{link: {model that is predicted: values of a machine fitted to the other models' cells}}. Raises UserError."""
    path = Path(results_dir) / FOLDER / FILE
    try:
        found: dict[str, dict[str, dict[str, float]]] = json.loads(path.read_text(encoding="utf-8"))["machines"]
    except (OSError, ValueError, KeyError):
        raise UserError(f"{path} is missing or broken: python experiments/predict.py --fit makes it") from None
    return found


def cases(records: Sequence[ResultRecord]) -> list[tuple[Case, ResultRecord]]:
    """Every replayed cell, of one cell the newest record, in the order of names."""
    found = {}
    for r in sorted(records, key=lambda r: r.time):
        if (of := predicted.case(r)) is not None:
            found[of.id] = (of, r)
    return [found[name] for name in sorted(found)]


def evaluate(
    records: Sequence[ResultRecord],
    machines: dict[str, dict[str, dict[str, float]]],
    kernels: Mapping[str, float] | None = None,
) -> list[Outcome]:
    """Every cell for which there is a machine that was fitted without its model.

    kernels: ns per byte; None: of the kernel benchmark's record among `records`.
    """
    kernels = predicted.kernel_rates(list(records)) if kernels is None else kernels
    found = []
    for of, record in cases(records):
        values = machines.get(of.link, {}).get(of.model)
        if values is None or not kernels:
            continue
        scale = float(record.link["dilation"])
        ms = predicted.step(of, Machine(of.link, values, kernels)).ms
        t = record.timing
        times = (ms, *(float(t[k]) for k in ("median_ms", *(RANGE if "min_ms" in t else OLD_RANGE))))
        found.append(Outcome(of, *(t / scale for t in times)))
    return found


def beside(results_dir: str | Path, records: Sequence[ResultRecord]) -> dict[str, Outcome]:
    """{id of a cell's record: outcome}. A folder without a fit, or without the kernel benchmark, takes the published one."""
    folder = results_dir if (Path(results_dir) / FOLDER / FILE).is_file() else PUBLISHED
    kernels = predicted.kernel_rates(list(records)) or predicted.kernel_rates(read_all(PUBLISHED))
    return {o.case.id: o for o in evaluate(records, load(folder), kernels)}


def summary(outcomes: Sequence[Outcome]) -> Summary:
    """Of at least one outcome."""
    inside = sum(0.97 * o.low_ms <= o.predicted_ms <= 1.03 * o.high_ms for o in outcomes)
    return Summary(len(outcomes), *quantiles([o.error for o in outcomes]), inside)


def quantiles(errors: Sequence[float]) -> tuple[float, float, float]:
    """Median, 95th percentile and largest of the errors' sizes, of at least one."""
    sizes = sorted(map(abs, errors))
    return statistics.median(sizes), sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))], sizes[-1]


def reason(o: Outcome) -> str:
    """Why a prediction may be that far off, as far as the cell's own record tells."""
    if not o.steady:
        return f"unsteady: its own steps took {number(o.low_ms)} to {number(o.high_ms)} ms"
    if o.case.link == "loopback":
        return "loopback: what a byte and a message cost where all ranks share two cores differs from model to model"
    if o.case.name == "deepspeed":
        return "eager passes over one large buffer: what a byte costs depends on whether the buffer fits the caches"
    if o.case.copies > 1:
        return "eight-fold messages of all nodes meet on one link: how late its last flow is differs from step to step"
    return "what small messages cost where eight processes share two cores differs from model to model"


HEAD = ("cells", "number", "median", "95th percentile", "worst", "within the cell's own range")


def line(name: str, outcomes: Sequence[Outcome]) -> list[str]:
    """A row of the summary; columns: HEAD."""
    s = summary(outcomes)
    return [name, str(s.cells), f"{s.median:.1%}", f"{s.p95:.1%}", f"{s.worst:.1%}", percent(s.inside / s.cells)]


def by_link(outcomes: Sequence[Outcome]) -> tuple[list[Outcome], list[Outcome]]:
    """Those on links of a set rate, those on loopback."""
    emulated, loopback = ([o for o in outcomes if o.case.link == link] for link in ("emulated", "loopback"))
    return emulated, loopback


def table(outcomes: Sequence[Outcome]) -> Table:
    """All, and by what makes a cell easy or hard. A part that is empty has no row."""
    emulated, loopback = by_link(outcomes)
    sending = [o for o in emulated if o.sends]
    parts: dict[str, Sequence[Outcome]] = {
        "all": outcomes if emulated and loopback else [],
        "links of a set rate": emulated,
        "of these, cells that send anything": sending,
        "of those, steady ones": [o for o in sending if o.steady],
        "loopback": loopback,
    }
    return Table.text(HEAD, [line(name, part) for name, part in parts.items() if part])


def markdown(outcomes: Sequence[Outcome]) -> str:
    """Summary, errors by method and the worst cells, as a page."""
    emulated, loopback = by_link(outcomes)
    names = sorted({(o.case.suite, o.case.name) for o in emulated})
    by_method = [
        line(f"{suite}, {name}", [o for o in emulated if (o.case.suite, o.case.name) == (suite, name)])
        for suite, name in names
    ]
    return "\n\n".join(
        [
            "# Predicted and replayed",
            "Made by `python experiments/predict.py --evaluate` from records alone; docs/predict.md says how. Each cell is "
            "predicted by a machine that was fitted to the cells of the other model: no time of the cell, nor of any cell "
            "of its model.",
            table(outcomes).grid().rstrip(),
            "## By method, links of a set rate",
            Table.text(HEAD, by_method).grid().rstrip(),
            "## The worst ten, links of a set rate",
            worst(emulated),
            "## The worst ten, loopback",
            worst(loopback),
        ]
    )


def worst(outcomes: Sequence[Outcome], count: int = 10) -> str:
    """The cells that are furthest off, with the likely reason."""
    rows = [
        [o.case.id, number(o.predicted_ms), number(o.measured_ms), f"{o.error:+.1%}", reason(o)]
        for o in sorted(outcomes, key=lambda o: -abs(o.error))[:count]
    ]
    return Table.text(["cell", "predicted, ms", "replayed, ms", "difference", "why"], rows).grid().rstrip()


def dump(machines: dict[str, dict[str, dict[str, float]]]) -> str:
    """The text of `FILE`."""
    about: dict[str, Any] = {
        "about": "for each link, by the model that is predicted: a machine fitted to the cells of all other models",
        "command": "python experiments/predict.py --fit",
        "machines": machines,
    }
    return json.dumps(about, indent=1) + "\n"
