"""The methods of one paper side by side: `python experiments/families.py cser [key=value ...] [--methods a,b]`.

Families: cser, zero_one_adam, slamb. Runs experiments of the paper at quick scale through experiments/compare.py, then the
same methods on a real task that needs no download, and prints for each what the paper compares: bytes per step, rounds, step
time and metric, against dense methods and 1-bit Adam. Exit status as of compare.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a script: import from the repository, not from this file's own folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from launch import interrupt

    interrupt.ends_silently()

from omegaconf import OmegaConf
from rich.console import Console

from experiments import compare, run, volume
from experiments.config import compose
from experiments.records.record import ResultRecord
from experiments.report import speedup, tables
from experiments.report.formats import DASH, fraction, mean_sd, number, size
from experiments.report.speedup import Row, SpeedupTable
from experiments.report.table import WIDTH, Column, Note, Table
from launch.errors import UserError
from launch.process import Stopped

DIGITS = "methods_digits"
LINKS = ("cluster=emulated", "cluster.link_gbps=0.1", "cluster.dilation=1")
"""Quick models are small, and so are the links: 100 Mbit/s, as they are."""

NOTE = (
    "Payload: bytes that a node sends per step. Rounds: share of the steps in which anything is sent; collectives per step. "
    "State: of the optimizer, on one rank."
)


@dataclass(frozen=True)
class Part:
    """One comparison. overrides: what it has by default; methods: optimizers to keep, None for all."""

    exp: str
    overrides: tuple[str, ...] = ()
    methods: tuple[str, ...] | None = None


CSER = ("cser", "csea", "cser_pl", "local_sgd", "qsparse", "ef_sgd")
FAMILIES: dict[str, tuple[Part, ...]] = {
    "cser": (Part("cser_cifar100", LINKS), Part(DIGITS, (), ("sgdm_nesterov", "onebit_adam", *CSER))),
    "zero_one_adam": (
        Part("zero_one_bert_base", LINKS),
        Part(DIGITS, (), ("adamw", "onebit_adam", "zero_one_adam", "birder")),
    ),
    "slamb": (
        Part("slamb_bert_large", LINKS),
        Part(DIGITS, (), ("sgdm", "lamb", "onebit_adam", "onebit_lamb", "slamb")),
    ),
}


def overrides_of(part: Part, given: Sequence[str]) -> list[str]:
    """The overrides of a part: its own, but for what the user has given."""
    keys = {o.lstrip("+").partition("=")[0] for o in given}
    own = [
        o
        for o in part.overrides
        if o.partition("=")[0] not in keys and not (o.startswith("cluster") and "cluster" in keys)
    ]
    return [f"+exp={part.exp}", *own, *given]


def parts_of(family: str, given: Sequence[str]) -> list[Part]:
    """What is to be run. With data of the user's, or at paper scale, the paper's experiments have a metric of their own."""
    whole = any(o == "scale=paper" or o.startswith("data.path=") for o in given)
    return [p for p in FAMILIES[family] if not (whole and p.exp == DIGITS)]


def kept(part: Part, given: Sequence[str], methods: Sequence[str] | None) -> list[str]:
    """The optimizers of a part that are to be run: the part's, or those of them that the user names."""
    listed = OmegaConf.to_container(compose.compose(overrides_of(part, given)).config.compare, resolve=True)
    assert isinstance(listed, list)
    known = list(
        dict.fromkeys(str(o)[len("optimizer=") :] for v in listed for o in v if str(o).startswith("optimizer="))
    )
    return [m for m in known if m in (part.methods or known) and m in (methods if methods is not None else known)]


def family(name: str, given: list[str], methods: list[str] | None) -> int:
    """Runs and prints all parts; returns the worst exit status. Raises UserError before anything has run."""
    if any(o.startswith("+exp=") for o in given):
        raise UserError("experiments are the family's own: python experiments/compare.py +exp=NAME runs one of them")
    parts = [(part, kept(part, given, methods)) for part in parts_of(name, given)]
    known = {m for part in FAMILIES[name] for m in kept(part, given, None)}
    if unknown := [m for m in methods or () if m not in known]:
        raise UserError(f"'{name}' compares no '{unknown[0]}'; it has: {', '.join(sorted(known))}")
    status = 0
    for part, chosen in parts:
        if chosen:
            status = max(status, compare.compare(overrides_of(part, given), chosen, show))
    resolved = compose.resolve(compose.compose(overrides_of(FAMILIES[name][0], given)))
    if name == "zero_one_adam" and not resolved["cluster"]["dry_run"]:
        status = max(status, volume.main(["--results", str(resolved["results_dir"])]))
    return status


def show(results_dir: str | Path, group: str, console: Console | None = None) -> None:
    """Prints a group of runs as the papers compare methods, with the published numbers. Raises UserError."""
    tables.print_group(results_dir, group, console or Console(width=WIDTH), comparison, ("speedup", "accuracy"))


def comparison(table: SpeedupTable, beside: SpeedupTable | None = None) -> Table:
    """Bytes, rounds, state, time and metric of each method; beside: the published table of the same setting."""
    measured, shown = speedup.measured, speedup.as_table(table)
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
        measured("speed vs fp32", lambda row: table.versus(row, "fp32")),
        *([speedup.published_column(beside)] if beside else []),
        measured(_metric_name(table.records), lambda row: _metric(row.record)),
    ]
    footnotes = (Note(NOTE), *shown.footnotes)
    return Table.of(columns, table.rows, title=shown.title, notes=shown.notes, footnotes=footnotes)


def _milliseconds(row: Row) -> str:
    if row.seconds is None:
        return DASH
    return ("mean " if row.uneven else "") + number(1000 * row.seconds)


def _metric(r: ResultRecord) -> str:
    trained = r.wire != "none" and not r.data.get("synthetic")
    return mean_sd(r.metric.get("value"), None) if trained else DASH


def _metric_name(records: Sequence[ResultRecord]) -> str:
    return next((str(r.metric["name"]) for r in records if r.metric.get("name")), "metric")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line's work and exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("--methods", help="optimizer names to keep, separated by commas; default: all")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, start nothing")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides of all its experiments")
    options = parser.parse_intermixed_args(arguments)
    methods = [m for m in options.methods.split(",") if m] if options.methods is not None else None
    try:
        return family(options.family, [*options.overrides, *["cluster.dry_run=true"] * options.dry_run], methods)
    except (UserError, KeyboardInterrupt, Stopped) as error:
        return run.report(error)


if __name__ == "__main__":
    from launch import interrupt

    interrupt.is_heard()
    sys.exit(main())
