"""Accelerate, the Hugging Face Trainer and Lightning, the real ones, on 2 ranks: the examples' own code is what runs.

A framework's cases run one after the other in one pair of processes, which is where the time goes. Two rounds of them: what
protects a change, and the runs that are interrupted and resumed.
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
from tests.helpers.ranks import run_ranks

METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Birder": (birder.Birder, {}),
    "OneBitAdam": (birder.OneBitAdam, {"warmup_steps": 3}),  # interrupted in its compressed stage
    "CSER": (birder.CSER, {"lr": 0.05, "block": 32, "gradient_ratio": 2, "model_ratio": 2, "reset_every": 3}),
    "AdamW": (birder.AdamW, {}),  # dense: the framework's own way to keep state
}
LOCAL = {"CSER"}
"""Methods whose models differ between ranks."""
FIRST = ("Birder", "CSER")
"""Methods whose uninterrupted run belongs to the first round."""
Found = list[dict[str, Any]]
"""Of each rank."""
ROUNDING = 1e-5
"""Means of numbers of size 1, added in fp32 in another order."""


def said(call: Any) -> str:
    try:
        call()
    except (RuntimeError, ValueError, TypeError) as e:
        return f"{type(e).__name__}: {e}"
    return ""


def both(first: Found, second: Found) -> Found:
    return [one | two for one, two in zip(first, second, strict=True)]


def check_resumed(results: Found, method: str) -> None:
    """Interrupted and resumed equals uninterrupted, on every rank; and something was trained, by both in common."""
    for mine in results:
        straight, resumed = mine[method], mine[f"{method} resumed"]
        assert np.array_equal(straight, resumed)
        assert not np.array_equal(straight, mine["start"])
    same = np.array_equal(results[0][method], results[1][method])
    assert same == (method not in LOCAL)


# ---- Accelerate --------------------------------------------------------------------------------------------------------


def in_accelerate(rank: int, world: int, folder: Path, resume: bool) -> dict[str, Any]:
    os.environ["LOCAL_RANK"] = str(rank)
    from accelerate.state import AcceleratorState

    loop = load("examples/accelerate_loop.py")
    torch.manual_seed(0)
    found: dict[str, Any] = {}

    def run(name: str, where: str, epochs: int, **options: Any) -> Any:
        AcceleratorState._reset_state(True)
        method, arguments = METHODS[name]
        return loop.train(folder / where, epochs, method, arguments, **options)

    if resume:
        for name in METHODS:
            found[name] = toy.flat(run(name, f"{name} a", 2)[0]).numpy()
            run(name, f"{name} b", 1)
            found[f"{name} resumed"] = toy.flat(run(name, f"{name} b", 2)[0]).numpy()
        return found
    for name in ("Birder", "OneBitAdam"):
        found[f"{name} half"] = toy.flat(run(name, f"{name} half", 1)[0]).numpy()
    net, accelerator = run("Birder", "clipping", 0)
    found["start"] = toy.flat(net).numpy()
    loss = net(torch.ones(2, 2)).sum()
    accelerator.backward(loss)
    found["clip"] = said(lambda: accelerator.clip_grad_norm_(net.parameters(), 1.0))
    found["clip value"] = said(lambda: accelerator.clip_grad_value_(net.parameters(), 1.0))
    found["norm"] = float(accelerator.clip_grad_norm_(net.parameters(), float("inf")))
    found["true norm"] = float(torch.nn.utils.get_total_norm([p.grad for p in net.parameters()]))
    critic = nn.Linear(2, 2)
    critic(torch.full((2, 2), 9.0)).sum().backward()
    found["another's clip"] = said(lambda: accelerator.clip_grad_norm_(critic.parameters(), 1.0))
    accelerator.clip_grad_value_(list(critic.parameters()), 0.01)
    found["another's largest"] = max(float(p.grad.abs().max()) for p in critic.parameters() if p.grad is not None)
    unwrap_optimizer(accelerator._optimizers[0]).attachment.close()
    found["closed clip"] = said(lambda: accelerator.clip_grad_norm_(net.parameters(), 1.0))
    found["bf16"] = toy.flat(run("OneBitAdam", "bf16", 1, mixed_precision="bf16")[0]).numpy()
    found["compiled"] = toy.flat(run("Birder", "compiled", 1, dynamo_backend="aot_eager")[0]).numpy()
    found["one rank's"] = said(lambda: accelerator._optimizers[0].load_state_dict({"state": {}, "param_groups": []}))
    found |= saved_by_hand(rank, loop, accelerator, folder)
    found["each alone"] = each_alone(loop)
    return found


def each_alone(loop: ModuleType) -> str:
    """The error when Accelerate finds no GPU and `cpu=True` is missing: every rank would train alone."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator = loop.Accelerator()
    assert accelerator.num_processes == 1
    net = nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(net, birder.Birder(net.parameters()))
    return said(lambda: loop.attach(accelerator, model, optimizer))


def saved_by_hand(rank: int, loop: ModuleType, accelerator: Any, folder: Path) -> dict[str, Any]:
    """Two attempts with one accelerator, as in a search for a batch size; states by torch.save next to save_state."""

    def attempt() -> tuple[nn.Module, Any]:
        accelerator.free_memory()
        net = nn.Linear(2, 2)
        plain = birder.Birder(net.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(net, plain)
        loop.attach(accelerator, model, plain)  # either does: the prepared one has it inside
        return model, optimizer

    def step(model: nn.Module, optimizer: Any) -> None:
        accelerator.backward(model(torch.full((2, 2), 1.0 + rank)).square().sum())
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = attempt()
    for _ in range(3):
        step(model, optimizer)
    model, optimizer = attempt()
    step(model, optimizer)
    asked: list[bool] = []
    hook = accelerator.register_save_state_pre_hook(lambda *_: asked.append("units" in optimizer.state_dict()))
    accelerator.save_state(str(folder / "state"))
    hook.remove()
    path = folder / f"by hand {rank}.pt"
    torch.save(optimizer.state_dict(), path)
    saved = {"weights": toy.flat(model), "momentum": unwrap_optimizer(optimizer).units[0].state["m"].clone()}

    def there() -> bool:
        now = unwrap_optimizer(optimizer)
        return now.steps == 1 and torch.equal(now.units[0].state["m"], saved["momentum"])

    found: dict[str, Any] = {}
    step(model, optimizer)
    optimizer.load_state_dict(torch.load(path))
    found["by hand"] = there()
    step(model, optimizer)
    accelerator.load_state(str(folder / "state"))
    found["second attempt"] = there() and torch.equal(toy.flat(model), saved["weights"])
    with optimizer.averaged():  # the models are equal
        found["second attempt"] &= torch.equal(toy.flat(model), saved["weights"])
    torch.distributed.barrier()
    other = torch.load(folder / f"by hand {1 - rank}.pt")
    loose = birder.Birder(toy.make().parameters())
    found["own hook"] = asked, "every_rank" in torch.load(folder / "state/optimizer.bin")
    torch.distributed.barrier()
    if rank == 0:  # as versions without the order of hooks have left it, in which a script's hook was given the note
        torch.save(torch.load(path), folder / "state/optimizer.bin")
    torch.distributed.barrier()
    step(model, optimizer)
    accelerator.load_state(str(folder / "state"))
    found["rank 0's in the file"] = there()
    found["not prepared"] = said(lambda: loop.attach(accelerator, model, loose))
    found["other rank's"] = said(lambda: optimizer.load_state_dict(other))
    return found


@pytest.fixture(scope="module")
def accelerated(tmp_path_factory: pytest.TempPathFactory) -> Found:
    pytest.importorskip("accelerate")
    return run_ranks(in_accelerate, 2, tmp_path_factory.mktemp("accelerate"), False)


@pytest.fixture(scope="module")
def accelerated_resumed(accelerated: Found, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return both(accelerated, run_ranks(in_accelerate, 2, tmp_path_factory.mktemp("accelerate"), True))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.long
def test_accelerate_resumes_bit_for_bit(accelerated_resumed: Found, method: str) -> None:
    """With two micro-batches a step, and dropout."""
    check_resumed(accelerated_resumed, method)


def test_accelerate_refuses_clipping_and_still_gives_the_norm(accelerated: Found) -> None:
    for mine in accelerated:
        assert mine["clip"].startswith("RuntimeError: clipping by the framework has no effect")
        assert "max_grad_norm=1.0" in mine["clip"]
        assert mine["clip value"].startswith("RuntimeError: clipping by the framework has no effect")
        assert mine["norm"] == mine["true norm"] > 0


def test_accelerate_clips_what_no_message_is_taken_from(accelerated: Found) -> None:
    """Another model's parameters, and those whose attachment is closed; every clipping was refused, for good."""
    for mine in accelerated:
        assert mine["another's clip"] == mine["closed clip"] == ""
        assert mine["another's largest"] == pytest.approx(0.01)


def test_accelerate_refuses_the_state_of_one_rank(accelerated: Found) -> None:
    for mine in accelerated:
        assert mine["one rank's"].startswith("ValueError: the state of Birder differs from rank to rank")


def test_accelerates_state_dict_is_the_state_of_this_rank(accelerated: Found) -> None:
    """To scripts that save it by hand; they were given a note in its place, and lost the state without a word."""
    for mine in accelerated:
        assert mine["by hand"]
        assert "accelerator.prepare(model, optimizer)" in mine["not prepared"]
        assert "it differs from rank to rank, so save and load it on every rank" in mine["other rank's"]


def test_ranks_that_accelerate_takes_for_one_process_each_are_refused(accelerated: Found) -> None:
    for mine in accelerated:
        assert "would train each of the 2 ranks alone: on CPUs say Accelerator(cpu=True)" in mine["each alone"]


def test_a_scripts_own_hook_of_save_state_is_given_this_ranks_state(accelerated: Found) -> None:
    """It was given the note, and the file rank 0's state, which rank 0 alone could load."""
    for mine in accelerated:
        assert mine["own hook"] == ([True], True)
        assert mine["rank 0's in the file"]


def test_accelerate_saves_the_optimizer_of_the_second_attempt(accelerated: Found) -> None:
    assert all(mine["second attempt"] for mine in accelerated)


def test_accelerate_trains_in_bf16_autocast(accelerated: Found) -> None:
    first, second = accelerated
    assert np.array_equal(first["bf16"], second["bf16"])
    assert not np.array_equal(first["bf16"], first["OneBitAdam half"])


def test_accelerate_compiled_equals_eager(accelerated: Found) -> None:
    for mine in accelerated:
        assert np.array_equal(mine["compiled"], mine["Birder half"])


# ---- the Trainer ---------------------------------------------------------------------------------------------------------


def in_trainer(rank: int, world: int, folder: Path, resume: bool) -> dict[str, Any]:
    os.environ["LOCAL_RANK"] = str(rank)
    from transformers import BertForSequenceClassification

    hf = load("examples/transformers_trainer.py")
    steps = 8
    found: dict[str, Any] = {}
    for name, method in METHODS.items():
        options = {"accumulate": 2} if name == "Birder" else {}

        def make(where: str, stop: int | None = None, method: Any = method, n: str = name, o: Any = options) -> Any:
            more = {"gradient_accumulation_steps": o.get("accumulate", 1), "bf16": n == "OneBitAdam"}
            return hf.trainer(folder / f"{n} {where}", steps, stop, (method[0], {"lr": 1e-3} | method[1]), **more)

        if resume:
            make("b", steps // 2).train()
            resumed = make("b")
            resumed.train(resume_from_checkpoint=True)
            found[f"{name} resumed"] = toy.flat(resumed.model).numpy()
        if (name in FIRST) == resume:
            continue
        straight = make("a")
        found["start"] = toy.flat(straight.model).numpy()
        straight.train()
        found[name] = toy.flat(straight.model).numpy()
        if resume:
            continue
        found[f"{name} kept"] = "units" in straight.optimizer.state_dict()
        found[f"{name} loss"] = straight.evaluate()["eval_loss"]
        saved = BertForSequenceClassification.from_pretrained(folder / f"{name} a/checkpoint-{steps}").eval()
        found[f"{name} saved"] = toy.flat(saved).numpy()
        rows = hf.sentences()[:32]
        with torch.no_grad():
            inputs = {key: torch.tensor([row[key] for row in rows]) for key in ("input_ids", "labels")}
            found[f"{name} loss of the saved"] = float(saved(**inputs).loss)
        found[f"{name} norms"] = [entry["grad_norm"] for entry in straight.state.log_history if "grad_norm" in entry]
    if resume:
        return found
    clipping = hf.trainer(folder / "clipping", 2, max_grad_norm=1.0)
    found["clip"] = said(clipping.train)
    found["steps"] = unwrap_optimizer(clipping.optimizer).steps
    other = hf.trainer(folder / "other", 2, method=(torch.optim.SGD, {"lr": 0.1}))
    found["other"] = said(other.train)
    early = hf.trainer(folder / "early", 2, save_strategy="no", bf16=True)
    early.evaluate()
    found["evaluated first"] = said(early.train), toy.flat(early.model).numpy(), type(early.model_wrapped).__name__
    found["evaluated again"] = early.evaluate()["eval_loss"]
    for name, size, short in (("as found", 7, ()), ("found", 8, (1,)), ("found late", 8, (2,))):
        search = hf.trainer(folder / name, 3, per_device_train_batch_size=size, auto_find_batch_size=True, data_seed=0)
        search.add_callback(OutOfMemory(rank, short))
        found[name] = said(search.train) or toy.flat(search.model).numpy()
        found[f"{name} sent"] = unwrap_optimizer(search.optimizer).attachment.counter.total
    return found


def OutOfMemory(rank: int, steps: tuple[int, ...]) -> Any:
    """Memory runs out before these updates, when backward has sent its messages. Dropout begins anew in each attempt."""
    from transformers import TrainerCallback

    left = list(steps)

    class Callback(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            torch.manual_seed(rank)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step + 1 in left:
                left.remove(state.global_step + 1)
                raise RuntimeError("CUDA out of memory.")

    return Callback()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Found:
    pytest.importorskip("accelerate")
    return run_ranks(in_trainer, 2, tmp_path_factory.mktemp("trainer"), False)


@pytest.fixture(scope="module")
def trained_resumed(trained: Found, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return both(trained, run_ranks(in_trainer, 2, tmp_path_factory.mktemp("trainer"), True))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.long
def test_the_trainer_resumes_bit_for_bit(trained_resumed: Found, method: str) -> None:
    """With dropout and a schedule; Birder with two micro-batches a step, 1-bit Adam in bf16 autocast."""
    check_resumed(trained_resumed, method)


@pytest.mark.slow
def test_the_trainer_refuses_its_own_clipping_before_the_first_step(trained: Found) -> None:
    for mine in trained:
        assert mine["clip"].startswith("ValueError: TrainingArguments(max_grad_norm=1.0): clipping by the framework")
        assert mine["steps"] == 0


@pytest.mark.slow
def test_the_trainer_refuses_other_optimizers(trained: Found) -> None:
    assert all("optimizer of the birder package, got SGD" in mine["other"] for mine in trained)


@pytest.mark.slow
def test_the_trainer_trains_after_it_has_evaluated(trained: Found) -> None:
    """Accelerate took the bare model for one that it had prepared, and there was no DDP to attach to."""
    first, second = trained
    for mine in trained:
        assert (mine["evaluated first"][0], mine["evaluated first"][2]) == ("", "DistributedDataParallel")
        assert not np.array_equal(mine["evaluated first"][1], mine["start"])
    assert np.array_equal(first["evaluated first"][1], second["evaluated first"][1])
    assert first["evaluated again"] == second["evaluated again"]


@pytest.mark.slow
def test_the_trainer_finds_a_batch_size(trained: Found) -> None:
    """It wraps the model again, with the same optimizer: that has to be attached again, from the beginning."""
    for mine in trained:
        assert np.array_equal(mine["found"], mine["as found"])
        assert mine["found sent"] == mine["as found sent"] > 0
        assert mine["found late"].startswith("RuntimeError: gradients of a step have been taken already")


@pytest.mark.slow
def test_the_trainer_saves_and_evaluates_the_mean_of_models_that_differ(trained: Found) -> None:
    first, second = trained
    assert np.array_equal(first["CSER saved"], second["CSER saved"])
    mean = (first["CSER"].astype(np.float64) + second["CSER"]) / 2
    assert np.abs(first["CSER saved"] - mean).max() < ROUNDING
    for mine in trained:
        assert mine["CSER loss"] == pytest.approx(mine["CSER loss of the saved"], rel=ROUNDING)
    assert np.array_equal(first["Birder saved"], first["Birder"])


@pytest.mark.slow
def test_after_the_trainers_checkpoint_every_rank_has_its_state(trained: Found) -> None:
    """Ranks other than 0 were given the note that rank 0 had saved."""
    assert all(mine[f"{name} kept"] for mine in trained for name in FIRST)


@pytest.mark.slow
def test_the_trainer_logs_a_norm_without_clipping(trained: Found) -> None:
    assert all(norm > 0 for mine in trained for norm in mine["Birder norms"])
    assert trained[0]["Birder norms"]


# ---- Lightning ---------------------------------------------------------------------------------------------------------


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
    if resume:
        return found
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


@pytest.mark.slow
def test_lightning_finds_a_learning_rate(lit: Found) -> None:
    """Its finder trains before other callbacks begin, and loads the state again without them."""
    for mine in lit:
        assert [mine["CSER found"], mine["Birder found"]] == [(4, True, True)] * 2


@pytest.mark.slow
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


# ---- on one process ------------------------------------------------------------------------------------------------------


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
