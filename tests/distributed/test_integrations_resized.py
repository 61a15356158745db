"""`any_world` of Accelerate, the Trainer and Lightning: training goes on with another number of ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import birder
from birder.hooks.attachment import unwrap_optimizer
from tests.helpers import load, toy
from tests.helpers.ranks import run_ranks

METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Birder": (birder.Birder, {"lr": 1e-3}),
    "CSER": (birder.CSER, {"lr": 0.05, "block": 32, "gradient_ratio": 2, "model_ratio": 2, "reset_every": 3}),
}
OWN = {"Birder": "m", "CSER": "momentum"}
"""A state that every worker has for itself, of which new ones get the mean."""


def own(method: Any, name: str) -> tuple[int, np.ndarray]:
    """(steps, that state of every unit)."""
    flats = [unit.state[OWN[name]][: unit.numel].float().flatten() for unit in unwrap_optimizer(method).units]
    return unwrap_optimizer(method).steps, torch.cat(flats).numpy().copy()


def in_accelerate(folder: Path, name: str, go_on: bool) -> dict[str, Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from birder.integrations.accelerate import attach

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True)
    method, options = METHODS[name]
    net = toy.make()
    model, optimizer = accelerator.prepare(net, method(net.parameters(), **options))
    attach(accelerator, model, optimizer, any_world=True, unit_mb=0.001)
    found: dict[str, Any] = {}
    if go_on:
        accelerator.load_state(str(folder))
        found["begins"] = *own(optimizer, name), toy.flat(net).numpy()
    for step in range(4):
        accelerator.backward(toy.loss(model, accelerator.process_index, step))
        optimizer.step()
        optimizer.zero_grad()
    found["ends"] = own(optimizer, name)
    with optimizer.averaged():
        found["mean"] = toy.flat(net).numpy()
    if not go_on:
        accelerator.save_state(str(folder))
    return found


def in_trainer(folder: Path, name: str, go_on: bool) -> dict[str, Any]:
    from transformers import TrainerCallback

    hf = load("examples/transformers_trainer.py")
    trainer = hf.trainer(folder, 8, None if go_on else 4, METHODS[name])
    trainer.attach_options |= {"any_world": True, "unit_mb": 0.01}
    found: dict[str, Any] = {}

    class Begins(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            found["begins"] = *own(trainer.optimizer, name), toy.flat(trainer.model).numpy()

    if go_on:
        trainer.add_callback(Begins())
    trainer.train(resume_from_checkpoint=go_on or None)
    found["ends"] = own(trainer.optimizer, name)
    with unwrap_optimizer(trainer.optimizer).averaged():
        found["mean"] = toy.flat(trainer.model).numpy()
    return found


def in_lightning(folder: Path, name: str, go_on: bool) -> dict[str, Any]:
    lightning = load("examples/lightning_callback.py")
    method, options = METHODS[name]
    found: dict[str, Any] = {}

    class Circle(lightning.Circle):
        def on_train_start(self) -> None:
            if go_on:
                found["begins"] = *own(self.optimizers(use_pl_optimizer=False), name), toy.flat(self).numpy()

        def on_train_end(self) -> None:
            found["ends"] = own(self.optimizers(use_pl_optimizer=False), name)
            with unwrap_optimizer(self.optimizers(use_pl_optimizer=False)).averaged():
                found["mean"] = toy.flat(self).numpy()

    torch.manual_seed(0)
    any_world: Callable[..., Any] = lightning.BirderCallback
    lightning.BirderCallback = lambda: any_world(any_world=True, unit_mb=0.0005)  # of this loaded module alone
    lightning.fit(folder, 1 + go_on, Circle(method, options))
    return found


FRAMEWORKS = {"accelerate": in_accelerate, "transformers": in_trainer, "lightning": in_lightning}


def trained(rank: int, world: int, framework: str, folder: Path, go_on: bool) -> dict[str, Any]:
    found = {}
    for name in METHODS:
        os.environ.update(LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        found[name] = FRAMEWORKS[framework](folder / name, name, go_on)
    return found


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.slow
@pytest.mark.long
def test_another_number_of_ranks_goes_on(framework: str, tmp_path: Path) -> None:
    """With the mean of two workers' states, and of their models where these differ, as birder/checkpoint/elastic.py says."""
    pytest.importorskip(framework)
    for before, worlds in ((2, (3, 1)), (1, (2,))):
        source = tmp_path / f"of_{before}"
        ended = run_ranks(trained, before, framework, source, False)
        for world in worlds:
            shutil.copytree(source, tmp_path / f"{before}_{world}")
            later = run_ranks(trained, world, framework, tmp_path / f"{before}_{world}", True)
            for name in METHODS:
                steps = ended[0][name]["ends"][0]
                mean = np.mean([mine[name]["ends"][1] for mine in ended], axis=0)
                for mine in later:
                    now, state, model = mine[name]["begins"]
                    assert now == steps
                    np.testing.assert_allclose(state, mean, rtol=0, atol=1e-6)
                    np.testing.assert_allclose(model, ended[0][name]["mean"], rtol=0, atol=1e-6)
                    assert mine[name]["ends"][0] > steps
                    assert not np.array_equal(mine[name]["mean"], model)
                    assert np.array_equal(mine[name]["mean"], later[0][name]["mean"])


def test_without_it_another_number_is_refused_in_a_line_that_names_it(tmp_path: Path) -> None:
    from birder.integrations import every_rank

    optimizer = birder.Birder(nn.Linear(3, 2).parameters())
    state = run_ranks(saving, 2, tmp_path)
    assert state == [1, 1]
    with pytest.raises(ValueError, match="saved by 2 ranks, this run has 1: use 2 ranks, or any_world=True"):
        every_rank.load(tmp_path, optimizer)
    every_rank.load(tmp_path, optimizer, any_world=True)
    assert optimizer.steps == 1


def saving(rank: int, world: int, folder: Path) -> int:
    from birder.integrations import every_rank

    net = nn.Linear(3, 2)
    ddp = nn.parallel.DistributedDataParallel(net)
    optimizer = birder.Birder(net.parameters())
    birder.attach(ddp, optimizer)
    ddp(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    every_rank.save(folder, optimizer)
    return optimizer.steps
