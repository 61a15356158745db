"""How a speedup table is shown: its columns, what stands above and below it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from experiments.records.record import ResultRecord
from experiments.report import arithmetic, captions, metrics, prediction, sentences
from experiments.report.formats import DASH, fraction, mean_sd, number, size, times
from experiments.report.speedup import SpeedupRow, SpeedupTable
from experiments.report.table import Column, Note, Table

OFF = 0.1
"""A link whose measured rate is further than this share from what its setting should give is marked."""
OFF_MARK = " ‡"


def columns(table: SpeedupTable) -> list[Column]:
    """The columns, each with what makes its cells from a `SpeedupRow`; to add one see experiments/report/table.py."""
    splits = list(dict.fromkeys(key for row in table.rows for key in row.record.timing.get("split", {})))
    rounds = measured("rounds per step", lambda row: number(row.record.rounds_per_step), short="rounds")
    update = measured("update, ms", lambda row: number(row.record.timing.get("update_ms")), terminal=False)
    return [
        Column("method", "left", value=_label),
        Column("wire", terminal=False, value=lambda row: row.record.wire),
        Column("step time, median (p10–p90), ms", short="step ms (p10–p90)", value=lambda row: step_time(row.record)),
        measured("samples/s", lambda row: number(row.record.timing.get("samples_per_s")), terminal=False),
        measured("speedup vs fp32", lambda row: captions.versus(table, row, "fp32"), short="vs fp32"),
        measured("speedup vs bf16", lambda row: captions.versus(table, row, "bf16"), short="vs bf16"),
        measured(
            "% of no-communication bound", lambda row: captions.share(table.compared(row, "none")), short="of bound"
        ),
        *([update] if any("update_ms" in row.record.timing for row in table.rows) else []),
        measured("payload per node and step", payload, short="payload per node, step"),
        measured("payload vs fp32", lambda row: fraction(table.payload_ratio(row)), terminal=False),
        measured("NIC tx per node and step", lambda row: size(row.record.bytes_per_step["nic_tx"]), short="NIC tx"),
        measured("collectives per step", lambda row: number(row.record.collectives_per_step), terminal=False),
        *([rounds] if table.skips else []),
        measured("state per rank", lambda row: size(row.record.state_bytes_per_rank), terminal=False),
        *map(_split, splits),
        Column("record", terminal=False, value=_link),
    ]


def measured(name: str, value: Callable[[SpeedupRow], str], *, short: str = "", terminal: bool = True) -> Column:
    """A column of something that a run measured: a dash for one that failed."""
    return Column(name, "right", short, terminal, lambda row: value(row) if row.record.status == "completed" else DASH)


def _split(key: str) -> Column:
    name = f"{key.removesuffix('_ms')}, ms"
    return measured(name, lambda row: number(row.record.timing.get("split", {}).get(key)), terminal=False)


def as_table(table: SpeedupTable, reference: SpeedupTable | None = None, metric: bool = False) -> Table:
    """The table, its machine and link above it, what it shows below it.

    reference: the published table of the same setting: its speedups are a further column. metric: whether that of what was
    trained is one too.
    """
    first, shown = table.records[0], [row.record for row in table.rows]
    caveats, rounds = sentences.caveats(table.records), captions.notes(shown)
    notes = [
        *Note.of(f"{caveats}." if caveats else "", kind="caution"),
        Note(f"{sentences.hardware(first)}. Group `{table.group}`."),
        *(note for note in rounds if note.kind == "caution"),
    ]
    marked, uneven = any(_label(row) != row.label for row in table.rows), any(row.uneven for row in table.rows)
    footnotes = [
        *failures(table),
        *(note for note in rounds if note.kind == "plain"),
        *Note.of(
            f"{OFF_MARK.strip()} {sentences.say('off', share=OFF)}" if marked else "",
            sentences.say("uneven") if uneven else "",
            arithmetic.listed(arithmetic.of_runs(shown)),
            sentences.say("trained", rows=prediction.trained_rows(shown)),
        ),
        *Note.of(captions.compression(table), kind="strong"),
    ]
    every = columns(table)
    every[1:1] = [metric_column(table)] if metric else []
    every += [published_column(reference)] if reference else []
    title = ", ".join(filter(None, (sentences.say("title", r=first), table.workload)))
    picture = f"![step time](../plots/{table.slug}_step_time.png)" if any(row.ms for row in table.rows) else ""
    return Table.of(every, table.rows, title=title, notes=tuple(notes), footnotes=tuple(footnotes), picture=picture)


def closing(table: SpeedupTable, reference: SpeedupTable | None = None) -> Table:
    """How a comparison ends: `as_table` with the metric of what was trained on real data, without what nobody measured."""
    made = as_table(table, reference, metric=True)
    known = [
        c.terminal and {*cells} != {DASH} for c, cells in zip(made.columns, zip(*made.rows, strict=True), strict=True)
    ]
    return replace(made, columns=tuple(replace(c, terminal=k) for c, k in zip(made.columns, known, strict=True)))


def as_papers(table: SpeedupTable, reference: SpeedupTable | None = None) -> Table:
    """As papers compare methods: bytes, rounds, state, time and metric of each; reference: as in `as_table`."""
    shown = as_table(table)
    columns = [
        Column("method", "left", value=lambda row: row.label),
        Column(
            "payload", value=lambda row: size(row.payload) if row.record.status == "completed" else row.record.status
        ),
        measured("vs fp32", lambda row: fraction(table.payload_ratio(row))),
        measured("rounds", lambda row: number(row.record.rounds_per_step)),
        measured("collectives", lambda row: number(row.record.collectives_per_step)),
        measured("state", lambda row: size(row.record.state_bytes_per_rank)),
        measured("step ms", lambda row: "mean " * row.uneven + number(row.ms)),
        measured("speed vs fp32", lambda row: captions.versus(table, row, "fp32")),
        *([published_column(reference)] if reference else []),
        metric_column(table),
    ]
    footnotes = (Note(sentences.say("papers")), *shown.footnotes)
    return Table.of(columns, table.rows, title=shown.title, notes=shown.notes, footnotes=footnotes)


def metric_column(table: SpeedupTable) -> Column:
    """The metric of what was trained on real data."""
    name = next((str(r.metric["name"]) for r in table.records if r.metric.get("name")), "metric")

    def value(row: SpeedupRow) -> str:
        trained = row.record.wire != "none" and not row.record.data.get("synthetic")
        return mean_sd(row.record.metric.get("value"), None) if trained else DASH

    return measured(name, value)


def published_column(published: SpeedupTable) -> Column:
    """The speedups over fp32 of a published table, by the rows' labels."""
    theirs = {(row.label, row.record.wire): published.speedup(row, "fp32") for row in published.rows}
    return Column("published vs fp32", value=lambda row: times(theirs.get((row.label, row.record.wire))))


def failures(table: SpeedupTable) -> list[Note]:
    """One note for each failed run of the table, with its reason."""
    failed = [row for row in table.rows if row.record.status != "completed"]
    return [Note(f"{row.label} failed: {row.record.reason or 'no reason recorded'}", "failure") for row in failed]


def _label(row: SpeedupRow) -> str:
    return row.label + (OFF_MARK if (row.record.link.get("off_by") or 0.0) > OFF else "")


def _link(row: SpeedupRow) -> str:
    link = f"[{row.record.id}](../records/{row.record.id}.json)"
    return f"{link} (median of {row.runs} runs)" if row.runs > 1 else link


def step_time(r: ResultRecord) -> str:
    """Median (or mean, and that it is one) and spread in milliseconds; for a failed run its status."""
    t = r.timing
    if r.status != "completed":
        return r.status
    if t.get("median_ms") is None:  # no step was timed
        return DASH
    typical = f"mean {number(t.get('mean_ms'))}" if metrics.uneven(r) else number(t.get("median_ms"))
    return f"{typical} ({number(t.get('p10_ms'))}–{number(t.get('p90_ms'))})"


def payload(row: SpeedupRow) -> str:
    """What a node sends per step: between nodes, and within the node where that was counted too."""
    intra = row.record.bytes_per_step["payload_intra"]
    if row.record.nodes > 1 and intra:
        return f"{size(row.payload)} + {size(intra)} within the node"
    return size(row.payload)
