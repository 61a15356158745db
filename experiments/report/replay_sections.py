"""The sections that the page of a suite can have: `SECTIONS`, by their kind.

A section is a function that yields blocks: tables, and Markdown text; text that begins with # is a heading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from experiments.cells.page import Section
from experiments.cells.suite import Place, Suite
from experiments.records.record import ResultRecord
from experiments.report import prediction, replay_check, replay_details, replay_verdicts
from experiments.report.formats import DASH, number, size, times
from experiments.report.replayed import Results
from experiments.report.sentences import hardware
from experiments.report.table import Column, Table

Block = str | Table
ADAM_BYTES = 8
"""Adam's state per parameter: two fp32 moments."""


def _summary(results: Results, section: Section) -> Iterator[Block]:
    """One row for each assumption: the suite's method against fp32 and bf16 on all nodes, beside the paper."""
    suite, ours, rows = results.suite, results.suite.report.ours, []
    for setting in results.settings():
        place = Place(*setting[:2], suite.nodes[-1], setting[2])
        row = [_setting(suite, place), number(results.ms(place, "fp32")), number(results.ms(place, ours))]
        for base in ("fp32", "bf16"):
            best = results.best(setting, ours, base)
            row += [results.versus(place, ours, base), DASH if best is None else results.versus(best[1], ours, base)]
        factor = replay_verdicts.headline(results, place.model)[1]
        rows.append([*row, results.versus(place, "none"), times(factor)])
    name = suite.methods[ours].label.partition(",")[0]
    head = ("assumption", "fp32, ms", f"{name}, ms", "vs fp32", "best", "vs bf16", "best", "bound", "paper")
    yield Table.text(head, rows)


def _setting(suite: Suite, place: Place) -> str:
    link = f"{suite.links[place.link].gbit:g} Gbit/s"
    return ", ".join(filter(None, [place.model, suite.rates.get(place.rate or ""), link]))


def _reproduced(results: Results, section: Section) -> Iterator[Block]:
    yield from replay_verdicts.reproduced(results)


def _fastest(results: Results, section: Section) -> Iterator[Block]:
    if said := replay_verdicts.fastest(results):
        yield "\n".join(f"- {sentence}" for sentence in said)


def _picture(results: Results, section: Section) -> Iterator[Block]:
    if results.records:
        yield f"![{results.suite.report.plot.alt}](../plots/{results.suite.report.plot.file}.png)"


def _check(results: Results, section: Section) -> Iterator[Block]:
    yield replay_check.table(results)


def _predicted(results: Results, section: Section) -> Iterator[Block]:
    """How far the cells are from what is predicted for them."""
    if len(results.predicted):
        yield prediction.table(results.predicted)


def _times(results: Results, section: Section) -> Iterator[Block]:
    """Step times and speedups over nodes, a table for each model, rate and link."""
    suite = results.suite
    for model in results.models:
        yield f"## {suite.models[model].title}"
        if section.timelines:
            yield "\n".join(_timeline(suite, model, rate) for rate in suite.rates)
        for setting in (s for s in results.settings() if s[0] == model):
            title = ", ".join(filter(None, [suite.rates.get(setting[1] or ""), suite.links[setting[2]].title]))
            yield grid(results, suite.across(setting), title)


def _timeline(suite: Suite, model: str, rate: str) -> str:
    t = suite.timeline(model, rate)
    rest = "; ".join(filter(None, [t.source or t.command, t.note]))
    took = f"{number(t.step_ms)} ms of computation a step, {t.elements / 1e6:.1f} M parameters"
    return f"- {suite.rates[rate]}: {took}. {rest}."


def grid(results: Results, places: list[Place], title: str) -> Table:
    """Step times and speedups of every method over `places`."""
    suite, gpus, ratios = results.suite, results.suite.gpus_per_node, results.suite.report.ratios
    places = [p for p in places if p.nodes in suite.report.node_columns or p in results.places()]
    apart = [p for p in places if p.nodes > 1]
    unit = "GPUs" if gpus > 1 else "nodes"
    head = [f"ms, {p.nodes * gpus} {unit}" for p in places]
    head += [f"{heading}, {p.nodes * gpus}" for heading in ratios.values() for p in apart]
    rows = []
    for name, method in suite.rows.items():
        if any(results.ms(p, name) for p in places):
            row = [method.label, *(number(results.ms(p, name)) for p in places)]
            for base, heading in ratios.items():
                row += [results.versus(p, name, base, share=heading.startswith("of ")) for p in apart]
            rows.append(row)
    return Table.text(("method", *head), rows, title=title)


def _memory(results: Results, section: Section) -> Iterator[Block]:
    """State and peak of the cells with the whole model."""
    suite = results.suite
    models = list(dict.fromkeys(p.model for p in results.places()))
    rows = []
    for name, method in suite.rows.items():
        found = [_whole(results, m, name) for m in models]
        base = [_whole(results, m, "fp32") for m in models]
        if any(found):
            peaks = [_more(r, b, suite.name) for r, b in zip(found, base, strict=True)]
            rows.append((method.label, *(_state(r, suite.name) for r in found), *peaks))
    head = [*(f"{m}, state vs Adam's" for m in models), *(f"{m}, peak over fp32's" for m in models)]
    if results.records:
        yield Table.text(("method", *head), rows)


def _whole(results: Results, model: str, method: str) -> ResultRecord | None:
    """The record of a cell with the whole model."""
    found = (results.records.get(results.suite.cell(p, method)) for p in results.suite.places([model]))
    return next((r for r in found if r and r.config[results.suite.name]["fraction"] == 1), None)


def _state(r: ResultRecord | None, section: str) -> str:
    if r is None or r.state_bytes_per_rank is None:
        return DASH
    return times(r.state_bytes_per_rank / (ADAM_BYTES * r.config[section]["elements"]))


def _more(r: ResultRecord | None, base: ResultRecord | None, section: str) -> str:
    peaks = [None if x is None else x.config[section]["peak"] for x in (r, base)]
    if peaks[0] is None or peaks[1] is None:
        return DASH
    return f"{'-' if peaks[0] < peaks[1] else '+'}{size(abs(peaks[0] - peaks[1]))}"


KERNELS = (
    Column("kernel", "left", value=lambda r: f"`{r['kernel']}`"),
    Column("bytes per element", value=lambda r: f"{r['bytes_per_element']:g}"),
    Column("ns per element", value=lambda r: number(r["ns_per_element"])),
    Column("GB/s", value=lambda r: number(r["gb_per_s"])),
    Column("eager reference / kernel", value=lambda r: f"{number(r['against_reference'])}x"),
    Column("of a copy's bandwidth", value=lambda r: f"{100 * r['of_copy']:.0f} %"),
)
HOOKS = (
    Column("method", "left", value=lambda r: r["method"]),
    Column("step, ms", value=lambda r: number(r["step_ms"])),
    Column("more than without a hook, ms", value=lambda r: number(r["overhead_ms"])),
)


def _kernels(results: Results, section: Section) -> Iterator[Block]:
    """The kernels of each device, and on a GPU what a hook costs."""
    for device, r in sorted(results.kernels.items()):
        about: dict[str, Any] = r.config[results.suite.name]
        yield f"## Kernels on a {device.upper().replace('CUDA', 'GPU')}, back end {about['backend']}"
        on = "on its current stream" if device == "cuda" else "on one thread"
        yield (
            f"{hardware(r)}. Each kernel {on}, with the eager torch reference and a copy of as many bytes; medians of "
            f"ratios within a round. Server kernels take the bits of {about.get('workers', 4)} workers."
        )
        yield Table.of(KERNELS, about["kernels"])
        if "hooks" in about:
            yield "What a hook costs where nothing is sent:"
            yield Table.of(HOOKS, about["hooks"])
    if results.kernels and "cuda" not in results.kernels:
        yield "No GPU was available: `make gpu-check` measures the same on one."


SECTIONS: dict[str, Callable[[Results, Section], Iterator[Block]]] = {
    "summary": _summary,
    "reproduced": _reproduced,
    "fastest": _fastest,
    "plot": _picture,
    "check": _check,
    "predicted": _predicted,
    "times": _times,
    "memory": _memory,
    "details": replay_details.details,
    "kernels": _kernels,
}
