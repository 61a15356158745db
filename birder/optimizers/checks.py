"""Checks of arguments: one line that says what is wrong and what would be right."""

from __future__ import annotations

from typing import Any

import torch

LARGEST = torch.finfo(torch.float32).max
"""Beyond it a number is infinite in the arithmetic of a step."""


def require(ok: bool, name: str, value: Any, wanted: str) -> None:
    """Raises ValueError, in one line, unless `ok`."""
    if not ok:
        raise ValueError(f"{name} must be {wanted}, got {value}")


def require_whole(name: str, value: Any, minimum: int = 1) -> None:
    """Raises ValueError unless `value` is a whole number, `minimum` or more. True is none."""
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
    require(ok, name, value, f"a whole number >= {minimum}")


def is_number(value: Any) -> bool:
    """Whether `value` is a real number that fp32 can hold. True and infinity are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST


def require_number(name: str, value: Any, wanted: str = "at least 0", low: float = 0.0) -> None:
    """Raises ValueError unless `value` is a finite number of `low` or more."""
    require(is_number(value) and value >= low, name, value, wanted)


def require_flag(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is True or False."""
    require(isinstance(value, bool), name, repr(value), "True or False")


def check_parameter(p: torch.Tensor) -> None:
    """Raises ValueError for a parameter that the fp32 arithmetic of this package would spoil."""
    if p.dtype == torch.float32:
        return
    kind = str(p.dtype).removeprefix("torch.")
    if p.dtype in (torch.bfloat16, torch.float16):
        # Of numbers with 8 or 11 bits of mantissa a step of size lr moves few or none.
        raise ValueError(f"parameters must be float32, got {kind}: keep the model in float32 and use torch.autocast")
    raise ValueError(f"parameters must be float32, got {kind}: convert the model with model.float()")


def check_gradient(g: torch.Tensor) -> None:
    """Raises RuntimeError for a sparse gradient."""
    if g.layout is not torch.strided:
        raise RuntimeError("gradients must be dense, got a sparse one: use torch.nn.Embedding(..., sparse=False)")


def whole_number(name: str, value: Any) -> int:
    """`value`, if it is a whole number from 1; raises ValueError."""
    require_whole(name, value)
    return int(value)
