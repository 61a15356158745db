"""What the benchmark has measured, from records alone, and what that says of one-phase Birder and of compressing at all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.cells import bench_plan
from experiments.cells.bench_plan import LINKS, METHODS, MODELS, NODES, Cell
from experiments.records.record import ResultRecord, read_all
from experiments.report.formats import number
from launch.errors import UserError

OURS = "birder_one_phase"
TIE = 0.03
"""Step times that differ by less count as equal."""


@dataclass(frozen=True)
class Results:
    """All cells that have been measured, and the kernels by device."""

    records: dict[Cell, ResultRecord]
    kernels: dict[str, ResultRecord]

    def places(self) -> list[tuple[str, str, int]]:
        """(model, link, nodes) with anything to show."""
        known = {(c.model, c.link, c.nodes) for c in self.records}
        return [p for p in itertools.product(MODELS, LINKS, NODES) if p in known]

    def ms(self, model: str, link: str, nodes: int, method: str, key: str | None = None) -> float | None:
        """Step time, or a part of it (`key` of the split), of the cluster's clock."""
        found = self.records.get(Cell(model, link, nodes, method))
        if found is None:
            return None
        value = found.timing["median_ms"] if key is None else found.timing["split"][key]
        return float(value) / float(found.link["dilation"])

    def ratio(self, place: tuple[str, str, int], method: str, base: str) -> float | None:
        """t_base / t_method."""
        ours, theirs = self.ms(*place, method), self.ms(*place, base)
        return theirs / ours if ours and theirs else None

    def fastest(self, place: tuple[str, str, int]) -> list[tuple[float, str]]:
        """Compressed methods of a place, the fastest first."""
        found = [(self.ms(*place, name), name) for name, m in METHODS.items() if m.compressed]
        return sorted((ms, name) for ms, name in found if ms is not None)


def collect(records: Sequence[ResultRecord]) -> Results:
    """The benchmark's records; of one cell the newest."""
    cells: dict[Cell, ResultRecord] = {}
    kernels: dict[str, ResultRecord] = {}
    for r in sorted((r for r in records if r.exp == bench_plan.EXP and r.status == "completed"), key=lambda r: r.time):
        about = r.config["bench"]
        if "kernels" in about:
            kernels[r.hardware["device"]] = r
        elif "method" in about and about["method"] in METHODS:
            cells[Cell(**{k: about[k] for k in ("model", "link", "nodes", "method")})] = r
    return Results(cells, kernels)


def load(results_dir: str | Path) -> Results:
    """From `<results_dir>/records`. Raises UserError where nothing has been measured."""
    found = collect(read_all(results_dir))
    if not found.records and not found.kernels:
        raise UserError(f"no record of the benchmark in {Path(results_dir) / 'records'}: run make bench")
    return found


def verdicts(results: Results) -> list[str]:
    """For every place, whether one-phase Birder is the fastest compressed method; on loopback, whether to compress at all."""
    return [said for place in results.places() for said in _verdict(results, place)]


def _verdict(results: Results, place: tuple[str, str, int]) -> Iterator[str]:
    model, link, nodes = place
    where = f"{model}, {LINKS[link]}, {nodes} nodes"
    ranking = results.fastest(place)
    own = results.ms(*place, OURS)
    if own is not None and len(ranking) > 1:
        bound = results.ms(*place, "none")
        took = f"{number(own)} ms"
        if bound:
            took += f", {_apart(own / bound - 1, 'above', 'below')} the bound without communication"
        others = [(ms, METHODS[name].label) for ms, name in ranking if name != OURS]
        ms, label = others[0]
        if own <= ms:
            verdict = f"is the fastest compressed method ({took}); the next is {label}, {number(ms)} ms"
        elif own < ms * (1 + TIE):
            verdict = (
                f"is as fast as the fastest compressed method ({took}), within {TIE:.0%} of {label}, {number(ms)} ms"
            )
        else:
            verdict = f"is not the fastest compressed method ({took}): {label} takes {number(ms)} ms"
        yield f"{where}: Birder one-phase {verdict}."
    dense = results.ms(*place, "fp32")
    if link == "loopback" and dense is not None and ranking:
        slow, name = ranking[0]
        label = METHODS[name].label
        advice = "do not compress: " if slow > dense else ""
        longer = f"takes {slow / dense:.2f} times as long as fp32 DDP"
        yield f"{where}: {advice}{label}, the fastest compressed method, {longer}."


def _apart(difference: float, above: str, below: str) -> str:
    return f"{abs(100 * difference):.0f} % {above if difference >= 0 else below}"
