"""The page of a suite, from records alone: tables/<suite>.md of a results folder, its picture, what a terminal shows of it.

Which sections a page has, in which order and with which columns, stands in the suite's YAML (`report`). A section is a
function that gives blocks: tables, and Markdown text; text that begins with # is a heading: `SECTIONS`, by their kind. Every
cell with the columns that a suite asks for: `QUANTITIES`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.cells import timelines
from experiments.cells.suite import Measurement, PageSection, Place, Suite
from experiments.report import prediction, replay_words, sentences
from experiments.report.formats import DASH, number, percent, size, times
from experiments.report.replay_plots import plot
from experiments.report.replayed import Results, load
from experiments.report.sentences import machines, say
from experiments.report.table import Column, Note, Table, terminal

Block = str | Table
ADAM_BYTES = 8
"""Adam's state per parameter: two fp32 moments."""


# ---- the page ---------------------------------------------------------------------------------------------------------


def mark(suite: Suite) -> str:
    """What a page and a picture say of their origin."""
    return f"Made by {suite.report.made_by}"


def paths(suite: Suite, results_dir: str | Path) -> tuple[Path, Path]:
    """Where page and picture lie."""
    base = Path(results_dir)
    return base / "tables" / f"{suite.name}.md", base / "plots" / f"{suite.report.plot.file}.png"


def render(suite: Suite, results_dir: str | Path) -> dict[Path, bytes]:
    """Page and, where a cell has been measured, picture: path -> content. Raises UserError."""
    results, (page, picture) = load(suite, results_dir), paths(suite, results_dir)
    drawn = {picture: plot(results, mark(suite))} if results.records else {}
    return {page: markdown(results).encode(), **drawn}


def markdown(results: Results) -> str:
    """The page."""
    suite, report = results.suite, results.suite.report
    first = next(iter(results.records.values()), None)
    blocks = [block for section in report.sections for block in _blocks(results, section)]
    return sentences.page(
        "suite",
        mark=mark(suite),
        title=report.title,
        caveats=first and replay_words.caveats(results),
        about=first and report.about.format(hardware=machines(results.records.values())),
        rounds=replay_words.rounds(results),
        blocks=[block.markdown() if isinstance(block, Table) else f"{block}\n" for block in blocks],
    )


def show(suite: Suite, results_dir: str | Path, *, device: str = "cpu", kernels_only: bool = False) -> None:
    """Prints what the page says, caveats first: its sections for a terminal, the kernels of `device`, where the files are."""
    results = load(suite, results_dir)
    results = replace(results, kernels={d: r for d, r in results.kernels.items() if d == device})
    console = terminal()
    if results.records and not kernels_only:
        Note(replay_words.caveats(results), "caution").show(console)
        for note in replay_words.rounds(results):
            note.show(console)
    for section in suite.report.sections:
        if section.terminal and (section.kind == "kernels" or not kernels_only):
            for block in _blocks(results, section):
                if isinstance(block, Table):
                    block.show(console)
                else:
                    text = block if block.startswith("- ") else block.lstrip("# ").replace("\n", " ")
                    Note(text, "strong" if block.startswith("#") else "plain").show(console)
    for path in paths(suite, results_dir):
        if path.is_file():
            console.print(str(path), soft_wrap=True, markup=False, highlight=False)


def _blocks(results: Results, section: PageSection) -> Iterator[Block]:
    made = list(SECTIONS[section.kind](results, section))
    if made and section.heading:
        yield f"## {section.heading}"
        yield from [section.note] if section.note else []
    yield from made


# ---- its sections -----------------------------------------------------------------------------------------------------


def _summary(results: Results, section: PageSection) -> Iterator[Block]:
    """One row for each assumption: the suite's method against fp32 and bf16 on all nodes, next to the paper."""
    suite, ours, rows = results.suite, results.suite.report.ours, []
    for setting in results.settings():
        place = Place(*setting[:2], suite.nodes[-1], setting[2])
        assumption = filter(None, [place.model, suite.rate(place), f"{suite.links[place.link].gbit:g} Gbit/s"])
        row = [", ".join(assumption), number(results.ms(place, "fp32")), number(results.ms(place, ours))]
        for base in ("fp32", "bf16"):
            best = results.best(setting, ours, base)
            row += [results.versus(place, ours, base), DASH if best is None else results.versus(best[1], ours, base)]
        factor = replay_words.headline(results, place.model)[1]
        rows.append([*row, results.versus(place, "none"), times(factor)])
    name = suite.methods[ours].label.partition(",")[0]
    head = ("assumption", "fp32, ms", f"{name}, ms", "vs fp32", "best", "vs bf16", "best", "bound", "paper")
    yield Table.text(head, rows)


def _times(results: Results, section: PageSection) -> Iterator[Block]:
    """Step times and speedups over nodes, a table for each model, rate and link."""
    suite = results.suite
    for model in results.models:
        yield f"## {suite.models[model].title}"
        if section.timelines:
            yield "\n".join(_timeline(suite, model, rate) for rate in suite.rates)
        for setting in (s for s in results.settings() if s[0] == model):
            places = suite.across(setting)
            title = ", ".join(filter(None, [suite.rate(places[0]), suite.links[setting[2]].title]))
            yield grid(results, places, title)


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


def _memory(results: Results, section: PageSection) -> Iterator[Block]:
    """State and peak of the cells with the whole model."""
    suite = results.suite
    about = {c: {**r.config[suite.name], "state": r.state_bytes_per_rank} for c, r in results.records.items()}
    whole = {(c.model, c.method): found for c, found in about.items() if found["fraction"] == 1}

    def state(model: str, method: str) -> str:
        """As a share of Adam's."""
        own = whole.get((model, method), {"state": None})
        return DASH if own["state"] is None else times(own["state"] / (ADAM_BYTES * own["elements"]))

    def more(model: str, method: str) -> str:
        """The peak, above that of fp32."""
        own, base = (whole.get((model, m), {}).get("peak") for m in (method, "fp32"))
        return DASH if own is None or base is None else f"{'-' if own < base else '+'}{size(abs(own - base))}"

    models = list(dict.fromkeys(p.model for p in results.places()))
    head = [*(f"{m}, state vs Adam's" for m in models), *(f"{m}, peak over fp32's" for m in models)]
    rows = [
        (method.label, *(state(m, name) for m in models), *(more(m, name) for m in models))
        for name, method in suite.rows.items()
        if any((m, name) in whole for m in models)
    ]
    if results.records:
        yield Table.text(("method", *head), rows)


KERNELS = (
    Column("kernel", "left", value=lambda r: f"`{r['kernel']}`"),
    Column("bytes per element", value=lambda r: f"{r['bytes_per_element']:g}"),
    Column("ns per element", value=lambda r: number(r["ns_per_element"])),
    Column("GB/s", value=lambda r: number(r["gb_per_s"])),
    Column("eager reference / kernel", value=lambda r: f"{number(r['against_reference'])}x"),
    Column("of a copy's bandwidth", value=lambda r: f"{100 * r['of_copy']:.0f} %"),
)
HOOKS = (
    Column("model, batch", "left", value=lambda r: f"{r['model']}, {r['batch']}"),
    Column("method", "left", value=lambda r: r["method"]),
    Column("step, ms", value=lambda r: number(r["step_ms"])),
    Column("more than without a hook, ms", value=lambda r: number(r.get("overhead_ms"))),
    Column("of the step", value=lambda r: f"{100 * r['overhead']:+.0f} %" if "overhead" in r else DASH),
)


def _as_on_cpu(row: dict[str, Any]) -> str:
    if "distance" not in row:
        scaled = ", an overflow skipped by all ranks" * ("float16" in row["method"].split())
        return f"trains{scaled}" if row["ok"] else "no"
    return "every bit" if row["equal"] else f"{row['distance']:.1g} of the way apart"


ON_GPU = (
    Column("method", "left", value=lambda r: r["method"]),
    Column(
        "ranks, back end", "left", value=lambda r: f"{r['ranks']}, {'NCCL' if 'nccl' in r['backend'] else r['backend']}"
    ),
    Column("as on the CPU", "left", value=_as_on_cpu),
    Column(
        "a resumed run the same",
        "left",
        value=lambda r: {True: "every bit", False: "no", None: DASH}[r.get("resume_equal")],
    ),
)


def _kernels(results: Results, section: PageSection) -> Iterator[Block]:
    """The kernels of each device, and on a GPU what a hook costs."""
    for device, r in sorted(results.kernels.items()):
        about: dict[str, Any] = r.config[results.suite.name]
        yield f"## Kernels on a {device.upper().replace('CUDA', 'GPU')}, back end {about['backend']}"
        yield say("kernels", r=r, device=device, workers=about.get("workers", 4))
        yield Table.of(KERNELS, about["kernels"])
        if "hooks" in about:
            yield say("hooks")
            yield Table.of(HOOKS, about["hooks"])
        if "compared" in about:
            yield say("compared", rows=about["compared"])
        if "methods" in about:
            yield say("on_gpu")
            yield Table.of(ON_GPU, about["methods"])
    if results.kernels and "cuda" not in results.kernels:
        yield "No GPU was available: `make gpu-check` measures the same on one."


# ---- every cell, with the quantities that the suite asks for ----------------------------------------------------------

GPU_GB_PER_S = 1300.0
"""What element-wise kernels reach of an A100-80GB's 2 TB/s: an assumption."""


def _details(results: Results, section: PageSection) -> Iterator[Table]:
    """Every cell with the columns that the suite asks for, in one table or in one for each place."""
    suite = results.suite
    rates, links = [None, *suite.rates], [None, *suite.links]
    orders: list[list[Any]] = [list(suite.models), rates, list(suite.nodes), links, list(suite.methods)]
    cells = sorted(results.records, key=lambda c: [order.index(value) for order, value in zip(orders, c, strict=True)])
    head = [
        Column(heading, "right" if i else "left", value=functools.partial(QUANTITIES[quantity], results))
        for i, (heading, quantity) in enumerate(section.columns.items())
    ]
    if not section.by_place:
        yield Table.of(head, cells)
        return
    for p in results.places():
        title = ", ".join(filter(None, [p.model, suite.rate(p), suite.links[p.link].title]))
        mine = [c for c in cells if c == suite.cell(p, c.method)]
        yield Table.of(head, mine, title=f"{title}, {p.nodes} nodes")


def _named(results: Results, c: Measurement) -> str:
    suite = results.suite
    where = f"{c.model}, {suite.rate(c)}, {c.nodes} x {suite.gpus_per_node}"
    return where + (f", {c.link}" if c.link else "") + f": {suite.methods[c.method].label}"


def _here(results: Results, c: Measurement) -> str:
    """Median, smallest and largest; records before `min_ms` called these p10 and p90."""
    t = results.records[c].timing
    least, most = t.get("min_ms", t.get("p10_ms")), t.get("max_ms", t.get("p90_ms"))
    return f"{number(t['median_ms'])} ({number(least)}–{number(most)})"


def _arithmetic(results: Results, c: Measurement) -> float | None:
    """Bytes that the method sends for this share of the elements, without headers."""
    if c.nodes == 1:
        return None
    suite, elements = results.suite, results.records[c].config[results.suite.name]["elements"]
    return timelines.nic_bytes(suite.methods[c.method].traffic, elements, c.nodes, suite.gpus_per_node)


def _of_arithmetic(results: Results, c: Measurement) -> str:
    nic, expected = results.records[c].bytes_per_step["nic_tx"], _arithmetic(results, c)
    return number(nic / expected) if nic is not None and expected else DASH


def _gpu(results: Results, c: Measurement) -> str:
    """Share of the step that encoding and update would take on a GPU, by their memory traffic alone."""
    nbytes = results.suite.methods[c.method].gpu_bytes
    if nbytes is None:
        return DASH
    ms = results.suite.timeline(c.model, c.rate).elements * nbytes / (GPU_GB_PER_S * 1e6)
    return percent(ms / results.clock(c))


def _foreseen(results: Results, c: Measurement, clock: float = 1.0) -> str:
    """What is predicted, on a clock that is so many times slower than the cluster's, and how far off it is."""
    name = results.records[c].id
    if name not in results.predicted.index:
        return DASH
    found: Any = results.predicted.loc[name]
    return f"{number(clock * found.predicted_ms)} ({100 * found.error:+.1f} %)"


def _of_step(results: Results, c: Measurement, *keys: str) -> str:
    return percent(sum(results.clock(c, key) for key in keys) / results.clock(c))


QUANTITIES: dict[str, Callable[[Results, Measurement], str]] = {
    "cell": _named,
    "method": lambda rs, c: rs.suite.methods[c.method].label,
    "dilation": lambda rs, c: number(rs.records[c].link["dilation"]),
    "share": lambda rs, c: replay_words.share(rs.records[c].config[rs.suite.name]["fraction"]),
    "here": _here,
    "predicted_here": lambda rs, c: _foreseen(rs, c, float(rs.records[c].link["dilation"])),
    "step": lambda rs, c: number(rs.clock(c)),
    "predicted": _foreseen,
    "encode": lambda rs, c: number(rs.clock(c, "encode_ms")),
    "wire": lambda rs, c: number(rs.clock(c, "wire_ms")),
    "exposed": lambda rs, c: number(rs.clock(c, "exposed_wire_ms")),
    "update": lambda rs, c: number(rs.clock(c, "update_ms")),
    "encode_share": lambda rs, c: _of_step(rs, c, "encode_ms"),
    "cpu": lambda rs, c: _of_step(rs, c, "encode_ms", "update_ms"),
    "gpu": _gpu,
    "payload": lambda rs, c: size(rs.records[c].bytes_per_step["payload_inter"]),
    "nic": lambda rs, c: size(rs.records[c].bytes_per_step["nic_tx"]),
    "arithmetic": lambda rs, c: size(_arithmetic(rs, c)),
    "ratio": _of_arithmetic,
    "collectives": lambda rs, c: number(rs.records[c].collectives_per_step),
    "record": lambda rs, c: f"[record](../records/{rs.records[c].id}.json)",
}
"""What a column of a details table can hold."""


SECTIONS: dict[str, Callable[[Results, PageSection], Iterable[Block]]] = {
    "summary": _summary,
    "reproduced": lambda results, _: replay_words.reproduced(results),
    "fastest": lambda results, _: filter(None, ["\n".join(f"- {said}" for said in replay_words.fastest(results))]),
    "plot": lambda results, _: (
        [f"![{results.suite.report.plot.alt}](../plots/{results.suite.report.plot.file}.png)"] * bool(results.records)
    ),
    "check": lambda results, _: [replay_words.check_table(results)],
    "predicted": lambda results, _: [prediction.table(results.predicted)] if len(results.predicted) else [],
    "times": _times,
    "memory": _memory,
    "details": _details,
    "kernels": _kernels,
}
