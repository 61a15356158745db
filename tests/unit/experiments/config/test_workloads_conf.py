"""Every experiment, workload and hyper-parameter file, found by globbing: it composes, resolves and opens as it should."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from experiments.config import compose, hparams
from launch.errors import UserError
from tests.helpers.tiers import slow, slow_unless

CONF = compose.CONF
EXPERIMENTS = sorted(p.stem for p in (CONF / "exp").glob("*.yaml"))
WORKLOADS = sorted(p.stem for p in (CONF / "workload").glob("*.yaml"))
# Of CSER, 0/1 Adam and SLAMB: tests/unit/experiments/config/test_experiments_more.py.
OF_OTHERS = {name for name in EXPERIMENTS if name.startswith(("cser_", "zero_one_", "slamb_"))}
OF_NO_PAPER = {"language_model"}
# tests/unit/experiments/runs/test_all_methods.py, tests/unit/experiments/runs/test_papers.py.
OF_ALL_METHODS = {"methods", "methods_digits"}
OF_BIRDER = {"resnet50", "resnet50_b128", "bert_squad", "cifar100", "ptb", "wikipedia"}
OF_THE_PAPER = OF_BIRDER | OF_OTHERS


@pytest.mark.parametrize("exp", EXPERIMENTS)
def test_experiment_opens_with_facts(exp: str) -> None:
    text = (CONF / "exp" / f"{exp}.yaml").read_text()
    head = text[: text.index("defaults:")]
    assert head.startswith("# @package _global_\n")
    for word in ("Expected:", "Cost:", "Command:"):
        assert word in head
    assert ("The paper:" in head) == (exp in OF_THE_PAPER)
    assert exp in OF_THE_PAPER or "Not an experiment of the paper" in head


@pytest.mark.parametrize(
    "exp",
    slow_unless(
        {"resnet50", "hsdp_gpt2"}.__contains__, sorted(set(EXPERIMENTS) - OF_OTHERS - OF_ALL_METHODS - OF_NO_PAPER)
    ),
)
def test_every_variant_of_an_experiment_is_a_valid_run(exp: str) -> None:
    """At quick scale and without data everything runs; the first row is the bound, the others the four methods.

    Where the paper trains on nodes of 8 GPUs, Birder comes in both forms: ranks as workers, and nodes, which is the paper's.
    """
    variants = [list(v) for v in compose.compose([f"+exp={exp}"]).config.compare]
    made = [compose.compose([f"+exp={exp}", "scale=quick", *variant]) for variant in variants]
    resolved = [compose.resolve(one) for one in made]
    others = "hsdp" if exp == "hsdp_gpt2" else "flat"
    both = exp in OF_BIRDER | {"bert_squad_base", "hsdp_gpt2"}
    forms = [others, "hierarchical"] if both else [others]
    assert [r["comm"]["enabled"] for r in resolved] == [False, True, True, True] + [True] * len(forms)
    assert [r["optimizer"].get("wire") for r in resolved[1:3]] == ["fp32", "bf16"]
    assert [r["optimizer"]["_target_"] for r in resolved[3:]] == ["birder.OneBitAdam"] + ["birder.Birder"] * len(forms)
    assert [r["comm"]["topology"] for r in resolved] == [others] * 4 + forms
    assert {r["exp"] for r in resolved} == {exp}
    compose.workload(resolved[-1])


@pytest.mark.parametrize("workload", WORKLOADS)
def test_scales_hold_the_same_keys(workload: str) -> None:
    scales = compose.compose([f"workload={workload}"]).config.scales
    assert set(scales) == {"quick", "paper"}
    assert set(scales.quick) == set(scales.paper)


ENTRIES = [
    (workload, optimizer)
    for workload in sorted(p.stem for p in (CONF / "hparams").glob("*.yaml"))
    for optimizer in hparams.table(workload, CONF)
]

FIRST = {workload: (workload, optimizer) for workload, optimizer in reversed(ENTRIES)}.values()
"""One entry of each workload."""


def compared() -> set[tuple[str, str]]:
    """What the experiments compare: tests of these compose it."""
    pairs = set()
    for exp in EXPERIMENTS:
        text = (CONF / "exp" / f"{exp}.yaml").read_text()
        (workload,) = re.findall(r"override /workload: (\w+)", text)
        pairs |= {(workload, optimizer) for optimizer in re.findall(r"\boptimizer(?:=|: )(\w+)", text)}
    return pairs


@pytest.mark.parametrize(
    ("workload", "optimizer"),
    [*FIRST, *(slow(*entry) for entry in ENTRIES if entry not in {*FIRST, *compared()})],
)
def test_hyper_parameters_belong_to_a_workload_and_an_optimizer(workload: str, optimizer: str) -> None:
    """A misspelt name would be skipped without a word: the group is optional."""
    assert workload in WORKLOADS
    composed = compose.compose([f"workload={workload}", f"optimizer={optimizer}", "scale=quick"])
    assert composed.choices["hparams"] == f"{workload}/{optimizer}"
    assert compose.resolve(composed)["optimizer"]["lr"] > 0


@pytest.mark.parametrize("workload", sorted({workload for workload, _ in ENTRIES}))
def test_hyper_parameters_are_those_that_differ_from_the_default(workload: str) -> None:
    for optimizer, entry in hparams.table(workload, CONF).items():
        default = OmegaConf.load(CONF / "optimizer" / f"{optimizer}.yaml").optimizer
        for key in set(entry) - set(hparams.SECTIONS):
            assert OmegaConf.is_missing(default, key) or entry[key] != default[key], f"{optimizer}.{key}"


def test_hyper_parameters_give_way_to_experiment_and_command_line() -> None:
    """Default < hparams < experiment < command line, key by key."""

    def decay(*overrides: str) -> float:
        return float(compose.compose(["optimizer=birder", *overrides]).config.optimizer.weight_decay)

    assert OmegaConf.load(CONF / "optimizer" / "birder.yaml").optimizer.weight_decay == 0.0
    assert decay("workload=cifar100") == decay("workload=image_folder") == 5e-4
    assert decay("workload=bert_squad") == 0.01
    assert decay("workload=resnet18") == 0.0  # has no entry
    assert decay("+exp=methods") == 1e-4  # the experiment's, over 1e-4 of fashion_mnist's entry as well
    assert decay("workload=cifar100", "optimizer.weight_decay=0.25") == 0.25
    assert decay("workload=cifar100", "++optimizer.weight_decay=0.25") == 0.25
    taken = compose.compose(["workload=digits", "optimizer=birder", "hparams=cifar100/birder"])
    assert taken.config.optimizer.weight_decay == 5e-4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("birder: {beta1: 0.9}", "birder has no 'beta1'; it takes beta, beta2, bits, "),
        ("bider: {lr: 0.1}", "has an entry for 'bider'"),
        ("birder: {train: {lr_bach: total}}", "birder sets train.lr_bach, which is not a key of"),
        ("birder: 0.1", "birder must hold arguments"),
        ("birder: {train: 5}", "birder: train must hold keys"),
        ("defaults: [mnist]", "takes its defaults from 'mnist'"),
        ("defaults: 5", "defaults must be a list"),
        ("birder: [", "is not readable as YAML"),
        ("- birder", "must hold keys with values"),
    ],
)
def test_mistakes_in_hyper_parameters(text: str, words: str, tmp_path: Path) -> None:
    conf = tmp_path / "conf"
    (conf / "hparams").mkdir(parents=True)
    (conf / "optimizer").symlink_to(CONF / "optimizer")
    (conf / "config.yaml").symlink_to(CONF / "config.yaml")
    (conf / "hparams" / "digits.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        hparams.table("digits", conf)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("workload", sorted({workload for workload, _ in ENTRIES}))
def test_files_of_hyper_parameters_hold_no_mistake(workload: str) -> None:
    hparams.table(workload, CONF)


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
