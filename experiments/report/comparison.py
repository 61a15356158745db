"""A group of runs as papers compare methods: bytes, rounds, state, step time and metric of each. No torch."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from experiments.report import captions, speedup_table, tables
from experiments.report.formats import DASH, fraction, number, size
from experiments.report.speedup import Row, SpeedupTable
from experiments.report.table import Column, Note, Table

NOTE = (
    "Payload: bytes that a node sends per step. Rounds: share of the steps in which anything is sent; collectives per step. "
    "State: of the optimizer, on one rank."
)


def show(results_dir: str | Path, group: str, console: Console | None = None, *, verbose: bool = False) -> list[Table]:
    """Prints a group of runs as the papers compare methods. Arguments and what it returns: as of `tables.print_group`."""
    return tables.print_group(results_dir, group, console, comparison, ("speedup", "accuracy"), verbose)


def comparison(table: SpeedupTable, beside: SpeedupTable | None = None) -> Table:
    """Bytes, rounds, state, time and metric of each method; beside: the published table of the same setting."""
    measured, shown = speedup_table.measured, speedup_table.as_table(table)
    columns = [
        Column("method", "left", value=lambda row: row.label),
        Column(
            "payload", value=lambda row: size(row.payload) if row.record.status == "completed" else row.record.status
        ),
        measured("vs fp32", lambda row: fraction(table.payload_ratio(row))),
        measured("rounds", lambda row: number(row.record.rounds_per_step)),
        measured("collectives", lambda row: number(row.record.collectives_per_step)),
        measured("state", lambda row: size(row.record.state_bytes_per_rank)),
        measured("step ms", _milliseconds),
        measured("speed vs fp32", lambda row: captions.versus(table, row, "fp32")),
        *([speedup_table.published_column(beside)] if beside else []),
        speedup_table.metric_column(table),
    ]
    footnotes = (Note(NOTE), *shown.footnotes)
    return Table.of(columns, table.rows, title=shown.title, notes=shown.notes, footnotes=footnotes)


def _milliseconds(row: Row) -> str:
    if row.seconds is None:
        return DASH
    return ("mean " if row.uneven else "") + number(1000 * row.seconds)
