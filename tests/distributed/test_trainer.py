"""The Hugging Face Trainer, the real one, on 2 ranks: the example's own code is what runs.

Its cases run one after the other in one pair of processes, which is where the time goes. Two rounds of them: what protects a
change, and the runs that are interrupted and resumed.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import birder
from birder.hooks.attachment import unwrap_optimizer
from tests.helpers import load, toy
from tests.helpers.integrations import FIRST, METHODS, ROUNDING, Found, both, check_resumed, said
from tests.helpers.ranks import run_ranks


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
    twice = hf.trainer(folder / "twice", 2, method=(birder.Birder, {"max_grad_norm": 20.0}), max_grad_norm=1.0)
    found["clips already"] = said(twice.train)
    rated = hf.trainer(folder / "rated", 1, method=(birder.Birder, {}), learning_rate=3e-4, save_strategy="no")
    rated.train()
    found["rate"] = unwrap_optimizer(rated.optimizer).param_groups[0]["initial_lr"]
    factory = hf.trainer(folder / "made", 1, method=(lambda: of_model, {"lr": 0.25}))
    found["made"] = factory.create_optimizer().param_groups[0]["lr"]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        hf.trainer(folder / "both", 1, method=(birder.Birder, {"lr": 1e-3}), learning_rate=3e-4).create_optimizer()
        hf.trainer(folder / "one", 1, method=(birder.Birder, {"lr": 1e-3})).create_optimizer()
    found["two rates"] = [str(w.message) for w in warned if "learning_rate" in str(w.message)]
    found["stages"] = two_stages(hf, folder)
    rated.model = rated.model_wrapped = None  # as between two trials of a search for hyper-parameters
    found["no model yet"] = said(rated._forget_evaluation)
    other = hf.trainer(folder / "other", 2, method=(torch.optim.SGD, {"lr": 0.1}))
    found["other"] = said(other.train)
    early = hf.trainer(folder / "early", 2, save_strategy="no", bf16=True)
    early.evaluate()
    found["evaluated first"] = said(early.train), toy.flat(early.model).numpy(), type(early.model_wrapped).__name__
    found["evaluated again"] = early.evaluate()["eval_loss"]
    found["no length"] = without_length(hf, folder)
    found["in a step"] = saved_in_a_step(hf, folder)
    for name, backend in (("eager", None), ("compiled", "aot_eager")):
        run = hf.trainer(folder / name, 3, save_strategy="no", torch_compile_backend=backend)
        run.add_callback(OutOfMemory(rank, ()))  # the same dropout
        run.train()
        found[name] = toy.flat(run.model).numpy(), unwrap_optimizer(run.optimizer).attachment.counter.total
        found[f"{name} model"] = type(run.model_wrapped).__name__
    for name, size, short in (("as found", 7, ()), ("found", 8, (1,)), ("found late", 8, (2,))):
        search = hf.trainer(folder / name, 3, per_device_train_batch_size=size, auto_find_batch_size=True, data_seed=0)
        search.add_callback(OutOfMemory(rank, short))
        found[name] = said(search.train) or toy.flat(search.model).numpy()
        found[f"{name} sent"] = unwrap_optimizer(search.optimizer).attachment.counter.total
    return found


def without_length(hf: Any, folder: Path) -> tuple[str, int, np.ndarray]:
    """Two batches a step, five a pass over a dataset without length: the fifth belongs to the next pass's first step."""

    class Rows(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(hf.sentences()[:80])

    trainer = hf.trainer(folder / "no length", 4, gradient_accumulation_steps=2, save_strategy="no")
    trainer.train_dataset = Rows()
    return said(trainer.train), unwrap_optimizer(trainer.optimizer).steps, toy.flat(trainer.model).numpy()


def saved_in_a_step(hf: Any, folder: Path) -> tuple[str, list[str]]:
    """A checkpoint asked for between backward and step, as `enable_jit_checkpoint` does after a signal."""
    from transformers import TrainerCallback

    class Asks(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                trainer._save_checkpoint(trainer.model, trial=None)

    trainer = hf.trainer(folder / "in a step", 3, save_strategy="no")
    trainer.add_callback(Asks())
    return said(trainer.train), [p.parent.name for p in (folder / "in a step").glob("*/trainer_state.json")]


def two_stages(hf: Any, folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A model after it was trained with local steps, and with what another trainer of it begins; then that one's second
    optimizer."""
    from transformers import TrainerCallback

    kind, options = METHODS["CSER"]
    first = hf.trainer(folder / "stage 1", 3, method=(kind, {"lr": 1e-2} | options), save_strategy="no")
    first.train()
    own, begun = toy.flat(first.model).numpy(), []

    class Look(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            begun.append(toy.flat(second.model).numpy())

    second = hf.trainer(folder / "stage 2", 1, method=(kind, {"lr": 1e-2} | options), save_strategy="no")
    second.model = second.model_wrapped = first.model
    second.add_callback(Look())
    second.train()
    second.optimizer = None
    second.train()
    return own, begun[0], begun[1]


def of_model(model: torch.nn.Module, lr: float) -> birder.Birder:
    return birder.Birder(model.parameters(), lr=lr)


def OutOfMemory(rank: int, steps: tuple[int, ...]) -> Any:
    """Memory runs out before these updates, when backward has sent its messages. Every attempt has the same dropout."""
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
def test_the_trainer_may_not_clip_what_the_optimizer_clips(trained: Found) -> None:
    """It would clip each rank's own gradient, and the optimizer's limit would never act."""
    for mine in trained:
        assert "Birder clips the averaged gradient itself, to max_grad_norm=20: turn the" in mine["clips already"]


@pytest.mark.slow
def test_the_trainers_learning_rate_is_the_optimizers(trained: Found) -> None:
    for mine in trained:
        assert mine["rate"] == 3e-4
        assert len(mine["two rates"]) == 1
        assert "learning_rate=0.0003) has no effect, as optimizer_cls_and_kwargs has lr=0.001" in mine["two rates"][0]
        assert mine["no model yet"] == ""


@pytest.mark.slow
def test_the_trainer_takes_what_makes_an_optimizer_of_a_model(trained: Found) -> None:
    """As the Trainer itself does; it was a TypeError of issubclass."""
    assert all(mine["made"] == 0.25 for mine in trained)


def test_a_second_trainer_begins_with_the_mean_of_models_that_differ(trained: Found) -> None:
    (mine, first, _), (theirs, second, _) = (found["stages"] for found in trained)
    assert not np.array_equal(mine, theirs)
    assert np.array_equal(first, second)
    assert np.abs(first - (mine.astype(np.float64) + theirs) / 2).max() < ROUNDING


def test_a_second_optimizer_of_a_trainer_begins_with_the_mean_too(trained: Found) -> None:
    """It was refused, as the first was attached still."""
    (_, begun, first), (_, _, second) = (found["stages"] for found in trained)
    assert np.array_equal(first, second)
    assert not np.array_equal(first, begun)


def test_the_trainer_accumulates_over_the_end_of_a_dataset_without_length(trained: Found) -> None:
    """Its last batches were sent without a step, and the next pass was refused as a second backward pass."""
    first, second = (mine["no length"] for mine in trained)
    assert first[:2] == second[:2] == ("", 4)
    assert np.array_equal(first[2], second[2])


@pytest.mark.slow
def test_the_trainer_saves_after_the_step_that_is_under_way(trained: Found) -> None:
    for found in trained:
        assert found["in a step"] == ("", ["checkpoint-2"])


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
def test_the_trainer_compiles(trained: Found) -> None:
    for mine in trained:
        assert (mine["eager model"], mine["compiled model"]) == ("DistributedDataParallel", "OptimizedModule")
        assert np.array_equal(mine["compiled"][0], mine["eager"][0])
        assert mine["compiled"][1] == mine["eager"][1] > 0
        assert not np.array_equal(mine["compiled"][0], mine["start"])


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
