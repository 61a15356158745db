"""`njit`: numba's, also where the code that it compiles can be kept nowhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """As `numba.njit(**options)`. With cache=True numba raises RuntimeError where neither the package's folder nor the user's
    can be written (a read-only image, no HOME): such a process compiles for itself.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(**options)(function)
        except RuntimeError:
            return numba.njit(**options | {"cache": False})(function)

    return compiled
