"""The Triton kernels: in Triton's interpreter, through its compiler, and on a GPU where there is one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from birder import kernels
from birder.kernels import reference
from tests.helpers import ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def run(*command: str, cache: Path, interpret: bool = False) -> None:
    """In a process of its own: whether kernels are interpreted is decided once, when triton is imported."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(cache)}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/helpers/triton_cases.py")


@pytest.mark.slow
@pytest.mark.long
def test_interpreted_kernels_equal_the_reference(tmp_path):
    run(*PYTEST, cache=tmp_path, interpret=True)


@pytest.mark.slow
@pytest.mark.long
def test_kernels_compile_for_a_gpu(tmp_path):
    run("tests/helpers/triton_compile.py", cache=tmp_path)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU at hand")
@pytest.mark.gpu
def test_kernels_on_the_gpu_equal_the_reference(tmp_path):
    run(*PYTEST, cache=tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is at hand")
def test_where_triton_does_not_run_the_reference_does_with_one_warning():
    kernels._cuda.cache_clear()
    with pytest.warns(UserWarning, match="no Triton, 1-bit kernels run unfused"):
        assert kernels.backend(torch.device("cuda")) is reference
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.backend(torch.device("cuda")) is reference
    kernels._cuda.cache_clear()
