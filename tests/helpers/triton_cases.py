"""The Triton kernels against the reference. Run by tests/gpu/test_kernels_triton.py in a process of its own.

With TRITON_INTERPRET=1, which Triton reads when it is imported, on the CPU in its interpreter; otherwise on the GPU.
"""

from __future__ import annotations

import os

import pytest

from birder.kernels import cuda
from tests.helpers.kernel_cases import cases

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
CASES = [(f"{name} {i}", run) for name, runs in cases(cuda, DEVICE).items() for i, run in enumerate(runs)]


@pytest.mark.parametrize("run", [run for _, run in CASES], ids=[name for name, _ in CASES])
def test_kernel(run):
    run()
