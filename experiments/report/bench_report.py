"""The page of the benchmark, from records alone: results/tables/bench.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.bench import kernels as bench_kernels
from experiments.cells.bench_plan import LINKS, METHODS, TITLES, Cell
from experiments.records.record import ResultRecord, write_file
from experiments.report.bench_plot import MARK, plot
from experiments.report.bench_results import Results, load, verdicts
from experiments.report.formats import DASH, number, percent, size, times
from experiments.report.speedup import hardware
from experiments.report.table import WIDTH, Column, Table

TABLE, PLOT = "tables/bench.md", "plots/bench.png"
ADAM_BYTES = 8
"""Adam's state per parameter: two fp32 moments."""


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
    console = console or Console(width=WIDTH)
    results = load(results_dir)
    if cells:
        for model, link in dict.fromkeys((m, at) for m, at, _ in results.places()):
            console.print(f"{TITLES[model]}; {LINKS[link]}", style="bold", markup=False, highlight=False)
            _times(results, model, link).show(console)
        for sentence in verdicts(results):
            console.print(sentence, markup=False, highlight=False)
    if device in results.kernels:
        bench = results.kernels[device].config["bench"]
        console.print(_kernels_title(results.kernels[device]), style="bold", markup=False, highlight=False)
        kernel_table(bench["kernels"]).show(console)
        if "hooks" in bench:
            hook_table(bench["hooks"]).show(console)
    for name in (TABLE, PLOT):
        if (Path(results_dir) / name).is_file():
            console.print(str(Path(results_dir) / name), soft_wrap=True, markup=False, highlight=False)


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
    lines = [f"<!-- {MARK} from the records; do not edit. -->", "# Benchmark against peers", ""]
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
                lines += [f"### {LINKS[link]}", "", _times(results, model, link).grid()]
        lines += ["## Memory", "", _memory_note(), "", _memory(results).grid()]
        lines += ["## What a step consists of", "", _details_note(), ""]
        for place in results.places():
            lines += [f"### {place[0]}, {LINKS[place[1]]}, {place[2]} nodes", ""]
            lines += [_details(results, place).grid()]
    for device, r in sorted(results.kernels.items()):
        bench = r.config["bench"]
        lines += [f"## {_kernels_title(r)}", "", f"{hardware(r)}. {_kernels_note(device)}", ""]
        lines += [kernel_table(bench["kernels"]).grid()]
        if "hooks" in bench:
            lines += ["What a hook costs where nothing is sent:", "", hook_table(bench["hooks"]).grid()]
    if results.kernels and "cuda" not in results.kernels:
        lines += ["No GPU was at hand: `make bench-gpu` measures the same on one.", ""]
    return "\n".join(lines).rstrip() + "\n"


def _times(results: Results, model: str, link: str) -> Table:
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
    return Table.text(head, rows)


def _memory_note() -> str:
    return (
        "State is what optimizer and hook keep on each rank between steps, as a share of Adam's 8 bytes per parameter; rows "
        "of dense methods are SGDM's, which has half of Adam's. Peak is the largest resident memory of a rank during the "
        "cell, as the kernel counts it (VmHWM), above that of fp32 DDP; measured with the whole model on 2 ranks."
    )


def _memory(results: Results) -> Table:
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
    return Table.text(head, rows)


def _whole(results: Results, model: str, method: str) -> ResultRecord | None:
    """The record of a cell with the whole model."""
    r = results.records.get(Cell(model, "loopback", 2, method))
    return r if r is not None and r.config["bench"]["fraction"] == 1 else None


def kernel_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Rows of `experiments.bench.kernels.measure`."""
    return Table.of(
        [
            Column("kernel", "left", value=lambda r: f"`{r['kernel']}`"),
            Column("bytes per element", value=lambda r: f"{r['bytes_per_element']:g}"),
            Column("ns per element", value=lambda r: number(r["ns_per_element"])),
            Column("GB/s", value=lambda r: number(r["gb_per_s"])),
            Column("eager reference / kernel", value=lambda r: f"{number(r['against_reference'])}x"),
            Column("of a copy's bandwidth", value=lambda r: percent(r["of_copy"])),
        ],
        rows,
    )


def hook_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Rows of `experiments.bench.hooks.measure`."""
    return Table.of(
        [
            Column("method", "left", value=lambda r: r["method"]),
            Column("step, ms", value=lambda r: number(r["step_ms"])),
            Column("more than without a hook, ms", value=lambda r: number(r["overhead_ms"])),
        ],
        rows,
    )


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


def _details(results: Results, place: tuple[str, str, int]) -> Table:
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
    return Table.text(head, rows)


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
