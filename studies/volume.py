"""What 0/1 Adam sends over a whole run, from its schedule alone: `python studies/volume.py [--steps 118000,152511]`.

Prints the tables next to the published numbers and writes them to tables/zero_one_adam_volume.md of the results folder.
Nothing is trained. Exit status: 0 success; 2 bad input.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script
    import _script  # noqa: F401

from rich.console import Console

from experiments.records.record import LOCAL, write_file
from experiments.report import published, sentences
from experiments.report.table import Note, Table, terminal
from experiments.report.volume import (
    LENGTHS,
    SEARCH,
    Setting,
    against_adam,
    against_onebit_adam,
    bits,
    measured,
    passed_at,
    readings,
    rounds_saved,
)
from experiments.runs import command
from launch.errors import UserError

TABLE = "tables/zero_one_adam_volume.md"
TITLE = "0/1 Adam: rounds and volume of a whole run"
RULES = {"as published": False, "reference implementation": True}
ROUNDS = ("rule", "steps", "variance rounds", "1-bit rounds", "steps without", "fewer")
CLAIMS = (
    ("volume reduction against 1-bit Adam, at most", "onebit"),
    ("fewer communication rounds, at most", "rounds"),
    ("volume reduction against Adam, BERT-Large, at most", "adam"),
    ("volume reduction, first arXiv version", "onebit"),
)
"""Quantities of results/paper/zero_one_adam.json, and what they are to be compared with."""


def rounds_rows(setting: Setting, lengths: Sequence[int]) -> list[list[str]]:
    runs = [(rule, setting.rounds(steps, aligned)) for rule, aligned in RULES.items() for steps in lengths]
    counts = [[f"{n:,}" for n in (r.steps, r.dense, r.onebit, r.skipped)] for _, r in runs]
    return [[rule, *each, _percent(rounds_saved(r))] for (rule, r), each in zip(runs, counts, strict=True)]


def volume_head(setting: Setting) -> list[str]:
    against = [f"less than 1-bit Adam, {warmup:,} dense ({name})" for name, warmup in setting.onebit_warmups]
    return ["rule", "steps", "dense rounds in", "bits per parameter and step", "less than Adam", *against]


def volume_rows(setting: Setting, lengths: Sequence[int]) -> list[list[str]]:
    rows = []
    for (rule, aligned), wire, steps in itertools.product(RULES.items(), (16, 32), lengths):
        r = setting.rounds(steps, aligned)
        saved = [_percent(against_onebit_adam(r, warmup, wire)) for _, warmup in setting.onebit_warmups]
        each = [f"{bits(r, wire) / steps:.3f}", f"{against_adam(r, wire):.1f}x"]
        rows.append([rule, f"{steps:,}", f"fp{wire}", *each, *saved])
    return rows


# ---- next to the published numbers ------------------------------------------------------------------------------------


def claim(quantity: str) -> dict[str, Any]:
    """The published number of that name. Raises UserError when results/paper has none."""
    for entry in published.load():
        if entry["quantity"] == quantity and "0/1 Adam" in entry["source"]:
            return entry
    raise UserError(f"results/paper/zero_one_adam.json has no '{quantity}': give it back its name")


def claim_rows(setting: Setting, lengths: Sequence[int]) -> tuple[list[str], list[list[str]], list[str]]:
    """Head and rows of the comparison, and one sentence for each published number: what comes nearest to it."""
    head = ["published", "read as", *(f"{steps:,} steps" for steps in lengths), "passed at, steps"]
    rows, sentences = [], []
    for quantity, kind in CLAIMS:
        entry = claim(quantity)
        percentage = entry["unit"] == "%"
        target = float(entry["value"]) / (100 if percentage else 1)
        show = _percent if percentage else (lambda v: f"{v:.1f}x")
        shown = f"{entry['value']:g} %" if percentage else f"{entry['value']:g}x"
        for words, measure in readings(setting, kind):
            values = [measure(setting.rounds(steps, False)) for steps in lengths]
            rows.append([shown, words, *map(show, values), passed_at(setting, measure, target)])
        value, reading = min(measured(setting, kind, lengths), key=lambda found: abs(found[0] - target))
        said = f"Published: {quantity}: {shown} ({entry['source']}; {entry['status']})"
        sentences.append(f"{said}. Nearest here: {show(value)} {reading}.")
    return head, rows, sentences


def tables(setting: Setting, lengths: Sequence[int]) -> list[Table]:
    """Rounds, volume, and both next to the published numbers."""
    head, rows, sentences = claim_rows(setting, lengths)
    rounds = Note(
        "By the rule as published a step with a variance round has a 1-bit round too; in the reference implementation it "
        "has the first alone. *fewer*: the share of steps without any round; 1-bit Adam has one in every step."
    )
    floats = Note(
        "Adam sends floats in every step, 1-bit Adam in its dense steps, 0/1 Adam in variance rounds: the same floats "
        "within a row."
    )
    readings_ = Note(
        "The sources found do not say for which run and which floats. Each reading has its own row (rule as "
        f"published); the last column has the run lengths from {SEARCH[0]:,} to {SEARCH[-1]:,} steps at which it "
        "passes the published number."
    )
    nearest = Note("\n".join(f"- {sentence}" for sentence in sentences))
    return [
        Table.text(ROUNDS, rounds_rows(setting, lengths), title="Rounds", notes=(rounds,)),
        Table.text(volume_head(setting), volume_rows(setting, lengths), title="Volume", notes=(floats,)),
        Table.text(head, rows, title="Compared with the published numbers", notes=(readings_,), footnotes=(nearest,)),
    ]


def caution(s: Setting) -> Note:
    """What the numbers are not."""
    return Note(
        f"**Computed from the schedule, nothing was run.** kappa {s.kappa}, variance frozen after {s.warmup_steps:,} "
        f"steps, interval between syncs doubled every {s.local_doubling:,} steps, {s.local_limit} at most. "
        "One direction; scales and padding are left out."
    )


def markdown(setting: Setting, lengths: Sequence[int]) -> str:
    """The whole page."""
    made = [table.markdown(2) for table in tables(setting, lengths)]
    return sentences.page("zero_one_adam_volume", title=TITLE, caution=caution(setting).text, tables=made)


def show(setting: Setting, lengths: Sequence[int], console: Console | None = None) -> None:
    """Prints the page's tables."""
    console = console or terminal()
    Note(TITLE, "strong").show(console)
    caution(setting).show(console)
    for table in tables(setting, lengths):
        table.show(console)


def write(setting: Setting, lengths: Sequence[int], results_dir: str | Path) -> Path:
    """Writes the page into a results folder and returns its path. Raises UserError."""
    path = Path(results_dir) / TABLE
    write_file(path, markdown(setting, lengths).encode(), "table")
    return path


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


# ---- the command ------------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> tuple[Setting, list[int], argparse.Namespace]:
    """The command line. Raises UserError for numbers out of range."""
    default = Setting()
    parser = command.parser(__doc__)
    parser.add_argument("--steps", default=",".join(map(str, LENGTHS)), help="lengths of the run, separated by commas")
    parser.add_argument("--kappa", type=int, default=default.kappa, help="variance rounds before their gap doubles")
    parser.add_argument("--freeze", type=int, default=default.warmup_steps, help="last step with a variance round")
    parser.add_argument(
        "--doubling", type=int, default=default.local_doubling, help="steps before the interval doubles"
    )
    parser.add_argument("--limit", type=int, default=default.local_limit, help="largest interval between syncs")
    parser.add_argument("--results", default=LOCAL, help="results folder")
    parser.add_argument("--print-only", action="store_true", help="write no file")
    options = parser.parse_args(arguments)
    numbers = options.steps.split(",")
    if not all(n.strip().isdigit() and int(n) > 0 for n in numbers):
        raise UserError(f"--steps must be whole numbers above 0, such as 118000,152511, not '{options.steps}'")
    for name in ("kappa", "freeze", "doubling", "limit"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} must be at least 1, not {getattr(options, name)}")
    setting = Setting(options.kappa, options.freeze, options.doubling, options.limit)
    return setting, [int(n) for n in numbers], options


@command.report_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line's work and exit status."""
    setting, lengths, options = parse(arguments)
    show(setting, lengths)
    if not options.print_only:
        print(f"table: {write(setting, lengths, options.results)}")
    return 0


if __name__ == "__main__":
    command.start(main)
