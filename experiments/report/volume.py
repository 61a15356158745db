"""What 0/1 Adam sends over a whole run, from its schedule alone, beside the published numbers. No torch.

Volumes are bits per parameter in one direction; scales and padding are left out. studies/volume.py is the command.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from experiments.records.record import write_file
from experiments.report import published
from experiments.report.table import Note, Table, terminal
from launch.errors import UserError

if TYPE_CHECKING:
    from birder.optimizers.zero_one_schedule import Rounds

    Measure = Callable[[Rounds], float]

TABLE = "tables/zero_one_adam_volume.md"
LENGTHS = (118_000, 152_511)
"""Steps of the published runs of BERT-Base and BERT-Large."""
TITLE = "0/1 Adam: rounds and volume of a whole run"
RULES = {"as published": False, "reference implementation": True}
SEARCH = range(20_000, 400_001, 100)
"""Run lengths among which those are looked for that give a published number."""


@dataclass(frozen=True)
class Setting:
    """The two schedules. onebit_warmups: 1-bit Adam's dense steps, with the model that they are published for."""

    kappa: int = 16
    warmup_steps: int = 12_500
    local_doubling: int = 32_678
    local_limit: int = 16
    onebit_warmups: tuple[tuple[str, int], ...] = (("BERT-Large", 23_000), ("BERT-Base", 16_000))

    def rounds(self, steps: int, aligned: bool) -> Rounds:
        """How often a run of so many steps communicates. Imports torch, as all of birder.optimizers."""
        from birder.optimizers import zero_one_schedule as schedule

        return schedule.rounds(
            steps, self.warmup_steps, self.kappa, self.local_doubling, self.local_limit, aligned=aligned
        )


def bits(rounds: Rounds, wire: int) -> float:
    """Bits per parameter over the run, one way; `wire`: bits of a float in variance rounds."""
    return wire * rounds.dense + rounds.onebit


def onebit_adam_bits(steps: int, warmup: int, wire: int) -> float:
    """The same of 1-bit Adam."""
    dense = min(steps, warmup)
    return wire * dense + (steps - dense)


def against_adam(rounds: Rounds, wire: int) -> float:
    """How many times less than an all-reduce of floats in every step."""
    return wire * rounds.steps / bits(rounds, wire)


def against_onebit_adam(rounds: Rounds, warmup: int, wire: int) -> float:
    """The share of 1-bit Adam's volume that is saved."""
    return 1 - bits(rounds, wire) / onebit_adam_bits(rounds.steps, warmup, wire)


def rounds_saved(rounds: Rounds) -> float:
    """The share of steps without any round."""
    return rounds.skipped / rounds.steps


ROUNDS = ("rule", "steps", "variance rounds", "1-bit rounds", "steps without", "fewer")


def rounds_rows(setting: Setting, lengths: Sequence[int]) -> list[list[str]]:
    rows = []
    for rule, aligned in RULES.items():
        for steps in lengths:
            r = setting.rounds(steps, aligned)
            counts = [f"{n:,}" for n in (steps, r.dense, r.onebit, r.skipped)]
            rows.append([rule, *counts, _percent(rounds_saved(r))])
    return rows


def volume_head(setting: Setting) -> list[str]:
    against = [f"less than 1-bit Adam, {warmup:,} dense ({name})" for name, warmup in setting.onebit_warmups]
    return ["rule", "steps", "dense rounds in", "bits per parameter and step", "less than Adam", *against]


def volume_rows(setting: Setting, lengths: Sequence[int]) -> list[list[str]]:
    rows = []
    for rule, aligned in RULES.items():
        for wire in (16, 32):
            for steps in lengths:
                r = setting.rounds(steps, aligned)
                saved = [_percent(against_onebit_adam(r, warmup, wire)) for _, warmup in setting.onebit_warmups]
                each = [f"{bits(r, wire) / steps:.3f}", f"{against_adam(r, wire):.1f}x"]
                rows.append([rule, f"{steps:,}", f"fp{wire}", *each, *saved])
    return rows


# ---- beside the published numbers ------------------------------------------------------------------------------------

CLAIMS = (
    ("volume reduction against 1-bit Adam, at most", "onebit"),
    ("fewer communication rounds, at most", "rounds"),
    ("volume reduction against Adam, BERT-Large, at most", "adam"),
    ("volume reduction, first arXiv version", "onebit"),
)
"""Quantities of results/paper/zero_one_adam.json, and what they are to be compared with."""


def readings(setting: Setting, kind: str) -> list[tuple[str, Measure]]:
    """The ways in which a published number can be read."""
    if kind == "rounds":
        return [("steps without any round", rounds_saved)]
    if kind == "adam":
        return [("against fp16 Adam", lambda r: against_adam(r, 16))]
    return [
        (
            f"against 1-bit Adam with {warmup:,} fp{wire} steps ({name})",
            lambda r, warmup=warmup, wire=wire: against_onebit_adam(r, warmup, wire),  # type: ignore[misc]
        )
        for name, warmup in setting.onebit_warmups
        for wire in (16, 32)
    ]


def claim(quantity: str) -> dict[str, Any]:
    """The published number of that name. Raises UserError when results/paper has none."""
    for entry in published.load():
        if entry["quantity"] == quantity and "0/1 Adam" in entry["source"]:
            return entry
    raise UserError(f"results/paper/zero_one_adam.json has no '{quantity}': give it back its name")


def passed_at(setting: Setting, measure: Measure, value: float) -> str:
    """Run lengths at which the measure passes `value`, to 100 steps, by the rule as published."""
    above = [measure(setting.rounds(steps, False)) >= value for steps in SEARCH]
    crossings = [steps for steps, now, before in zip(SEARCH[1:], above[1:], above, strict=False) if now != before]
    return ", ".join(f"{c:,}" for c in crossings) or ("always more" if above[0] else "always less")


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
        found: list[tuple[float, str]] = []
        for words, measure in readings(setting, kind):
            values = [measure(setting.rounds(steps, False)) for steps in lengths]
            rows.append([shown, words, *map(show, values), passed_at(setting, measure, target)])
            found += [
                (abs(value - target), f"{show(value)} {words}, {steps:,} steps")
                for value, steps in zip(values, lengths, strict=True)
            ]
        nearest = min(found)[1]
        sentences.append(
            f"Published: {quantity}: {shown} ({entry['source']}; {entry['status']}). Nearest here: {nearest}."
        )
    return head, rows, sentences


def tables(setting: Setting, lengths: Sequence[int]) -> list[Table]:
    """Rounds, volume, and both beside the published numbers."""
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
        "The sources at hand do not say for which run and which floats. Each reading has its own row (rule as "
        f"published); the last column has the run lengths from {SEARCH[0]:,} to {SEARCH[-1]:,} steps at which it "
        "passes the published number."
    )
    nearest = Note("\n".join(f"- {sentence}" for sentence in sentences))
    return [
        Table.text(ROUNDS, rounds_rows(setting, lengths), title="Rounds", notes=(rounds,)),
        Table.text(volume_head(setting), volume_rows(setting, lengths), title="Volume", notes=(floats,)),
        Table.text(head, rows, title="Beside the published numbers", notes=(readings_,), footnotes=(nearest,)),
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
    head = ["<!-- Made by studies/volume.py from the schedule; do not edit. -->", f"# {TITLE}", ""]
    made = [table.markdown(2) for table in tables(setting, lengths)]
    return "\n".join([*head, caution(setting).text, "", *made])


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
