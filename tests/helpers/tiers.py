"""Which of a test's cases are left to `make test-all`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case of `parametrize` that is marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_unless(fast: Callable[[Any], bool], cases: Iterable[Any]) -> list[Any]:
    """Cases of one value each; those that are not `fast` are marked slow."""
    return [case if fast(case) else slow(case) for case in cases]
