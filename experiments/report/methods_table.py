"""The table of all methods on one task, and its plot, from the records of `experiments/all_methods.py` alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.records.record import ResultRecord, read_all
from experiments.report import accuracy, plots, speedup
from experiments.report.accuracy import AccuracyTable, Cell
from experiments.report.differences import NOT_A_VARIANT, flatten
from experiments.report.formats import DASH, fraction, markdown_table, mean_sd, number, size, times
from experiments.report.speedup import Row
from launch.errors import UserError

EXP = "methods"
# In which the runs of one method differ among each other.
OF_A_RUN = ("optimizer.lr", "train.epochs", "train.max_steps", "train.eval_every", "train.timing_warmup", "evaluate")
EDGE = " §"
INTRO = """\
Every method is tuned from the same small budget, three or four learning rates (`tried`), one run each with the first seed.
The rate is chosen by {chosen}; what is shown is the {metric} on the test set with that rate, mean ± sample standard
deviation over n seeds. Settings: conf/exp/methods.yaml. Bytes, rounds (share of the steps in which anything is sent) and
collectives are those of whole training runs, warm-ups included; state is what the optimizer keeps on one rank besides the
parameters.
{edge} The chosen rate is the smallest or largest one tried: a wider budget might do better."""


@dataclass(frozen=True)
class Line:
    """One method. `best`: its runs at the chosen learning rate; `timed`: the run that measured its step time."""

    label: str
    tried: tuple[Cell, ...]
    best: Cell | None
    timed: Row | None

    @property
    def record(self) -> ResultRecord | None:
        """A run that speaks for bytes, rounds and state: the one with the first seed at the chosen rate."""
        return self.best.valid[0] if self.best and self.best.valid else None

    @property
    def payload(self) -> float | None:
        return Row(self.label, self.record).payload if self.record else None

    @property
    def at_edge(self) -> bool:
        rates = [c.lr for c in self.tried if c.lr is not None]
        return self.best is not None and len(rates) > 1 and self.best.lr in (min(rates), max(rates))

    @property
    def failures(self) -> list[str]:
        return [
            f"{self.label}, lr {cell.lr:g}, seed {r.seed}, failed: {r.reason}"
            for cell in self.tried
            for r in cell.records
            if r.status != "completed" and cell.lr is not None
        ]


@dataclass(frozen=True)
class MethodsTable:
    """All methods in one setting."""

    scores: AccuracyTable
    lines: tuple[Line, ...]

    @property
    def plot_name(self) -> str:
        return f"plots/{self.scores.slug}_bytes.png"

    @property
    def metric(self) -> str:
        return str(self.scores.metric["name"])

    @property
    def timed(self) -> list[ResultRecord]:
        return [line.timed.record for line in self.lines if line.timed]

    def payload_ratio(self, line: Line) -> float | None:
        """What the method sends as a share of the fp32 all-reduce."""
        dense = [x.payload for x in self.lines if x.record and x.record.wire == "fp32" and x.payload]
        return line.payload / dense[0] if dense and line.payload is not None else None

    def speedup(self, line: Line) -> float | None:
        """Step time of the fastest fp32 all-reduce over that of the method."""
        dense = [t.seconds for x in self.lines if (t := x.timed) and t.record.wire == "fp32" and t.seconds]
        return min(dense) / line.timed.seconds if dense and line.timed and line.timed.seconds else None


def build(records: Sequence[ResultRecord]) -> list[MethodsTable]:
    """One table for each setting of the experiment that has been trained."""
    ours = [r for r in records if r.exp == EXP]
    clocks = [r for r in sorted(ours, key=lambda r: (r.time, r.id)) if is_timing(r)]
    tables = []
    for scores in accuracy.build(ours):
        lines, shape = [], _shape(scores.cells[0].records[0])
        timed = {key(r.config): r for r in clocks if _shape(r) == shape}  # the latest of each method
        for label in dict.fromkeys(cell.label for cell in scores.cells):
            mine = tuple(cell for cell in scores.cells if cell.label == label)
            clock = timed.get(key(mine[0].records[0].config))
            lines.append(Line(label, mine, scores.best(label), Row(label, clock) if clock else None))
        bound = [r for r in timed.values() if r.wire == "none"]
        lines += [Line(r.method, (), None, Row(r.method, r)) for r in bound[-1:]]
        tables.append(MethodsTable(scores, tuple(lines)))
    return tables


def key(config: dict[str, Any]) -> str:
    """What a method is: its configuration without what differs between its runs."""
    skip = (*NOT_A_VARIANT, *OF_A_RUN)
    flat = {k: v for k, v in flatten(config).items() if not any(k == s or k.startswith(s + ".") for s in skip)}
    return json.dumps(flat, sort_keys=True)


def _shape(r: ResultRecord) -> tuple[str, int, int]:
    return r.scale, r.nodes, r.ranks_per_node


def is_timing(r: ResultRecord) -> bool:
    """Whether the run measured its step time and nothing else."""
    return r.status == "completed" and r.config.get("evaluate") is False and bool(r.timing.get("median_ms"))


def markdown(table: MethodsTable) -> str:
    """The table as a section of a page that lies in results/tables."""
    head = ["method", table.metric, "n", accuracy.HELD_OUT, "lr", "tried", "payload per node and step", "vs fp32"]
    head += ["rounds per step", "collectives per step", "state per rank", "step time, ms", "speed vs fp32", "records"]
    rows = [_cells(table, line) for line in table.lines]
    chosen = "the accuracy on a held-out part of the training set" if table.scores.tuned else "the test metric itself"
    intro = INTRO.format(chosen=chosen, metric=table.metric, edge=EDGE.strip())
    lines = [f"### {table.scores.title}", "", intro, "", f"**{clock_note(table)}**", "", markdown_table(head, rows)]
    failures = [text for line in table.lines for text in line.failures]
    lines += [f"- {text}" for text in failures] + [""] * bool(failures)
    return "\n".join([*lines, f"![{table.metric} against bytes](../{table.plot_name})", ""])


def clock_note(table: MethodsTable) -> str:
    """Where the step times come from, in plain words."""
    if not table.timed:
        return "Step times have not been measured."
    note = f"Step times: short runs, {speedup.honesty(table.timed)}; {speedup.hardware(table.timed[0])}."
    groups = {r.group for r in table.timed}
    return note if len(groups) == 1 else f"{note} They were measured at {len(groups)} different times."


def plot(table: MethodsTable) -> bytes | None:
    """The metric against the bytes that a node sends per step."""
    points = []
    for line in table.lines:
        if line.best is not None and line.payload:
            mean, sd = line.best.summary(None)
            points.append((line.label, line.record.method if line.record else line.label, line.payload, mean, sd))
    return plots.metric_against_bytes(points, table.metric, table.scores.title)


def show(results_dir: str | Path, console: Console | None = None) -> None:
    """Prints the table. Raises UserError when nothing of it has been run."""
    tables = build(read_all(results_dir))
    if not tables:
        raise UserError(f"no finished run of experiment {EXP!r} in {Path(results_dir) / 'records'}")
    console = console or Console(width=118)
    for table in tables:
        console.print(table.scores.title, style="bold", markup=False, highlight=False)
        console.print(clock_note(table), style="yellow", markup=False, highlight=False)
        shown = Table()
        names = ["method", table.metric, "n", "lr", "payload", "vs fp32", "rounds", "state", "step ms", "vs fp32"]
        for place, name in enumerate(names):
            shown.add_column(name, justify="right" if place else "left", overflow="fold")
        for line in table.lines:
            cells = _cells(table, line)
            shown.add_row(*[cells[i] for i in (0, 1, 2, 4, 6, 7, 8, 10, 11, 12)])
        console.print(shown)
        for line in table.lines:
            for text in line.failures:
                console.print(text, style="red", markup=False, highlight=False)


def _cells(table: MethodsTable, line: Line) -> list[str]:
    best, r = line.best, line.record
    rates = [f"{c.lr:g}" + ("" if c.valid else " (failed)") for c in line.tried if c.lr is not None]
    if best is None or r is None:
        value = "failed" if line.tried else DASH
        scored = [line.label, value, DASH, DASH, DASH, ", ".join(rates) or DASH, *[DASH] * 5]
    else:
        first = min(x.seed for c in line.tried for x in c.records)
        n = f"{len(best.valid)}" + (f" of {len(best.records)}" if len(best.valid) < len(best.records) else "")
        lr = DASH if best.lr is None else f"{best.lr:g}" + (EDGE if line.at_edge else "")
        scored = [
            line.label,
            mean_sd(*best.summary(None)),
            n,
            mean_sd(best.held_out(first), None),
            lr,
            ", ".join(rates),
        ]
        scored += [size(line.payload), fraction(table.payload_ratio(line)), number(r.rounds_per_step)]
        scored += [number(r.collectives_per_step), size(r.state_bytes_per_rank)]
    clock = [speedup.step_time(line.timed), times(table.speedup(line))] if line.timed else [DASH, DASH]
    runs = [*(best.records if best else ()), *([line.timed.record] if line.timed else ())]
    names = [str(x.seed) if x.config.get("evaluate", True) else "time" for x in runs]
    links = " ".join(f"[{name}](../records/{x.id}.json)" for name, x in zip(names, runs, strict=True))
    return [*scored, *clock, links]
