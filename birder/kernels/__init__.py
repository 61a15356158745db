"""Element-wise work of the 1-bit methods: one set of functions, the implementation chosen by the tensor's device.

| module | runs on | needs |
|---|---|---|
| reference | any device | torch |
| cpu | CPU tensors | numba |
| one_phase | any device; index work only | torch |

Without numba the reference runs on CPU too, after one warning.
"""

from __future__ import annotations

import functools
import warnings
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from birder.kernels import reference
from birder.kernels.one_phase import assemble, owned
from birder.kernels.reference import binarize, ratio, unpack

__all__ = [
    "apply_bits",
    "assemble",
    "average_signs",
    "binarize",
    "encode",
    "owned",
    "pack_signs",
    "ratio",
    "reduce_bits",
    "unpack",
    "unseen_blocks",
]


@functools.cache
def _cpu() -> ModuleType:
    try:
        from birder.kernels import cpu
    except ImportError:
        warnings.warn("numba is not installed: 1-bit kernels run unfused in torch, about 10x slower", stacklevel=3)
        return reference
    return cpu


def backend(device: torch.device) -> ModuleType:
    """The module whose functions serve tensors on `device`."""
    return _cpu() if device.type == "cpu" else reference


def encode(g: Tensor, m: Tensor, b: Tensor, **options: Any) -> Tensor:
    """See `reference.encode`."""
    return backend(g.device).encode(g, m, b, **options)


def reduce_bits(rows: Tensor, **options: Any) -> Tensor:
    """See `reference.reduce_bits`."""
    return backend(rows.device).reduce_bits(rows, **options)


def apply_bits(p: Tensor, bits: Tensor, **options: Any) -> None:
    """See `reference.apply_bits`."""
    backend(p.device).apply_bits(p, bits, **options)


def unseen_blocks(b: Tensor, active: Tensor, block: int) -> Tensor:
    """See `reference.unseen_blocks`."""
    return backend(b.device).unseen_blocks(b, active, block)


def pack_signs(z: Tensor) -> Tensor:
    """See `reference.pack_signs`."""
    return backend(z.device).pack_signs(z)


def average_signs(rows: Tensor, scales: Tensor) -> Tensor:
    """See `reference.average_signs`."""
    return backend(rows.device).average_signs(rows, scales)
