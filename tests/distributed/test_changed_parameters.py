"""What a script does to the parameters itself: clips them, loads others, masks them, puts an average in and out.

The controls are torch's SGD and Adam under DDP. Methods whose ranks train on their own between synchronisations keep such a
change, and all ranks get it with the next one.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import birder
from birder import attach
from tests.helpers import toy
from tests.helpers.ordinary import said
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import slow, slow_unless
from tests.helpers.virtual import World

H = 4
"""Steps from one synchronisation to the next, of all methods that have them."""
CSER = {"lr": 0.05, "gradient_ratio": 2, "model_ratio": 1, "reset_every": H, "block": 8}
ADAM = {"lr": 1e-3, "eps": 1e-3, "warmup_steps": H, "local_doubling": 1, "local_limit": H}
LOCO = {"lr": 1e-3, "sync_every": H, "top_k": 2, "chunk": 32}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "torch SGD": ("SGD", {"lr": 0.05, "momentum": 0.9}),
    "torch Adam": ("Adam", {"lr": 1e-3}),
    "CSER I": ("CSER", CSER),
    "CSER I, top_k": ("CSER", CSER | {"model_ratio": 2, "compressor": "top_k"}),
    "CSER II": ("CSER", CSER | {"implementation": "II"}),
    "CSER released": ("CSER", CSER | {"variant": "released"}),
    "QSparse": ("QSparseLocalSGD", {"lr": 0.05, "ratio": 8, "sync_every": H, "block": 8}),
    "QSparse, H = 1": ("QSparseLocalSGD", {"lr": 0.05, "ratio": 8, "sync_every": 1, "block": 8}),
    "SparseLoCo": ("SparseLoCo", LOCO | {"outer_lr": 0.7, "outer_momentum": 0.9}),
    "SparseLoCo, H = 1": ("SparseLoCo", LOCO | {"sync_every": 1}),
    "SparseLoCo, dense": ("SparseLoCo", LOCO | {"message": "dense", "outer_lr": 0.7, "outer_momentum": 0.9}),
    "SparseLoCo, int4": ("SparseLoCo", LOCO | {"message": "int4", "outer_lr": 0.7, "outer_momentum": 0.9}),
    "EF-SGD": ("EFSGD", {"lr": 0.05, "ratio": 8, "block": 8}),
    "SLAMB": ("SLAMB", {"lr": 1e-3, "sync_every": H}),
    "0/1 Adam": ("ZeroOneAdam", ADAM | {"weight_decay": 0.1}),
    "0/1 Adam, deepspeed": ("DeepSpeedZeroOneAdam", ADAM | {"weight_decay": 0.1}),
    "Birder": ("Birder", {"lr": 1e-3}),
}
FEW = ("torch Adam", "CSER I", "CSER I, top_k", "QSparse", "SparseLoCo", "EF-SGD", "0/1 Adam", "Birder")
"""What `make test` runs: of each kind of method one."""
EACH = slow_unless(FEW.__contains__, METHODS)
PARTS = [FEW, slow(tuple(n for n in METHODS if n not in FEW))]
ASKING = {n for n in METHODS if n.startswith(("QSparse", "SparseLoCo", "0/1", "CSER I, top_k")) and "H = 1" not in n}
LIMIT, FAR = 0.05, 5.0
Change = Callable[[torch.nn.Module, int, int], None]


def clip(model: torch.nn.Module, rank: int, step: int) -> None:
    for p in model.parameters():  # no version counter sees either
        if step % 2:
            p.data.clamp_(-LIMIT, LIMIT)
        else:
            np.clip(p.detach().numpy(), -LIMIT, LIMIT, out=p.detach().numpy())


def decay(model: torch.nn.Module, rank: int, step: int) -> None:
    for p in model.parameters():
        p.data = p.data * 0.95


def average_in_and_out(model: torch.nn.Module, rank: int, step: int) -> None:
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict({name: torch.zeros_like(t) for name, t in kept.items()})
    model.load_state_dict(kept)


def load(model: torch.nn.Module, rank: int, step: int, *, at: int, ranks: range = range(9)) -> None:
    if step == at and rank in ranks:
        model.load_state_dict({name: torch.full_like(t, FAR) for name, t in model.state_dict().items()})


CHANGES: dict[str, Change | None] = {
    "none": None,
    "clip": clip,
    "decay": decay,
    "average_in_and_out": average_in_and_out,
    "load": functools.partial(load, at=5 * H // 2),  # within an interval
    "load after a sync": functools.partial(load, at=2 * H),
    "load one": functools.partial(load, at=5 * H // 2, ranks=range(1)),
}
STEPS = 3 * H


def make(name: str, model: torch.nn.Module) -> Any:
    kind, options = METHODS[name]
    return getattr(torch.optim if name.startswith("torch") else birder, kind)(model.parameters(), **options)


def train(name: str, change: Change | None, rank: int, late: bool = False, **how: Any) -> tuple[Tensor, list[str]]:
    """The model after each step, and what was said."""
    model = toy.make()
    optimizer, ddp = make(name, model), DistributedDataParallel(model)
    attachment = None if name.startswith("torch") else attach(ddp, optimizer, **how)
    rows = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            toy.loss(ddp, rank, step).backward()
            if change is not None and late:
                change(model, rank, step)
            optimizer.step()
            if change is not None and not late:
                change(model, rank, step)
            rows.append(toy.flat(model))
    if attachment is not None:
        attachment.close()
    warned = [str(w.message) for w in said if w.category is RuntimeWarning]
    other_matters = ("of the warm-up", "on other ranks alone")  # toy's rows come late, and not on every rank
    return torch.stack(rows), [line for line in warned if not any(part in line for part in other_matters)]


def ranks_train(rank: int, world: int, names: list[str], changes: list[str], how: dict[str, Any]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for name in names:
        for change in changes:
            rows, said = train(name, CHANGES[change], rank, **how)
            found[name, change] = rows.numpy(), said
    return found


@functools.cache
def part(change: str, few: bool) -> list[dict[tuple[str, str], tuple[np.ndarray, list[str]]]]:
    return run_ranks(ranks_train, 2, [n for n in METHODS if (n in FEW) == few], [change], {})


def found(name: str, change: str) -> list[tuple[np.ndarray, list[str]]]:
    """Of each rank the models of a method after its steps, and what was said."""
    return [of_rank[name, change] for of_rank in part(change, name in FEW)]


@functools.cache
def syncs(name: str) -> list[int]:
    """Steps after which all ranks have the same model."""
    method = make(name, toy.make())
    every = getattr(method, "reset_every", getattr(method, "sync_every", 1))
    return [s for s in range(1, STEPS + 1) if (method.synced(s) if hasattr(method, "synced") else s % every == 0)]


def spread(name: str, change: str) -> np.ndarray:
    """How far the two ranks' models are apart after each step."""
    (first, _), (second, _) = found(name, change)
    return np.abs(first - second).max(axis=1)


def last(name: str, change: str, step: int = STEPS) -> np.ndarray:
    """The mean model after a step."""
    return sum(rows[step - 1] for rows, _ in found(name, change)) / 2


@pytest.mark.parametrize("change", [c for c in CHANGES if c != "load one"])
@pytest.mark.parametrize("name", EACH)
def test_ranks_agree_after_a_synchronisation(name: str, change: str) -> None:
    apart = spread(name, change)[syncs(name)[-1] - 1]
    size = max(abs(last(name, change)).max(), 0.1)
    if "top_k" in name and change in ("none", "average_in_and_out"):
        assert apart < 1  # only a part of the error is sent
    else:
        assert apart <= (4e-7 * size if name == "CSER I" else 0)


@pytest.mark.parametrize("change", ["load", "load after a sync"])
@pytest.mark.parametrize("name", EACH)
def test_loaded_weights_are_kept(name: str, change: str) -> None:
    """Up to what the steps since then have moved them."""
    assert np.abs(last(name, change) - FAR).mean() < 0.1
    assert np.abs(last(name, "none") - FAR).mean() > 4


@pytest.mark.parametrize(
    "name", slow_unless(FEW.__contains__, [n for n in METHODS if not n.startswith(("torch", "EF", "Birder"))])
)
def test_weights_loaded_on_one_rank_are_averaged(name: str) -> None:
    if "H = 1" in name:  # as under DDP with torch's optimizers, ranks stay apart
        assert spread(name, "load one")[-1] > 1
    else:
        assert spread(name, "load one")[syncs(name)[-1] - 1] < 4e-7 * FAR
        middle = (last(name, "none", 5 * H // 2) + FAR) / 2
        assert np.abs(last(name, "load one") - middle).mean() < 0.1


@pytest.mark.parametrize("name", EACH)
def test_clipped_weights_stay_within_their_limits_and_train(name: str) -> None:
    for rows, _ in found(name, "clip"):
        assert np.abs(rows).max() <= np.float32(LIMIT)
        assert np.abs(rows[-1] - rows[0]).max() > 1e-3


@pytest.mark.parametrize("name", EACH)
def test_no_step_of_a_callers_own_decay_is_lost(name: str) -> None:
    """0.95^12 of what the parameters began with is 0.54; that of the synchronisations alone, 0.95^3, would be 0.86."""
    rows = toy.part(last(name, "decay"), "embed.weight")[toy.USED :]  # never had a gradient
    began = toy.make().embed.weight.detach()[toy.USED :]
    assert torch.allclose(rows, began * 0.95**STEPS, rtol=5e-3)  # some have a decay of their own, of 1e-4


@pytest.mark.parametrize("name", EACH)
def test_an_average_put_in_and_out_changes_nothing_and_is_not_told(name: str) -> None:
    for mine, plain in zip(found(name, "average_in_and_out"), found(name, "none"), strict=True):
        assert (mine[0] == plain[0]).all()
        assert mine[1] == plain[1] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_what_costs_more_is_told_once(name: str) -> None:
    for change in ("clip", "decay", "load", "load one"):
        said = [lines for _, lines in found(name, change)]
        assert said[1] == []
        assert len(said[0]) == (name in ASKING)
        assert all(s.startswith("parameters were changed between two synchronisations") for s in said[0])


@pytest.mark.parametrize("name", ["CSER I, top_k", "QSparse", "SparseLoCo", "0/1 Adam"])
@pytest.mark.filterwarnings("error:parameters were changed:RuntimeWarning")
def test_what_a_synchronisation_makes_of_parameters_is_no_change_of_a_script(name: str) -> None:
    """Nor when a state is saved after each step, and laid out again."""
    model = toy.make()
    optimizer = make(name, model)
    for step in range(1, STEPS + 1):
        toy.train(model, optimizer, 0, [step])
        assert not optimizer.state_dict()["changed"], step
        optimizer.bind()


def bytes_of_syncs(rank: int, world: int, name: str) -> list[int]:
    """Of three synchronisations; parameters are clipped before the second one alone."""
    kind, options = METHODS[name]
    made = World(lambda params: getattr(birder, kind)(params, **options), 2)
    sent = made.train(range(1, H + 3))[0]
    made.each(lambda: clip(made.model, 0, 1))
    sent += made.train(range(H + 3, 3 * H + 1))[0]
    return [sent[step - 1][0] for step in (H, 2 * H, 3 * H)]


@pytest.mark.parametrize("name", ["QSparse", "SparseLoCo"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_change_costs_more_in_its_own_interval_alone(name: str) -> None:
    (sent,) = run_ranks(bytes_of_syncs, 1, name)
    assert sent[0] == sent[2] < sent[1]


# ---- between backward and step -------------------------------------------------------------------------------------------


def late_train(rank: int, world: int, names: tuple[str, ...]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for name in names:
        try:
            found[name] = train(name, decay, rank, late=True)[0].numpy()
        except RuntimeError as e:
            found[name] = str(e)
        if not name.startswith("torch"):
            found[name, "in step"] = train(name, decay, rank, late=True, overlap=False)[0].numpy()
    return found


@pytest.mark.parametrize("names", PARTS, ids=["few", "rest"])
def test_a_change_between_backward_and_step_counts_or_is_refused(names: tuple[str, ...]) -> None:
    began = toy.make().embed.weight.detach()[toy.USED :]
    first, second = run_ranks(late_train, 2, names)
    for name, got in first.items():
        if isinstance(got, str):
            assert "parameters were changed between backward and step()" in got
            assert "overlap=False" in got
            assert name.startswith(("QSparse", "SparseLoCo", "CSER", "0/1 Adam, deepspeed")), name
            assert second[name] == got  # no rank waits for another
        else:  # on the mean: what a rank has read of them by then is a matter of timing
            rows = toy.part((got[-1] + second[name][-1]) / 2, "embed.weight")[toy.USED :]
            assert torch.allclose(rows, began * 0.95**STEPS, rtol=5e-3), name


def decays_late(rank: int, world: int) -> dict[str, str]:
    """What is said where weight decay is a part of messages, and parameters change between backward and step."""
    said_of = {}
    kinds: dict[str, dict[str, Any]] = {"EFSGD": {}, "EF21SGDM": {}, "DeepSpeedZeroOneAdam": {"warmup_steps": 1}}
    for name, options in kinds.items():
        model = toy.make()
        optimizer = getattr(birder, name)(model.parameters(), weight_decay=0.1, **options)
        ddp = DistributedDataParallel(model)
        attach(ddp, optimizer)
        toy.loss(ddp, rank, 1).backward()
        decay(model, rank, 1)
        said_of[name] = said(optimizer.step)
    return said_of


def test_a_change_of_parameters_whose_decay_has_been_sent_is_refused() -> None:
    (said_of,) = run_ranks(decays_late, 1)
    for name, line in said_of.items():
        assert "parameters were changed between backward and step()" in line, name


# ---- resume, nodes -------------------------------------------------------------------------------------------------------


def resumed(rank: int, world: int, names: tuple[str, ...]) -> dict[str, bool]:
    """Weights are loaded, a checkpoint is made before the next step, and another run goes on from it."""
    found = {}
    for name in names:
        if name.startswith("torch"):
            continue
        runs = []
        for _ in range(2):
            model = toy.make()
            optimizer, ddp = make(name, model), DistributedDataParallel(model)
            runs.append((model, optimizer, ddp, attach(ddp, optimizer)))
        (model, optimizer, ddp, _), (other, theirs, wrapped, _) = runs
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            advance(optimizer, ddp, rank, range(1, 5 * H // 2 + 1))
            load(model, rank, 0, at=0)
            saved = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
            theirs.load_state_dict(saved[0])
            theirs.state_dict()
            other.load_state_dict(saved[1])
            for o, d in ((optimizer, ddp), (theirs, wrapped)):
                advance(o, d, rank, range(5 * H // 2 + 1, STEPS + 2))
        found[name] = torch.equal(toy.flat(model), toy.flat(other))
        for *_, attachment in runs:
            attachment.close()
    return found


def advance(optimizer: Any, ddp: torch.nn.Module, rank: int, steps: range) -> None:
    toy.train(ddp, optimizer, rank, steps)


@pytest.mark.parametrize("names", PARTS, ids=["few", "rest"])
def test_a_run_goes_on_from_a_checkpoint_of_changed_parameters(names: tuple[str, ...]) -> None:
    for found in run_ranks(resumed, 2, names):
        assert all(found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("chosen", PARTS, ids=["few", "rest"])
def test_with_nodes_as_workers_loaded_weights_are_kept_too(chosen: tuple[str, ...]) -> None:
    names = [n for n in chosen if n in ASKING or n == "CSER I"]
    results = run_ranks(ranks_train, 4, names, ["load", "clip"], {"hierarchical": True}, ranks_per_node=2)
    for name in names:
        mean = sum(r[name, "load"][0][-1] for r in results) / 4
        assert np.abs(mean - FAR).mean() < 0.1, name
        for change in ("load", "clip"):
            rows = [r[name, change][0][syncs(name)[-1] - 1] for r in results]
            tolerance = 2e-6 if name == "CSER I" else 0
            assert all(np.abs(row - rows[0]).max() <= tolerance for row in rows), name
