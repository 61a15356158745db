"""Paired differences of methods: intervals that cover what they should, verdicts against a margin that was stated."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from experiments.config import compose
from experiments.records.record import ResultRecord
from experiments.report import accuracy
from experiments.report.metrics import Difference, StatedParity, difference, holm
from launch.errors import UserError
from tests.helpers.records import score


def test_what_both_share_drops_out() -> None:
    base = {s: 90.0 + 5 * s for s in range(5)}  # seeds differ by far more than methods do
    same = difference({s: v + 0.5 for s, v in base.items()}, base)
    assert same == Difference(0.5, 0.5, 0.5, 5)
    # Student's t of 2 degrees of freedom, 97.5 %: 4.3027.
    found = difference({0: 1.0, 1: 2.0, 2: 3.0}, {0: 0.0, 1: 0.0, 2: 0.0})
    assert found is not None
    assert found.value == 2.0
    assert found.low == pytest.approx(2 - 4.3027 / 3**0.5, abs=1e-4)
    assert found.high == pytest.approx(2 + 4.3027 / 3**0.5, abs=1e-4)


def test_seeds_that_only_one_has_do_not_count() -> None:
    found = difference({0: 1.0, 1: 2.0, 7: 99.0}, {0: 0.0, 1: 1.0, 3: -99.0})
    assert found == Difference(1.0, None, None, 2)
    assert difference({0: 1.0}, {1: 1.0}) is None
    assert difference({0: 1.0}, {0: 2.0}) == Difference(-1.0, None, None, 1)


def test_two_seeds_that_differ_by_the_same_decide_nothing() -> None:
    """Accuracies are multiples of 1/360 on digits: two differences are often equal, and Student's t of them would be 0."""
    found = difference({0: 97.5, 1: 97.0}, {0: 96.5, 1: 96.0})
    assert found is not None
    assert found.verdict(0.5, True) == found.verdict(1.0, True) == "not decided"
    assert found.p == 1.0
    assert difference({0: 97.5, 1: 97.0}, {0: 97.5, 1: 97.0}) == Difference(0.0, 0.0, 0.0, 2)  # the same runs


def test_relative_differences_are_shares_of_the_baseline() -> None:
    found = difference({0: 103.0, 1: 206.0, 2: 309.0}, {0: 100.0, 1: 200.0, 2: 300.0}, relative=True)
    assert found is not None
    assert found.value == pytest.approx(0.03)
    assert found.text(relative=True) == "+3.00 [3.00, 3.00] %"
    assert difference({0: 1.0}, {0: 0.0}, relative=True) is None
    # A correlation of 30 is better than one of -2: the quotient would have it 1,600 % worse.
    assert difference({0: 30.0, 1: 31.0}, {0: -2.0, 1: -2.1}, relative=True) is None


@pytest.mark.parametrize(
    ("low", "high", "higher", "verdict"),
    [
        (-0.9, 0.9, True, "parity"),
        (0.1, 0.9, True, "parity"),  # a difference, but one that was stated to count as none
        (0.1, 1.1, True, "better"),
        (-1.1, -0.1, True, "worse"),
        (0.1, 1.1, False, "worse"),
        (-3.0, -2.0, False, "better"),
        (-1.1, 0.5, True, "not decided"),
        (-0.5, 1.1, True, "not decided"),
        (None, None, True, "not decided"),
    ],
)
def test_verdicts(low: float | None, high: float | None, higher: bool, verdict: str) -> None:
    assert Difference(0.0, low, high, 5).verdict(1.0, higher) == verdict


def test_the_interval_holds_the_difference_in_95_of_100_studies() -> None:
    studies, n, true = 2000, 5, 0.3
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(studies):
        base = rng.normal(90, 3, n)
        method = base + rng.normal(true, 0.4, n)
        found = difference(dict(enumerate(method)), dict(enumerate(base)))
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        held += found.low <= true <= found.high
    # Binomial: 5 sigmas, false-alarm rate 6e-7 with another seed.
    assert abs(held / studies - 0.95) < 5 * (0.95 * 0.05 / studies) ** 0.5


def runs(parity: dict[str, Any] | None, higher: bool = True) -> list[ResultRecord]:
    """SGDM, Birder at two learning rates, 1-bit Adam, with three seeds each."""
    values = {("SGDM fp32", 0.1): 0.0, ("SGDM bf16", 0.1): 9.0, ("Birder", 0.01): 0.1, ("Birder", 0.1): -5.0,
              ("1-bit Adam", 0.1): -2.0}  # fmt: skip
    made = []
    for (method, lr), shift in values.items():
        for seed in range(3):
            value = 90.0 + 3 * seed + (shift if higher else -shift) + 0.01 * seed * (method != "SGDM fp32")
            metric = {"name": "m", "value": value, "target": None, "higher_is_better": higher, "all": {"m": value}}
            r = score(method, value, seed, lr, metric=metric)
            config = {**r.config, **({"parity": parity} if parity else {})}
            made.append(dataclasses.replace(r, config=config))
    return made


@pytest.mark.parametrize("higher", [True, False])
def test_tables_print_differences_and_verdicts_of_the_best_rates(higher: bool) -> None:
    (table,) = accuracy.build(runs({"baseline": "sgdm", "margin": 0.5}, higher))
    assert table.baseline is not None
    assert table.baseline.label == "SGDM fp32"
    found = {(c.label, c.lr): table.compared(c) for c in table.cells}
    assert found["SGDM fp32", 0.1] is None  # the baseline itself
    assert found["Birder", 0.1] is None  # not its best rate
    verdicts = {key: d.verdict(0.5, higher) for key, d in found.items() if d is not None}
    assert verdicts == {("SGDM bf16", 0.1): "better", ("Birder", 0.01): "parity", ("1-bit Adam", 0.1): "worse"}
    text = accuracy.as_table(table).markdown()
    assert "vs SGDM fp32" in text
    assert "| parity |" in text
    assert "Parity: the interval lies within 0.5" in text


def test_no_verdict_without_a_margin_that_all_runs_share() -> None:
    (table,) = accuracy.build(runs(None))
    assert "verdict" not in accuracy.as_table(table).markdown()
    mixed = [*runs({"baseline": "SGDM", "margin": 0.5})[:7], *runs({"baseline": "SGDM", "margin": 5.0})[7:]]
    (table,) = accuracy.build(mixed)
    assert "verdict" not in accuracy.as_table(table).markdown()


def test_experiments_state_their_margins() -> None:
    stated = {
        exp: StatedParity.of(compose.resolve(compose.compose([f"+exp={exp}"])))
        for exp in ("bert_squad", "ptb", "digits")
    }
    assert stated == {
        "bert_squad": StatedParity(baseline="BertAdam", margin=1.0),
        "ptb": StatedParity(baseline="BertAdam", margin=0.03, relative=True),
        "digits": StatedParity(baseline="SGDM", margin=1.0),
    }
    assert StatedParity.of(compose.resolve(compose.compose([]))) is None
    with pytest.raises(UserError, match=r"parity\.margin"):
        compose.resolve(compose.compose(["parity.margin=-1"]))


def test_p_and_holm_are_those_of_scipy_and_of_the_book() -> None:
    from scipy import stats

    rng = np.random.default_rng(3)
    base = dict(enumerate(rng.normal(90, 1, 5)))
    others = [{s: v + shift + rng.normal(0, 0.3) for s, v in base.items()} for shift in (0.0, 0.5, 2.0)]
    found = [gap for other in others if (gap := difference(other, base)) is not None]
    for gap, other in zip(found, others, strict=True):
        assert gap.p == pytest.approx(stats.ttest_rel(list(other.values()), list(base.values())).pvalue)
    p = [gap.p for gap in found]
    order = np.argsort(p)
    expected, least = [0.0] * 3, 0.0
    for rank, i in enumerate(order):
        least = max(least, (3 - rank) * p[i])
        expected[i] = min(1.0, least)
    assert holm(found) == pytest.approx(expected)
    assert Difference(1.0, 1.0, 1.0, 3).p == 0.0
    assert Difference(0.0, 0.0, 0.0, 3).p == Difference(1.0, None, None, 1).p == 1.0


def seeds(method: str, values: list[float], lr: float = 0.1, **changes: Any) -> list[ResultRecord]:
    made = [score(method, v, seed, lr, **changes) for seed, v in enumerate(values)]
    return [dataclasses.replace(r, config=r.config | {"parity": PARITY}) for r in made]


PARITY = {"baseline": "SGDM", "margin": 0.1, "relative": False}


def test_better_is_said_after_correction_for_all_methods_alone() -> None:
    base = seeds("SGDM fp32", [90.0, 90.0, 90.0])
    good = [90.6, 90.9, 91.2]  # p = 0.036
    (alone,) = accuracy.build([*base, *seeds("Birder", good)])
    (crowd,) = accuracy.build(
        [*base, *seeds("Birder", good), *seeds("1-bit Adam", [89.0, 91.2, 90.1]), *seeds("SGDM bf16", good)]
    )
    (bad,) = accuracy.build([*base, *seeds("Birder", [89.4, 89.1, 88.8]), *seeds("1-bit Adam", [89.0, 91.2, 90.1])])
    said = [next(t.verdict(c) for c in t.chosen if c.label == "Birder") for t in (alone, crowd, bad)]
    assert said == ["better", "not decided", "worse"]  # what is lost needs no correction


def test_better_is_not_said_against_a_rate_at_which_the_baseline_loses_to_itself() -> None:
    """The choice is that of held-out data with the seed that all rates have; with more seeds another rate is better."""

    def kept(method: str, values: list[float], held_out: float, lr: float) -> list[ResultRecord]:
        made = seeds(method, values, lr)
        return [
            dataclasses.replace(r, metric=r.metric | {"all": {"top1": r.metric["value"], "held_out": held_out}})
            for r in made
        ]

    lucky = kept("SGDM fp32", [88.0], 70.0, 0.1) + kept("SGDM fp32", [88.0, 88.0, 88.0], 60.0, 0.1)[1:]
    other = kept("SGDM fp32", [90.0, 90.0, 90.0], 69.0, 0.3)
    (table,) = accuracy.build([*lucky, *other[:1], *kept("Birder", [90.1, 90.2, 90.0], 69.0, 0.1)])
    assert table.held_against is table.baseline
    assert next(table.verdict(c) for c in table.chosen if c.label == "Birder") == "better"
    lucky = [r for r in lucky if r.seed != 2]
    (table,) = accuracy.build([*lucky, *other[::2], *kept("Birder", [90.1, 90.2, 90.0], 69.0, 0.1)])
    assert table.baseline is not None
    assert table.baseline.lr == 0.1
    assert table.held_against is not None
    assert table.held_against.lr == 0.3
    assert next(table.verdict(c) for c in table.chosen if c.label == "Birder") != "better"
