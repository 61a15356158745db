"""Timelines: checked when read, spread by the work of each layer, recorded on whatever there is."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from birder.predict.timeline import parse
from experiments import timelines as commands
from experiments.cells import timeline_tools, timelines
from launch.errors import UserError
from tests.helpers import ROOT

GOOD: dict[str, Any] = {
    "name": "two",
    "model": "two",
    "gpu": "none",
    "precision": "fp32",
    "batch_per_gpu": 4,
    "gpus_per_node": 8,
    "forward_ms": 2.0,
    "step_ms": 6.0,
    "intra_node": {"reduce_scatter_ms": 0.1, "all_reduce_ms": 0.2, "all_gather_ms": 0.01, "reason": "made up"},
    "gradients": [["a.weight", [8, 4], 6.0], ["a.bias", [8], 6.0], ["b.weight", [2, 8], 3.0]],
    "source": "a test",
}


def changed(**changes: Any) -> dict[str, Any]:
    content = copy.deepcopy(GOOD)
    content.update(changes)
    return {k: v for k, v in content.items() if v is not None}


def test_a_file_reads_back_as_it_was_written(tmp_path: Path) -> None:
    made = parse(GOOD, "here")
    path = timelines.write(made, tmp_path / "two.json")
    assert timelines.load(path) == made
    assert timelines.load(str(tmp_path / "two.json")) == made
    assert made.elements == 32 + 8 + 16
    assert made.layers == [[2], [0, 1]]
    assert len(path.read_text().splitlines()) < 25  # one line for each gradient, not one for each number


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], "a timeline is a JSON object"),
        (changed(step_ms=None), "lacks step_ms"),
        (changed(speed=3), "unknown key speed"),
        (changed(gpu=5), "gpu must be of type str, not 5"),
        (changed(batch_per_gpu="32"), "batch_per_gpu must be of type int, not '32'"),
        (changed(update_ms="slow"), "update_ms must be of type float, not 'slow'"),
        (changed(update_ms=-2.0), "update_ms and wall_ms must not be negative"),
        (changed(wall_ms=-2.0), "update_ms and wall_ms must not be negative"),
        (changed(step_ms=5.0), "forward_ms <= ready_ms <= step_ms"),
        (changed(forward_ms=3.5), "forward_ms <= ready_ms <= step_ms"),
        (changed(forward_ms=0.0), "forward_ms <= ready_ms <= step_ms"),
        (changed(gradients=[]), "no gradients"),
        (changed(gradients=[["a", [1], 3.0], ["a", [1], 4.0]]), "a stands there twice"),
        (changed(gradients=[["a", [0], 3.0]]), "shape of a is not positive"),
        (changed(gradients=[["a", [1], "soon"]]), "could not convert"),
        (changed(gradients=[["a", [1], float("nan")]]), "not a number"),
        (changed(batch_per_gpu=0), "at least 1"),
        (changed(source=None), "either a source or the command"),
        (changed(command="and how"), "either a source or the command"),
        (changed(intra_node={"reason": "none"}), "all_gather_ms"),
    ],
)
def test_wrong_content_is_named_in_one_line(content: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"^{re.escape(str(path))}") as caught:
        timelines.load(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_absent_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no timeline nothing; there are: .*resnet50_b32_tf32"):
        timelines.load("nothing")
    for content in (b"{", b'{"gpu": "caf\xe9"}'):  # not UTF-8
        (tmp_path / "x.json").write_bytes(content)
        with pytest.raises(UserError, match=r"x\.json is not a readable timeline"):
            timelines.load(tmp_path / "x.json")


@pytest.mark.parametrize("name", timelines.names())
def test_committed_timelines(name: str) -> None:
    """Names say what is inside; published rates give step times, and others were recorded on the GPU that they name; the
    models are the real ones, parameter for parameter."""
    t = timelines.load(name)
    assert t.name == name
    assert t.elements == {"resnet50": 25_557_032, "bert_base": 108_893_186}[t.model]
    assert max(g.ready_ms for g in t.gradients) == pytest.approx(t.step_ms, rel=1e-3)
    assert t.intra_node.all_reduce_ms == pytest.approx(2 * 7 / 8 * 4 * t.elements / 230e9 * 1000, rel=1e-3)
    assert name.startswith(f"{t.model}_b{t.batch_per_gpu}_{t.precision}")
    if t.source:
        rates = {("resnet50", "tf32"): 938, ("resnet50", "amp"): 2470, ("bert_base", "tf32"): 43.9 * 3.4}
        rate = rates.get((t.model, t.precision), 134 * 3.4)
        assert t.step_ms == pytest.approx(1000 * t.batch_per_gpu / rate, rel=1e-4)
        assert t.forward_ms == pytest.approx(t.step_ms / 3, rel=1e-4)
    else:
        assert name.rpartition("_")[2].upper() in t.gpu
        assert 0.2 < t.forward_ms / t.step_ms < 0.5
    order = [t.gradients[i].name for layer in t.layers for i in layer]
    assert order.index("fc.weight" if t.model == "resnet50" else "qa_outputs.weight") < 3
    assert order[-1] == ("conv1.weight" if t.model == "resnet50" else order[-1])


def test_work_is_spread_by_the_operations_of_each_layer() -> None:
    """Three linear layers by hand: a weight's gradient costs as much as the gradient handed on, which the first lacks."""
    work = {name: share for name, _, share in timeline_tools.work_until_ready("tiny")}
    macs = {"0": 64 * 64, "2": 64 * 32, "4": 32 * 10}
    total = 2 * macs["4"] + 2 * macs["2"] + macs["0"]
    assert work["4.weight"] == pytest.approx(2 * macs["4"] / total, abs=macs["4"] / total + 1e-9)
    assert work["2.weight"] == pytest.approx(2 * (macs["4"] + macs["2"]) / total, abs=macs["2"] / total + 1e-9)
    assert work["0.weight"] == 1.0
    assert work["4.weight"] < work["2.weight"] < work["0.weight"]
    assert work == {name: share for name, _, share in timeline_tools.work_until_ready("tiny")}


def test_make_and_record_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--model", "tiny", "--batch", "32", "--out"]
    made = tmp_path / "made.json"
    arguments = [
        *common,
        str(made),
        "--precision",
        "tf32",
        "--images-per-s",
        "3200",
        "--gpu",
        "X",
        "--source",
        "a book",
    ]
    assert commands.main(["make", *arguments]) == 0
    t = timelines.load(made)
    assert (t.name, t.step_ms, t.source) == ("tiny_b32_tf32", 10.0, "a book")
    assert t.forward_ms == pytest.approx(10 / 3, abs=1e-3)

    recorded = tmp_path / "recorded.json"
    arguments = [*common, str(recorded), "--precision", "amp", "--steps", "3", "--device", "cpu"]
    assert commands.main(["record", *arguments]) == 0
    t = timelines.load(recorded)
    assert t.gpu == "cpu"
    assert t.command == "python experiments/timelines.py record --model tiny --batch 32 --precision amp --steps 3"
    ready = {g.name: g.ready_ms for g in t.gradients}
    assert 0 < t.forward_ms <= ready["4.weight"] <= ready["2.weight"] <= ready["0.weight"] <= t.step_ms
    capsys.readouterr()

    assert commands.main(["record", *common, str(recorded), "--precision", "tf32", "--device", "cpu"]) == 2
    assert commands.main(["make", "--model", "x", *arguments[2:4], *common[4:], str(made), "--precision", "amp",
                           "--samples-per-s", "1", "--gpu", "X", "--source", "s"]) == 2  # fmt: skip
    errors = capsys.readouterr().err.splitlines()
    assert errors[0].startswith("error: tf32 is a GPU's format")
    assert errors[1].startswith("error: model 'x' is unknown")
    assert len(errors) == 2
    for given in (["record"], ["make", "--samples-per-s", "1", "--gpu", "X", "--source", "s"]):
        assert commands.main([*given, *arguments[:8], "--gpus-per-node", "0"]) == 2
        assert capsys.readouterr().err == "error: --gpus-per-node must be at least 1, got 0\n"


def test_reading_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys; from experiments.cells import timelines as t; t.load(t.names()[0]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_files_are_small() -> None:
    for path in timelines.FOLDER.glob("*.json"):
        assert path.stat().st_size < 20_000
        assert json.loads(path.read_text())["name"] == path.stem
