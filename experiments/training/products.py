"""Products of bf16 matrices, and convolutions, by the fp32 kernels of a CPU: `train.bf16_matmul=fp32`.

A product of two bf16 numbers is exact in fp32, and kernels for bf16 add up in fp32 too. So both give the same but for the
order of the sums, and where a CPU has no fast instructions for bf16 the detour takes a fraction of the time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from launch.errors import UserError

# What linear layers, attention that is written out and convolutions come to, forward and backward.
PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten.convolution_backward.default,
}


class Fp32Products(TorchDispatchMode):
    """Inside, products and convolutions of bf16 are computed in fp32 and rounded to bf16; all else is as it was."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func in PRODUCTS and args[0].dtype is torch.bfloat16:
            exact = tree_map_only(Tensor, Tensor.float, args)
            return tree_map_only(Tensor, Tensor.bfloat16, func(*exact, **options))
        return func(*args, **options)


def check_device(settings: Mapping[str, Any], device: torch.device) -> None:
    """Raises UserError where they are asked for on a GPU, whose kernels for bf16 are the fast ones.

    settings: `train` of the configuration.
    """
    if settings["bf16_matmul"] != "native" and device.type != "cpu":
        raise UserError(
            f"train.bf16_matmul=fp32 is for CPUs, and this run is on {device.type}: set train.bf16_matmul=native"
        )


def slow(settings: Mapping[str, Any], device: torch.device) -> bool:
    """Whether products are computed in a format for which this CPU has no instructions. settings: as above."""
    native = settings["precision"] == "bf16" and settings["bf16_matmul"] == "native"
    known = device.type == "cpu" and torch.backends.mkldnn.is_available()
    return native and known and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def products_of(settings: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """What forward and backward run in. settings: as above."""
    return contextlib.nullcontext() if settings["bf16_matmul"] == "native" else Fp32Products()
