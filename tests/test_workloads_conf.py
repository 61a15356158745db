"""Every experiment, workload and hyper-parameter file, found by globbing: it composes, resolves and opens as it should."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.config import compose
from launch.errors import UserError

CONF = compose.CONF
EXPERIMENTS = sorted(p.stem for p in (CONF / "exp").glob("*.yaml"))
WORKLOADS = sorted(p.stem for p in (CONF / "workload").glob("*.yaml"))
# Of CSER, 0/1 Adam and SLAMB: tests/test_experiments_more.py.
OF_OTHERS = {name for name in EXPERIMENTS if name.startswith(("cser_", "zero_one_", "slamb_"))}
# tests/test_all_methods.py, tests/test_families.py.
OF_ALL_METHODS = {"methods", "methods_digits"}
OF_THE_PAPER = {"resnet50", "resnet50_b128", "bert_squad", "cifar100", "ptb", "wikipedia"} | OF_OTHERS


@pytest.mark.parametrize("exp", EXPERIMENTS)
def test_experiment_opens_with_facts(exp: str) -> None:
    text = (CONF / "exp" / f"{exp}.yaml").read_text()
    head = text[: text.index("defaults:")]
    assert head.startswith("# @package _global_\n")
    for word in ("Expected:", "Cost:", "Command:"):
        assert word in head
    assert ("The paper:" in head) == (exp in OF_THE_PAPER)
    assert exp in OF_THE_PAPER or "Not an experiment of the paper" in head


@pytest.mark.parametrize("exp", sorted(set(EXPERIMENTS) - OF_OTHERS - OF_ALL_METHODS))
def test_every_variant_of_an_experiment_is_a_valid_run(exp: str) -> None:
    """At quick scale and without data everything runs; the first row is the bound, the others the four methods."""
    variants = [list(v) for v in compose.compose([f"+exp={exp}"]).config.compare]
    made = [compose.compose([f"+exp={exp}", "scale=quick", *variant]) for variant in variants]
    resolved = [compose.resolve(one) for one in made]
    assert [r["comm"]["enabled"] for r in resolved] == [False, True, True, True, True]
    assert [r["optimizer"].get("wire") for r in resolved[1:3]] == ["fp32", "bf16"]
    assert [r["optimizer"]["_target_"] for r in resolved[3:]] == ["birder.OneBitAdam", "birder.Birder"]
    assert {r["exp"] for r in resolved} == {exp}
    compose.workload(resolved[-1])


@pytest.mark.parametrize("workload", WORKLOADS)
def test_scales_hold_the_same_keys(workload: str) -> None:
    scales = compose.compose([f"workload={workload}"]).config.scales
    assert set(scales) == {"quick", "paper"}
    assert set(scales.quick) == set(scales.paper)


@pytest.mark.parametrize("file", sorted(p.stem for p in (CONF / "hparams").glob("*.yaml")))
def test_hyper_parameters_belong_to_a_workload_and_an_optimizer(file: str) -> None:
    """A misspelt name would be skipped without a word: the group is optional."""
    pairs = {f"{w}_{p.stem}": (w, p.stem) for w in WORKLOADS for p in (CONF / "optimizer").glob("*.yaml")}
    workload, optimizer = pairs[file]
    lr = compose.resolve(compose.compose([f"workload={workload}", f"optimizer={optimizer}", "scale=quick"]))
    assert lr["optimizer"]["lr"] > 0
    assert compose.compose([f"workload={workload}", f"optimizer={optimizer}"]).choices["hparams"] == file


def test_the_papers_learning_rates_of_resnet50() -> None:
    """0.1 and 0.001 times batch/256: of all GPUs for SGDM, of one for the other two."""

    def lr(*overrides: str) -> float:
        fixed = ["+exp=resnet50", "scale=paper", "cluster.nodes=8"]
        return float(compose.resolve(compose.compose([*fixed, *overrides]))["optimizer"]["lr"])

    assert lr("optimizer=sgdm") == pytest.approx(0.1 * 64 * 32 / 256)
    assert lr("optimizer=onebit_adam") == lr("optimizer=birder") == pytest.approx(0.001 * 32 / 256)
    assert lr("optimizer=birder", "train.lr_batch=total") == pytest.approx(0.001 * 64 * 32 / 256)
    assert lr("optimizer=birder", "optimizer.lr=0.5") == 0.5


def test_paper_scale_without_data_says_what_is_missing(tmp_path: Path) -> None:
    resolved = compose.resolve(compose.compose(["+exp=resnet50", "scale=paper"]))
    with pytest.raises(UserError, match=r"no data: give data\.path="):
        compose.workload(resolved)
    resolved = compose.resolve(compose.compose(["+exp=resnet50", "scale=paper", f"data.path={tmp_path / 'absent'}"]))
    with pytest.raises(UserError, match="no folder"):
        compose.workload(resolved)
