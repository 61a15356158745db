"""Where numba or Triton does not run: the kernels run all the same, with one warning; what is wrong with a GPU is raised."""

from __future__ import annotations

import builtins
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from birder import kernels
from birder.kernels import reference
from tests.helpers import ROOT

STEP = """
import warnings, torch
import birder
from birder import kernels
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    p = torch.nn.Parameter(torch.ones(64))
    optimizer = birder.Birder([p], lr=0.5)
    for _ in range(2):
        p.grad = torch.ones(64)
        optimizer.step()
said = [str(w.message) for w in caught if "kernels run unfused" in str(w.message)]
print(kernels.backend(p.device).__name__, len(said), float(p[0]), *said)
"""


def step(before: str, *path: Path) -> str:
    """What a step in a process of its own says; before: what happens there before this package is imported."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT))), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", before + STEP], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@pytest.mark.slow
def test_where_compiled_code_can_be_kept_nowhere_it_is_compiled_all_the_same() -> None:
    pytest.importorskip("numba")
    nowhere = """
from numba.core import caching
def refuse(self): raise OSError("read-only file system")
for kind in caching.CacheImpl._locator_classes: kind.ensure_cache_path = refuse
"""
    assert step(nowhere).startswith("birder.kernels.cpu 0 0.0")


@pytest.mark.slow
def test_a_numba_that_does_not_load_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise OSError('libllvm: cannot open shared object file')")
    said = step("", tmp_path)
    assert said.startswith("birder.kernels.reference 1 0.0")
    assert "numba does not load (libllvm" in said


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        (OSError("libllvm: cannot open shared object file"), "numba does not load (libllvm"),
        (ImportError("Numba needs NumPy 1.0 or less"), "numba does not load (Numba needs"),
        (SystemError("initialization of _internal failed"), "numba does not load (initialization"),
        (ModuleNotFoundError("No module named numba", name="numba"), "numba is not installed"),
    ],
)
def test_what_is_wrong_with_numba_is_said(monkeypatch: pytest.MonkeyPatch, raised: Exception, says: str) -> None:
    import_module = builtins.__import__

    def broken(name: str, *more: Any, **options: Any) -> Any:
        if name == "numba":
            raise raised
        return import_module(name, *more, **options)

    monkeypatch.setattr(builtins, "__import__", broken)
    with pytest.warns(UserWarning, match=re.escape(says)) as caught:
        assert kernels._cpu.__wrapped__() is reference
    assert len(caught) == 1


class Gpu:
    """torch.cuda of a machine with a GPU. sticky: it has failed, and says so whenever it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, sticky: bool = False) -> None:
        self.sticky = sticky
        zeros = torch.zeros
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", self.ask)
        monkeypatch.setattr(torch, "zeros", lambda *size, device=None: (self.ask(), zeros(*size))[1])
        kernels._cuda.cache_clear()

    def ask(self, device: torch.device | None = None) -> None:
        if self.sticky:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


def triton(monkeypatch: pytest.MonkeyPatch, pack_signs: Any) -> None:
    monkeypatch.setattr(kernels, "cuda", SimpleNamespace(pack_signs=pack_signs), raising=False)


@pytest.fixture(autouse=True)
def nothing_is_remembered():
    yield
    kernels._cuda.cache_clear()


def test_a_gpu_that_has_failed_is_no_missing_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch, sticky=True)
    triton(monkeypatch, lambda z: z)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="illegal memory access"):
            kernels.backend(torch.device("cuda"))


def test_nor_is_one_that_fails_in_the_first_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)

    def fail(z: torch.Tensor) -> None:
        gpu.sticky = True
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    triton(monkeypatch, fail)
    with pytest.raises(RuntimeError, match="CUDA error: an illegal memory access"):
        kernels.backend(torch.device("cuda"))


def test_a_missing_compiler_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch)

    def fail(z: torch.Tensor) -> None:
        raise RuntimeError("Failed to find C compiler")

    triton(monkeypatch, fail)
    with pytest.warns(UserWarning, match="no Triton.*Failed to find C compiler"):
        assert kernels.backend(torch.device("cuda")) is reference
