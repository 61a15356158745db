"""torch.compile with inductor, where a C++ compiler is there. It fuses operations and so rounds otherwise than eager."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import birder
from birder import attach
from tests.helpers import toy
from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.long]
STEPS = 12
METHODS: dict[str, dict[str, Any]] = {
    "Birder": {"lr": 0.01},
    "OneBitAdam": {"lr": 0.01, "warmup_steps": 4, "eps": 1e-4},
}
WHERE = {"Birder": ("model", "ddp"), "OneBitAdam": ("ddp",)}
"""How inductor rounds has nothing to do with the method."""
ROUNDING = 1e-4
"""Of losses around 1.5, relative: fp32 sums and tanh in another order, and what that makes of 12 steps."""

compiler = any(map(shutil.which, ("g++", "clang++"))) and Path(sysconfig.get_path("include"), "Python.h").is_file()
needs_compiler = pytest.mark.skipif(not compiler, reason="no C++ compiler, or no Python headers")


def train(rank: int, name: str, where: str) -> tuple[list[float], np.ndarray]:
    """where: around the model, around DDP, or nowhere."""
    torch._dynamo.reset()
    model = toy.make()
    inner: Any = torch.compile(model) if where == "model" else model
    ddp = DistributedDataParallel(inner)
    optimizer = getattr(birder, name)(model.parameters(), **METHODS[name])
    attach(ddp, optimizer)
    outer: Any = torch.compile(ddp) if where == "ddp" else ddp
    losses = []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss = toy.loss(outer, rank, step)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, toy.flat(model).numpy()


def every_way(rank: int, world: int, cache: str) -> dict[tuple[str, str], Any]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    import torch._functorch.config
    import torch._inductor.config
    import torch._inductor.metrics

    torch._inductor.config.compile_threads = 1  # no pool of processes for a few kernels
    # Graphs are not taken from a cache; compiled kernels are, so that the second rank and method need not compile again.
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    found: dict[tuple[str, str], Any] = {(n, w): train(rank, n, w) for n in METHODS for w in ("nowhere", *WHERE[n])}
    found["kernels", ""] = torch._inductor.metrics.generated_kernel_count
    return found


@needs_compiler
def test_inductor_trains_the_losses_of_eager(tmp_path: Path) -> None:
    """One pair of processes: both methods, the model compiled inside of DDP and DDP with the model."""
    first, second = run_ranks(every_way, 2, str(tmp_path))
    start = toy.flat(toy.make()).numpy()
    for name in METHODS:
        for where in WHERE[name]:
            for mine in (first, second):
                eager, compiled = mine[name, "nowhere"], mine[name, where]
                assert np.allclose(compiled[0], eager[0], rtol=ROUNDING, atol=0)
                assert not np.array_equal(compiled[1], start)
            assert np.array_equal(first[name, where][1], second[name, where][1])  # the same model on both ranks
    assert first["kernels", ""] > 0  # it was inductor that ran
