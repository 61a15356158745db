"""The table of the papers' claims: which rows it has, and in which order. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.records.record import ResultRecord
from experiments.report import claims_measured as measured
from experiments.report import claims_predicted, volume
from experiments.report.claims import TABLES, Claim

STEPS = volume.LENGTHS[1]
"""Of 0/1 Adam's longer published run, BERT-Large."""


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
            nearest = min(found, key=lambda f: abs(f[0] - target))
            least, close, most = (f"{100 * value:.1f} %, {words}" for value, words in (found[0], nearest, found[-1]))
            verdict = f"confirmed by the nearest reading: {close}; exceeded by others, up to {most}; least is {least}"
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

    def same(text: str, methods: Sequence[str], source: str, bases: Sequence[str]) -> Claim | None:
        return measured.same_accuracy(records, text, f"{source}, abstract; verified", methods, bases)

    found: list[Claim | None] = [
        *measured.birder_replayed(records),
        *claims_predicted.birder_predicted(),
        measured.birder_trained(records),
        measured.birder_bytes(records),
        same(
            "Birder is as accurate as SGDM and Adam",
            ("Birder", "Birder hierarchical"),
            "Birder, NeurIPS 2023",
            ("SGDM fp32", *adam),
        ),
        *claims_predicted.onebit_volumes(),
        *claims_predicted.bert_large_speeds(schedule, STEPS),
        *zero_one_volume(),
        same("0/1 Adam converges as Adam does", ("0/1 Adam",), "0/1 Adam, ICLR 2023", adam),
        *claims_predicted.cser_speeds(),
        same("CSER is as accurate as SGD", ("CSER",), "CSER, NeurIPS 2020", ("SGDM Nesterov fp32", "SGDM fp32")),
        claims_predicted.slamb_volume(),
        claims_predicted.slamb_scaling(),
        same("SLAMB is as accurate as LAMB", ("SLAMB",), "SLAMB, ICML 2023", ("LAMB fp32", "AdamW fp32")),
        *claims_predicted.untried(),
    ]
    return [c for c in found if c is not None]
