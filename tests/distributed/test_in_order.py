"""What ranks, streams and graphs must find in order: units of layers that one replica does not use, futures, captures."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import birder
from birder.hooks.ddp import BucketHook
from tests.helpers.ranks import run_ranks


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(3)])

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        for i in used:
            x = self.layers[i](x)
        return x


def other_layers(rank: int, world: int, overlap: bool) -> tuple[list[int | None], str]:
    """Replica 0 does not use the layer in the middle: the units in their order of exchange, and what is said."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = Layers()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = birder.Birder(model.parameters(), lr=1e-2)
    birder.attach(model, optimizer, mesh=mesh, unit_mb=0.0009, overlap=overlap)
    order: list[int | None] = []
    submit = optimizer._submit

    def noted(task: Any, unit: int | None = None, whole: bool = False) -> None:
        order.append(unit)
        submit(task, unit, whole)

    optimizer._submit = noted  # type: ignore[method-assign]
    model(torch.ones(4, 16), (0, 1, 2) if rank else (0, 2)).square().sum().backward()
    with pytest.raises(RuntimeError) as said:
        optimizer.step()
    return order, str(said.value)


@pytest.mark.parametrize("overlap", [True, False])
def test_replicas_that_use_other_layers_are_refused_in_the_first_step(overlap: bool) -> None:
    """FSDP's hooks completed units in another order on each, and one layer's bits met another's."""
    first, second = run_ranks(other_layers, 2, overlap)
    assert first == second
    assert first[0] == [0, 1, 2, None, None]  # units in order, and what is of the whole step
    assert first[1].startswith("replicas have gradients of different layers")


class Event:
    """A future as torch's are for a GPU: who comes after a value without a tensor waits for nothing."""

    def __init__(self, value: Any, waited: list[Any]) -> None:
        self._value, self._waited = value, waited

    def then(self, callback: Callable[[Event], Any]) -> Event:
        assert isinstance(self._value, Tensor)
        return Event(callback(self), self._waited)

    def value(self) -> Any:
        return self._value

    def wait(self) -> Any:
        self._waited.append(self._value)
        return self._value


def test_a_bucket_that_is_dense_in_part_is_handed_on_when_its_means_are_there() -> None:
    """On NCCL DDP read it while they were being put back."""
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4))]
    buffer, waited = torch.arange(7.0), []
    sender: Any = SimpleNamespace(all_reduce_mean=lambda sent, number, wire: Event(sent * 2, waited))
    bucket: Any = SimpleNamespace(
        buffer=lambda: buffer, parameters=lambda: params, gradients=lambda: [buffer[:3], buffer[3:]], index=lambda: 0
    )
    hook = BucketHook(DistributedDataParallel.__new__(DistributedDataParallel))
    done: Any = hook._average(bucket, {torch.float32: (sender, [1])})
    assert done.value() is buffer
    assert buffer.tolist() == [0, 1, 2, 6, 8, 10, 12]
    assert [t.tolist() for t in waited] == [[6, 8, 10, 12]]


@pytest.mark.parametrize("name", ["AdamW", "Birder"])
def test_a_step_is_not_captured_in_a_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays would keep the step's number and learning rate."""
    model = nn.Linear(4, 2)
    optimizer = getattr(birder, name)(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="capture forward and backward alone"):
        optimizer.step()


def test_ranks_agree_on_learning_rates_of_any_type() -> None:
    """A GPU's tensor prints its device, another one on each rank, and few digits."""
    digests = [
        birder.SGDM(nn.Linear(2, 2).parameters(), lr=lr).digest()  # type: ignore[arg-type]
        for lr in (
            0.125,
            torch.tensor(0.125),
            torch.tensor(0.125, dtype=torch.float64),
            torch.tensor(0.12500001, dtype=torch.float64),
        )
    ]
    assert digests[0] == digests[1] == digests[2] != digests[3]
