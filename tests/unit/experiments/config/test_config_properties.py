"""Any value for any key gives a run that can be written down, or one line that says what is wrong; never a traceback."""

from __future__ import annotations

import dataclasses
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from experiments.config import compose, validate
from experiments.config.kinds import shown
from launch.errors import UserError
from launch.spec import RunSpec
from launch.words import one_line
from tests.helpers.tiers import slow

BASES = (
    ("+exp=digits",),
    ("+exp=digits", "optimizer=onebit_adam"),
    ("+exp=digits", "optimizer=cser", "cluster=slurm"),
    ("+exp=resnet50", "scale=quick", "optimizer=sgdm", "cluster=emulated"),
    ("+exp=cifar100", "scale=quick", "cluster=ssh", "cluster.hosts=a,b", "wandb=offline"),
    ("+exp=bert_squad", "scale=quick", "optimizer=zero_one_adam", "+profile=step"),
    ("+exp=ptb", "scale=quick", "optimizer=slamb"),
    ("+exp=replay_resnet50", "optimizer=onebit_lamb"),
)
LINE = 300
"""Characters that a message stays below."""
EXAMPLES, MORE_EXAMPLES = 12, int(os.environ.get("CONFIG_EXAMPLES", "40"))


def outcome(overrides: list[str]) -> RunSpec | str:
    """The run that a command line gives, or the message it ends in."""
    try:
        composed = compose.compose(overrides)
        compose.check(composed)
        return compose.make_spec(composed)
    except UserError as error:
        return str(error)


def is_sound(found: RunSpec | str) -> bool:
    if isinstance(found, str):
        return 0 < len(found) < LINE and found.isprintable()
    written = yaml.safe_load(yaml.safe_dump(dataclasses.asdict(found)))
    return bool(written["config"] == found.config) and "${" not in str(found.config)


@cache
def keys(base: tuple[str, ...]) -> list[str]:
    config = compose.compose(list(base)).config
    raw = OmegaConf.to_container(config, resolve=False)
    assert isinstance(raw, dict)
    found: list[str] = []

    def walk(section: dict[Any, Any], prefix: str) -> None:
        for key, value in section.items():
            found.append(f"{prefix}{key}")
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")

    walk(raw, "")
    return sorted({*found, *validate.keys_of(raw)})


NUMBERS = st.one_of(
    st.integers(),
    st.integers(-3, 3),
    st.floats(),
    st.sampled_from(
        ["1e300", "-0.0", "1e-320", "2**63", "9" * 400, "inf", "nan", "0x10", "1_000", "007", "1:30", ".5", "-"]
    ),
)
QUOTED = st.text(max_size=400).map(lambda t: "'" + t.replace("\\", "\\\\").replace("'", "\\'") + "'")
REFERENCES = (
    *("???", "${seed}", "${nothing}", "${train}", "${scaled:nodes}", "${lr_rule:0.1}", "${lr_rule:x}"),
    *("${oc.env:HOME}", "${oc.env:NOPE}"),
)
SPECIAL = (
    "null true off auto fp16 fp8 sgdm paper birder.Nosuch os.system torch.nn.Linear /nonexistent ~ .. a/b a,b -1 [] {}"
)
WORDS = st.sampled_from([*REFERENCES, *SPECIAL.split(" ")])
PLAIN = st.text(st.characters(codec="utf-8"), max_size=30)
SIMPLE = st.one_of(NUMBERS.map(str), WORDS, QUOTED)
LISTS = st.lists(SIMPLE, max_size=4).map(lambda v: f"[{','.join(v)}]")
DICTS = st.lists(st.tuples(st.sampled_from(["a", "lr", "name", "1", "_target_", "_args_"]), SIMPLE), max_size=3).map(
    lambda v: "{" + ",".join(f"{key}:{value}" for key, value in v) + "}"
)
VALUES = st.one_of(SIMPLE, LISTS, DICTS, PLAIN)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """One of the bases with one override more: any operation, any key (some misspelt), any value."""
    base = draw(st.sampled_from(BASES))
    key = draw(st.sampled_from(keys(base)))
    change = draw(st.sampled_from(["", "", "", "", "", "", "s", ".x", "._target_"]))
    key = key[:-1] if change == "s" and key.endswith("s") else key + change
    operation = draw(st.sampled_from(["", "", "", "", "+", "++", "~"]))
    if operation == "~" and draw(st.booleans()):
        return [*base, f"~{key}"]
    return [*base, f"{operation}{key}={draw(VALUES)}"]


@pytest.mark.parametrize("examples", [EXAMPLES, slow(MORE_EXAMPLES)])
def test_any_value_for_any_key(examples: int) -> None:
    @settings(max_examples=examples)
    @given(command_lines())
    def sound(overrides: list[str]) -> None:
        found = outcome(overrides)
        assert is_sound(found), (overrides[-1], found)

    sound()


@pytest.mark.parametrize("base", BASES)
def test_bases_are_runs(base: tuple[str, ...], tmp_path: Path) -> None:
    """Otherwise the property would hold for lack of a valid start."""
    assert isinstance(found := outcome([*base, f"output_dir={tmp_path}"]), RunSpec), found


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("scales.quick.nodes=${scaled:nodes}", "scales.quick.nodes refers to itself"),
        ("scales.quick.nodes=${cluster.nodes}", "scales.quick.nodes refers to itself"),
        ("train.batch_per_rank=${lr_rule:0.1}", "the configuration refers to itself"),
        ("seed=${seed}", "Recursive interpolation detected (at seed)"),
    ],
)
def test_circles_are_refused_at_once(override: str, words: str) -> None:
    assert words in str(outcome([*BASES[5], override]))


@given(st.one_of(st.text(), st.integers(), st.floats(), st.lists(st.text()), st.none(), st.booleans()))
@settings(max_examples=300)
def test_values_are_shown_on_one_short_line(value: Any) -> None:
    assert shown(value).isprintable()
    assert len(shown(value)) <= 65
    assert one_line(str(value)).isprintable()
    assert len(one_line(str(value))) <= 150
