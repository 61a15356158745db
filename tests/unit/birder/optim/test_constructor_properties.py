"""Whatever an optimizer is made with: two steps that raise nothing, or one line that says what is wrong."""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import birder
from tests.distributed.test_guards import METHODS

LINE = 300
"""Characters that a message stays below."""
EXAMPLES = int(os.environ.get("CONFIG_EXAMPLES", "300"))
COMMON = ("max_grad_norm", "seed", "topology")
"""Options of every method; those of its own stand in its signature."""

NUMBERS = st.one_of(
    st.sampled_from([0, 1, 2, -1, 0.5, 0.9, 1e-3, 1e-30, 1e-320, 1e30, 1e38, 1e39, 1e300, 2**31, 2**63, 10**400, -0.0]),
    st.integers(-3, 100),
    st.floats(),
    st.floats(0, 1),
)
OTHERS = st.sampled_from(
    [
        None,
        True,
        False,
        "",
        "auto",
        "paper",
        "x\ny",
        "1",
        b"1",
        1j,
        (),
        [],
        {},
        object(),
        torch.zeros(()),
        torch.ones(2),
    ]
)
VALUES = st.one_of(
    NUMBERS, NUMBERS, OTHERS, st.text(max_size=400), st.tuples(NUMBERS, NUMBERS), st.lists(st.one_of(NUMBERS, OTHERS))
)


def options_of(name: str) -> list[str]:
    """The names that the constructor of a method takes, those that it passes on and those of all methods included."""
    own: dict[str, None] = {}
    for level in getattr(birder, name).__mro__:
        if level is birder.BucketOptimizer:
            break
        if "__init__" in vars(level):
            own |= dict.fromkeys(inspect.getfullargspec(vars(level)["__init__"]).args[2:])
            own |= dict.fromkeys(inspect.getfullargspec(vars(level)["__init__"]).kwonlyargs)
    fixed = ("nesterov", "variant") if name == "EF21SGDM" else ()
    return [*(k for k in own if k not in fixed), *COMMON]


def parameters(kind: str) -> Any:
    """What stands for the model's parameters."""
    torch.manual_seed(0)
    made: dict[str, Any] = {
        "usual": [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(()))],
        "one": [nn.Parameter(torch.randn(1))],
        "empty tensor": [nn.Parameter(torch.randn(4)), nn.Parameter(torch.zeros(0, 3))],
        "complex": [nn.Parameter(torch.randn(3, dtype=torch.complex64))],
        "float64": [nn.Parameter(torch.randn(3, dtype=torch.float64))],
        "bfloat16": [nn.Parameter(torch.randn(3, dtype=torch.bfloat16))],
        "none": [],
        "no tensor": [3.0],
        "a tensor": torch.randn(3),
        "twice": [p := nn.Parameter(torch.randn(3)), p],
    }
    return made[kind]


USUAL = ("usual", "one", "empty tensor")
KINDS = (*USUAL, *USUAL, "complex", "float64", "bfloat16", "none", "no tensor", "a tensor", "twice")


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, str, dict[str, Any]]:
    """A method, what it is given as parameters, and one to three options with any value each."""
    name = draw(st.sampled_from(sorted(METHODS)))
    keys = draw(st.lists(st.sampled_from(options_of(name)), min_size=1, max_size=3, unique=True))
    return name, draw(st.sampled_from(KINDS)), {k: draw(VALUES) for k in keys}


def outcome(name: str, kind: str, options: dict[str, Any]) -> str:
    """What the constructor says. "" when it takes everything: two steps have then been made."""
    params = parameters(kind)
    try:
        optimizer = getattr(birder, name)(params, **(METHODS[name] | options))
    except (ValueError, TypeError) as error:
        return str(error) or "nothing"
    optimizer.bind()
    for step in range(2):
        for i, p in enumerate(params):
            p.grad = torch.full_like(p, 0.1 * (step + i + 1))
        optimizer.step()
    return ""


@settings(max_examples=EXAMPLES)
@given(calls())
def test_any_value_for_any_option(call: tuple[str, str, dict[str, Any]]) -> None:
    said = outcome(*call)
    assert len(said) < LINE, (call, said)
    assert said.isprintable(), (call, said)
    assert not said or call[1] not in USUAL or any(k in said for k in call[2]), (call, said)


@pytest.mark.parametrize("name", sorted(METHODS))
@pytest.mark.parametrize("kind", USUAL)
def test_what_is_usual_is_taken(name: str, kind: str) -> None:
    """Otherwise the property would hold for lack of a valid start."""
    assert outcome(name, kind, {}) == ""
