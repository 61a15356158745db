"""Element-wise work of the 1-bit methods: one set of functions, the implementation chosen by the tensor's device.

| module | runs on | needs |
|---|---|---|
| reference | any device | torch |
| cpu | CPU tensors | numba |
| cuda | GPU tensors | triton, and a C compiler at run time |

`reference` defines each kernel: its arguments, what it computes and what it returns. The others equal it bit for bit. A
kernel writes its result into `out` and its intermediate sums into `sums` (`partial_sums`) where the caller gives them,
otherwise into new tensors. Without numba or Triton the reference runs there too, after one warning. Which kernel moves how
many bytes, and what it does with NaN: docs/kernels.md.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from birder.kernels import reference
from birder.kernels.bits import message_bytes, part, scales_of, unpack
from birder.kernels.reference import adam_moments, partial_sums, ratio, settle


@functools.cache
def _cpu() -> ModuleType:
    try:
        import numba
    except Exception as error:  # not there; or it, or its LLVM, does not load
        missing = isinstance(error, ModuleNotFoundError) and error.name == "numba"
        why = "numba is not installed" if missing else f"numba does not load ({_reason(error)})"
        warnings.warn(f"{why}: 1-bit kernels run unfused in torch, about 10x slower", stacklevel=3)
        return reference
    from birder.kernels import cpu

    return cpu


def _reason(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


@functools.cache
def _cuda(device: torch.device) -> ModuleType:
    """For this GPU, which need not be the current one: a context on another costs memory there."""
    there = torch.cuda.is_available()
    if there:
        torch.zeros(8, device=device)
        torch.cuda.synchronize(device)  # raises errors of the GPU itself, which Triton did not cause
    try:
        from birder.kernels import cuda

        cuda.pack_signs(torch.zeros(8, device=device))  # Triton builds its launcher at the first use, with a C compiler
    except Exception as error:  # not installed, no compiler, a GPU that it does not know: the reference serves them all
        if there:
            torch.cuda.synchronize(device)  # raises where the GPU has failed meanwhile
        warnings.warn(
            f"no Triton, 1-bit kernels run unfused in torch, several times slower: {_reason(error)}", stacklevel=3
        )
        return reference
    return cuda


def backend(device: torch.device) -> ModuleType:
    """The module whose functions serve tensors on `device`."""
    if device.type == "cpu":
        return _cpu()
    return _cuda(device) if device.type == "cuda" else reference


def _by_offset(offsets: Sequence[int]) -> tuple[list[int], list[int]]:
    """Which tensors begin at a multiple of 32 elements, as those of whole parameters do, and which do not."""
    odd = [i for i, offset in enumerate(offsets) if offset % 32]
    return [i for i, offset in enumerate(offsets) if offset % 32 == 0], odd


def _whole_bytes(flat: Tensor, parts: int = 1) -> None:
    if flat.numel() % (8 * parts):
        each = f" in each of {parts} parts" if parts > 1 else ""
        raise ValueError(
            f"the number of elements{each} must be a multiple of 8, for whole bytes of bits, got {flat.numel()}"
        )


def _served(name: str, by: int = 0, whole: bool = False) -> Callable[..., Any]:
    """The kernel of that name, of the back end for the device of its argument number `by`, or for its option `device`.

    whole: that argument must make whole bytes of bits, in each of `parts`.
    """

    @functools.wraps(getattr(reference, name))
    def kernel(*args: Any, **options: Any) -> Any:
        if whole:
            _whole_bytes(args[by], options.get("parts", 1))
        device = options["device"] if "device" in options else args[by].device
        return getattr(backend(device), name)(*args, **options)

    return kernel


encode = _served("encode", whole=True)
binarize = _served("binarize", whole=True)
reduce_bits = _served("reduce_bits")
owned = _served("owned")
assemble = _served("assemble")
modulate = _served("modulate", whole=True)
modulate_adam = _served("modulate_adam", by=1, whole=True)
serve_sigma = _served("serve_sigma")
unseen_blocks = _served("unseen_blocks")
random_mask = _served("random_mask")
chosen_blocks = _served("chosen_blocks")
pack_signs = _served("pack_signs", whole=True)
average_signs = _served("average_signs")
add_message = _served("add_message")
add_momentum = _served("add_momentum")
add_average = _served("add_average")
split_signs = _served("split_signs", whole=True)
write_signs = _served("write_signs")


@functools.wraps(reference.apply_bits)
def apply_bits(params: Sequence[Tensor], offsets: Sequence[int], bits: Tensor, **options: Any) -> None:
    even, odd = _by_offset(offsets)
    for i in odd:  # of shards of parameters an offset may be any
        first, count = offsets[i], params[i].numel()
        active = options["active"] if options["active"] is None else options["active"][first : first + count]
        mine = part(bits, first, count)
        backend(bits.device).apply_bits([params[i]], [0], mine, **options | {"active": active})
    if even:
        backend(bits.device).apply_bits([params[i] for i in even], [offsets[i] for i in even], bits, **options)


@functools.wraps(reference.take)
def take(flat: Tensor, grads: Sequence[Tensor], offsets: Sequence[int], **options: Any) -> None:
    even, odd = _by_offset(offsets)
    if odd:
        reference.take(flat, [grads[i] for i in odd], [offsets[i] for i in odd], **options)
    if even:
        backend(flat.device).take(flat, [grads[i] for i in even], [offsets[i] for i in even], **options)


@functools.wraps(reference.move_adam)
def move_adam(params: list[Tensor], m: list[Tensor], v: list[Tensor], **options: float) -> None:
    backend(params[0].device).move_adam(params, m, v, **options)
