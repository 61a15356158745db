"""Birder in Lightning (needs the extra `lightning`).

    torchrun --nproc-per-node 2 examples/lightning_callback.py FOLDER

Saves after every epoch; a second call resumes from the last checkpoint in FOLDER. Every rank prints its last metrics.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import _script  # noqa: F401

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from birder import Birder
from birder.integrations.lightning import BirderCallback

POINTS, BATCH = 512, 16


def circle(seed: int = 0) -> TensorDataset:
    """Points in the plane, and whether they lie inside the unit circle."""
    x = torch.randn(POINTS, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.square().sum(1) < 1).long())


class Circle(LightningModule):
    """method, options: the optimizer and its arguments."""

    def __init__(self, method: Any = Birder, options: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
        self.method, self.options = method, {"lr": 3e-3} | (options or {})

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        self.log("loss", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return self.method(self.parameters(), **self.options)


def fit(folder: Path, epochs: int, module: Circle, **arguments: Any) -> Trainer:
    """Trains up to the end of epoch number `epochs`, and continues from the last checkpoint in `folder`, if any."""
    ranks, per_node = (int(os.environ.get(key, 1)) for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=per_node,
        num_nodes=ranks // per_node,
        max_epochs=epochs,
        callbacks=[BirderCallback(), ModelCheckpoint(folder, save_last=True, save_top_k=0)],
        **({"logger": False, "enable_progress_bar": False, "enable_model_summary": False} | arguments),
    )
    last = folder / "last.ckpt"
    batches = DataLoader(circle(), BATCH, shuffle=True)
    trainer.fit(module, batches, DataLoader(circle(1), 64), ckpt_path=last if last.is_file() else None)
    return trainer


if __name__ == "__main__":
    seed_everything(0)  # the same initial model on every rank
    done = fit(Path(sys.argv[1] if len(sys.argv) > 1 else "lightning_checkpoints"), 10, Circle())
    print(f"rank {done.global_rank}: {done.callback_metrics}")
