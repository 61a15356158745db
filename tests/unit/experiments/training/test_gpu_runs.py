"""What runs on a GPU do besides training: TF32, the generator's state in checkpoints, gradients as views of DDP's buckets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import birder
from experiments.training import sharded
from experiments.training.resume import Checkpoints
from experiments.training.world import allow_tf32, placed
from launch.errors import UserError

GPU = torch.device("cuda", 0)


@pytest.fixture
def flags() -> Iterator[Any]:
    """Reads the two switches; they are put back."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    with (
        torch.backends.__allow_nonbracketed_mutation()
    ):  # which torch's test helpers forbid, where a test has loaded them
        before = matmul.allow_tf32, cudnn.allow_tf32
        yield lambda: (matmul.allow_tf32, cudnn.allow_tf32)
        matmul.allow_tf32, cudnn.allow_tf32 = before


def test_tf32_is_what_the_precision_says(flags: Any) -> None:
    for precision, allowed in (("tf32", True), ("fp32", False), ("tf32", True), ("bf16", False)):
        allow_tf32(precision, GPU)
        assert flags() == (allowed, allowed)
    with pytest.raises(UserError, match="tf32 is a GPU's format"):
        allow_tf32("tf32", torch.device("cpu"))


@pytest.mark.parametrize(
    ("cluster", "backend", "device"),
    [
        ({}, "nccl", "cuda:1"),
        ({"device": "cpu"}, "gloo", "cpu"),
        ({"backend": "gloo"}, "gloo", "cpu"),
        ({"backend": "gloo", "device": "cuda"}, "gloo", "cuda:1"),
    ],
)
def test_the_device_is_the_one_that_was_asked_for(
    cluster: dict[str, Any], backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert placed(cluster) == (backend, torch.device(device))


def test_a_checkpoint_has_the_state_of_the_gpus_generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a resumed run with dropout would differ from the uninterrupted one."""
    state = torch.arange(16, dtype=torch.uint8)
    put_back: list[torch.Tensor] = []

    def made() -> Checkpoints:
        model = torch.nn.Linear(3, 2)
        optimizer = birder.SGDM(model.parameters(), lr=0.1)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        workload: Any = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
        wrapped = SimpleNamespace(module=model)
        method: Any = SimpleNamespace(ddp=wrapped, optimizer=optimizer, workload=workload, scaler=None)
        return Checkpoints(tmp_path, 2, method, 1)

    first, again = made(), made()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: state.clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", put_back.append)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    first.save(1, {})
    found = again.find()
    assert found is not None
    again.apply(found)
    (restored,) = put_back
    assert torch.equal(restored, state)


def test_gradients_are_views_of_the_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(sharded, "DistributedDataParallel", lambda model, **options: seen.append(options))
    config = {
        "comm": {"topology": "flat", "bucket_cap_mb": 25, "hook": None, "enabled": True},
        "train": {"static_graph": False},
    }
    sharded.wrap(torch.nn.Linear(2, 2), SimpleNamespace(config=config), torch.device("cpu"))  # type: ignore[arg-type]
    assert seen[0]["gradient_as_bucket_view"] is True
