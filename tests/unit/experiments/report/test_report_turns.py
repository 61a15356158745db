"""Tables of methods that took turns: intervals, ties, the cost of updates, a busy machine; old records too."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from experiments.records.record import ResultRecord
from experiments.report import captions, metrics, plots, speedup, speedup_table
from tests.helpers.records import cells, full_group, run

PACE = (1.0, 1.1, 0.9, 1.3, 1.0, 0.95, 1.05, 1.2, 1.0, 0.9)
WOBBLE = (1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0, 1.0)
ABOUT: dict[str, Any] = {
    "world": "w",
    "seed": 0,
    "held": "all",
    "repeated": False,
    "bound_ms": {"before": 600.0, "after": 606.0},
    "drift": 0.01,
    "busy": {"others": 0.01, "steal": 0.0, "load": 4.0, "cores": 2},
}


def timed(method: str, ms: float, shift: int = 0, **about: Any) -> ResultRecord:
    """A method that took turns: everybody's pace changes from round to round, its own a little."""
    each = [ms * p * WOBBLE[(k + shift) % 10] for k, p in enumerate(PACE)]
    r = run(method, sorted(each)[5])
    r.timing["median_ms"] = (sorted(each)[4] + sorted(each)[5]) / 2
    return dataclasses.replace(
        r, timing={**r.timing, "update_ms": 12.3}, turns={**ABOUT, **about, "ms": each, "steps": [2] * 10}
    )


def group(**about: Any) -> list[ResultRecord]:
    times = {
        "SGDM fp32": 3000.0,
        "SGDM bf16": 1700.0,
        "1-bit Adam": 1000.0,
        "Birder": 1001.0,
        "no communication": 600.0,
    }
    return [timed(method, ms, shift, **about) for shift, (method, ms) in enumerate(times.items())]


def test_speedups_have_intervals_and_ties_are_marked() -> None:
    (table,) = speedup.build(group())
    rows = {row.label: row for row in table.rows}
    found = metrics.interval(rows["SGDM fp32"].record, rows["Birder"].record)
    assert found is not None
    assert found.value == pytest.approx(table.speedup(rows["Birder"], "fp32"), rel=1e-3)
    assert found.low < found.value < found.high
    assert found.high - found.low < 0.15  # the pace of the machine is in all of them
    text = speedup_table.as_table(table).markdown()
    shown = cells(text, "Birder")
    assert shown[4] == f"{found.value:.2f}x [{found.low:.2f}, {found.high:.2f}]"
    assert shown[6].startswith("60 % [")
    assert shown[7] == "12.3"
    assert "| update, ms |" in text
    assert cells(text, "SGDM fp32")[4] == "1.00x"  # with itself
    assert "Not decided against Birder: 1-bit Adam" in str(captions.compression(table))
    assert "10 rounds in shuffled order" in text
    assert "busy" not in text
    close = [timed("SGDM fp32", 1000.0), timed("Birder", 999.0, 3)]
    (table,) = speedup.build(close)
    assert cells(speedup_table.as_table(table).markdown(), "Birder")[4].endswith("] =")
    assert str(captions.compression(table)).startswith("Whether to compress on this link is not decided")


def test_a_table_says_when_the_machine_was_busy_or_has_changed_its_pace() -> None:
    busy = {"others": 0.24, "steal": 0.02, "load": 5.5, "cores": 2}
    text = speedup_table.as_table(speedup.build(group(busy=busy))[0]).markdown()
    assert "**The machine was busy: other programs took 24 % of its 2 cores' time during the rounds" in text
    text = speedup_table.as_table(speedup.build(group(drift=-0.13, repeated=True))[0]).markdown()
    assert "the bound changed by -13% from the time" in text
    assert "repeated once" in str(captions.caution({**ABOUT, "repeated": True}))
    assert captions.caution(ABOUT) is None
    drifted = {"busy": None, "drift": -0.12, "repeated": False}
    assert "more than this machine carries" in str(captions.caution(drifted))
    assert "more than this machine carries" not in str(captions.caution({**drifted, "repeated": True}))
    assert "rebuilt in every round" in speedup_table.as_table(speedup.build(group(held="one"))[0]).markdown()


def test_a_table_of_too_few_rounds_speaks_of_no_interval() -> None:
    for count, words in ((3, "3 rounds in shuffled order; fewer than 4 give no interval"), (4, "[low, high] is the")):
        records = [dataclasses.replace(r, turns={**r.turns, "ms": r.turns["ms"][:count]}) for r in group()]
        (note,) = captions.notes(records)
        assert words in note.text
        assert ("[low, high]" in note.text) == (count == 4)


def test_records_without_rounds_have_no_intervals() -> None:
    old = full_group()
    (table,) = speedup.build(old)
    text = speedup_table.as_table(table).markdown()
    assert cells(text, "Birder")[4] == "3.75x"
    assert "update, ms" not in text
    assert "interval" not in text
    # Of different worlds, or one of them a run of its own: no pairs.
    assert metrics.interval(old[0], timed("Birder", 800.0)) is None
    assert metrics.interval(timed("SGDM fp32", 3000.0), timed("Birder", 800.0, world="another")) is None


def test_a_row_that_stands_for_several_runs_has_no_interval() -> None:
    """That of the median one would be of its rounds alone, not of what runs differ by."""
    twice = dataclasses.replace(timed("Birder", 990.0, 3), id="again", seed=1)
    (table,) = speedup.build([*group(), twice])
    row = table.row("Birder")
    found = table.compared(row, "fp32")
    assert row.runs == 2
    assert found is not None
    assert (found.low, found.high) == (None, None)
    assert metrics.interval(table.row("SGDM fp32").record, row.record) is not None  # which its rounds have


def test_plots_name_the_interval() -> None:
    (with_rounds,), (without,) = speedup.build(group()), speedup.build(full_group())
    assert plots.step_times(with_rounds) is not None
    assert plots.step_times(without) is not None
