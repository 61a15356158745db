"""A model that FSDP2 shards over the ranks of a node, as the training loop knows DistributedDataParallel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from launch.spec import RunSpec

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule  # half a second on every rank: only those that shard load it


class ShardedModel(nn.Module):
    """A replica on every node, sharded over its ranks: every block of an nn.ModuleList by itself, the rest together.

    module: the model. mesh: nodes x ranks per node.
    """

    def __init__(self, model: nn.Module, nodes: int, ranks_per_node: int, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        super().__init__()
        self.mesh = init_device_mesh(device.type, (nodes, ranks_per_node), mesh_dim_names=("replicate", "shard"))
        inside = self.mesh["shard"]
        for blocks in [m for m in model.modules() if isinstance(m, nn.ModuleList)]:
            for block in blocks:
                if any(True for _ in block.parameters()):
                    fully_shard(block, mesh=inside)
        fully_shard(model, mesh=inside, reshard_after_forward=False)
        self.module = model
        self.parts = [m for m in model.modules() if isinstance(m, FSDPModule)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @property
    def _root(self) -> FSDPModule:
        return cast("FSDPModule", self.module)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients add up on this rank."""
        self._root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._root.set_requires_gradient_sync(True)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, every rank has the whole model. Forward passes send nothing: ranks may differ in how many they make."""
        self._root.set_reshard_after_forward(False)
        for part in self.parts:
            part.unshard()
        try:
            yield
        finally:
            self._root.set_reshard_after_forward(True)
            self._root.set_reshard_after_forward(False, recurse=False)
            for part in self.parts:
                part.reshard()


Wrapped = DistributedDataParallel | ShardedModel


def wrap(model: nn.Module, spec: RunSpec, device: torch.device) -> Wrapped:
    """The model under what `comm.topology` says: FSDP2 for hsdp, DistributedDataParallel for any other."""
    comm = spec.config["comm"]
    if comm["topology"] == "hsdp":
        return ShardedModel(model, spec.nodes, spec.ranks_per_node, device)
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        bucket_cap_mb=comm["bucket_cap_mb"],
        gradient_as_bucket_view=True,
    )


def gathered(model: Wrapped) -> contextlib.AbstractContextManager[None]:
    """Inside, every rank can run `model.module` by itself."""
    return model.gathered() if isinstance(model, ShardedModel) else contextlib.nullcontext()
