"""The schema of the configuration: it fits the files of conf/, the constructors, and the page that documents it."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from typing import Any

import pytest
from omegaconf import OmegaConf

import birder
from experiments.config import compose, validate
from experiments.config.question import Question
from experiments.config.schema import Config
from experiments.config.schema_cluster import CLUSTERS
from experiments.config.schema_optimizer import OPTIMIZERS
from experiments.records.record import ROOT
from launch.errors import UserError


class Mine(birder.SGDM):
    """An optimizer that no schema knows."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        sharpness: float = 1.0,
        betas: tuple[float, float] | None = None,
        window: tuple[int, int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, **options)
        self.sharpness = sharpness


@pytest.mark.parametrize(
    "model", [Config, *CLUSTERS.values(), *OPTIMIZERS.values(), Question], ids=lambda m: m.__name__
)
def test_every_key_has_a_meaning(model: Any) -> None:
    for path, field in validate.fields(model):
        assert field.description, path


@pytest.mark.parametrize("target", [*OPTIMIZERS, *CLUSTERS])
def test_keys_are_arguments_of_the_constructor(target: str) -> None:
    schemas: dict[str, Any] = {**OPTIMIZERS, **CLUSTERS}
    cls = pkgutil.resolve_name(target)
    assert set(schemas[target].model_fields) <= set(validate.signature(cls).model_fields)


def test_schemas_are_of_classes_that_files_choose() -> None:
    files = [*(compose.CONF / "optimizer").glob("*.yaml"), *(compose.CONF / "cluster").glob("*.yaml")]
    chosen = {OmegaConf.load(path)[path.parent.name]._target_ for path in files}
    assert {*OPTIMIZERS, *CLUSTERS} == chosen


def test_a_class_of_the_users_is_known_by_its_constructor() -> None:
    at = [
        "+exp=digits",
        "optimizer=sgdm",
        "optimizer._target_=tests.unit.experiments.config.test_schema.Mine",
        "~optimizer.momentum",
    ]
    compose.check(
        compose.compose([*at, "+optimizer.sharpness=2.0", "+optimizer.betas=[0.9,0.99]"])
    )  # YAML has no tuples
    for override, words in (
        ("+optimizer.sharpnes=2.0", r"no key 'optimizer\.sharpnes' .* did you mean optimizer\.sharpness\?"),
        ("+optimizer.sharpness=much", r"optimizer\.sharpness must be a number, not 'much'"),
        ("+optimizer.window=3", r"optimizer\.window must be a list, or null, not 3"),
        ("optimizer.lr=-1", r"optimizer\.lr must be a number of 0 or more, not -1"),
        ("+optimizer.sync_every=0", r"optimizer\.sync_every must be a whole number, 1 or more, not 0"),  # a usual name
    ):
        with pytest.raises(UserError, match=words):
            compose.check(compose.compose([*at, override]))


@pytest.mark.parametrize(
    ("value", "words"),
    [("null", "not null"), ("true", "not true"), ("'1'", "not '1'"), ("inf", "not inf"), ("[1]", r"not \[1\]")],
)
def test_a_number_is_a_number(value: str, words: str) -> None:
    with pytest.raises(UserError, match=rf"optimizer\.lr must be a number of 0 or more, {words}"):
        compose.resolve(compose.compose(["+exp=digits", f"optimizer.lr={value}"]))


def test_configuration_needs_no_torch() -> None:
    """Mistakes show at once."""
    program = (
        "import sys\n"
        "from experiments.config import compose\n"
        "compose.resolve(compose.compose(['+exp=digits']))\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
