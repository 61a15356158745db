"""Experiments of CSER, 0/1 Adam and SLAMB: what they compare, at which ratios, batches and rates."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from experiments.config import compose, schedules
from launch.errors import UserError
from tests.helpers.tiers import slow, slow_unless

FAMILIES = {
    "cser_": ["SGDM", "EFSGD", "QSparseLocalSGD", "CSER"],
    "zero_one_": ["AdamW", "OneBitAdam", "Birder", "ZeroOneAdam"],
    "slamb_": ["SGDM", "BertAdam", "LAMB", "OneBitLAMB", "SLAMB"],
}
EXPERIMENTS = sorted(p.stem for p in (compose.CONF / "exp").glob("*.yaml") if p.stem.startswith(tuple(FAMILIES)))
FEW = {"cser_cifar100", "zero_one_bert_base", "slamb_bert_large"}
"""Of each paper the experiment that `make test` composes whole."""


@cache
def listed(exp: str) -> list[list[str]]:
    return [list(map(str, v)) for v in compose.compose([f"+exp={exp}"]).config.compare]


@cache
def variant(exp: str, scale: str, number: int = -1) -> dict[str, Any]:
    """One variant, resolved; the last is the paper's own method."""
    return compose.resolve(compose.compose([f"+exp={exp}", f"scale={scale}", *listed(exp)[number]]))


def variants(exp: str, scale: str) -> list[dict[str, Any]]:
    return [variant(exp, scale, k - len(listed(exp))) for k in range(len(listed(exp)))]


def chosen(exp: str, cls: str) -> dict[str, Any]:
    """The last variant with this optimizer."""
    numbers = range(-1, -len(listed(exp)) - 1, -1)
    return next(v for k in numbers if (v := variant(exp, "paper", k))["optimizer"]["_target_"] == f"birder.{cls}")


@pytest.mark.parametrize("scale", ["quick", "paper"])
@pytest.mark.parametrize("exp", slow_unless(FEW.__contains__, EXPERIMENTS))
def test_variants_are_the_bound_the_baseline_and_the_papers_methods(exp: str, scale: str) -> None:
    made = variants(exp, scale)
    assert [v["comm"]["enabled"] for v in made] == [False] + [True] * (len(made) - 1)
    assert [v["optimizer"].get("wire") for v in made[1:3]] == ["fp32", "bf16"]
    assert len({v["optimizer"]["_target_"] for v in made[:3]}) == 1
    known = next(classes for prefix, classes in FAMILIES.items() if exp.startswith(prefix))
    classes = [v["optimizer"]["_target_"].removeprefix("birder.") for v in made]
    assert set(classes) <= set(known)
    assert classes[-1] == known[-1]  # the paper's own method comes last, and is the experiment's default
    default = compose.resolve(compose.compose([f"+exp={exp}", f"scale={scale}"]))
    assert default["optimizer"] == made[-1]["optimizer"]


@pytest.mark.parametrize("exp", slow_unless(FEW.__contains__, EXPERIMENTS))
def test_quick_scale_needs_no_data_and_paper_scale_the_real_model(exp: str, tmp_path: Path) -> None:
    compose.workload(variant(exp, "quick"))
    paper = variant(exp, "paper")["workload"]
    small = {"tiny", "wrn_10_2", "resnet20", "resnet8", "synthetic"}
    assert not small & {v for v in paper.values() if isinstance(v, str)}
    if paper.get("allow_synthetic") is False:
        with pytest.raises(UserError, match=r"data\.path="):
            compose.workload(variant(exp, "paper"))


@pytest.mark.parametrize("exp", EXPERIMENTS)
def test_scales_of_an_experiment_hold_the_same_keys(exp: str) -> None:
    scales = compose.compose([f"+exp={exp}"]).config.scales
    assert set(scales.quick) == set(scales.paper)


@pytest.mark.parametrize("exp", slow_unless(FEW.__contains__, [e for e in EXPERIMENTS if e.startswith("cser_")]))
@pytest.mark.parametrize("scale", ["quick", "paper"])
def test_all_of_cser_sends_the_same_share(exp: str, scale: str) -> None:
    """R_C = 1 / (1/R_C2 + 1/(R_C1 H)) = 32 for each method but the dense ones."""
    for v in variants(exp, scale)[3:]:
        o = v["optimizer"]
        if "gradient_ratio" in o:
            sent = (1 / o["gradient_ratio"] if o["gradient_ratio"] else 0) + 1 / (o["model_ratio"] * o["reset_every"])
        else:
            sent = 1 / (o["ratio"] * o.get("sync_every", 1))
        assert sent == pytest.approx(1 / 32), o["_target_"]


@pytest.mark.parametrize("whole", [False, slow(True)])
@pytest.mark.parametrize(
    ("exp", "batch", "nodes", "ranks"),
    [
        ("cser_cifar100", 8 * 16, 8, 1),
        ("cser_imagenet", 8 * 32, 8, 1),
        ("zero_one_bert_base", 4096, 16, 4),
        ("zero_one_bert_large", 4096, 16, 4),
        ("zero_one_resnet18", 256, 2, 4),
        ("zero_one_bert_large_512", 4096, 16, 4),
        ("slamb_bert_large", 65_536, 32, 4),
        ("slamb_bert_large_512", 32_768, 32, 4),
        ("slamb_bert_xl", 65_536, 128, 8),
        ("slamb_swin_b", 4096, 16, 8),
        ("slamb_cifar10", 4 * 256, 1, 4),
    ],
)
def test_batches_and_clusters_of_the_papers(exp: str, batch: int, nodes: int, ranks: int, whole: bool) -> None:
    for v in variants(exp, "paper") if whole else [variant(exp, "paper")]:
        assert (v["cluster"]["nodes"], v["cluster"]["ranks_per_node"]) == (nodes, ranks)
        assert v["train"]["batch_per_rank"] * v["train"]["accumulate"] * nodes * ranks == batch


def test_learning_rates_of_the_papers() -> None:
    """Base rates, and the rate at the peak of the schedule, which is the published one."""
    assert chosen("cser_imagenet", "SGDM")["optimizer"]["lr"] == 0.1
    assert chosen("cser_imagenet", "CSER")["optimizer"]["lr"] == 0.05
    assert chosen("zero_one_resnet18", "ZeroOneAdam")["optimizer"]["lr"] == 1e-4
    for exp, cls, lr, step, total in (
        ("zero_one_bert_base", "ZeroOneAdam", 4e-4, 12_500, 118_000),
        ("zero_one_bert_large", "ZeroOneAdam", 4e-4, 12_500, 152_511),
        ("slamb_bert_large", "SLAMB", 6e-3, 2_000, 7_038),
        ("slamb_bert_large_512", "SLAMB", 4e-3, 200, 1_563),
        ("zero_one_bert_large_512", "ZeroOneAdam", 2.82e-5, 1_000, 15_000),
    ):
        config = chosen(exp, cls)
        assert config["train"]["max_steps"] == total
        schedule = config["train"]["lr_schedule"]
        rates = [config["optimizer"]["lr"] * schedules.factor(schedule, s, total, 100) for s in (1, step, total)]
        assert rates[1] == pytest.approx(lr)
        assert rates[0] == pytest.approx(lr / step)
        assert rates[2] < rates[1]
    swin = chosen("slamb_swin_b", "SLAMB")
    assert swin["optimizer"]["lr"] == pytest.approx(5e-4 / 8 * 2.828 * 4096 / 512, rel=1e-3)
    # The last of 300 epochs ends at MIN_LR, 1 % of the peak, and the steps before it are hardly above.
    assert schedules.factor(swin["train"]["lr_schedule"], 90_000, 90_000, 300) == pytest.approx(0.01, rel=1e-3)
    for cls in ("AdamW", "OneBitAdam", "ZeroOneAdam"):  # PyTorch's ImageNet example
        assert chosen("zero_one_resnet18", cls)["optimizer"]["weight_decay"] == 1e-4


@pytest.mark.parametrize("whole", [False, slow(True)])
@pytest.mark.parametrize(
    ("exp", "precision"),
    [
        ("slamb_bert_large", "fp16"),
        ("slamb_bert_large_512", "fp16"),
        ("slamb_bert_xl", "bf16"),
        ("slamb_swin_b", "bf16"),
    ],
)
def test_precisions_of_slamb(exp: str, precision: str, whole: bool) -> None:
    """Mixed precision on V100 and A100."""
    for scale, wanted in (("paper", precision), ("quick", "fp32")):
        made = variants(exp, scale) if whole else [variant(exp, scale)]
        assert {v["train"]["precision"] for v in made} == {wanted}


def test_metrics_of_slamb() -> None:
    """The paper's Table 2 has validation losses."""
    for exp in ("slamb_bert_large", "slamb_bert_large_512", "slamb_bert_xl"):
        assert compose.workload(variant(exp, "quick")).metric == "loss"
    assert compose.workload(variant("zero_one_bert_base", "quick")).metric == "perplexity"


def test_bert_xl_has_the_published_number_of_parameters() -> None:
    """2.8 B, to two digits: 12 h^2 + 13 h a layer, words and places, the head's h^2."""
    from experiments.workloads.bert import PRESETS

    shape = PRESETS["xl"]
    h, words = shape["hidden_size"], chosen("slamb_bert_xl", "SLAMB")["workload"]["vocab_size"]
    total = shape["num_hidden_layers"] * (12 * h * h + 13 * h) + (words + 512 + 2) * h + h * h
    assert round(total / 1e9, 1) == 2.8
    assert h % shape["num_attention_heads"] == 0
    assert shape["intermediate_size"] == 4 * h


def test_policies_of_the_papers() -> None:
    assert chosen("zero_one_bert_large_512", "ZeroOneAdam")["optimizer"]["warmup_steps"] == 155_000 - 152_511
    assert chosen("zero_one_bert_large_512", "OneBitAdam")["optimizer"]["warmup_steps"] == 1_500
    for exp in ("zero_one_bert_base", "zero_one_bert_large"):
        o = chosen(exp, "ZeroOneAdam")["optimizer"]
        assert (o["warmup_steps"], o["kappa"], o["local_limit"]) == (12_500, 16, 16)
    for exp, beta3, every in (
        ("slamb_bert_large", 0.93, 100),
        ("slamb_bert_large_512", 0.93, 100),
        ("slamb_bert_xl", 0.93, 100),
        ("slamb_swin_b", 0.93, 100),
        ("slamb_cifar10", 0.99, 50),
    ):
        o = chosen(exp, "SLAMB")["optimizer"]
        assert (o["fraction"], o["beta3"], o["sync_every"]) == (0.1, beta3, every)


@pytest.mark.parametrize("exp", slow_unless(FEW.__contains__, EXPERIMENTS))
def test_quick_scale_reaches_the_rounds_that_come_rarely(exp: str) -> None:
    """Within the steps that are timed: each interval of local steps or between averages of models comes to its end."""
    for v in variants(exp, "quick"):
        steps = v["train"]["max_steps"]
        every = [v["optimizer"][key] for key in ("reset_every", "sync_every") if key in v["optimizer"]]
        if steps is not None and every:
            timed = range(v["train"]["timing_warmup"] + 1, steps + 1)
            assert any(step % every[0] == 0 for step in timed), v["optimizer"]["_target_"]
