"""The table of all methods on one task, from the records of `experiments/all_methods.py` alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.records.record import ResultRecord, read_all
from experiments.report import accuracy, arithmetic, captions, metrics, published, speedup_table
from experiments.report.accuracy import HELD_OUT, AccuracyTable
from experiments.report.comparison import Cell
from experiments.report.differences import distinguishing
from experiments.report.formats import DASH, fraction, mean_sd, number, size
from experiments.report.sentences import say
from experiments.report.table import Column, Note, Table, terminal
from launch.errors import UserError

EXP = "methods"
# In which the runs of one method differ among each other.
OF_A_RUN = ("optimizer.lr", "train.epochs", "train.max_steps", "train.eval_every", "train.timing_warmup", "evaluate")


@dataclass(frozen=True)
class Line:
    """One method. `best`: its runs at the chosen learning rate; `timed`: the run that measured its step time."""

    label: str
    tried: tuple[Cell, ...]
    best: Cell | None
    timed: ResultRecord | None

    @property
    def record(self) -> ResultRecord | None:
        """A run that speaks for bytes, rounds and state: the one with the first seed at the chosen rate."""
        return self.best.valid[0] if self.best else None

    @property
    def payload(self) -> float | None:
        return metrics.payload(self.record) if self.record else None

    @property
    def first_seed(self) -> int:
        return accuracy.choosers(self.tried)[0]

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
        return f"{self.scores.slug}_bytes"

    @property
    def metric(self) -> str:
        return str(self.scores.metric["name"])

    @property
    def timed(self) -> list[ResultRecord]:
        return [line.timed for line in self.lines if line.timed]

    @property
    def failures(self) -> list[str]:
        return [said for line in self.lines for said in line.failures]

    def payload_ratio(self, line: Line) -> float | None:
        """What the method sends as a share of the fp32 all-reduce."""
        dense = [x.payload for x in self.lines if x.record and accuracy.full_precision(x.record) and x.payload]
        return line.payload / dense[0] if dense and line.payload is not None else None

    def versus(self, line: Line) -> str:
        """Step time of the fastest fp32 all-reduce over that of the method, with its interval where both took turns."""
        dense = [r for r in self.timed if accuracy.full_precision(r) and metrics.step_ms(r)]
        if not dense or line.timed is None:
            return DASH
        base = min(dense, key=lambda r: metrics.step_ms(r) or 0.0)
        return captions.faster(metrics.speedup(base, line.timed))


def build(records: Sequence[ResultRecord]) -> list[MethodsTable]:
    """One table for each setting of the experiment that has been trained."""
    ours = [r for r in records if r.exp == EXP]
    clocks = [r for r in sorted(ours, key=lambda r: (r.time, r.id)) if is_timing(r)]
    tables = []
    for scores in accuracy.build(ours):
        lines, shape = [], _shape(scores.first)
        timed = [r for r in reversed(clocks) if _shape(r) == shape]  # the latest first
        for label, mine in scores.by_label.items():
            clock = next((r for r in timed if same_setting(r, mine[0].records[0])), None)
            lines.append(Line(label, tuple(mine), scores.bests[label], clock))
        bound = [r for r in timed if r.wire == "none"]
        lines += [Line(r.method, (), None, r) for r in bound[:1]]
        tables.append(MethodsTable(scores, tuple(lines)))
    return tables


def same_setting(a: ResultRecord, b: ResultRecord) -> bool:
    """Whether two runs are of one method: the same label, and no key that both know differs but those of single runs.

    A key that only one of them has is younger than the other, which ran with today's default; a variant has its own
    label.
    """
    mine, theirs = distinguishing(a.config, OF_A_RUN), distinguishing(b.config, OF_A_RUN)
    return (a.method, a.wire) == (b.method, b.wire) and all(mine[k] == theirs[k] for k in mine.keys() & theirs.keys())


def _shape(r: ResultRecord) -> tuple[str, int, int]:
    return r.scale, r.nodes, r.ranks_per_node


def is_timing(r: ResultRecord) -> bool:
    """Whether the run measured its step time and nothing else."""
    return r.status == "completed" and r.config.get("evaluate") is False and bool(r.timing.get("median_ms"))


def columns(table: MethodsTable) -> list[Column]:
    """The columns, each with what makes its cells from a `Line`; to add one see experiments/report/table.py."""
    return [
        Column("method", "left", value=lambda line: line.label),
        Column(table.metric, value=_score),
        _trained("n", lambda line: line.best.count()),
        _trained(HELD_OUT, lambda line: mean_sd(*line.best.summary(HELD_OUT, [line.first_seed])), terminal=False),
        _trained("lr", lambda line: table.scores.rate(line.best)),
        Column("tried", terminal=False, value=_rates),
        _trained("payload per node and step", lambda line: size(line.payload), short="payload"),
        _trained("vs fp32", lambda line: fraction(table.payload_ratio(line))),
        _trained("rounds per step", lambda line: number(line.record.rounds_per_step), short="rounds"),
        _trained("collectives per step", lambda line: number(line.record.collectives_per_step), terminal=False),
        _trained("state per rank", lambda line: size(line.record.state_bytes_per_rank), short="state"),
        Column(
            "step time, ms",
            short="step ms",
            value=lambda line: speedup_table.step_time(line.timed) if line.timed else DASH,
        ),
        Column("speed vs fp32", value=table.versus),
        Column("records", terminal=False, value=_links),
    ]


def as_table(table: MethodsTable, reference: MethodsTable | None = None) -> Table:
    """The table, how it was made and where its step times come from above it, failed runs below it.

    reference: the published table of the same setting: its metric is a further column.
    """
    every = columns(table)
    if reference:
        theirs = {line.label: _score(line) for line in reference.lines}
        every.append(Column(f"published {table.metric}", value=lambda line: theirs.get(line.label, DASH)))
    failed = tuple(Note(text, "failure") for text in table.failures)
    notes = [
        Note(say("methods", t=table, edge=accuracy.EDGE)),
        Note(say("clock", timed=table.timed), "caution"),
    ]
    notes += captions.notes(table.timed) + Note.of(arithmetic.listed(arithmetic.of_runs(table.timed)))
    picture = f"![{table.metric} against bytes](../plots/{table.plot_name}.png)"
    said = {"notes": tuple(notes), "footnotes": failed, "picture": picture}
    return Table.of(every, table.lines, title=table.scores.title, **said)


def show(results_dir: str | Path) -> None:
    """Prints the table. Raises UserError when nothing of it has been run."""
    tables = build(read_all(results_dir))
    if not tables:
        raise UserError(f"no finished run of experiment {EXP!r} in {Path(results_dir) / 'records'}")
    known = {t.scores.title: t for t in build(published.records(results_dir, EXP))}
    for table in tables:
        as_table(table, known.get(table.scores.title)).show(terminal())


def _trained(name: str, value: Callable[[Any], str], *, short: str = "", terminal: bool = True) -> Column:
    """A column of something that training measured: a dash for a method without a run that ended well."""
    return Column(name, "right", short, terminal, lambda line: value(line) if line.record else DASH)


def _score(line: Line) -> str:
    if line.best is None:
        return "failed" if line.tried else DASH
    return mean_sd(*line.best.summary(None))


def _rates(line: Line) -> str:
    rates = [f"{c.lr:g}" + ("" if c.valid else " (failed)") for c in line.tried if c.lr is not None]
    return ", ".join(rates) or DASH


def _links(line: Line) -> str:
    runs = [*(line.best.records if line.best else ()), *([line.timed] if line.timed else ())]
    return accuracy.links((str(x.seed) if x.config.get("evaluate", True) else "time", x) for x in runs)
