"""Suites: what a file may hold, how options are written, and that the published pages come from the published records."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments import replay
from experiments.cells import engine, suite
from experiments.records.record import ROOT
from experiments.report import figure, replay_page, replayed
from launch.errors import UserError

PUBLISHED = ROOT / "results/published"


def content(**changes: Any) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((suite.FILES.folder / "bench.yaml").read_text())
    return {**read, **changes}


@pytest.mark.parametrize("name", suite.names())
def test_published_pages_are_those_of_the_published_records(name: str) -> None:
    made = suite.load(name)
    results = replayed.load(made, PUBLISHED)
    page, picture = replay_page.paths(made, PUBLISHED)
    assert page.read_text() == replay_page.markdown(results)
    drawn = replay_page.plot(results, replay_page.mark(made))
    assert figure.digest(picture.read_bytes()) == figure.digest(drawn)


@pytest.mark.parametrize("name", suite.names())
def test_what_a_suite_names_exists(name: str) -> None:
    made = suite.load(name)
    assert made.name == name
    assert {c for s in made.report.sections for c in s.columns.values()} <= set(replay_page.QUANTITIES)
    assert {made.report.ours, *made.report.ratios} <= set(made.rows)
    assert all(m.checks is None or m.checks in made.rows for m in made.methods.values())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speed": 3}, "speed: extra inputs are not permitted"),
        ({"mbit": 0}, "mbit: input should be greater than 0"),
        ({"nodes": ["two"]}, "nodes.0: input should be a valid integer"),
        ({"models": {"a": {"title": "a", "fraction": "2/1"}}}, "models.a.fraction: input should be less than or equal"),
        ({"models": {"a": {"title": "a", "fraction": "1/0"}}}, "not a readable suite: Fraction(1, 0)"),
        ({"links": {"x": {"gbit": 1.0}}}, "links.x.title: field required"),
        ({"nodes": [2, 3]}, "links.loopback.fractions says nothing of bert_base on 3 nodes"),
        ({"record": "{speed}"}, "record may hold {model}, {rate}, {nodes}, {link}, {method}"),
        (
            {"methods": {"a": {"label": "a", "wire": "fp32", "fraction": 1, "optimizer": {}}}},
            "no method 'birder_one_phase'",
        ),
    ],
)
def test_a_wrong_suite_is_named_in_one_line(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content(**changes)))
    with pytest.raises(UserError) as caught:
        suite.load(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_suite_is_found_by_name_or_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content(name="mine", mbit=12.0)))
    made, options = replay.parse([f"suite={path}"])
    assert (made.name, options.mbit) == ("mine", 12.0)
    assert replay.main(["suite=nothing"]) == replay.main([]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors[0].startswith("error: no suite 'nothing'; there are: bench, paper")
    assert errors[1].startswith("error: which suite? suite=NAME; there are: bench, paper")
    assert replay.main(["suite=paper", "kernels_only=true"]) == 2
    assert "suite paper has no kernels" in capsys.readouterr().err


def test_a_key_and_a_flag_say_the_same() -> None:
    keys = ["suite=bench", "nodes=[8, 2]", "methods=birder,fp32", "profile=true", "no_kernels=false", "steps=5"]
    flags = ["--suite", "bench", "--nodes", "8,2", "--methods=birder,fp32", "--profile", "--steps", "5"]
    _, options = replay.parse(keys)
    assert options == replay.parse(flags)[1]
    assert (options.nodes, options.methods, options.steps) == ([2, 8], ["fp32", "birder"], 5)
    assert options.profile
    assert not options.no_kernels
    assert options.links == ["emulated", "loopback"]
    assert replay.parse(["suite=bench", "results=/my results [1]"])[1].results == "/my results [1]"


def test_every_step_of_the_slowest_node_is_kept_and_nothing_is_called_a_percentile() -> None:
    def node(*walls: float) -> list[dict[str, Any]]:
        return [{"wall_ms": w, **dict.fromkeys(engine.PARTS, w / 10)} for w in walls]

    found = engine.timing_of(engine.slowest([node(10.0, 30.0, 20.0), node(12.0, 11.0, 25.0)]), samples=64)
    assert found["steps_ms"] == [12.0, 30.0, 25.0]
    assert (found["steps"], found["median_ms"], found["min_ms"], found["max_ms"]) == (3, 25.0, 12.0, 30.0)
    assert found["samples_per_s"] == pytest.approx(1000 * 64 / 25)
    assert set(found["split"]) == set(engine.PARTS)
    assert not {"p10_ms", "p90_ms"} & set(found)


def test_reports_need_no_torch() -> None:
    names = [f"experiments.report.{p.stem}" for p in (ROOT / "experiments" / "report").glob("[!_]*.py")]
    code = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
