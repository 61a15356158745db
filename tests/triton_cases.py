"""The Triton kernels against the reference. Run by tests/test_kernels_triton.py in a process of its own.

With TRITON_INTERPRET=1, which Triton reads when it is imported, on the CPU in its interpreter; otherwise on the GPU.
"""

from __future__ import annotations

import os

import pytest
import torch

from birder.kernels import cuda, reference_feedback
from tests import kernel_checks

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
SIZES = [0, 8, 1016, 2048, 2048 + 1032]  # a program takes 2048 or 1024 elements
if not INTERPRETED:
    SIZES += [2**20 + 8, 10**7]


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", kernel_checks.DTYPES)
@pytest.mark.parametrize("hold", [False, True])
def test_encode(numel, dtype, hold):
    kernel_checks.encode(cuda, DEVICE, numel, dtype, seed=2**63 + 12345 + numel, hold=hold, eps=1e-8 * hold)


@pytest.mark.parametrize("dtype", kernel_checks.DTYPES)
def test_encode_with_two_betas_and_turned_draws(dtype):
    kernel_checks.encode(cuda, DEVICE, 2048 + 1032, dtype, seed=2**63 + 77, eps=1e-8, ours=True)


def test_certain_signs_never_flip():
    kernel_checks.certain_signs(cuda, DEVICE, 4096)


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 300])
@pytest.mark.parametrize("numel", SIZES[:4])
def test_server(workers, numel):
    kernel_checks.server(cuda, DEVICE, workers if numel < 2048 else min(workers, 8), numel // 8, seed=2**62 + numel)


@pytest.mark.parametrize("workers", [1, 2, 4, 16, 3])
def test_server_of_whole_words(workers):
    kernel_checks.server(
        cuda, DEVICE, workers, 4 * 700, seed=2**50 + 36
    )  # from a word in the middle of a Philox block on


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_apply(dtype, partial, decay):
    kernel_checks.apply(cuda, DEVICE, dtype, decay, partial)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep", [1.0, 0.99])
def test_adam(dtype, keep):
    kernel_checks.moved_adam(cuda, DEVICE, dtype, keep)


@pytest.mark.parametrize("dtype", kernel_checks.DTYPES)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("screen", [False, True])
def test_take(dtype, scaled, screen):
    kernel_checks.taken(cuda, DEVICE, dtype, scaled, screen)


@pytest.mark.parametrize("numel", SIZES)
def test_draws(numel):
    kernel_checks.draws(cuda, DEVICE, numel, seed=2**63 + 999 + numel)


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("groups", [1, 300])
def test_one_phase(workers, groups):
    kernel_checks.one_phase(cuda, DEVICE, workers, groups, seed=2**62 + 17)


@pytest.mark.parametrize("numel", [0, 8, 1024, 1025, 5000])
@pytest.mark.parametrize("block", [1024, 100])
def test_unseen_blocks(numel, block):
    kernel_checks.unseen(cuda, DEVICE, numel, block)


@pytest.mark.parametrize("numel", SIZES)
def test_signs(numel):
    kernel_checks.signs(cuda, DEVICE, 3, numel // 8)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("workers", [1, 5])
def test_error_feedback(numel, masked, workers):
    kernel_checks.feedback(cuda, DEVICE, numel, workers, masked)


def test_error_feedback_with_nan():
    kernel_checks.feedback(cuda, DEVICE, 2000, 2, True, spoilt=True)


@pytest.mark.parametrize("numel", [1, 5, 1024, 1025, 3 * 1024 + 5])
def test_the_sum_has_one_order(numel):
    from birder.kernels.cuda_feedback import _total

    x = torch.rand(numel, dtype=torch.float64)
    above = reference_feedback.partial_sums(numel, DEVICE)
    assert float(_total(x.to(DEVICE), above)) == float(reference_feedback.tree_sum(x))


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_more_elements_than_an_int32_counts():
    count = 2**28 + 3
    z = torch.full((8 * count,), -1.0, device=DEVICE)
    z[-9:] = 1.0
    bits = cuda.pack_signs(z)
    assert bits[-2:].tolist() == [128, 255]
    assert not bits[:-2].any()


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_the_package_chooses_triton():
    from birder import kernels

    assert kernels.backend(torch.device("cuda")) is cuda
