"""The details of the page of a suite: every cell, with the quantities (`QUANTITIES`) that the suite asks for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from experiments.cells import traffic
from experiments.cells.page import Section
from experiments.cells.suite import Cell
from experiments.report import replay_words
from experiments.report.formats import DASH, number, percent, size
from experiments.report.replayed import Results
from experiments.report.table import Column, Table

GPU_GB_PER_S = 1300.0
"""What element-wise kernels reach of an A100-80GB's 2 TB/s: an assumption."""


def details(results: Results, section: Section) -> Iterator[Table]:
    """Every cell with the columns that the suite asks for, in one table or in one for each place."""
    suite = results.suite
    orders = (list(suite.models), [None, *suite.rates], list(suite.nodes), [None, *suite.links], list(suite.methods))
    cells = sorted(results.records, key=lambda c: [o.index(v) for o, v in zip(orders, c.as_dict().values())])  # type: ignore[attr-defined]
    head = [
        Column(heading, "right" if i else "left", value=functools.partial(QUANTITIES[quantity], results))
        for i, (heading, quantity) in enumerate(section.columns.items())
    ]
    if not section.by_place:
        yield Table.of(head, cells)
        return
    for p in results.places():
        title = ", ".join(filter(None, [p.model, suite.rates.get(p.rate or ""), suite.links[p.link].title]))
        mine = [c for c in cells if c == suite.cell(p, c.method)]
        yield Table.of(head, mine, title=f"{title}, {p.nodes} nodes")


def _cell(results: Results, c: Cell) -> str:
    suite = results.suite
    where = f"{c.model}, {suite.rates.get(c.rate or '', '')}, {c.nodes} x {suite.gpus_per_node}"
    return where + (f", {c.link}" if c.link else "") + f": {suite.methods[c.method].label}"


def _here(results: Results, c: Cell) -> str:
    """Median, smallest and largest; records before `min_ms` called these p10 and p90."""
    t = results.records[c].timing
    least, most = t.get("min_ms", t.get("p10_ms")), t.get("max_ms", t.get("p90_ms"))
    return f"{number(t['median_ms'])} ({number(least)}–{number(most)})"


def _arithmetic(results: Results, c: Cell) -> float | None:
    """Bytes that the method sends for this share of the elements, without headers."""
    if c.nodes == 1:
        return None
    suite, elements = results.suite, results.records[c].config[results.suite.name]["elements"]
    return traffic.nic_bytes(suite.methods[c.method].traffic, elements, c.nodes, suite.gpus_per_node)


def _ratio(results: Results, c: Cell) -> str:
    nic, expected = results.records[c].bytes_per_step["nic_tx"], _arithmetic(results, c)
    return number(nic / expected) if nic is not None and expected else DASH


def _gpu(results: Results, c: Cell) -> str:
    """Share of the step that encoding and update would take on a GPU, by their memory traffic alone."""
    nbytes = results.suite.methods[c.method].gpu_bytes
    if nbytes is None:
        return DASH
    ms = results.suite.timeline(c.model, c.rate).elements * nbytes / (GPU_GB_PER_S * 1e6)
    return percent(ms / results.clock(c))


def _foreseen(results: Results, c: Cell, clock: float = 1.0) -> str:
    """What is predicted, on a clock that is so many times slower than the cluster's, and how far off it is."""
    name = results.records[c].id
    if name not in results.predicted.index:
        return DASH
    found: Any = results.predicted.loc[name]
    return f"{number(clock * found.predicted_ms)} ({100 * found.error:+.1f} %)"


def _of_step(results: Results, c: Cell, *keys: str) -> str:
    return percent(sum(results.clock(c, key) for key in keys) / results.clock(c))


QUANTITIES: dict[str, Callable[[Results, Cell], str]] = {
    "cell": _cell,
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
    "ratio": _ratio,
    "collectives": lambda rs, c: number(rs.records[c].collectives_per_step),
    "record": lambda rs, c: f"[record](../records/{rs.records[c].id}.json)",
}
"""What a column of a details table can hold."""
