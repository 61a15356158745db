"""What 0/1 Adam sends over a whole run, from its schedule alone: `python studies/volume.py [--steps 118000,152511]`.

Prints the tables next to the published numbers and writes them to tables/zero_one_adam_volume.md of the results folder.
Nothing is trained. Exit status: 0 success; 2 bad input.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script
    import _script  # noqa: F401

from experiments.records.record import LOCAL, write_file
from experiments.report import claims, sentences
from experiments.report.sentences import say
from experiments.report.table import Note, Table, terminal
from experiments.report.volume import (
    LENGTHS,
    SEARCH,
    VolumeSchedules,
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
CLAIMS = (
    ("volume reduction against 1-bit Adam, at most", "onebit"),
    ("fewer communication rounds, at most", "rounds"),
    ("volume reduction against Adam, BERT-Large, at most", "adam"),
    ("volume reduction, first arXiv version", "onebit"),
)
"""Quantities of results/paper/zero_one_adam.json, and what they are to be compared with."""


def rounds(setting: VolumeSchedules, lengths: Sequence[int]) -> Table:
    """How often runs communicate."""
    rows = []
    for (rule, aligned), steps in itertools.product(RULES.items(), lengths):
        r = setting.rounds(steps, aligned)
        rows.append([rule, *(f"{n:,}" for n in (r.steps, r.dense, r.onebit, r.skipped)), _percent(rounds_saved(r))])
    note = Note(
        "By the rule as published a step with a variance round has a 1-bit round too; in the reference implementation it "
        "has the first alone. *fewer*: the share of steps without any round; 1-bit Adam has one in every step."
    )
    head = ("rule", "steps", "variance rounds", "1-bit rounds", "steps without", "fewer")
    return Table.text(head, rows, title="Rounds", notes=(note,))


def volume(setting: VolumeSchedules, lengths: Sequence[int]) -> Table:
    """What runs send."""
    rows = []
    for (rule, aligned), wire, steps in itertools.product(RULES.items(), (16, 32), lengths):
        r = setting.rounds(steps, aligned)
        saved = [_percent(against_onebit_adam(r, warmup, wire)) for _, warmup in setting.onebit_warmups]
        each = [f"{bits(r, wire) / steps:.3f}", f"{against_adam(r, wire):.1f}x"]
        rows.append([rule, f"{steps:,}", f"fp{wire}", *each, *saved])
    note = Note(
        "Adam sends floats in every step, 1-bit Adam in its dense steps, 0/1 Adam in variance rounds: the same floats "
        "within a row."
    )
    against = [f"less than 1-bit Adam, {warmup:,} dense ({name})" for name, warmup in setting.onebit_warmups]
    head = ("rule", "steps", "dense rounds in", "bits per parameter and step", "less than Adam", *against)
    return Table.text(head, rows, title="Volume", notes=(note,))


def compared(setting: VolumeSchedules, lengths: Sequence[int]) -> Table:
    """Both next to the published numbers; below, for each of these what comes nearest to it. Raises LookupError."""
    head = ("published", "read as", *(f"{steps:,} steps" for steps in lengths), "passed at, steps")
    rows, nearest = [], []
    for quantity, kind in CLAIMS:
        entry = claims.paper(quantity, "")
        percentage = entry["unit"] == "%"
        target = float(entry["value"]) / (100 if percentage else 1)
        show = _percent if percentage else (lambda v: f"{v:.1f}x")
        shown = f"{entry['value']:g} %" if percentage else f"{entry['value']:g}x"
        for words, measure in readings(setting, kind):
            values = [measure(setting.rounds(steps, False)) for steps in lengths]
            rows.append([shown, words, *map(show, values), passed_at(setting, measure, target)])
        value, reading = min(measured(setting, kind, lengths), key=lambda found: abs(found[0] - target))
        nearest.append(f"- {say('published', e=entry)} Nearest here: {show(value)} {reading}.")
    note = Note(
        "The sources found do not say for which run and which floats. Each reading has its own row (rule as "
        f"published); the last column has the run lengths from {SEARCH[0]:,} to {SEARCH[-1]:,} steps at which it "
        "passes the published number."
    )
    said = {"notes": (note,), "footnotes": (Note("\n".join(nearest)),)}
    return Table.text(head, rows, title="Compared with the published numbers", **said)


def tables(setting: VolumeSchedules, lengths: Sequence[int]) -> list[Table]:
    return [part(setting, lengths) for part in (rounds, volume, compared)]


def caution(s: VolumeSchedules) -> Note:
    """What the numbers are not."""
    return Note(
        f"**Computed from the schedule, nothing was run.** kappa {s.kappa}, variance frozen after {s.warmup_steps:,} "
        f"steps, interval between syncs doubled every {s.local_doubling:,} steps, {s.local_limit} at most. "
        "One direction; scales and padding are left out."
    )


def markdown(setting: VolumeSchedules, lengths: Sequence[int]) -> str:
    """The whole page."""
    made = [table.markdown(2) for table in tables(setting, lengths)]
    return sentences.page("zero_one_adam_volume", title=TITLE, caution=caution(setting).text, tables=made)


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


# ---- the command ------------------------------------------------------------------------------------------------------

OPTIONS = {
    "kappa": ("kappa", "variance rounds before their gap doubles"),
    "freeze": ("warmup_steps", "last step with a variance round"),
    "doubling": ("local_doubling", "steps before the interval doubles"),
    "limit": ("local_limit", "largest interval between syncs"),
}
"""Options of the command line: the field of `VolumeSchedules`, and what it is."""


def parse(arguments: Sequence[str] | None) -> tuple[VolumeSchedules, list[int], argparse.Namespace]:
    """The command line. Raises UserError for numbers out of range."""
    parser = command.parser(__doc__)
    parser.add_argument("--steps", default=",".join(map(str, LENGTHS)), help="lengths of the run, separated by commas")
    for name, (field, what) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=int, default=getattr(VolumeSchedules, field), help=what)
    parser.add_argument("--results", default=LOCAL, help="results folder")
    parser.add_argument("--print-only", action="store_true", help="write no file")
    options = parser.parse_args(arguments)
    numbers = options.steps.split(",")
    if not all(n.strip().isdigit() and int(n) > 0 for n in numbers):
        raise UserError(f"--steps must be whole numbers above 0, such as 118000,152511, not '{options.steps}'")
    for name in OPTIONS:
        if getattr(options, name) < 1:
            raise UserError(f"--{name} must be at least 1, not {getattr(options, name)}")
    setting = VolumeSchedules(**{field: getattr(options, name) for name, (field, _) in OPTIONS.items()})
    return setting, [int(n) for n in numbers], options


@command.report_errors
def main(arguments: Sequence[str] | None = None) -> int:
    setting, lengths, options = parse(arguments)
    console = terminal()
    Note(TITLE, "strong").show(console)
    caution(setting).show(console)
    for table in tables(setting, lengths):
        table.show(console)
    if not options.print_only:
        path = Path(options.results) / TABLE
        write_file(path, markdown(setting, lengths).encode(), "table")
        print(f"table: {path}")
    return 0


if __name__ == "__main__":
    command.start(main)
