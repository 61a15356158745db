"""Models by name, counted beside what is known of them, and the examples' page. Nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from birder.predict import gpus
from experiments.cells import architectures, step_times, timelines
from experiments.cells.architectures import Asked, gpt, quantity, work
from experiments.report import step_times as report
from launch.errors import UserError

PUBLISHED = {
    "hf:gpt2": 124.4e6,
    "hf:gpt2-medium": 354.8e6,
    "hf:llama-3.2-1b": 1235.8e6,
    "hf:bert-base": 109.5e6,
    "torchvision:resnet50": 25.56e6,
    "params:350M": 350e6,
}
"""Parameters of models as their authors count them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_by_name_has_the_parameters_that_are_published(name: str) -> None:
    found = work(Asked(name, 1, "bf16", None if "resnet" in name else 32))
    assert found.elements == pytest.approx(PUBLISHED[name], rel=0.01)
    assert found.timeline(gpus.find("h100")).step_ms > 0


def test_a_folder_with_a_configuration_serves_as_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2}))
    found = work(Asked(f"hf:{tmp_path}", 2, "fp32", 16))
    assert found.elements == 50257 * 64 + 1024 * 64 + 2 * (12 * 64**2 + 13 * 64) + 2 * 64


def test_a_gpt_by_its_shape_has_as_many_parameters_as_said() -> None:
    made = gpt("1.3B layers=24 width=2048 vocab=50k", 1024)
    assert (made.n_layer, made.n_embd, made.vocab_size) == (24, 2048, 50000)
    assert made.n_inner == round((1.3e9 - 50e3 * 2048 - 4 * 24 * 2048**2) / (2 * 24 * 2048))
    assert quantity("50k", "vocab") == 50_000
    with pytest.raises(UserError, match="takes layers, width, vocab and heads"):
        gpt("1B depth=3", 1024)


def test_checkpointing_computes_more_and_keeps_less() -> None:
    plain, again = (work(Asked("hf:gpt2", 2, "bf16", 128, checkpointing=c)) for c in (False, True))
    assert 1.15 < again.tflop / plain.tflop < 1.35
    assert again.saved_bytes < plain.saved_bytes / 2


@pytest.mark.parametrize(("name", "nearest"), [("resnet_51", "resnet50"), ("gpt2-medum", "gpt2-medium")])
def test_a_name_without_a_kind_is_found_or_the_nearest_is_told(name: str, nearest: str) -> None:
    assert architectures.named("gpt2-medium") == "hf:gpt2-medium"
    assert architectures.named("resnet50") == "torchvision:resnet50"
    with pytest.raises(UserError, match=nearest):
        architectures.named(name)


def test_the_timelines_that_there_are_come_out_of_the_architecture() -> None:
    """The targets: 15 % of the step, 10 % of it for every gradient. All of them are on the page of step times."""
    found = step_times.recorded(("resnet50_b32_tf32", "bert_base_b3_amp"))
    assert len(found) == 2
    for r in found:
        assert abs(r.error) < 0.15
        assert r.readiness < 0.10
        assert report.own([r]).grid().splitlines()[2] in report.PAGE.read_text(encoding="utf-8")


def test_published_throughputs_were_written_down_and_are_on_the_page() -> None:
    rows = step_times.rows()
    assert len(rows) >= 10
    assert {r.source for r in rows} <= set(step_times.sources())
    (row,) = (r for r in rows if r.torchvision == "resnet18")
    found = step_times.beside(row)
    assert report.rows([found]).grid().splitlines()[2] in report.PAGE.read_text(encoding="utf-8")
    assert report.why(found)
    assert len(timelines.names()) == 8
