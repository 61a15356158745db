"""All checks of a back end of the kernels: for tests/helpers/triton_cases.py and `make gpu-check`. Needs no pytest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

import torch

from birder import kernels
from birder.kernels import reference
from tests.helpers import kernel_checks as checks

SIZES = (0, 8, 1016, 2048, 2048 + 1032)
"""Elements. A program takes 2048 or 1024 of them."""
MORE = (2**20 + 8, 10**7)
"""Besides SIZES, on a GPU."""
HALVES = (torch.float32, torch.bfloat16)
EITHER = (False, True)

Checks = dict[str, list[Callable[[], object]]]


def cases(module: ModuleType, device: str) -> Checks:
    """Name of a group of kernels -> calls that raise AssertionError where `module` on `device` differs from the reference."""
    gpu = device != "cpu"
    sizes = SIZES + MORE if gpu else SIZES

    def check(run: Callable[..., object], *more: Any, **options: Any) -> Callable[[], object]:
        return partial(run, module, device, *more, **options)

    made: Checks = {}
    for dtype in checks.DTYPES:
        made[f"encode, {dtype}"] = [
            *(
                check(checks.encode, n, dtype, seed=2**63 + 12345 + n, hold=hold, eps=1e-8 * hold)
                for n, hold in product(sizes, EITHER)
            ),
            check(checks.encode, 2048 + 1032, dtype, seed=2**63 + 77, eps=1e-8, ours=True),
        ]
    made["signs that are certain"] = [check(checks.certain_signs, 4096)]
    made["server"] = [
        *(
            check(checks.server, workers if n < 2048 else min(workers, 8), n // 8, seed=2**62 + n)
            for workers, n in product((1, 2, 3, 8, 300), SIZES[:4])
            if gpu or workers < 300 or n == 8
        ),
        # Whole words, from one in the middle of a Philox block on.
        *(check(checks.server, workers, 4 * 700, seed=2**50 + 36) for workers in (1, 2, 4, 16, 3)),
    ]
    made["apply"] = [check(checks.apply, *how) for how in product(HALVES, (0.0, 0.01), EITHER)]
    made["Adam"] = [check(checks.moved_adam, *how) for how in product(HALVES, (1.0, 0.99))]
    made["take"] = [check(checks.taken, *how) for how in product(checks.DTYPES, EITHER, EITHER)]
    made["take"].append(check(checks.taken, torch.float32, False, True, shifted=True))
    made["draws"] = [check(checks.draws, n, seed=2**63 + 999 + n) for n in sizes]
    made["one phase"] = [check(checks.one_phase, *how, seed=2**62 + 17) for how in product((1, 2, 3, 8), (1, 300))]
    made["unseen"] = [check(checks.unseen, *how) for how in product((0, 8, 1024, 1025, 5000), (1024, 100))]
    for steps, limit in product(EITHER, (1, 2)):
        name = f"sigma-delta, {'int8' if steps else 'fp32'}, {3 - limit} phases"
        made[name] = [
            *(
                check(checks.modulated, n, checks.DTYPES[0], steps, limit, hold=hold)
                for n, hold in product(sizes, EITHER)
            ),
            *(check(checks.modulated, 3080, dtype, steps, limit) for dtype in checks.DTYPES[1:]),
        ]
    made["sigma-delta's server"] = [
        check(checks.served, workers, n // 8, steps)
        for workers, n, steps in product((1, 2, 3, 8, 300), SIZES[:4], EITHER)
        if gpu or workers < 300 or n == 8
    ]
    made["signs"] = [check(checks.signs, 3, n // 8) for n in sizes]
    for masked in EITHER:
        made["error feedback" + ", masked" * masked] = [
            check(checks.feedback, n, workers, masked) for n, workers in product(sizes, (1, 5))
        ]
    made["error feedback, masked"].append(check(checks.feedback, 2000, 2, True, spoilt=True))
    made["order of a sum"] = [check(_one_order, n) for n in (1, 5, 1024, 1025, 3 * 1024 + 5)]
    if gpu:
        made["more elements than an int32 counts"] = [check(_beyond_int32)]
        made["the package takes them"] = [check(_chosen)]
    return made


def _one_order(module: ModuleType, device: str, numel: int) -> None:
    from birder.kernels.cuda import _total

    x = torch.rand(numel, dtype=torch.float64)
    above = reference.partial_sums(numel, torch.device(device))
    assert float(_total(x.to(device), above)) == float(reference.tree_sum(x))


def _beyond_int32(module: ModuleType, device: str) -> None:
    count = 2**28 + 3
    z = torch.full((8 * count,), -1.0, device=device)
    z[-9:] = 1.0
    bits = module.pack_signs(z)
    assert bits[-2:].tolist() == [128, 255]
    assert not bits[:-2].any()


def _chosen(module: ModuleType, device: str) -> None:
    assert kernels.backend(torch.device(device)) is module
