"""DDP over a model that tensor parallelism has split: as torch's optimizer, or refused before the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

import birder
from tests.helpers.ranks import run_ranks

REPLICATED = slice(3, 6)  # the second layer's bias and the normalisation
METHODS: dict[str, Callable[..., Any]] = {
    "torch": torch.optim.AdamW,
    "adamw": birder.AdamW,
    "bertadam": lambda params, lr: birder.BertAdam(params, lr=lr, tensor_clip=None),
    "birder": birder.Birder,
    "sigma_delta": birder.SigmaDeltaAdam,
    "lion": birder.Lion,
}
REFUSED = {
    "a scale": lambda params: birder.EfficientAdam(params),
    "1-bit Adam's scale": lambda params: birder.OneBitAdam(params, warmup_steps=2),
    "norms": lambda params: birder.LAMB(params),
    "the norm of each tensor": lambda params: birder.BertAdam(params),
    "the norm of all": lambda params: birder.AdamW(params, max_grad_norm=1.0),
}


def split(hidden: int) -> tuple[DistributedDataParallel, int]:
    """2 replicas x 2 parts: the model, and the number of this rank's replica."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "part"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 4), nn.LayerNorm(4))
    parallelize_module(model, mesh["part"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    _pre_dp_module_transform(model)
    return DistributedDataParallel(model, process_group=mesh["replicate"].get_group()), mesh.get_local_rank("replicate")


def trained(rank: int, world: int) -> dict[str, list[np.ndarray]]:
    """By method: all parameters of this rank."""
    ends = {}
    for name, make in METHODS.items():
        ddp, replica = split(8)
        params = list(ddp.parameters())  # after the first forward pass torch's transform holds the parts elsewhere
        optimizer = make(params, lr=0.01)
        if name != "torch":
            birder.attach(ddp, optimizer)
        drawn = torch.Generator().manual_seed(replica)
        for _ in range(6):
            out = ddp(torch.randn(5, 6, generator=drawn))
            optimizer.zero_grad()
            out.square().mean(0)[:2].sum().backward()
            optimizer.step()
        ends[name] = [(p.to_local() if isinstance(p, DTensor) else p).detach().numpy() for p in params]
    return ends


@pytest.mark.slow
def test_it_trains_as_with_torchs_optimizer() -> None:
    ranks = run_ranks(trained, 4)
    for name in METHODS:
        ends = [rank[name] for rank in ranks]
        for a, b in ((0, 2), (1, 3)):
            assert all(map(np.array_equal, ends[a], ends[b])), f"{name}: replicas differ"
        assert all(map(np.array_equal, ends[0][REPLICATED], ends[1][REPLICATED])), (
            f"{name}: ranks with other parts differ"
        )
    for rank in ranks:
        for ours, theirs in zip(rank["adamw"], rank["torch"], strict=True):
            assert np.allclose(ours, theirs, atol=1e-6)


def refused(rank: int, world: int) -> dict[str, str]:
    answers = {}
    for name, make in {**REFUSED, "unequal parts": lambda params: birder.Birder(params)}.items():
        ddp, _ = split(7 if name == "unequal parts" else 8)
        try:
            birder.attach(ddp, make(ddp.parameters()))
        except RuntimeError as error:
            answers[name] = str(error)
    return answers


def test_what_would_drift_apart_is_refused() -> None:
    for answers in run_ranks(refused, 4):
        assert answers.keys() == REFUSED.keys() | {"unequal parts"}
        for name, line in answers.items():
            assert "tensor parallelism has split 0.weight" in line
            assert ("in unequal parts" in line) is (name == "unequal parts")
