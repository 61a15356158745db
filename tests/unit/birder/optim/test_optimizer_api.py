"""torch.optim's interface, as torch's AdamW has it: hooks, entries of others in `state`, copies, groups, torch.compile."""

from __future__ import annotations

import copy
import importlib
import io
import warnings
from typing import Any

import pytest
import torch

import birder
from tests.distributed.test_guards import METHODS, make, train
from tests.helpers import toy

ALL = ["torch", *METHODS]


def built(name: str) -> tuple[toy.Net, Any]:
    model = toy.make()
    return model, torch.optim.AdamW(model.parameters()) if name == "torch" else make(name, model, lr=0.01)


@pytest.mark.parametrize("name", ALL)
def test_hooks_see_and_change_the_whole_state(name: str) -> None:
    model, optimizer = built(name)
    train(model, optimizer, range(1, 4))
    called: list[Any] = []
    optimizer.register_state_dict_pre_hook(lambda o: called.append("saving"))
    optimizer.register_state_dict_post_hook(lambda o, state: state | {"extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, state: called.append(("loading", state["extra"])))
    optimizer.register_load_state_dict_post_hook(lambda o: called.append(("loaded", o.param_groups[0]["lr"])))
    state = copy.deepcopy(optimizer.state_dict())
    assert state["extra"] == 1
    state["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(state)
    assert called == ["saving", ("loading", 1), ("loaded", 0.5)]
    optimizer.register_load_state_dict_pre_hook(lambda o, state: state | {"param_groups": []})
    with pytest.raises(ValueError, match="parameter groups"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("name", ALL)
def test_a_graph_of_parameters_that_a_step_has_changed_is_refused(name: str) -> None:
    """A generator's loss from before the critic's step: its gradients were of neither the old values nor the new ones."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2), torch.nn.Linear(2, 1))
    model[2].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters()) if name == "torch" else make(name, model, lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        loss, of_frozen = (layers(torch.ones(3, 4)).square().mean() for layers in (model, model[:1]))
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        of_frozen.backward()  # reads no parameter


def test_a_state_of_other_options_is_loaded_with_a_warning() -> None:
    """Options of groups are the saved ones, as in torch. Those of the whole optimizer changed without a word."""
    model, optimizer = built("SigmaDeltaAdam")
    train(model, optimizer, range(1, 4))
    state = copy.deepcopy(optimizer.state_dict())
    same = make("SigmaDeltaAdam", model, lr=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same.load_state_dict(state)
    assert same.param_groups[0]["lr"] == 0.01
    other = birder.SigmaDeltaAdam(model.parameters(), variance="shared")
    with pytest.warns(RuntimeWarning, match="saved with variance='of_mean', this optimizer has variance='shared'"):
        other.load_state_dict(state)
    assert other.variance == "shared"
    del state["options"]  # as states were before
    other.load_state_dict(state)


@pytest.mark.parametrize(("saved", "present"), [("int8", "fp32"), ("fp32", "int8")])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_numbers_of_another_kind_are_refused_and_change_nothing(saved: str, present: str) -> None:
    """127 in int8 is 1 in fp32, and 0.9 in fp32 was 0 in int8."""
    model = toy.make()
    theirs, mine = (birder.SigmaDeltaAdam(model.parameters(), errors=errors) for errors in (saved, present))
    for optimizer, steps in ((theirs, range(1, 3)), (mine, range(3, 4))):
        train(model, optimizer, steps)
    before = copy.deepcopy(mine.state_dict()["units"])
    with pytest.raises(ValueError, match="use the options that it was saved with"):
        mine.load_state_dict(theirs.state_dict())
    after = mine.state_dict()["units"]
    assert all(torch.equal(a[k], b[k]) for a, b in zip(before, after, strict=True) for k in a)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("name", METHODS)
def test_numbers_of_groups_may_be_tensors_of_one_element(name: str, shape: tuple[int, ...]) -> None:
    """As torch takes them; the script may change them in place."""
    numbers = {"lr": 0.01, "betas": (0.5, 0.75), "momentum": 0.5, "weight_decay": 0.125}
    ends = []
    for kind in (float, lambda value: torch.full(shape, value, dtype=torch.float64)):
        model = toy.make()
        known = make(name, model).param_groups[0].keys() & numbers.keys()
        given = {k: tuple(map(kind, v)) if isinstance(v, tuple) else kind(v) for k in known for v in [numbers[k]]}
        optimizer = make(name, model, **given)
        train(model, optimizer, range(1, 4))
        if isinstance(given["lr"], torch.Tensor):
            given["lr"].fill_(0.02)
        else:
            optimizer.param_groups[0]["lr"] = 0.02
        train(model, optimizer, range(4, 6))
        ends.append(toy.flat(model))
    assert torch.allclose(*ends, rtol=0, atol=1e-6)  # a factor in fp64 may be rounded at another place


@pytest.mark.parametrize("name", ALL)
def test_step_hooks_run_once_and_schedulers_may_wrap_step(name: str) -> None:
    model, optimizer = built(name)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    train(model, optimizer, range(1, 3))
    schedule.step()
    assert called == ["before", "after"] * 2
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * optimizer.param_groups[0]["initial_lr"])


@pytest.mark.parametrize("name", ALL)
def test_what_others_put_into_state_is_saved_loaded_and_copied(name: str) -> None:
    model, optimizer = built(name)
    train(model, optimizer, range(1, 4))
    last = list(model.parameters())[-1]
    optimizer.state[last]["mine"] = torch.ones(2)
    other, loaded = built(name)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    kept = io.BytesIO()
    torch.save((model, optimizer), kept)
    kept.seek(0)
    pairs = [copy.deepcopy((model, optimizer)), torch.load(kept, weights_only=False), (other, loaded)]
    for theirs, o in pairs:
        assert torch.equal(o.state[list(theirs.parameters())[-1]]["mine"], torch.ones(2))


@pytest.mark.parametrize("name", ALL)
def test_hooks_stay_behind_when_an_optimizer_is_pickled(name: str) -> None:
    model, optimizer = built(name)
    optimizer.register_step_pre_hook(lambda *_: None)  # which cannot be pickled
    optimizer.register_state_dict_post_hook(lambda *_: None)
    train(model, optimizer, range(1, 3))
    kept = io.BytesIO()
    torch.save((model, optimizer), kept)
    kept.seek(0)
    other, loaded = torch.load(kept, weights_only=False)
    for m, o in ((model, optimizer), (other, loaded)):
        train(m, o, range(3, 5))
    assert torch.equal(toy.flat(model), toy.flat(other))


@pytest.mark.parametrize("name", ALL)
def test_groups_of_other_lengths_are_refused_and_change_nothing(name: str) -> None:
    model, optimizer = built(name)
    train(model, optimizer, range(1, 4))
    saved = copy.deepcopy(optimizer.state_dict())
    group = saved["param_groups"][0]
    train(model, optimizer, range(4, 6))
    before = copy.deepcopy((model, optimizer))
    for groups in ([group, group], [group | {"params": group["params"][1:]}]):
        with pytest.raises(ValueError, match="group"):
            optimizer.load_state_dict(saved | {"param_groups": groups})
    for m, o in ((model, optimizer), before):
        train(m, o, range(6, 8))
    assert torch.equal(toy.flat(model), toy.flat(before[0]))


@pytest.mark.parametrize("how", ["replaced", "emptied", "moved", "entry"])
def test_a_replaced_or_emptied_state_is_refused_in_the_next_step(how: str) -> None:
    model, optimizer = built("Birder")
    optimizer.state.clear()  # there is none yet
    train(model, optimizer, range(1, 3))
    first = next(iter(model.parameters()))
    optimizer.state[first]["of others"] = 1  # which is theirs to do
    train(model, optimizer, range(3, 5))
    before = toy.flat(model)
    if how == "replaced":
        optimizer.state = {}
    elif how == "emptied":
        optimizer.state.clear()
    elif how == "entry":
        optimizer.state[first] = {}
    else:
        optimizer.state[first]["m"] = torch.zeros_like(first)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"optimizer.state cannot be replaced or emptied.*before the first step"):
            train(model, optimizer, range(5, 6))
    assert torch.equal(before, toy.flat(model))


@pytest.mark.parametrize("name", METHODS)
def test_names_of_parameters_are_kept(name: str) -> None:
    model = toy.make()
    plain, optimizer = make(name, model), make(name, model)
    named = type(optimizer)(model.named_parameters(), **METHODS[name])
    assert named.state_dict()["param_groups"][0]["param_names"] == [n for n, _ in model.named_parameters()]
    named.load_state_dict(plain.state_dict())
    assert named.param_groups[0]["param_names"] == [n for n, _ in model.named_parameters()]
    assert "lr: " in repr(named)


@pytest.mark.parametrize("name", METHODS)
def test_zeroed_gradients_are_as_none(name: str) -> None:
    """Every parameter of this model gets a gradient in each step."""
    found = []
    for to_none in (True, False):
        model, optimizer = built(name)
        for step in range(1, 6):
            optimizer.zero_grad(set_to_none=to_none)
            toy.loss(model, 0, step).backward()
            optimizer.step()
        found.append(toy.flat(model))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["AdamW", "Birder", "OneBitAdam", "SLAMB"])
@pytest.mark.parametrize("how", ["step", "function", "whole step"])
def test_compiled_step_is_the_plain_one(name: str, how: str) -> None:
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model, optimizer = built(name)

        def advance(model: toy.Net = model, optimizer: Any = optimizer, whole: bool = how == "whole step") -> None:
            if whole:
                optimizer.zero_grad()
                toy.loss(model, 0, 1).backward()
            optimizer.step()

        does: Any = optimizer.step if how == "step" else advance
        does = torch.compile(does, backend="eager") if compiled else does
        for step in range(1, 6):
            if how != "whole step":
                optimizer.zero_grad()
                toy.loss(model, 0, step).backward()
            does()
        found.append(toy.flat(model))
    assert torch.equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch", "Birder"])
def test_a_compiled_model_in_a_closure_stays_compiled(name: str) -> None:
    from torch._dynamo.testing import CompileCounter  # takes seconds

    torch._dynamo.reset()
    model, optimizer = built(name)
    counter = CompileCounter()
    forward = torch.compile(model, backend=counter)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = forward(toy.batch(0, 1)[0]).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("name", "place"), [("elastic", "checkpoint.elastic"), ("fsdp_state", "checkpoint.shards"), ("optimizers", "optim")]
)
def test_a_module_is_found_under_its_old_name(name: str, place: str) -> None:
    with pytest.warns(FutureWarning, match=f"birder.{name} is birder.{place} now"):
        assert getattr(birder, name) is importlib.import_module(f"birder.{place}")


def test_an_optimizer_of_frozen_layers_alone_talks_on_their_device() -> None:
    """On NCCL it took the CPU, for which there is no back end."""
    layer = torch.nn.Linear(2, 2, device="meta").requires_grad_(False)
    optimizer = birder.Birder(layer.parameters())
    optimizer.bind()
    assert optimizer.units == []
    assert optimizer.device.type == "meta"


@pytest.mark.parametrize("name", ["EfficientAdam", "SigmaDeltaAdam", "SparseLoCo", "ZeroOneAdam"])
def test_a_coordinate_without_gradient_stays_also_where_eps_is_0(name: str) -> None:
    p = torch.nn.Parameter(torch.ones(100))
    options = {"ZeroOneAdam": {"warmup_steps": 3}, "SparseLoCo": {"weight_decay": 0.0}}.get(name, {})
    optimizer = getattr(birder, name)([p], lr=0.01, eps=0.0, **options)
    for step in range(6):
        p.grad = torch.randn(100, generator=torch.Generator().manual_seed(step))
        p.grad[7] = 0
        p.grad[8] = 0 if name == "SparseLoCo" else 1e-30  # its square is 0 in fp32, and AdamW divides by its root
        optimizer.step()
    assert p.isfinite().all()
    assert p[7] == p[8] == 1.0


@pytest.mark.parametrize("eps", [1e-8, 1e-3])
@pytest.mark.parametrize("name", ["OneBitAdam", "ZeroOneAdam"])
def test_a_step_that_takes_a_number_far_away_is_said(name: str, eps: float) -> None:
    """Nearly no gradient while variances are made, and then the bit of all: the loss need not show where that ends."""
    p = torch.nn.Parameter(torch.zeros(100))
    optimizer = getattr(birder, name)([p], lr=0.01, eps=eps, warmup_steps=3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(6):
            p.grad = torch.randn(100, generator=torch.Generator().manual_seed(step))
            p.grad[7] = 1e-9
            optimizer.step()
    far = [str(w.message) for w in said if "more than 1000 lr in a step" in str(w.message)]
    assert len(far) == (eps == 1e-8)
    assert (float(p[7].detach().abs()) > 10) == (eps == 1e-8)
    assert all(line.startswith(f"{name}: ") and "raise eps" in line for line in far)


@pytest.mark.parametrize("name", ["QSparseLocalSGD", "SparseLoCo"])
def test_one_element_cut_out_of_others_trains_as_any(name: str) -> None:
    """Its stride may be any number, and it still counts as contiguous."""
    ends = []
    for p in (torch.ones(1), torch.ones(3, 2)[::2, 1][:1]):
        p = torch.nn.Parameter(p)
        optimizer = getattr(birder, name)([p], lr=0.1, sync_every=2)
        for _ in range(4):
            p.grad = torch.ones_like(p)
            optimizer.step()
        ends.append(p.item())
    assert ends[0] == ends[1] < 1


@pytest.mark.parametrize("method", [birder.AdamW, birder.OneBitAdam])
def test_torchs_optimizer_does_not_start_afresh_with_a_state_of_ours(method: Any) -> None:
    """Without the moments it would train on as if it had just begun, and say nothing."""
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = method([p], **{"warmup_steps": 2} if method is birder.OneBitAdam else {})
    for _ in range(3):
        p.grad = torch.ones(4)
        optimizer.step()
    theirs = torch.optim.AdamW([p])
    with pytest.raises(KeyError, match="step"):
        theirs.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    assert set(optimizer.state) <= {p}
