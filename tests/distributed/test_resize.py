"""The study of what a change of the number of workers costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.records.record import PUBLISHED
from experiments.workloads.base import Shard
from experiments.workloads.digits import Digits
from studies import resize
from tests.helpers.ranks import run_ranks

SHORT = resize.Lengths(3, 5)


def short(rank: int, world: int) -> dict[str, Any]:
    workload = Digits()
    workload.prepare(Shard())
    config = resize.settings("birder", 1)
    two = resize.ResizedWorld(config, workload, 2, SHORT.steps)
    straight = two.train(range(1, SHORT.steps + 1), look=True)
    states = two.states()
    four = resize.ResizedWorld(config, workload, 4, SHORT.steps, two.parameters())
    kept = {}
    for rule in ("mean", "zeros"):
        four.take(states, rule)
        kept[rule] = {
            name: [bool(o.units[0].state[name].any()) for o in four.ranks.optimizers] for name in ("m", "b", "active")
        }
    return {"lines": resize.measure("birder", 1, SHORT), "straight": straight, "kept": kept}


@pytest.mark.slow
def test_losses_of_every_change_and_rule() -> None:
    (found,) = run_ranks(short, 1)
    lines = found["lines"]
    changes = [(line["before"], line["after"], line["rule"]) for line in lines]
    assert changes == [(n, k, rule) for n, k in ((4, 2), (4, 3), (2, 8)) for rule in resize.RULES]
    losses = {change: line["losses"] for change, line in zip(changes, lines, strict=True)}
    assert all(len(values) == SHORT.steps - SHORT.change for values in losses.values())
    # Looking changes nothing, and the unchanged run is one that nobody interrupts.
    assert losses[2, 8, "unchanged"] == [round(loss, 6) for loss in found["straight"][SHORT.change :]]
    assert losses[4, 2, "unchanged"] == losses[4, 3, "unchanged"]
    for n, k in ((4, 2), (4, 3), (2, 8)):
        assert len({tuple(losses[n, k, rule]) for rule in resize.RULES}) == 3
    assert found["kept"]["mean"] == {"m": [True] * 4, "b": [True] * 4, "active": [True] * 4}
    assert found["kept"]["zeros"] == {"m": [False] * 4, "b": [False] * 4, "active": [True] * 4}


def line(rule: str, seed: int, loss: float) -> dict[str, Any]:
    count = resize.STEPS - resize.CHANGE
    told = {"method": "birder", "before": 4, "after": 2, "rule": rule, "seed": seed}
    return {**told, "losses": [loss] * (count // 2) + [loss / 2] * (count - count // 2)}


def test_the_table_shows_shares_of_the_unchanged_runs_loss() -> None:
    lines = [line("unchanged", s, 1.0) for s in (0, 1)]
    lines += [line("mean", s, 1.0 + 0.01 * s) for s in (0, 1)] + [line("zeros", s, 1.1 + 0.02 * s) for s in (0, 1)]
    (row,) = resize.table(lines).rows
    # Student's t with one degree of freedom: 12.706 times the standard errors, 0.5 and 1 %.
    assert row == ("Birder, 4 → 2", "1.000", *["+0.50 [-5.85, 6.85] %", "+11.00 [-1.71, 23.71] %"] * 2)


def test_published_losses_have_a_value_for_each_step_after_the_change() -> None:
    lines = resize.read(PUBLISHED / resize.FILE)
    assert {len(item["losses"]) for item in lines} <= {resize.STEPS - resize.CHANGE}
    assert resize.page(lines) == (PUBLISHED / resize.PAGE).read_text(encoding="utf-8")


def test_a_bad_number_of_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    assert resize.main(["--seeds", "0"]) == 2
    assert capsys.readouterr().err == "error: --seeds is a number of 1 or more\n"
    assert list(tmp_path.iterdir()) == []
