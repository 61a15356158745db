"""What a back end's kernels take and do stands once, at their definitions (birder/kernels/reference.py)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def implements(definition: F) -> Callable[[Callable[..., Any]], F]:
    """Makes of a function of a back end a kernel with the arguments of `definition`.

    The function gets the tensors by position and, last, an object with all keyword arguments, defaults filled in. Where there
    are none it takes the definition's arguments themselves. Raises TypeError for arguments that the definition does not have.

    Numbers are Python's there: Triton takes no others, and a learning rate may be a tensor or numpy's.
    """
    named = [p for p in inspect.signature(definition).parameters.values() if p.kind is p.KEYWORD_ONLY]
    defaults = {p.name: p.default for p in named if p.default is not p.empty}
    names = {p.name for p in named}
    numbers = {p.name for p in named if str(p.annotation).startswith("float")}

    def made(function: Callable[..., Any]) -> F:
        def kernel(*tensors: Any, **options: Any) -> Any:
            given = defaults | options
            if given.keys() != names:
                raise TypeError(f"{definition.__name__} takes {sorted(names)}, got {sorted(given)}")
            given |= {name: float(given[name]) for name in numbers if given[name] is not None}
            return function(*tensors, SimpleNamespace(**given))

        return functools.wraps(definition)(kernel if named else function)  # type: ignore[return-value]

    return made
