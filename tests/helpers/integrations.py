"""What the tests of Accelerate, the Hugging Face Trainer and Lightning share: methods, what they find, how it is judged."""

from __future__ import annotations

from typing import Any

import numpy as np

import birder

METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Birder": (birder.Birder, {}),
    "OneBitAdam": (birder.OneBitAdam, {"warmup_steps": 3}),  # interrupted in its compressed stage
    "CSER": (birder.CSER, {"lr": 0.05, "block": 32, "gradient_ratio": 2, "model_ratio": 2, "reset_every": 3}),
    "AdamW": (birder.AdamW, {}),  # dense: the framework's own way to keep state
}
LOCAL = {"CSER"}
"""Methods whose models differ between ranks."""
FIRST = ("Birder", "CSER")
"""Methods whose uninterrupted run belongs to the first round."""
Found = list[dict[str, Any]]
"""Of each rank."""
ROUNDING = 1e-5
"""Means of numbers of size 1, added in fp32 in another order."""


def said(call: Any) -> str:
    """The kind and the one line of the error with which `call` is refused; '' where it is not."""
    try:
        call()
    except (RuntimeError, ValueError, TypeError, OSError) as e:
        return f"{type(e).__name__}: {e}"
    return ""


def both(first: Found, second: Found) -> Found:
    return [one | two for one, two in zip(first, second, strict=True)]


def check_resumed(results: Found, method: str) -> None:
    """Interrupted and resumed equals uninterrupted, on every rank; and something was trained, by both in common."""
    for mine in results:
        straight, resumed = mine[method], mine[f"{method} resumed"]
        assert np.array_equal(straight, resumed)
        assert not np.array_equal(straight, mine["start"])
    same = np.array_equal(results[0][method], results[1][method])
    assert same == (method not in LOCAL)
