"""Accuracy tables: seeds are averaged, settings are not, and the grid is all there."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from experiments.records.record import ResultRecord
from experiments.report import accuracy
from tests.records import score


def test_accuracy_is_mean_and_sample_sd_and_lists_the_whole_grid() -> None:
    records = [score("Birder", v, s, 0.001) for s, v in enumerate((90.0, 91.0, 92.0))]
    records += [score("Birder", v, s, 0.01) for s, v in enumerate((95.0, None))]
    records += [score("Birder", 80.0, 0, 0.0001), score("SGDM fp32", 93.0, 0, 0.1)]
    records += [score("Birder", None, 0, 0.1, status="failed", reason="loss is nan", metric={}, data={"name": None})]
    (table,) = accuracy.build(records)
    assert [(c.label, c.lr) for c in table.cells] == [
        ("SGDM fp32", 0.1),
        ("Birder", 0.0001),
        ("Birder", 0.001),
        ("Birder", 0.01),
        ("Birder", 0.1),
    ]
    assert table.cells[2].summary(None) == (91.0, 1.0)
    text = accuracy.markdown(table, plot=False)
    assert "| Birder | 0.001 | **91.00 ± 1.00** | 3 | 92 | best |" in text
    # One of two seeds is not finite: no candidate, and it shows.
    assert "| Birder | 0.01 | 95.00 | 1 of 2 | 92 |  |" in text
    assert "| Birder | 0.1 | failed: loss is nan | 0 of 1 | 92 |  |" in text
    assert "[2](../records/birder-0.001-2.json)" in text


def test_a_held_out_part_chooses_the_learning_rate() -> None:
    """Not the test metric, and not with hindsight: seed 0 decides, even when another seed fails later."""

    def scored(lr: float, seed: int, top1: float, held_out: float, **changes: Any) -> ResultRecord:
        metric = {"name": "top1", "value": top1, "target": None, "higher_is_better": True}
        return score(
            "Birder", top1, seed, lr, metric={**metric, "all": {"top1": top1, "held_out": held_out}}, **changes
        )

    records = [scored(0.1, 0, 99.0, 80.0), scored(0.2, 0, 90.0, 85.0), scored(0.2, 1, 91.0, 70.0)]
    records += [score("Birder", None, 2, 0.2, status="failed", reason="the loss is nan", metric={})]
    (table,) = accuracy.build(records)
    best = table.best("Birder")
    assert best is not None
    assert best.lr == 0.2
    text = accuracy.markdown(table, plot=False)
    assert "| Birder | 0.2 | **90.50 ± 0.71** | 77.50 ± 10.61 | 2 of 3 | — | best |" in text
    assert "chosen by held_out of its first seed" in text


def test_lower_is_better_for_perplexity() -> None:
    metric: dict[str, Any] = {"name": "perplexity", "target": None, "higher_is_better": False, "all": {}}
    records = [score("Birder", None, 0, lr, metric={**metric, "value": v}) for lr, v in ((0.1, 150.0), (0.2, 180.0))]
    (table,) = accuracy.build(records)
    best = table.best("Birder")
    assert best is not None
    assert best.lr == 0.1
    assert "lower is better" in accuracy.markdown(table, plot=False)


def test_accuracy_knows_neither_synthetic_data_nor_runs_without_communication() -> None:
    synthetic = score("Birder", 99.0, 0, 0.1, data={"name": "synthetic", "synthetic": True})
    assert accuracy.build([synthetic, score("no communication", 50.0, 0, 0.1)]) == []


def test_settings_and_variants_are_never_averaged_together() -> None:
    a = score("Birder", 90.0, 0, 0.1)
    other_steps = json.loads(json.dumps(a.config))
    other_steps["train"]["max_steps"] = 900
    other_beta = json.loads(json.dumps(a.config))
    other_beta["optimizer"]["beta"] = 0.9
    b = dataclasses.replace(a, id="b", config=other_steps, seed=1)
    c = dataclasses.replace(a, id="c", config=other_beta, seed=1)
    found = accuracy.build([a, b, c])
    assert [[cell.label for cell in t.cells] for t in found] == [["Birder", "Birder (optimizer.beta=0.9)"], ["Birder"]]


def test_the_same_seed_again_replaces_the_older_run() -> None:
    again = score("Birder", 95.0, 0, 0.1, id="again", time="2026-05-01T00:00:00Z")
    (table,) = accuracy.build([score("Birder", 90.0, 0, 0.1), again])
    assert [r.id for r in table.cells[0].records] == ["again"]
