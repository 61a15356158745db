"""Models by name, counted and compared with published counts, and the examples' page. Nothing is downloaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from birder.predict import gpus
from experiments.cells import architectures, timelines
from experiments.cells.architectures import Asked, config, gpt, quantity, work
from experiments.report.table import Table
from launch.errors import UserError
from studies import step_times

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


def test_a_folder_that_is_called_as_a_known_model_is_that_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2}))
    monkeypatch.chdir(tmp_path)
    assert [config(name).n_layer for name in (f"{tmp_path}/gpt2", "./gpt2", "gpt2")] == [2, 2, 2]
    (tmp_path / "gpt2" / "config.json").unlink()
    assert config("openai-community/gpt2").n_layer == 12


POSITIONS = {"Roberta": 514 - 2, "DistilBert": 512, "OPT": 2048, "Bart": 1024}
"""Tokens that a model takes, of a table that may have rows for other ends, by transformers' name."""


@pytest.mark.parametrize("kind", POSITIONS)
def test_no_more_tokens_than_there_are_positions(kind: str) -> None:
    import transformers

    layers = {"num_hidden_layers": 1, "decoder_layers": 1, "n_layers": 1, "max_position_embeddings": POSITIONS[kind]}
    layers["max_position_embeddings"] += 2 * (kind == "Roberta")
    shape = getattr(transformers, f"{kind}Config")(vocab_size=100, **layers)
    usual, same = (work(Asked("hf:it", 1, "bf16", seq), shape) for seq in (None, min(1024, POSITIONS[kind])))
    assert usual.tflop == same.tflop
    work(Asked("hf:it", 1, "bf16", POSITIONS[kind]), shape)
    with pytest.raises(UserError, match=f"hf:it takes {POSITIONS[kind]} tokens at most, not seq={POSITIONS[kind] + 1}"):
        work(Asked("hf:it", 1, "bf16", POSITIONS[kind] + 1), shape)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Swin", {"depths": [1, 1], "num_heads": [2, 2]}),  # its images come by name
        ("ConvNext", {"depths": [1, 1, 1, 1]}),  # without attention
        (
            "GPTNeo",
            {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "vocab_size": 100},
        ),  # none in torch's
    ],
)
def test_models_with_inputs_and_attention_of_their_own_are_counted_in_half_precision(
    kind: str, options: dict[str, Any]
) -> None:
    import transformers

    shape = getattr(transformers, f"{kind}Config")(**options)
    half, full = (work(Asked("hf:it", 1, precision), shape) for precision in ("bf16", "fp32"))
    assert half.tflop == full.tflop > 0
    assert half.saved_bytes < full.saved_bytes


def test_of_experts_those_that_a_token_meets_are_computed() -> None:
    from transformers import MixtralConfig

    width, wide, met, tokens = 64, 128, 2, 2 * 32
    shape = {"hidden_size": width, "intermediate_size": wide, "num_attention_heads": 2, "num_key_value_heads": 2}
    few, many = (
        work(Asked("hf:mixtral", 2, "bf16", 32), MixtralConfig(num_hidden_layers=n, vocab_size=100, **shape))
        for n in (1, 2)
    )
    # A layer: three matrices of each expert, four of attention, the router of 8; attention itself 3.5 times forward, causal.
    products = 6 * tokens * (met * 3 * width * wide + 4 * width**2 + 8 * width)
    assert (many.tflop - few.tflop) * 1e12 == pytest.approx(products + 3.5 * 2 * 2 * 32**2 * width, rel=1e-9)


def test_a_gpt_by_its_shape_has_as_many_parameters_as_said() -> None:
    made = gpt("1.3B layers=24 width=2048 vocab=50k", 1024)
    assert (made.n_layer, made.n_embd, made.vocab_size) == (24, 2048, 50000)
    assert made.n_inner == round((1.3e9 - (50e3 + 1024) * 2048 - 4 * 24 * 2048**2) / (2 * 24 * 2048))
    assert quantity("50k", "vocab") == 50_000
    with pytest.raises(UserError, match="takes layers, width, vocab and heads"):
        gpt("1B depth=3", 1024)


def test_a_gpt_with_many_positions_has_as_many_parameters_as_said_too() -> None:
    found = work(Asked("params:40M vocab=1k", 1, "bf16", 65536))
    assert found.elements == pytest.approx(40e6, rel=0.01)
    with pytest.raises(UserError, match="with 50257 words and 65536 positions"):
        gpt("10M width=256 layers=2", 65536)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("", "params: must be a number such as 50k or 1.3B, not ''"),
        ("1B heads=0.4", "heads must be a whole number, not 0.4"),
        ("1B width=0.4", "width must be a whole number, not 0.4"),
        ("1B layers=24.6", "layers must be a whole number, not 24.6"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_in_one_line(said: str, words: str) -> None:
    with pytest.raises(UserError, match=f"^{words}$"):
        gpt(said, 1024)


def test_checkpointing_computes_more_and_keeps_less() -> None:
    kinds = (None, "op", "layer", "full")
    plain, op, layer, full = (work(Asked("hf:gpt2", 2, "bf16", 128, checkpointing=c)) for c in kinds)
    assert 1.15 < full.tflop / plain.tflop < 1.35
    assert full.saved_bytes < plain.saved_bytes / 2
    # Every second layer: half of what all of them cost. op: of the products 3, 1, 4 and 4 w^2 wide every second one.
    assert layer.tflop - plain.tflop == pytest.approx((full.tflop - plain.tflop) / 2)
    assert full.saved_bytes < layer.saved_bytes < plain.saved_bytes
    assert full.saved_bytes < op.saved_bytes < plain.saved_bytes
    products = full.tflop - plain.tflop - sum(k.flops for k in plain.kernels if k.kind == "attention") / 3.5 / 1e12
    assert op.tflop - plain.tflop == pytest.approx(products * (1 + 4) / 12)
    assert [sum(k.kind == "attention" for k in w.kernels) for w in (plain, op, layer, full)] == [24, 24, 30, 36]


def test_a_fused_loss_reads_the_logits_and_writes_their_gradient() -> None:
    apart, fused = (work(Asked("hf:gpt2", 1, "bf16", 128, fused_loss=f)) for f in (False, True))
    logits = 2 * 128 * 50257
    moved = [sum(k.nbytes for k in w.kernels) for w in (apart, fused)]
    assert moved[0] - moved[1] > 6 * logits  # the same in fp32, several times
    assert fused.tflop == apart.tflop
    assert set(fused.ready) == set(apart.ready)


@pytest.mark.parametrize(("name", "nearest"), [("resnet_51", "resnet50"), ("gpt2-medum", "gpt2-medium")])
def test_a_name_without_a_kind_is_found_or_the_nearest_is_told(name: str, nearest: str) -> None:
    assert architectures.named("gpt2-medium") == "hf:gpt2-medium"
    assert architectures.named("resnet50") == "torchvision:resnet50"
    with pytest.raises(UserError, match=nearest):
        architectures.named(name)


@pytest.mark.parametrize(("name", "met"), [("resnet50_b32_tf32", True), ("bert_base_b3_amp", False)])
def test_the_timelines_that_there_are_come_out_of_the_architecture(name: str, met: bool) -> None:
    """The targets: 15 % of the step, 10 % of it for every gradient. A record that is the rate of a large batch, scaled, does
    not know the host, which starts the kernels of a small one: without it the targets hold. All are on the page."""
    (found,) = step_times.recorded((name,))
    assert step_times.met(found) is met
    assert (found.waits > 0.2) is not met
    alone = replace(found, work=replace(found.work, host_us=(0.0, 0.0)))
    assert abs(alone.error) < 0.15
    assert alone.readiness < 0.10
    assert Table.of(step_times.OWN, [found]).grid().splitlines()[2] in step_times.PAGE.read_text(encoding="utf-8")


def test_a_row_is_computed_on_the_gpu_that_its_source_says() -> None:
    row = next(r for r in step_times.shapes() if r.watts)
    usual, found = gpus.find(row.gpu), step_times.gpu_of(row)
    assert found.gb_per_s == row.gb_per_s == 2400
    assert found.peak("bf16") == pytest.approx(usual.peak("bf16") * (5 / 7) ** (1 / 3))
    assert usual.peak("bf16") > found.peak("bf16") > gpus.find("h100-pcie").peak("bf16")


def test_published_throughputs_were_written_down_and_are_on_the_page() -> None:
    rows = step_times.shapes()
    assert len(rows) >= 10
    assert {r.source for r in rows} <= set(step_times.sources())
    (row,) = (r for r in rows if r.torchvision == "resnet18")
    found = step_times.compared(row)
    assert Table.of(step_times.COLUMNS, [found]).grid().splitlines()[2] in step_times.PAGE.read_text(encoding="utf-8")
    assert step_times.why(found)
    assert sum(bool(timelines.load(name).source) for name in timelines.names()) == 8
