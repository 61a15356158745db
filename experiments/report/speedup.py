"""Speedup tables: step times of methods that took turns, or of runs made one after the other, on the same machine.

Speedup = t_baseline / t_method: medians of the step time, or the mean where a method's steps differ in what they send
(local steps: the median step would be one without communication). Baselines are the fp32 and the bf16 all-reduce of the
same table; where there are several, the fastest. The run without communication is the bound.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from experiments.records.labels import is_virtual
from experiments.records.record import ResultRecord
from experiments.report import arithmetic, captions, metrics, sentences, trained
from experiments.report.differences import order, variants
from experiments.report.formats import DASH, fraction, number, size, times
from experiments.report.metrics import Interval, Speedup
from experiments.report.table import Column, Note, Table

# Hyper-parameters that do not change what a step costs.
COSTLESS = (
    "optimizer.lr",
    "optimizer.weight_decay",
    "train.lr_schedule",
    "train.epochs",
    "train.max_steps",
    "train.eval_every",
)

OFF = 0.1
"""A link whose measured rate is further than this share from what its setting should give is marked."""
OFF_MARK = " ‡"
UNEVEN_NOTE = (
    "Mean: the method's steps differ in what they send, so that its speedups go by the mean step time. Rounds per step: "
    "the share of steps in which anything is sent."
)


@dataclass(frozen=True)
class Row:
    """One line of a table: a run, standing for `runs` runs that differ in seed and learning rate only."""

    label: str
    record: ResultRecord
    runs: int = 1

    @property
    def seconds(self) -> float | None:
        """Step time, the median or the mean (`uneven`); None for a failed run."""
        ms = metrics.step_ms(self.record)
        return None if ms is None else ms / 1000

    @property
    def uneven(self) -> bool:
        """Whether the method's steps differ in what they send, so that the mean step time is the one that counts."""
        return metrics.uneven(self.record)

    @property
    def payload(self) -> float | None:
        """Bytes that a node sends per step over the link that counts: between nodes when there are several."""
        return self.record.bytes_per_step.get("payload_inter" if self.record.nodes > 1 else "payload_intra")


@dataclass(frozen=True)
class SpeedupTable:
    """The runs of one group on one machine with one setting. `slug` names its plot."""

    slug: str
    group: str
    records: tuple[ResultRecord, ...]

    @cached_property
    def rows(self) -> list[Row]:
        suffix = variants(self.records, COSTLESS)
        cells: dict[tuple[Any, ...], list[ResultRecord]] = {}
        for r in sorted(self.records, key=lambda r: (*order(r), suffix[r.id], r.status, r.time, r.id)):
            # A failure is shown by itself, never averaged away.
            alone = "" if r.status == "completed" else r.id
            cells.setdefault((r.method + suffix[r.id], r.wire, alone), []).append(r)
        rows = []
        for (label, _, _), same in cells.items():
            same.sort(key=lambda r: (Row(label, r).seconds or 0.0, r.id))
            rows.append(Row(label, same[(len(same) - 1) // 2], len(same)))
        return rows

    def row(self, label: str) -> Row:
        """Raises KeyError for a label that no row has."""
        return {row.label: row for row in self.rows}[label]

    def baseline(self, wire: str) -> Row | None:
        """The fastest completed run whose collectives carry `wire` ("none": the bound)."""
        timed = [row for row in self.rows if row.record.wire == wire and row.seconds is not None]
        return min(timed, key=lambda row: row.seconds or 0.0, default=None)

    def compared(self, row: Row, wire: str) -> Speedup | None:
        """Of `row` over the baseline of `wire`; None when either is missing. A row of several runs has no interval."""
        base = self.baseline(wire)
        found = None if base is None else metrics.speedup(base.record, row.record)
        alone = base is not None and base.runs == row.runs == 1
        return found if found is None or alone else replace(found, interval=None)

    def speedup(self, row: Row, wire: str) -> float | None:
        """The value of `compared`."""
        found = self.compared(row, wire)
        return None if found is None else found.value

    def ratio(self, row: Row, wire: str) -> Interval | None:
        """The interval of `compared`."""
        found = self.compared(row, wire)
        return None if found is None else found.interval

    def versus(self, row: Row, wire: str) -> str:
        """`compared` as text."""
        return captions.faster(self.compared(row, wire), row is self.baseline(wire))

    @property
    def skips(self) -> bool:
        """Whether any method of the table has steps in which nothing is sent."""
        found = [row.record.rounds_per_step for row in self.rows if row.record.wire != "none"]
        return any(rounds is not None and rounds < 1 for rounds in found)

    def of_bound(self, row: Row) -> float | None:
        """Share of the rate without communication that `row` reaches."""
        return self.speedup(row, "none")

    def payload_ratio(self, row: Row) -> float | None:
        """Payload of `row` as a share of the fp32 baseline's."""
        base = self.baseline("fp32")
        return row.payload / base.payload if base and base.payload and row.payload is not None else None


def build(records: list[ResultRecord], group: str | None = None) -> list[SpeedupTable]:
    """The table of the latest group of each setting, or every table of `group`. Runs without a group are in none."""
    groups: dict[tuple[str, str], list[ResultRecord]] = {}
    for r in records:
        if r.group is not None and group in (None, r.group) and not is_virtual(r.config):
            groups.setdefault((setting(r), r.group), []).append(r)
    found: dict[tuple[str, str], list[ResultRecord]] = {}
    for (shared, _), members in groups.items():
        failed = [r for r in members if r.status != "completed"]
        machines: dict[str, list[ResultRecord]] = {}
        for r in members:
            if r.status == "completed":
                machines.setdefault(json.dumps([r.hardware, _intended(r.link)], sort_keys=True), []).append(r)
        # The launcher writes the record of a failed run and may know less of link and device than the workers.
        for machine, completed in (machines or {"": []}).items():
            key = (shared, machine)
            if key not in found or _age(completed + failed) > _age(found[key]):
                found[key] = completed + failed
    # A group in which everything failed is shown only where there is nothing better.
    timed = {shared for shared, machine in found if machine}
    kept = {key: rs for key, rs in found.items() if key[1] or key[0] not in timed}
    tables: list[SpeedupTable] = []
    counts: dict[str, int] = {}
    for _, members in sorted(kept.items()):
        r = members[0]
        slug = f"{r.exp}_{r.scale}_{r.cluster}_{r.nodes}x{r.ranks_per_node}"
        counts[slug] = counts.get(slug, 0) + 1
        slug += f"-{counts[slug]}" if counts[slug] > 1 else ""
        tables.append(SpeedupTable(slug, r.group or "", tuple(members)))
    return tables


def _intended(link: dict[str, Any]) -> dict[str, Any]:
    """A link without what differs between two measurements of it."""
    varying = ["measured", "off_by", "note", "probed_mbit_per_s"]
    if link.get("set_mbit_per_s") or link.get("probed_mbit_per_s"):
        varying.append("mbit_per_s")
    return {key: value for key, value in link.items() if key not in varying}


def columns(table: SpeedupTable) -> list[Column]:
    """The columns, each with what makes its cells from a `Row`; to add one see experiments/report/table.py."""
    splits = list(dict.fromkeys(key for row in table.rows for key in row.record.timing.get("split", {})))
    rounds = measured("rounds per step", lambda row: number(row.record.rounds_per_step), short="rounds")
    update = measured("update, ms", lambda row: number(row.record.timing.get("update_ms")), terminal=False)
    in_turns = any(row.record.turns for row in table.rows)  # intervals want the room of a terminal's line
    return [
        Column("method", "left", value=_label),
        Column("wire", terminal=False, value=lambda row: row.record.wire),
        Column("step time, median (p10–p90), ms", short="step ms (p10–p90)", value=step_time),
        measured("samples/s", lambda row: number(row.record.timing.get("samples_per_s")), terminal=not in_turns),
        measured("speedup vs fp32", lambda row: table.versus(row, "fp32"), short="vs fp32"),
        measured("speedup vs bf16", lambda row: table.versus(row, "bf16"), short="vs bf16"),
        measured("% of no-communication bound", lambda row: _of_bound(table, row), short="of bound"),
        *([update] if any("update_ms" in row.record.timing for row in table.rows) else []),
        measured("payload per node and step", payload, short="payload/node/step"),
        measured("payload vs fp32", lambda row: fraction(table.payload_ratio(row)), terminal=False),
        measured("NIC tx per node and step", lambda row: size(row.record.bytes_per_step["nic_tx"]), short="NIC tx"),
        measured("collectives per step", lambda row: number(row.record.collectives_per_step), terminal=False),
        *([rounds] if table.skips else []),
        measured("state per rank", lambda row: size(row.record.state_bytes_per_rank), terminal=False),
        *map(_split, splits),
        Column("record", terminal=False, value=_link),
    ]


def measured(name: str, value: Callable[[Row], str], *, short: str = "", terminal: bool = True) -> Column:
    """A column of something that a run measured: a dash for one that failed."""
    return Column(name, "right", short, terminal, lambda row: value(row) if row.record.status == "completed" else DASH)


def _of_bound(table: SpeedupTable, row: Row) -> str:
    return captions.share(table.compared(row, "none"), row is table.baseline("none"))


def _split(key: str) -> Column:
    name = f"{key.removesuffix('_ms')}, ms"
    return measured(name, lambda row: number(row.record.timing.get("split", {}).get(key)), terminal=False)


def as_table(table: SpeedupTable, beside: SpeedupTable | None = None) -> Table:
    """The table, its machine and link above it, what it shows below it.

    beside: the published table of the same setting: its speedups have a column of their own.
    """
    r = table.records[0]
    said = sentences.honesty(table.records)
    notes = [Note(f"{said}.", "caution")] if said else []
    notes.append(Note(f"{sentences.hardware(r)}. Group `{table.group}`."))
    footnotes = failures(table)
    for sentence, cautious in captions.notes([row.record for row in table.rows]):
        if cautious:
            notes.append(Note(sentence, "caution"))
        else:
            footnotes.append(Note(sentence))
    if any((row.record.link.get("off_by") or 0.0) > OFF for row in table.rows):
        footnotes.append(
            Note(f"{OFF_MARK.strip()} The link was more than {OFF:.0%} off its set rate when it was measured.")
        )
    if any(row.uneven for row in table.rows):
        footnotes.append(Note(UNEVEN_NOTE))
    if checked := arithmetic.of_runs([row.record for row in table.rows]):
        footnotes.append(Note(arithmetic.listed(checked)))
    if predicted := trained.sentence([row.record for row in table.rows]):
        footnotes.append(Note(predicted))
    if summary := captions.compression(table):
        footnotes.append(Note(summary, "strong"))
    shown = [*columns(table), *([published_column(beside)] if beside else [])]
    return Table.of(shown, table.rows, title=sentences.title(r), notes=tuple(notes), footnotes=tuple(footnotes))


def published_column(published: SpeedupTable) -> Column:
    """The speedups over fp32 of a published table, by the rows' labels."""
    theirs = {(row.label, row.record.wire): published.speedup(row, "fp32") for row in published.rows}
    return Column("published vs fp32", value=lambda row: times(theirs.get((row.label, row.record.wire))))


def failures(table: SpeedupTable) -> list[Note]:
    """One note for each failed run of the table, with its reason."""
    failed = [row for row in table.rows if row.record.status != "completed"]
    return [Note(f"{row.label} failed: {row.record.reason or 'no reason recorded'}", "failure") for row in failed]


def markdown(table: SpeedupTable) -> str:
    """The table and its plot as a section of a page in the tables folder."""
    plot = f"![step time](../plots/{table.slug}_step_time.png)\n" if any(row.seconds for row in table.rows) else ""
    return as_table(table).markdown() + plot


def _label(row: Row) -> str:
    return row.label + (OFF_MARK if (row.record.link.get("off_by") or 0.0) > OFF else "")


def _link(row: Row) -> str:
    link = f"[{row.record.id}](../records/{row.record.id}.json)"
    return f"{link} (median of {row.runs} runs)" if row.runs > 1 else link


def step_time(row: Row) -> str:
    """Median (or mean, and that it is one) and spread in milliseconds; for a failed run its status."""
    t = row.record.timing
    if row.record.status != "completed":
        return row.record.status
    typical = f"mean {number(t.get('mean_ms'))}" if row.uneven else number(t.get("median_ms"))
    return f"{typical} ({number(t.get('p10_ms'))}–{number(t.get('p90_ms'))})"


def payload(row: Row) -> str:
    """What a node sends per step: between nodes, and within the node where that was counted too."""
    intra = row.record.bytes_per_step["payload_intra"]
    if row.record.nodes > 1 and intra:
        return f"{size(row.payload)} + {size(intra)} within the node"
    return size(row.payload)


def setting(r: ResultRecord) -> str:
    """What runs must share to stand in one table, but for group, machine and link."""
    train = r.config.get("train", {})
    batch = [train.get(key) for key in ("batch_per_rank", "accumulate", "precision")]
    return json.dumps([r.exp, r.scale, r.cluster, r.nodes, r.ranks_per_node, batch])


def _age(records: list[ResultRecord]) -> tuple[str, str]:
    return max((r.time, r.group or "") for r in records)
