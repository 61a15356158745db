"""Lightning and its Fabric, the real ones, on 2 ranks: the example's own code is what runs.

Its cases run one after the other in one pair of processes, which is where the time goes. Two rounds of them: what protects a
change, and the runs that are interrupted and resumed.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import birder
from birder.hooks.attachment import unwrap_optimizer
from tests.helpers import load, toy
from tests.helpers.integrations import FIRST, LOCAL, METHODS, ROUNDING, Found, both, check_resumed, said
from tests.helpers.ranks import run_ranks


def in_lightning(rank: int, world: int, folder: Path, resume: bool) -> dict[str, Any]:
    lightning = load("examples/lightning_callback.py")
    found: dict[str, Any] = {}

    def run(name: str, where: str, epochs: int, **options: Any) -> tuple[Any, Any]:
        # Lightning forgets the world when it has finished.
        os.environ.update(LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
        torch.manual_seed(0)
        module = Tested(lightning)(*METHODS.get(name, (torch.optim.SGD, {})))
        found["start"] = toy.flat(module).numpy()
        trainer = lightning.fit(folder / where, epochs, module, **options)
        return toy.flat(module).numpy(), trainer

    for name in METHODS:
        more = {"accumulate_grad_batches": 2} if name == "Birder" else {}
        more |= {"precision": "bf16-mixed"} if name == "OneBitAdam" else {}
        if resume:
            run(name, f"{name} b", 1, **more)
            found[f"{name} resumed"], _ = run(name, f"{name} b", 2, **more)
        if (name in FIRST) == resume:
            continue
        found[name], trainer = run(name, f"{name} a", 2, **more)
        if resume:
            continue
        found[f"{name} loss"] = float(trainer.callback_metrics["loss"])
        if name == "CSER":
            found["failed validation"] = after_a_failed_validation(trainer)
        trainer.save_checkpoint(folder / f"{name} a/weights.ckpt", weights_only=True)
        if name == "CSER":  # while the models differ: `test` makes them the mean
            found["failed validation"] = after_a_failed_validation(trainer)
            found["saved during validation"] = saved_during_validation(trainer)
        trainer.test(trainer.lightning_module, lightning.DataLoader(lightning.circle(1), 64), verbose=False)
        found[f"{name} test loss"] = float(trainer.callback_metrics["test loss"])
        found[f"{name} after test"] = toy.flat(trainer.lightning_module).numpy()
        torch.distributed.barrier()
        saved = torch.load(folder / f"{name} a/last.ckpt", weights_only=True)
        mean = lightning.Circle(*METHODS[name])
        mean.load_state_dict(saved["state_dict"])
        found[f"{name} saved"] = toy.flat(mean).numpy()
        weights = torch.load(folder / f"{name} a/weights.ckpt", weights_only=True)["state_dict"]
        found[f"{name} weights"] = torch.cat([w.flatten() for w in weights.values()]).numpy()
        with torch.no_grad():
            x, y = lightning.circle(1).tensors
            found[f"{name} loss of the saved"] = float(torch.nn.functional.cross_entropy(mean.net(x), y))
        if name == "CSER":
            found["brought back"] = brought_back(lightning)
            found["next fold"] = next_fold(lightning, trainer, folder / "CSER a/last.ckpt")
            found["second fit"] = second_fit(lightning)
    if resume:
        return found
    found["averages"] = averages(lightning, folder / "averages")
    from lightning.pytorch.callbacks import LearningRateFinder

    for name in LOCAL | {"Birder"}:
        os.environ.update(LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
        torch.manual_seed(0)
        module = lightning.Circle(*METHODS[name])
        module.lr = 0.0
        steps = {"max_steps": 4, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        search = [LearningRateFinder(num_training_steps=16, early_stop_threshold=None), lightning.BirderCallback()]
        trainer = lightning.Trainer(
            accelerator="cpu", strategy="ddp", devices=world, callbacks=search, default_root_dir=folder, **steps
        )
        trainer.fit(module, lightning.DataLoader(lightning.circle(), 16))
        method = unwrap_optimizer(trainer.optimizers[0])
        found[f"{name} found"] = (method.steps, module.lr > 0, method.param_groups[0]["lr"] == module.lr)
    found["search later"] = search_in_training(lightning, folder / "search")
    found["in a step"] = saved_in_a_step(lightning, folder / "in a step.ckpt")
    found["failed in a step"] = failed_in_a_step(lightning, folder / "failed in a step")
    found["clip"] = said(lambda: run("Birder", "clipping", 1, gradient_clip_val=1.0))
    found["other"] = said(lambda: run("other", "other", 1))
    return found


def after_a_failed_validation(trainer: Any) -> tuple[bool, bool]:
    """Whether the parameters are the mean's during validation, and the rank's own again after an error in it."""
    module, own = trainer.lightning_module, toy.flat(trainer.lightning_module)
    callback = next(c for c in trainer.callbacks if type(c).__name__ == "BirderCallback")
    callback.on_validation_start(trainer, module)
    during = toy.flat(module)
    callback.on_exception(trainer, module, RuntimeError("of the script"))
    return torch.equal(own, during), torch.equal(own, toy.flat(module))


def fitted(lightning: ModuleType, module: Any, *callbacks: Any, **options: Any) -> str:
    """What the error of a short fit says."""
    os.environ.update(LOCAL_RANK=str(torch.distributed.get_rank()), WORLD_SIZE="2")
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    every = [*callbacks, lightning.BirderCallback()]
    trainer = lightning.Trainer(accelerator="cpu", strategy="ddp", devices=2, callbacks=every, **quiet | options)
    return said(lambda: trainer.fit(module, lightning.DataLoader(lightning.circle(), 16)))


def search_in_training(lightning: ModuleType, folder: Path) -> tuple[str, bool]:
    """What the finder of learning rates says in the second epoch, of models that differ, and whether it puts each rank's own
    back."""
    from lightning.pytorch.callbacks import LearningRateFinder

    same = []

    class Later(LearningRateFinder):
        def on_fit_start(self, *args: Any) -> None:
            return

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                before = toy.flat(pl_module)
                self.lr_find(trainer, pl_module)
                same.append(torch.equal(before, toy.flat(pl_module)))

    module = lightning.Circle(*METHODS["CSER"])
    module.lr = 0.05
    later = Later(num_training_steps=8, early_stop_threshold=None)
    return fitted(lightning, module, later, max_epochs=2, default_root_dir=folder), same == [True]


def saved_in_a_step(lightning: ModuleType, path: Path) -> tuple[str, int]:
    """A checkpoint asked for between backward and step, as a signal of SLURM's does; of which step it is."""

    class Asks(Tested(lightning)):  # type: ignore[misc]
        def on_after_backward(self) -> None:
            if self.trainer.global_step == 1:
                self.trainer.save_checkpoint(path)

    error = fitted(lightning, Asks(*METHODS["Birder"]), max_steps=3)
    torch.distributed.barrier()
    return error, int(torch.load(path, weights_only=True)["global_step"])


def failed_in_a_step(lightning: ModuleType, folder: Path) -> tuple[str, bool]:
    """What `fit` raises where a script raises between backward and step, and whether a checkpoint of it is left."""
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    class Fails(Tested(lightning)):  # type: ignore[misc]
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.trainer.global_step == 1:
                raise ValueError("a bug of the script")

    with pytest.warns(RuntimeWarning, match="on_exception.ckpt is not saved: the step that failed is half done"):
        error = fitted(lightning, Fails(*METHODS["Birder"]), OnExceptionCheckpoint(folder), enable_checkpointing=True)
    torch.distributed.barrier()
    return error, any(folder.glob("*.ckpt"))


def next_fold(lightning: ModuleType, trainer: Any, path: Path) -> bool:
    """Whether the fit that follows a test from a checkpoint starts from the weights of its own module."""

    class Fold(Tested(lightning)):  # type: ignore[misc]
        def on_train_start(self) -> None:
            self.first = toy.flat(self)

    callback = next(c for c in trainer.callbacks if type(c).__name__ == "BirderCallback")
    trainer.test(trainer.lightning_module, lightning.DataLoader(lightning.circle(1), 64), ckpt_path=path, verbose=False)
    torch.manual_seed(1)
    module = Fold(*METHODS["CSER"])
    own = toy.flat(module).clone()
    os.environ.update(LOCAL_RANK=str(torch.distributed.get_rank()), WORLD_SIZE="2")
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    again = lightning.Trainer(accelerator="cpu", strategy="ddp", devices=2, callbacks=[callback], max_steps=1, **quiet)
    again.fit(module, lightning.DataLoader(lightning.circle(), 16))
    return torch.equal(module.first, own)


def second_fit(lightning: ModuleType) -> tuple[np.ndarray, np.ndarray]:
    """A module after a fit with local steps, and with what another fit of it begins."""

    class Module(Tested(lightning)):  # type: ignore[misc]
        def on_train_start(self) -> None:
            self.first = toy.flat(self).numpy()

    torch.manual_seed(2)
    module = Module(*METHODS["CSER"])
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    own = None
    for _ in range(2):
        own = toy.flat(module).numpy()
        os.environ.update(LOCAL_RANK=str(torch.distributed.get_rank()), WORLD_SIZE="2")
        callback = lightning.BirderCallback()
        trainer = lightning.Trainer(
            accelerator="cpu", strategy="ddp", devices=2, callbacks=[callback], max_steps=3, **quiet
        )
        trainer.fit(module, lightning.DataLoader(lightning.circle(), 16))
    return own, module.first


def brought_back(lightning: ModuleType) -> tuple[np.ndarray, np.ndarray]:
    """A module with local steps at the end of its training, and when Lightning brings it from its processes to the script."""
    from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher

    class Module(Tested(lightning)):  # type: ignore[misc]
        def on_train_end(self) -> None:
            self.own = toy.flat(self).numpy()
            self.trainer.strategy._launcher = _MultiProcessingLauncher(self.trainer.strategy)

    os.environ.update(LOCAL_RANK=str(torch.distributed.get_rank()), WORLD_SIZE="2")
    module, quiet = Module(*METHODS["CSER"]), {"logger": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(
        accelerator="cpu", strategy="ddp", devices=2, callbacks=[lightning.BirderCallback()], max_steps=4, **quiet
    )
    trainer.fit(module, lightning.DataLoader(lightning.circle(), 16))
    return module.own, toy.flat(module).numpy()


def averages(lightning: ModuleType, folder: Path) -> dict[str, list[np.ndarray]]:
    """Of callbacks that average models that differ, before and after the one of this package: this rank's own models, what it
    has in the end, and what was saved."""
    from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging

    class Module(lightning.Circle):  # type: ignore[name-defined]
        def on_train_epoch_start(self) -> None:
            self.begun.append(toy.flat(self).numpy())

        def on_train_batch_end(self, *args: Any) -> None:
            self.own.append(toy.flat(self).numpy())

    found = {}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    for late in (False, True):
        kinds = {"EMA": EMAWeightAveraging(decay=0.5), "SWA": StochasticWeightAveraging(1e-2, 1, annealing_epochs=1)}
        for name, callback in kinds.items():
            os.environ.update(LOCAL_RANK=str(torch.distributed.get_rank()), WORLD_SIZE="2")
            torch.manual_seed(0)
            module = Module(*METHODS["CSER"])
            module.begun, module.own = [], []
            both = [lightning.BirderCallback(), callback]
            trainer = lightning.Trainer(
                accelerator="cpu",
                strategy="ddp",
                devices=2,
                max_epochs=2,
                limit_train_batches=4,
                callbacks=[*(reversed(both) if late else both), ModelCheckpoint(folder, save_last=True, save_top_k=0)],
                **quiet,
            )
            trainer.fit(
                module, lightning.DataLoader(lightning.circle(), 16), lightning.DataLoader(lightning.circle(1), 64)
            )
            torch.distributed.barrier()
            saved = torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]
            torch.distributed.barrier()
            (folder / "last.ckpt").unlink(missing_ok=True)
            whole = torch.cat([w.flatten() for w in saved.values()]).numpy()
            found[f"{name} {late}"] = [
                *(module.own if name == "EMA" else module.begun),
                toy.flat(module).numpy(),
                whole,
            ]
    return found


def saved_during_validation(trainer: Any) -> tuple[bool, bool]:
    """Whether the checkpoint of a callback's on_validation_epoch_end is that of on_train_epoch_end: states, weights."""
    module = trainer.lightning_module
    callback = next(c for c in trainer.callbacks if type(c).__name__ == "BirderCallback")

    def saved() -> tuple[list[np.ndarray], np.ndarray]:
        checkpoint: dict[str, Any] = {"state_dict": module.state_dict()}
        callback.on_save_checkpoint(trainer, module, checkpoint)
        states = [state["parameters"] for state in checkpoint["optimizer_states"][0]["every_rank"] or ()]
        mean = torch.cat([w.flatten() for w in checkpoint["state_dict"].values()])
        return [flat.numpy() for state in states for flat in state], mean.numpy()

    outside = saved()
    callback.on_validation_start(trainer, module)
    inside = saved()
    callback.on_validation_end(trainer, module)
    same = len(inside[0]) == len(outside[0]) and all(map(np.array_equal, inside[0], outside[0]))
    return same, np.array_equal(inside[1], outside[1])


def Tested(lightning: ModuleType) -> Any:
    class Module(lightning.Circle):  # type: ignore[name-defined]
        def test_step(self, batch: Any, number: int) -> None:
            self.log("test loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    return Module


@pytest.fixture(scope="module")
def lit(tmp_path_factory: pytest.TempPathFactory) -> Found:
    pytest.importorskip("lightning")
    return run_ranks(in_lightning, 2, tmp_path_factory.mktemp("lightning"), False)


@pytest.fixture(scope="module")
def lit_resumed(lit: Found, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return both(lit, run_ranks(in_lightning, 2, tmp_path_factory.mktemp("lightning"), True))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.long
def test_lightning_resumes_bit_for_bit(lit_resumed: Found, method: str) -> None:
    """Birder with two micro-batches a step, 1-bit Adam in bf16 autocast."""
    check_resumed(lit_resumed, method)


@pytest.mark.slow
def test_lightning_saves_and_evaluates_the_mean_of_models_that_differ(lit: Found) -> None:
    first, second = lit
    mean = (first["CSER"].astype(np.float64) + second["CSER"]) / 2
    assert np.abs(first["CSER saved"] - mean).max() < ROUNDING
    assert np.abs(first["CSER weights"] - mean).max() < ROUNDING
    for mine in lit:
        assert mine["CSER loss"] == pytest.approx(mine["CSER loss of the saved"], rel=ROUNDING)
        assert mine["CSER test loss"] == pytest.approx(mine["CSER loss of the saved"], rel=ROUNDING)
        assert np.abs(mine["CSER after test"] - mean).max() < ROUNDING
    assert np.array_equal(first["Birder saved"], first["Birder"])
    assert first["failed validation"] == second["failed validation"] == (False, True)
    assert first["saved during validation"] == second["saved during validation"] == (True, True)
    (mine, begun), (theirs, again) = first["second fit"], second["second fit"]
    assert not np.array_equal(mine, theirs)
    assert np.array_equal(begun, again)
    assert np.abs(begun - (mine.astype(np.float64) + theirs) / 2).max() < ROUNDING
    assert first["next fold"]
    assert second["next fold"]


@pytest.mark.slow
def test_the_model_that_lightning_brings_back_is_the_mean(lit: Found) -> None:
    """From processes that it has started itself (ddp_notebook): the script had rank 0's own, which it then evaluated."""
    (own, brought), (others, _) = (mine["brought back"] for mine in lit)
    assert not np.array_equal(own, others)
    assert np.array_equal(brought, (own + others) / 2)


def test_averages_of_models_that_differ_are_those_of_their_mean(lit: Found) -> None:
    """Each rank had its own, and rank 0's was saved, wherever the callback that averages stands."""
    for name in lit[0]["averages"]:
        *models, end, saved = zip(*(mine["averages"][name] for mine in lit), strict=True)
        assert not np.array_equal(*models[-1])
        means = [(a.astype(np.float64) + b) / 2 for a, b in models]
        average = means[0]
        for count, mean in enumerate(means[1:], 1):
            average = average + (mean - average) / (2 if name.startswith("EMA") else count + 1)
        assert np.array_equal(*end)
        assert np.abs(end[0] - average).max() < ROUNDING
        if name.startswith("EMA"):
            assert np.abs(saved[0] - average).max() < ROUNDING


def test_lightning_finds_a_learning_rate(lit: Found) -> None:
    """Its finder trains before other callbacks begin, and loads the state again without them."""
    for mine in lit:
        assert [mine["CSER found"], mine["Birder found"]] == [(4, True, True)] * 2


@pytest.mark.slow
def test_lightning_searches_a_learning_rate_in_mid_training(lit: Found) -> None:
    """It saves and restores: every rank has its own model and state again, where they differ."""
    for found in lit:
        assert found["search later"] == ("", True)


def test_lightning_saves_after_the_step_that_is_under_way(lit: Found) -> None:
    for found in lit:
        assert found["in a step"] == ("", 2)
        assert found["failed in a step"] == ("ValueError: a bug of the script", False)


def test_lightning_refuses_its_own_clipping_and_other_optimizers(lit: Found) -> None:
    for mine in lit:
        assert mine["clip"].startswith("ValueError: Trainer(gradient_clip_val=1.0): clipping by the framework")
        assert "one optimizer of the birder package" in mine["other"]


def in_fabric(rank: int, world: int) -> dict[str, Any]:
    from lightning.fabric import Fabric

    os.environ.update(LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    fabric = Fabric(accelerator="cpu", devices=world, strategy="ddp")
    fabric.launch()
    found: dict[str, Any] = {}
    for name, compiled in (("eager", False), ("compiled", True)):
        net = toy.make()
        plain = birder.Birder(net.parameters(), lr=1e-2)
        whole: Any = torch.compile(net, backend="aot_eager") if compiled else net
        model, optimizer = fabric.setup(whole, plain)
        attachment = birder.attach(model, optimizer)
        for step in (1, 2, 3):
            for micro in (0, 1):
                with fabric.no_backward_sync(model, enabled=micro == 0):
                    fabric.backward(toy.loss(model, rank, 2 * step + micro))
            optimizer.step()
            optimizer.zero_grad()
        found[name] = toy.flat(net).numpy()
        found[f"{name} bytes"] = attachment.counter.total
    fabric.backward(toy.loss(model, rank, 1))
    fabric.clip_gradients(model, optimizer, max_norm=1e-3)
    found["clip"] = said(optimizer.step)
    return found


@pytest.mark.slow
def test_fabric_trains_what_plain_ddp_does() -> None:
    pytest.importorskip("lightning")
    first, second = run_ranks(in_fabric, 2)
    reference = run_ranks(in_plain_ddp, 2)[0]
    for mine in (first, second):
        assert np.array_equal(mine["eager"], reference)
        assert np.array_equal(mine["compiled"], reference)
        assert mine["eager bytes"] == mine["compiled bytes"] > 0
        assert "gradients were changed after backward" in mine["clip"]


def in_plain_ddp(rank: int, world: int) -> np.ndarray:
    net = toy.make()
    optimizer = birder.Birder(net.parameters(), lr=1e-2)
    model = DistributedDataParallel(net)
    birder.attach(model, optimizer)
    for step in (1, 2, 3):
        with model.no_sync():
            toy.loss(model, rank, 2 * step).backward()
        toy.loss(model, rank, 2 * step + 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    return toy.flat(net).numpy()


def test_wrapped_models_and_optimizers_are_unwrapped() -> None:
    run_ranks(unwrapped, 1)


def unwrapped(rank: int, world: int) -> None:
    model = toy.make()
    optimizer = birder.Birder(model.parameters())

    class Wrapper(torch.optim.SGD):  # as Lightning's, which claims the wrapped class
        def __init__(self, inner: Any) -> None:
            self.optimizer = inner

    attachment = birder.attach(torch.compile(DistributedDataParallel(model)), Wrapper(optimizer))  # type: ignore[arg-type]
    assert attachment.optimizer is optimizer
    with pytest.raises(TypeError, match="got Linear"):
        birder.attach(torch.compile(nn.Linear(2, 2)), birder.Birder(nn.Linear(2, 2).parameters()))  # type: ignore[arg-type]
