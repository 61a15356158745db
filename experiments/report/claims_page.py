"""The page of the papers' claims: which rows it has, in which order, and what stands above them. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.records.record import PUBLISHED, ResultRecord, read_all
from experiments.report import claims, claims_predicted, volume
from experiments.report import claims_measured as measured
from experiments.report.claims import TABLES, Claim
from launch.errors import UserError

STEPS = volume.LENGTHS[1]
"""Of 0/1 Adam's longer published run, BERT-Large."""
NOTES = (
    "Of every headline claim: what was run here, and whether it came out. **trained**: real gradients, on emulated nodes "
    "and links. **replayed**: real collectives, computing waited for ([how](replay.md)). **predicted**: simulated from "
    "bytes, link rates and stated computing times, nothing fitted ([how](predict.md)); the assumptions stand in "
    "`experiments/cells/claimed.py`. **computed**: arithmetic. No GPU of the papers' clusters was at hand, so nothing here "
    "is a measurement of theirs.",
    "",
    "Wordings are the papers', in short; how far each source could be read is said beside it. "
    "`python experiments/claims.py` makes this page again, byte for byte; verdicts follow from the numbers.",
)


def zero_one_volume() -> list[Claim]:
    """87 % and 54 %, from the schedule alone."""
    setting, made = volume.Setting(), []
    for quantity, kind, text in (
        ("volume reduction against 1-bit Adam, at most", "onebit", "0/1 Adam sends up to {} % less than 1-bit Adam"),
        ("fewer communication rounds, at most", "rounds", "0/1 Adam has up to {} % fewer rounds of communication"),
    ):
        entry = volume.claim(quantity)
        target = float(entry["value"]) / 100
        found = [
            (measure(setting.rounds(steps, False)), f"{words}, {steps:,} steps")
            for words, measure in volume.readings(setting, kind)
            for steps in volume.LENGTHS
        ]
        found.sort()
        above = [f for f in found if f[0] >= target]
        shown = f"{100 * found[0][0]:.1f} % to {100 * found[-1][0]:.1f} % over {len(found)} readings"
        if above:
            least, most = ((f"{100 * value:.1f} %", words) for value, words in (found[0], above[0]))
            verdict = f"confirmed {most[1]} ({most[0]}); least is {least[0]}, {least[1]}"
        else:
            passed = volume.passed_at(setting, volume.readings(setting, kind)[0][1], target)
            verdict = f"not reached because these runs are too short: {100 * target:g} % is passed at {passed} steps"
        made.append(
            Claim(
                text.format(f"{entry['value']:g}"),
                f"{entry['source']}; {entry['status']}",
                "computed",
                f"[the schedule]({TABLES}/zero_one_adam_volume.md) over 118,000 and {STEPS:,} steps",
                shown,
                verdict,
            )
        )
    return made


def collect(records: Sequence[ResultRecord]) -> list[Claim]:
    """All rows, in the order of the page. Rows whose records are not there are left out."""
    rounds = volume.Setting().rounds(STEPS, False)
    schedule = rounds.dense, rounds.onebit, rounds.skipped
    adam = ("AdamW fp32", "BertAdam fp32")

    def same(text: str, method: str, source: str, bases: Sequence[str], tasks: Sequence[int] = (0,)) -> Claim | None:
        return measured.same_accuracy(records, text, f"{source}, abstract; verified", method, bases, tasks)

    found: list[Claim | None] = [
        *measured.birder_replayed(records),
        *claims_predicted.birder_predicted(),
        measured.birder_trained(records),
        measured.birder_bytes(records),
        same(
            "Birder is as accurate as SGDM and Adam",
            "Birder",
            "Birder, NeurIPS 2023",
            ("SGDM fp32", *adam),
            (0, 1, 2, 3),
        ),
        *claims_predicted.onebit_volumes(),
        *claims_predicted.bert_large_speeds(schedule, STEPS),
        *zero_one_volume(),
        same("0/1 Adam converges as Adam does", "0/1 Adam", "0/1 Adam, ICLR 2023", adam),
        *claims_predicted.cser_speeds(),
        same("CSER is as accurate as SGD", "CSER", "CSER, NeurIPS 2020", ("SGDM Nesterov fp32", "SGDM fp32"), (0, 3)),
        claims_predicted.slamb_volume(),
        claims_predicted.slamb_scaling(),
        same("SLAMB is as accurate as LAMB", "SLAMB", "SLAMB, ICML 2023", ("LAMB fp32",)),
        *claims_predicted.untried(),
    ]
    return [c for c in found if c is not None]


def text(results: str | Path = PUBLISHED) -> str:
    """The page. Raises UserError where a published number or a record cannot be read."""
    try:
        return claims.page(collect(read_all(results)), NOTES)
    except KeyError as error:
        raise UserError(str(error.args[0])) from None
