"""Page and picture of the benchmark, from records alone: results/tables/bench.md, results/plots/bench.png."""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from experiments import bench_hooks, bench_kernels, bench_plan
from experiments.bench_plan import LINKS, METHODS, MODELS, NODES, TITLES, Cell
from experiments.errors import UserError
from experiments.formats import DASH, markdown_table, number, percent, size, times
from experiments.record import ResultRecord, read_all, write_file
from experiments.speedup import hardware

MARK = "Made by experiments/bench.py"
TABLE, PLOT = "tables/bench.md", "plots/bench.png"
OURS = "birder_one_phase"
TIE = 0.03
"""Step times that differ by less count as equal."""
ADAM_BYTES = 8
"""Adam's state per parameter: two fp32 moments."""
COLOURS = {"fp32": "#4477aa", "16": "#66ccee", "lowrank": "#228833", "1bit": "#ccbb44", "none": "#bbbbbb"}


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


def write(results_dir: str | Path) -> list[Path]:
    """Writes page and picture, and returns their paths."""
    results, base = load(results_dir), Path(results_dir)
    write_file(base / TABLE, markdown(results).encode(), "table")
    written = [base / TABLE]
    if results.records:
        write_file(base / PLOT, plot(results), "plot")
        written.append(base / PLOT)
    return written


def show(results_dir: str | Path, *, device: str = "cpu", cells: bool = True, console: Console | None = None) -> None:
    """Prints what the page says: step times, verdicts, the kernels of `device`, and where the files are."""
    console = console or Console(width=118)
    results = load(results_dir)
    if cells:
        for model, link in dict.fromkeys((m, at) for m, at, _ in results.places()):
            console.print(f"{TITLES[model]}; {LINKS[link]}", style="bold", markup=False, highlight=False)
            _print(console, *_times(results, model, link))
        for sentence in verdicts(results):
            console.print(sentence, markup=False, highlight=False)
    if device in results.kernels:
        bench = results.kernels[device].config["bench"]
        console.print(_kernels_title(results.kernels[device]), style="bold", markup=False, highlight=False)
        print(bench_kernels.markdown(bench["kernels"]))
        if "hooks" in bench:
            print(bench_hooks.markdown(bench["hooks"]))
    for name in (TABLE, PLOT):
        if (Path(results_dir) / name).is_file():
            console.print(str(Path(results_dir) / name), soft_wrap=True, markup=False, highlight=False)


def _print(console: Console, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table()
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


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


def honesty(results: Results) -> str:
    """What these numbers are not."""
    words = [
        "computation is waited for as timelines of an A100 say, everything else runs",
        "one rank is a node of one GPU",
    ]
    emulated = [r for c, r in results.records.items() if c.link == "emulated"]
    if emulated:
        rates = sorted({r.link["set_mbit_per_s"] for r in emulated if r.link.get("set_mbit_per_s")})
        set_to = f" of {' and '.join(map(number, rates))} Mbit/s" if rates else ""
        slow = sorted(r.link["dilation"] for r in emulated)
        words.append(
            f"emulated links are token buckets{set_to}, so that of 10 Gbit/s time is {number(slow[0])} to {number(slow[-1])} "
            "times slower, and a fraction of every tensor is there"
        )
    if any(c.link == "loopback" for c in results.records):
        words.append("loopback is not slowed down, and no network behaves like it")
    return "Replayed, not measured on GPUs: " + "; ".join(words)


def markdown(results: Results) -> str:
    """The page."""
    lines = [f"<!-- {MARK} from results/records; do not edit. -->", "# Benchmark against peers", ""]
    if results.records:
        first = next(iter(results.records.values()))
        lines += [
            f"**{honesty(results)}.** {hardware(first)}. How, and what distorts: [bench](../../docs/bench.md).",
            "",
        ]
        lines += [*(f"- {said}" for said in verdicts(results)), "", f"![step times](../{PLOT})", ""]
        for model in dict.fromkeys(m for m, _, _ in results.places()):
            lines += [f"## {TITLES[model]}", ""]
            for link in dict.fromkeys(at for m, at, _ in results.places() if m == model):
                lines += [f"### {LINKS[link]}", "", markdown_table(*_times(results, model, link))]
        lines += ["## Memory", "", _memory_note(), "", markdown_table(*_memory(results))]
        lines += ["## What a step consists of", "", _details_note(), ""]
        for place in results.places():
            lines += [f"### {place[0]}, {LINKS[place[1]]}, {place[2]} nodes", ""]
            lines += [markdown_table(*_details(results, place))]
    for device, r in sorted(results.kernels.items()):
        bench = r.config["bench"]
        lines += [f"## {_kernels_title(r)}", "", f"{hardware(r)}. {_kernels_note(device)}", ""]
        lines += [bench_kernels.markdown(bench["kernels"])]
        if "hooks" in bench:
            lines += ["What a hook costs where nothing is sent:", "", bench_hooks.markdown(bench["hooks"])]
    if results.kernels and "cuda" not in results.kernels:
        lines += ["No GPU was at hand: `make bench-gpu` measures the same on one.", ""]
    return "\n".join(lines).rstrip() + "\n"


def _times(results: Results, model: str, link: str) -> tuple[list[str], list[list[str]]]:
    nodes = [n for m, at, n in results.places() if (m, at) == (model, link)]
    head = ["method", *(f"ms, {n} nodes" for n in nodes), *(f"vs fp32, {n}" for n in nodes)]
    head += [f"of bound, {n}" for n in nodes]
    rows = []
    for name, method in METHODS.items():
        if any(results.ms(model, link, n, name) for n in nodes):
            places = [(model, link, n) for n in nodes]
            row = [method.label, *(number(results.ms(*p, name)) for p in places)]
            row += [times(results.ratio(p, name, "fp32")) for p in places]
            rows.append([*row, *(percent(results.ratio(p, name, "none")) for p in places)])
    return head, rows


def _memory_note() -> str:
    return (
        "State is what optimizer and hook keep on each rank between steps, as a share of Adam's 8 bytes per parameter; rows "
        "of dense methods are SGDM's, which has half of Adam's. Peak is the largest resident memory of a rank during the "
        "cell, as the kernel counts it (VmHWM), above that of fp32 DDP; measured with the whole model on 2 ranks."
    )


def _memory(results: Results) -> tuple[list[str], list[list[str]]]:
    models = list(dict.fromkeys(m for m, _, _ in results.places()))
    head = ["method", *(f"{m}, state vs Adam's" for m in models), *(f"{m}, peak over fp32's" for m in models)]
    rows = []
    for name, method in METHODS.items():
        found = [_whole(results, m, name) for m in models]
        base = [_whole(results, m, "fp32") for m in models]
        if not any(found):
            continue
        states = [
            times(r.state_bytes_per_rank / (ADAM_BYTES * r.config["bench"]["elements"]))
            if r and r.state_bytes_per_rank is not None
            else DASH
            for r in found
        ]
        peaks = []
        for r, b in zip(found, base, strict=True):
            known = r and b and r.config["bench"]["peak"] is not None and b.config["bench"]["peak"] is not None
            peaks.append(_more(r.config["bench"]["peak"] - b.config["bench"]["peak"]) if r and b and known else DASH)
        rows.append([method.label, *states, *peaks])
    return head, rows


def _whole(results: Results, model: str, method: str) -> ResultRecord | None:
    """The record of a cell with the whole model."""
    r = results.records.get(Cell(model, "loopback", 2, method))
    return r if r is not None and r.config["bench"]["fraction"] == 1 else None


def _more(difference: float) -> str:
    return f"{'-' if difference < 0 else '+'}{size(abs(difference))}"


def _details_note() -> str:
    return (
        "Milliseconds of the cluster's clock, medians over few steps of the slowest node. Encode is all that makes messages "
        "and reads them, on CPU threads that the nodes share, mostly beside backward; wire is the time in which a collective "
        "was under way; exposed is what the step waited for communication after its last gradient; update is the "
        "optimizer's. Share is the part of the bytes that was really sent, D how much slower than the cluster it ran. NIC is "
        "what the interface counted, payload what was handed to the collectives, per node and step, of the share alone."
    )


def _details(results: Results, place: tuple[str, str, int]) -> tuple[list[str], list[list[str]]]:
    head = [
        "method",
        "step",
        "encode",
        "wire",
        "exposed",
        "update",
        "encode, of step",
        "payload",
        "NIC tx",
        "collectives",
    ]
    head += ["share", "D", "step here, ms", "record"]
    rows = []
    for name, method in METHODS.items():
        r = results.records.get(Cell(*place, name))
        if r is None:
            continue
        parts = [results.ms(*place, name, f"{key}_ms") for key in ("encode", "wire", "exposed_wire", "update")]
        t = r.timing
        rows.append(
            [
                method.label,
                number(results.ms(*place, name)),
                *map(number, parts),
                percent(t["split"]["encode_ms"] / t["median_ms"]),
                size(r.bytes_per_step["payload_inter"]),
                size(r.bytes_per_step["nic_tx"]),
                number(r.collectives_per_step),
                _share(r.config["bench"]["fraction"]),
                number(r.link["dilation"]),
                f"{number(t['median_ms'])} ({number(t['p10_ms'])}–{number(t['p90_ms'])})",
                f"[record](../records/{r.id}.json)",
            ]
        )
    return head, rows


def _share(fraction: float) -> str:
    return "1" if fraction == 1 else f"1/{1 / fraction:.3g}"


def _kernels_title(r: ResultRecord) -> str:
    where = "GPU" if r.hardware["device"] == "cuda" else "CPU"
    return f"Kernels on a {where}, back end {r.config['bench']['backend']}"


def _kernels_note(device: str) -> str:
    on = "on its current stream" if device == "cuda" else "on one thread"
    return (
        f"Each kernel {on}, beside the eager torch reference and a copy of as many bytes; medians of ratios within a round. "
        f"Server kernels take the bits of {bench_kernels.WORKERS} workers."
    )


def plot(results: Results) -> bytes:
    """Step times as bars: a row of panels for each model and link, a column for each number of nodes."""
    rows = list(dict.fromkeys((m, at) for m, at, _ in results.places()))
    columns = sorted({n for _, _, n in results.places()})
    drawn: list[Any] = []
    with style.context("default"):
        figure = Figure(figsize=(4.4 * len(columns) + 1.5, 0.8 + 2.6 * len(rows)), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(rows), len(columns), squeeze=False, sharey=True)
        names = list(METHODS)[::-1]
        for panels, (model, link) in zip(grid, rows, strict=True):
            for axes, nodes in zip(panels, columns, strict=True):
                found = [(i, results.ms(model, link, nodes, name)) for i, name in enumerate(names)]
                for i, ms in found:
                    if ms is not None:
                        axes.barh(i, ms, color=_colour(names[i]))
                        axes.text(ms, i, f" {number(ms)}", va="center", fontsize=6)
                        drawn.append([model, link, nodes, names[i], ms])
                bound = results.ms(model, link, nodes, "none")
                if bound is not None:
                    axes.axvline(bound, color="#888888", linewidth=0.8, linestyle=":")
                axes.set_yticks(range(len(names)), [METHODS[name].label for name in names], fontsize=7)
                axes.tick_params(axis="x", labelsize=7)
                axes.margins(x=0.15)
                axes.set_title(f"{model}, {LINKS[link]}, {nodes} nodes", fontsize=8)
        for axes in grid[-1]:
            axes.set_xlabel("step, ms of the cluster's clock", fontsize=7)
        figure.suptitle("Replayed, not measured on GPUs (docs/bench.md)", fontsize=9)
        buffer = io.BytesIO()
        described = f"{MARK}, data {hashlib.sha256(repr(drawn).encode()).hexdigest()}"
        figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None, "Description": described})
        return buffer.getvalue()


def _colour(method: str) -> str:
    if method.startswith("birder"):
        return "#aa3377" if method == OURS else "#ee6677"
    wire = METHODS[method].wire
    return COLOURS["16" if wire in ("bf16", "fp16") else wire]
