"""Suites: what a file may hold, how options are written, and that the published pages come from the published records."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

import birder
from experiments import replay
from experiments.cells import engine, suite
from experiments.cells.setups import Setup
from experiments.records.record import ROOT
from experiments.report import figure, replay_page, replayed
from experiments.workloads.base import Shard
from launch.errors import UserError
from tests.helpers.records import run

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
    for wrong in ("kernels=false", "methods=false", "kernels=true"):  # kernels is no switch, nor short for one
        with pytest.raises(UserError, match=r"no such switch|unrecognized"):
            replay.parse(["suite=bench", wrong])


def test_every_step_of_the_slowest_node_is_kept_and_nothing_is_called_a_percentile() -> None:
    def node(*walls: float) -> list[dict[str, Any]]:
        return [{"wall_ms": w, **dict.fromkeys(engine.PARTS, w / 10)} for w in walls]

    found = engine.timing_of(engine.slowest([node(10.0, 30.0, 20.0), node(12.0, 11.0, 25.0)]), samples=64)
    assert found["steps_ms"] == [12.0, 30.0, 25.0]
    assert (found["steps"], found["median_ms"], found["min_ms"], found["max_ms"]) == (3, 25.0, 12.0, 30.0)
    assert found["samples_per_s"] == pytest.approx(1000 * 64 / 25)
    assert set(found["split"]) == set(engine.PARTS)
    assert not {"p10_ms", "p90_ms"} & set(found)


class Waits(Setup):
    """100 ms in a step that sends, 10 ms in others; one in two sends here, one in `every` in what is replayed."""

    def __init__(self, every: int, steps: int) -> None:
        options = {"_target_": "birder.SparseLoCo", "message": "dense", "sync_every": 2}
        self.method = suite.SuiteMethod(label="DiLoCo", wire="model", every=every, fraction=1.0, optimizer=options)
        self.optimizer = birder.SparseLoCo([torch.nn.Parameter(torch.zeros(2))], lr=0.1, message="dense", sync_every=2)
        self.optimizer.steps = steps

    def step(self) -> dict[str, float]:
        self.optimizer.steps += 1
        return {"wall_ms": 10.0 if self.optimizer.steps % 2 else 100.0}


@pytest.mark.parametrize("steps", [0, 1])
def test_of_local_steps_one_in_so_many_counts_as_one_that_sends(steps: int) -> None:
    """Whichever of the two kinds comes first: (100 + 4 * 10) / 5."""
    assert Waits(5, steps)._typical() == {"wall_ms": pytest.approx(28.0)}


def test_bytes_of_local_steps_are_of_a_step_and_not_of_a_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = suite.load("bench")
    (name,) = (name for name, method in bench.methods.items() if method.every == 500)
    cell = bench.cells(bench.places(), [name])[0]
    monkeypatch.setattr(engine, "gathered", lambda mine: [mine])
    node = object.__new__(engine.Node)
    node.suite, node.size, node.shard, node.link, node._template = bench, 1, Shard(0, 1), {}, run("SGDM fp32")
    node.spec = SimpleNamespace(config={"workload": {}})
    parts = dict.fromkeys(engine.PARTS, 1.0)
    turn = {"wall_ms": 10.0, **parts, "sent": 1_000_000, "collectives": 50, "nic": (2_000_000, 500_000), "state": 8}
    kept = node._record(suite.scale(bench, cell, 100.0), [turn, turn], None, {})
    assert kept is not None
    sent = {name: kept.bytes_per_step[name] for name in ("payload_inter", "nic_tx", "nic_rx")}
    assert sent == {"payload_inter": 2000, "nic_tx": 4000, "nic_rx": 1000}
    assert kept.collectives_per_step == 0.1


def test_reports_need_no_torch() -> None:
    names = [f"experiments.report.{p.stem}" for p in (ROOT / "experiments" / "report").glob("[!_]*.py")]
    code = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
