"""Birder in a training loop with Hugging Face Accelerate (needs the extra `hf`).

    torchrun --nproc-per-node 2 examples/accelerate_loop.py FOLDER

Saves after every epoch; a second call resumes from FOLDER. Prints the loss of every epoch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import _script  # noqa: F401

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from birder import Birder
from birder.integrations.accelerate import attach

POINTS, BATCH, ACCUMULATE = 512, 16, 2


def circle() -> TensorDataset:
    """Points in the plane, and whether they lie inside the unit circle."""
    x = torch.randn(POINTS, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.square().sum(1) < 1).long())


def train(
    folder: Path,
    epochs: int,
    method: Callable[..., Any] = Birder,
    options: dict[str, Any] | None = None,
    **accelerate: Any,
) -> tuple[nn.Module, Accelerator]:
    """Trains up to the end of epoch number `epochs`, and resumes from `folder` if it holds a checkpoint; it may be empty.

    method, options: the optimizer and its arguments. accelerate: arguments of Accelerator.
    """
    accelerator = Accelerator(
        cpu=True,  # leave it out where there are GPUs
        gradient_accumulation_steps=ACCUMULATE,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        **accelerate,
    )
    set_seed(0)  # the same initial model on every rank
    net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
    plain = method(net.parameters(), **({"lr": 3e-3} | (options or {})))
    model, optimizer, batches = accelerator.prepare(net, plain, DataLoader(circle(), BATCH, shuffle=True))
    attach(accelerator, model, optimizer)
    set_seed(0, device_specific=True)  # dropout of its own on every rank

    if (folder / "model.safetensors").is_file():
        accelerator.load_state(str(folder))
    each = -(-len(batches) // ACCUMULATE)  # steps of an epoch: its last one may be of fewer batches
    for epoch in range(plain.steps // each, epochs):
        batches.set_epoch(epoch)
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state(str(folder))
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
    return net, accelerator


if __name__ == "__main__":
    train(Path(sys.argv[1] if len(sys.argv) > 1 else "accelerate_checkpoint"), 10)
