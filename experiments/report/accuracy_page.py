"""The tables of docs/accuracy.md: what was found about accuracy. No torch.

Of every setting that was run on virtual workers: the best learning rate of each method next to the baseline's, seed by
seed. Where the same experiment was run with several numbers of workers, these are columns.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from experiments.records import labels
from experiments.records.record import ResultRecord
from experiments.report import accuracy
from experiments.report.accuracy import AccuracyTable
from experiments.report.comparison import Cell
from experiments.report.differences import grouped
from experiments.report.formats import DASH, mean_sd
from experiments.report.metrics import difference
from experiments.report.sentences import say
from experiments.report.table import Column, Note, Table

TABLES = "../results/published/tables"
"""As seen from the page."""


def studies(records: Sequence[ResultRecord]) -> dict[str, list[AccuracyTable]]:
    """By experiment, all tables with runs on virtual workers.

    PyTorch's hooks, which want real ranks, stand in them where they were run in the same setting.
    """
    tables = accuracy.build([r for r in records if accuracy.hooked(r) or labels.is_virtual(r.config)])
    virtual = (t for t in tables if any(labels.is_virtual(r.config) for c in t.cells for r in c.records))
    return grouped(virtual, lambda t: t.first.exp)


def together(tables: Sequence[AccuracyTable]) -> list[list[AccuracyTable]]:
    """Those that differ in the number of workers alone: with the same batch of each, then with the same batch in all, then
    what has no company."""

    def same(t: AccuracyTable) -> tuple[object, ...]:
        return t.setting._replace(nodes=0, batch=0), t.parity

    of_each = grouped(tables, lambda t: (*same(t), t.setting.batch)).values()
    in_all = grouped(tables, lambda t: (*same(t), t.setting.batch_in_all)).values()
    groups: list[list[AccuracyTable]] = []
    for several in (sorted(group, key=lambda t: t.setting.workers) for group in (*of_each, *in_all) if len(group) > 1):
        groups += [several] * (several not in groups)
    shown = {table.slug for group in groups for table in group}
    return [*groups, *([table] for table in tables if table.slug not in shown)]


def section(tables: Sequence[AccuracyTable]) -> Table:
    """One table for `tables`, which differ in the number of workers alone."""
    return _wide(tables) if len(tables) > 1 else _long(tables[0])


def _long(table: AccuracyTable) -> Table:
    """One number of workers: a row for each method."""
    name = table.metric["name"]
    columns = [
        Column("method", "left", value=lambda c: c.label),
        Column("lr", value=table.rate),
        Column(name, value=lambda c: mean_sd(*c.summary(None))),
        Column(f"vs {table.baseline.label if table.baseline else 'baseline'}", value=table.difference_text),
        Column("verdict", "left", value=lambda c: _verdict(table, c)),
        Column("seeds", value=Cell.count),
    ]
    return Table.of(columns, table.chosen, notes=(Note(f"**{table.title}**; {_words(table)}"),))


def _wide(tables: Sequence[AccuracyTable]) -> Table:
    """Several numbers of workers: a row for each method, a column for each number."""
    columns = [Column("method", "left", value=str)]
    columns += [Column(f"{t.setting.workers} workers", value=functools.partial(_cell, t)) for t in tables]
    first, same = tables[0].setting, len({table.setting.batch for table in tables}) == 1
    batch = f"batch {first.batch} each" if same else f"batch {first.batch_in_all} in all"
    title = ", ".join(filter(None, (first.studied, batch, first.precision)))
    labels = dict.fromkeys(c.label for table in tables for c in table.chosen)
    return Table.of(columns, labels, notes=(Note(f"**{title}**; {_words(tables[0])}"),))


def _cell(table: AccuracyTable, label: str) -> str:
    if (cell := table.bests.get(label)) is None:
        return DASH
    shown = [mean_sd(*cell.summary(None)), table.difference_text(cell), _verdict(table, cell)]
    shown.append(_to_strongest(table, cell))
    return "<br>".join([s for s in shown if s] + [f"lr {table.rate(cell)}, n = {cell.count()}"])


def _to_strongest(table: AccuracyTable, cell: Cell) -> str:
    """The difference to the best method in fp32, where that is not the baseline. No verdict: nothing was stated of it."""
    best = table.strongest
    if best is None or best is table.baseline or accuracy.full_precision(cell.records[0]) or table.parity is None:
        return ""
    found = difference(cell.by_seed, best.by_seed, table.relative)
    return "" if found is None else f"{found.text(table.relative)} to {best.label}"


def _words(table: AccuracyTable) -> str:
    return say("study", t=table, page=f"{TABLES}/{table.first.exp}.md")


def _verdict(table: AccuracyTable, cell: Cell) -> str:
    return "baseline" if cell is table.baseline else table.verdict(cell)


def tables(found: Sequence[AccuracyTable]) -> str:
    """All studies of an experiment that have an interval, one table below the other."""
    every = [group for group in together(found) if any(len(c.by_seed) > 1 for table in group for c in table.chosen)]
    return "\n".join(section(group).markdown() for group in every)
