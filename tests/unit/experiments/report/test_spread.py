"""The study of how far repeated comparisons differ."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from experiments import compare
from experiments.records import record
from experiments.records.record import ResultRecord
from experiments.report import spread as report
from studies import spread
from tests.helpers import ROOT
from tests.unit.experiments.report.test_report_turns import group


def comparison(name: str, birder: float = 1.0, others: float = 0.0) -> list[ResultRecord]:
    """Birder's steps take `birder` times as long as in the others."""
    busy = {"others": others, "steal": 0.0, "load": 2.0, "cores": 2}
    made = []
    for r in group(world=name, busy=busy):
        slower = birder if r.method == "Birder" else 1.0
        timing = {**r.timing, "median_ms": r.timing["median_ms"] * slower}
        made.append(
            dataclasses.replace(
                r, id=f"{name}-{r.id}", group=name, time=f"2026-01-0{name[-1]}T00:00:00Z", timing=timing
            )
        )
    return made


def test_the_largest_difference_of_any_two(tmp_path: Path) -> None:
    records = [*comparison("g1"), *comparison("g2", 1.04), *comparison("g3", 1.08, others=0.3)]
    found = report.runs(records, "resnet50", 4)
    assert [run.group for run in found] == ["g1", "g2", "g3"]
    assert [report.busy(run) for run in found] == [False, False, True]
    assert report.largest(found[:2]) == pytest.approx(0.04)
    assert report.largest(found) == pytest.approx(0.08)
    assert report.largest(found[:1]) is None
    assert report.sentences(found) == [
        "2 runs on the idle machine: speedups of methods differ by 4.0 % at most, within 5%; "
        "those of the bound by 0.0 % at most, within 5%.",
        "3 runs with those on the busy one: speedups of methods differ by 8.0 % at most, within 10%; "
        "those of the bound by 0.0 % at most, within 10%.",
    ]
    assert "NOT within 5%" in report.sentences([found[0], report.runs(comparison("g4", 1.2), "resnet50", 4)[0]])[0]
    text = report.as_table(found).markdown()
    assert "Birder vs fp32" in text
    assert "SGDM fp32 vs fp32" not in text
    assert text.count("| g") == 3
    failed = dataclasses.replace(records[0], status="failed")
    assert len(report.runs([failed, *records[1:]], "resnet50", 4)) == 2
    assert report.runs(records, "resnet50", 8) == []


def test_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []

    def compared(overrides: list[str], methods: list[str] | None) -> int:
        done.append(f"g{len(done) + 1}")
        for r in comparison(done[-1]):
            record.write(r, tmp_path / "results")
        return 0

    monkeypatch.setattr(compare, "compare", compared)
    common = ["resnet50", f"results_dir={tmp_path}/results", "cluster.nodes=4"]
    assert spread.main([*common, "--table"]) == 2
    assert "no interleaved comparison" in capsys.readouterr().err
    assert spread.main([*common, "--runs", "2", "--busy", "1", "--out", str(tmp_path / "spread.md")]) == 0
    assert len(done) == 3
    assert "Run 3 of 3, next to a busy core" in capsys.readouterr().out
    assert (tmp_path / "spread.md").read_text().count("| g") == 3
    assert spread.main([*common, "--table"]) == 0
    assert len(done) == 3


@pytest.mark.parametrize(("folder", "busy"), [("spread", [False] * 5 + [True] * 2), ("elsewhere", [True])])
def test_published_studies_know_which_runs_were_beside_a_busy_core(folder: str, busy: list[bool]) -> None:
    found = report.runs(record.read_all(ROOT / "results/published" / folder), "resnet50", 4)
    assert [report.busy(run) for run in found] == busy
