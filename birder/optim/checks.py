"""Checks of arguments: one line that says what is wrong and what would be right."""

from __future__ import annotations

import functools
import numbers
import reprlib
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

LARGEST = torch.finfo(torch.float32).max
"""Beyond it a number is infinite in the arithmetic of a step."""
MOST = 2**63 - 1
"""Of a whole number that torch can hold."""
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60


def require(ok: bool, name: str, value: Any, wanted: str) -> None:
    """Raises ValueError, in one line, unless `ok`. A long value is shortened."""
    if not ok:
        got = _REPR.repr(value).encode("unicode_escape").decode()
        raise ValueError(f"{name} must be {wanted}, got {got[:100]}")


def require_choice(name: str, value: Any, *choices: str) -> str:
    """`value`; raises ValueError unless it is one of these words."""
    *first, last = choices
    require(isinstance(value, str) and value in choices, name, value, f"{', '.join(first)} or {last}")
    return str(value)


def require_whole(name: str, value: Any, minimum: int = 1) -> int:
    """`value`; raises ValueError unless it is a whole number, `minimum` or more. True is none."""
    ok = isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= MOST
    require(ok, name, value, f"a whole number >= {minimum}")
    return int(value)


def is_number(value: Any) -> bool:
    """Whether `value` is a real number that fp32 can hold, also numpy's or a tensor of one element, as torch's optimizers
    take them. True and infinity are none."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.is_floating_point() and abs(value.item()) <= LARGEST
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and abs(value) <= LARGEST  # type: ignore[operator]


def require_number(
    name: str,
    value: Any,
    wanted: str = "at least 0",
    low: float = 0.0,
    high: float = LARGEST,
    *,
    above: bool = False,
    below: bool = False,
    none: bool = False,
) -> Any:
    """`value`; raises ValueError unless it is a finite number from `low` to `high`, or above and below these.

    none: it may be None too.
    """
    inside = (value is None and none) or (is_number(value) and low <= value <= high)
    require(inside and not (above and value == low) and not (below and value == high), name, value, wanted)
    return value


def require_fraction(name: str, value: Any) -> Any:
    """`value`; raises ValueError unless it is a number in [0, 1)."""
    return require_number(name, value, "in [0, 1)", high=1.0, below=True)


def pair(value: Any) -> Any:
    """A list as a tuple, anything else unchanged: pairs come from files as lists."""
    return tuple(value) if isinstance(value, (list, tuple)) else value


def without_dimensions(value: Any) -> Any:
    """A tensor of one element in the same memory, as kernels take it; also in a pair. Anything else unchanged."""
    if isinstance(value, tuple):
        return tuple(map(without_dimensions, value))
    return value.view(()) if isinstance(value, torch.Tensor) and value.dim() and value.numel() == 1 else value


def is_pair(value: Any) -> bool:
    """Whether `value` is a tuple of two numbers that fp32 can hold."""
    return isinstance(value, tuple) and len(value) == 2 and all(map(is_number, value))


def require_flag(name: str, value: Any) -> bool:
    """`value`; raises ValueError unless it is True or False."""
    require(isinstance(value, bool), name, value, "True or False")
    return bool(value)


def require_betas(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a pair of numbers in [0, 1)."""
    betas = pair(value)
    require(is_pair(betas) and all(0 <= beta < 1 for beta in betas), name, betas, "two numbers in [0, 1)")


USUAL: dict[str, Callable[[str, Any], Any]] = {
    "lr": require_number,
    "weight_decay": require_number,
    "betas": require_betas,
    "eps": require_number,
    "momentum": require_fraction,
    "nesterov": require_flag,
}
"""Hyper-parameters that mean the same in all methods, and what checks them."""
MEANS_MORE = ("betas", "momentum", "dampening", "nesterov", "weight_decay", "amsgrad", "maximize")
"""What parameter groups of torch's optimizers may hold, and what trains otherwise without it."""


def check_foreign_options(kind: str, group: dict[str, Any], by_group: Iterable[str], defaults: dict[str, Any]) -> None:
    """Raises ValueError for a group with an option that all groups share, or one of torch's that this method lacks."""
    shared = [k for k in defaults if k not in by_group and k in group and group[k] != defaults[k]]
    if shared:
        raise ValueError(
            f"a parameter group sets {', '.join(shared)}, which all groups of {kind} share: give it to {kind}"
        )
    lost = [k for k in MEANS_MORE if k not in by_group and group.get(k)]
    if lost:
        raise ValueError(f"a parameter group sets {', '.join(lost)}, which {kind} does not have: leave it out")


def check_parameter(p: torch.Tensor) -> None:
    """Raises ValueError for a parameter that the fp32 arithmetic of this package would spoil."""
    if p.dtype == torch.float32:
        return
    kind = str(p.dtype).removeprefix("torch.")
    if p.dtype in (torch.bfloat16, torch.float16):
        # Of numbers with 8 or 11 bits of mantissa a step of size lr moves few or none.
        raise ValueError(f"parameters must be float32, got {kind}: keep the model in float32 and use torch.autocast")
    way = "make torch.view_as_real of it the parameter" if p.is_complex() else "convert the model with model.float()"
    raise ValueError(f"parameters must be float32, got {kind}: {way}")


def check_gradient(g: torch.Tensor) -> None:
    """Raises RuntimeError for a sparse gradient."""
    if g.layout is not torch.strided:
        raise RuntimeError("gradients must be dense, got a sparse one: use torch.nn.Embedding(..., sparse=False)")


def become(optimizer: Any, method: type, old: str) -> None:
    """Makes the optimizer one of the class `method`, which an old argument, `old`, has asked for, and says what to write.

    Raises ValueError for a class of the caller's own, which says itself from which one it is derived.
    """
    mine = type(optimizer)
    if issubclass(mine, method):
        return
    if mine is not method.__base__:
        raise ValueError(f"{old} is an old way to say birder.{method.__name__}: derive {mine.__name__} from that")
    warn_of_old_way(f"{mine.__name__}({old})", f"birder.{method.__name__}(...)")
    optimizer.__class__ = method


@functools.cache
def warn_of_old_way(old: str, new: str) -> None:
    """Says once in a process what to write instead."""
    warnings.warn(f"{old} is an old way to say {new}: use that", FutureWarning, stacklevel=5)
