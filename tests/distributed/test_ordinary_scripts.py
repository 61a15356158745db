"""What ordinary training scripts do: torch's behaviour, or one line in the first step in which it goes wrong.

One world of two ranks for all of it: each scenario is a function of the rank, and the tests read what it found.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import birder
from birder import attach
from tests.helpers.ranks import run_ranks

METHODS: dict[str, Callable[..., Any]] = {
    "AdamW": lambda p: birder.AdamW(p, lr=1e-2),
    "Birder": lambda p: birder.Birder(p, lr=1e-2, weight_decay=0.1),
    "OneBitAdam": lambda p: birder.OneBitAdam(p, lr=1e-2, warmup_steps=3, eps=1e-4),
    "OneBitLAMB": lambda p: birder.OneBitLAMB(p, lr=1e-2, warmup_steps=3),
    "ZeroOneAdam": lambda p: birder.ZeroOneAdam(p, lr=1e-2, warmup_steps=3),
    "CSER": lambda p: birder.CSER(p, lr=1e-2, gradient_ratio=2, model_ratio=2, reset_every=3, block=8),
    "EFSGD": lambda p: birder.EFSGD(p, lr=1e-2, ratio=2, block=8),
    "SLAMB": lambda p: birder.SLAMB(p, lr=1e-2, fraction=0.5, dense_below=1, sync_every=4),
}
SYNCED = ("QSparse", "SparseLoCo", "ZeroOneAdam with local steps")
LOCAL: dict[str, Callable[..., Any]] = {
    "QSparse": lambda p: birder.QSparseLocalSGD(p, lr=1e-2, ratio=2, sync_every=4, block=8),
    "SparseLoCo": lambda p: birder.SparseLoCo(p, lr=1e-2, sync_every=4, chunk=32, top_k=32),
    "ZeroOneAdam with local steps": lambda p: birder.ZeroOneAdam(
        p, lr=1e-2, warmup_steps=2, local_doubling=1, local_limit=4
    ),
}


class Constant(nn.Module):
    """Its gradient is exactly what the batch says, whatever the layout of memory."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        conv, matrix, mixed = torch.randn(6, 3, 2, 2), torch.randn(7, 5), torch.randn(4, 3, 5)
        if layout == "other":
            conv = conv.to(memory_format=torch.channels_last)
            matrix = matrix.t().contiguous().t()
            mixed = mixed.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        self.conv, self.matrix, self.mixed = nn.Parameter(conv), nn.Parameter(matrix), nn.Parameter(mixed)

    def forward(self, rank: int, step: int) -> Tensor:
        g = torch.Generator().manual_seed(100 * step + rank)
        return sum((p * torch.randn(p.shape, generator=g)).sum() for p in self.parameters())  # type: ignore[return-value]


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.aux, self.last = nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 3)

    def forward(self, x: Tensor, aux: bool = True) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(h + self.aux(h) if aux else h)


def batches(rank: int, count: int, seed: int = 0) -> Iterator[Tensor]:
    g = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(count):
        yield torch.randn(4, 6, generator=g)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {k: p.detach().clone() for k, p in model.named_parameters()}


def apart(tensor: Tensor) -> float:
    """The largest difference from rank 0's."""
    first = tensor.detach().clone()
    dist.broadcast(first, 0)
    gap = (tensor.detach() - first).abs().max().reshape(1)
    dist.all_reduce(gap, op=dist.ReduceOp.MAX)
    return float(gap)


def said(run: Callable[[], Any]) -> str:
    """The one line with which `run` is refused; '' where it is not."""
    try:
        run()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def train(ddp: nn.Module, optimizer: Optimizer, rank: int, count: int, seed: int = 0, **options: Any) -> None:
    for x in batches(rank, count, seed):
        optimizer.zero_grad()
        ddp(x, **options).square().mean().backward()
        optimizer.step()


def state_of(optimizer: Any, p: Tensor) -> dict[str, Tensor]:
    """What this rank keeps for every element of a parameter."""
    unit, i = optimizer._where[p]
    return {k: unit.view(t, i).clone() for k, t in unit.state.items() if t.numel() == unit.padded}


def memory_layouts(rank: int) -> dict[str, bool]:
    same = {}
    for name, make in {**METHODS, **LOCAL}.items():
        for overlap in (True, False):
            found = []
            for layout, view in (("contiguous", False), ("other", False), ("other", True)):
                model = Constant(layout)
                optimizer = make(model.parameters())
                ddp = DistributedDataParallel(model, gradient_as_bucket_view=view)
                attachment = attach(ddp, optimizer, overlap=overlap)
                for step in range(6):
                    optimizer.zero_grad()
                    ddp(rank, step).backward()
                    optimizer.step()
                attachment.close()
                found.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
            # Norms of tensors are added up in the order of memory.
            gap = 1e-5 if name in ("OneBitLAMB", "SLAMB") else 0.0
            same[f"{name}, overlap={overlap}"] = all(
                float((found[0] - other).abs().max()) <= gap for other in found[1:]
            )
    return same


def two_optimizers(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("Birder", "OneBitAdam", "CSER"):
        for both in (False, True):
            model = Trunk()
            trunk = [*model.first.parameters(), *model.aux.parameters()]
            one = METHODS[name](trunk)
            head = list(model.last.parameters())
            two = METHODS["Birder"](head) if both else torch.optim.AdamW(head, lr=1e-2)
            ddp = DistributedDataParallel(model)
            attachments = [attach(ddp, one)] + ([attach(ddp, two)] if both else [])
            if both:
                found["shared"] = said(lambda d=ddp, m=model: attach(d, METHODS["Birder"](m.last.parameters())))  # type: ignore[misc]
            for x in batches(rank, 6):
                one.zero_grad()
                two.zero_grad()
                ddp(x).square().mean().backward()
                one.step()
                two.step()
            for a in attachments:
                a.close()
            found[f"{name}, both={both}"] = apart(model.last.weight)
    return found


def foreign_gradients_are_means(rank: int) -> bool:
    """What another optimizer finds in `p.grad` is what DDP alone would have left there."""
    grads = []
    for ours in (False, True):
        model = Trunk()
        ddp = DistributedDataParallel(model)
        if ours:
            attach(ddp, METHODS["Birder"](model.first.parameters()))
        for x in batches(rank, 1):
            ddp(x).square().mean().backward()
        grads.append(torch.cat([p.grad.reshape(-1) for m in (model.aux, model.last) for p in m.parameters()]))  # type: ignore[union-attr]
    return torch.equal(*grads)


def frozen(rank: int) -> dict[str, Any]:
    """A layer is frozen or unused from step 4 on, then comes back."""
    found = {}
    for name, make in {**METHODS, **LOCAL}.items():
        for overlap in (True, False):
            model = Trunk()
            optimizer = make(model.parameters())
            ddp = DistributedDataParallel(model, find_unused_parameters=True)
            attachment = attach(ddp, optimizer, overlap=overlap)
            train(ddp, optimizer, rank, 4)
            before, state = values(model), state_of(optimizer, model.first.weight)
            for p in model.first.parameters():
                p.requires_grad_(False)
                p.grad = None
            train(ddp, optimizer, rank, 5, seed=1, aux=False)
            after = values(model)
            stays = {k: torch.equal(before[k], after[k]) for k in before}
            now = state_of(optimizer, model.first.weight)
            kept = all(torch.equal(state[k], now[k]) for k in state if k not in ("common", "last"))
            for p in model.first.parameters():
                p.requires_grad_(True)
            train(ddp, optimizer, rank, 4, seed=2)
            with optimizer.averaged():
                spread = max(apart(p) for p in model.parameters())
            moves = not torch.equal(model.first.weight, after["first.weight"])
            attachment.close()
            found[f"{name}, overlap={overlap}"] = (
                all(stays[k] for k in stays if not k.startswith("last")),
                not stays["last.weight"],
                kept,
                moves,
                spread,
            )
    return found


def used_on_one_rank(rank: int) -> dict[str, float]:
    """A layer that one rank uses and the other does not moves, alike on both."""
    found = {}
    for overlap in (True, False):
        model = Trunk()
        optimizer = METHODS["Birder"](model.parameters())
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        attachment = attach(ddp, optimizer, overlap=overlap)
        before = values(model)
        train(ddp, optimizer, rank, 3, aux=rank == 0)
        found[f"moved {overlap}"] = float((model.aux.weight - before["aux.weight"]).abs().max())
        found[f"apart {overlap}"] = apart(model.aux.weight)
        attachment.close()
    return found


def frozen_at_attach(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, make in METHODS.items():
        for refuse in (True, False):
            model = Trunk()
            model.first.requires_grad_(False)
            optimizer = make(model.parameters())
            ddp = DistributedDataParallel(model)
            attach(ddp, optimizer)
            train(ddp, optimizer, rank, 2)
            model.first.requires_grad_(True)
            if refuse:
                found[name] = [said(lambda d=ddp, o=optimizer: train(d, o, rank, 1, seed=1))]  # type: ignore[misc]
        steps, first = optimizer.steps, values(model)
        kept = state_of(optimizer, model.last.weight)
        ddp = DistributedDataParallel(model)
        optimizer.zero_grad()
        attach(ddp, optimizer)
        now = state_of(optimizer, model.last.weight)
        found[name].append(all(torch.equal(kept[k], now[k]) for k in kept))
        found[name].append(optimizer.steps == steps)
        train(ddp, optimizer, rank, 3, seed=2)
        with optimizer.averaged():
            found[name].append(apart(model.first.weight))
        found[name].append(float((model.first.weight - first["first.weight"]).abs().max()) > 0)
    return found


def ignored_by_ddp(rank: int) -> str:
    model = Trunk()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["aux.weight"])
    optimizer = METHODS["Birder"](model.parameters())
    ddp = DistributedDataParallel(model)
    attach(ddp, optimizer)
    return said(lambda: train(ddp, optimizer, rank, 1))


def added_group(rank: int) -> dict[str, Any]:
    model = Trunk()
    optimizer = METHODS["Birder"]([*model.first.parameters(), *model.last.parameters()])
    ddp = DistributedDataParallel(model)
    attach(ddp, optimizer)
    train(ddp, optimizer, rank, 2)
    optimizer.add_param_group({"params": list(model.aux.parameters()), "lr": 5e-3})
    line = said(lambda: train(ddp, optimizer, rank, 1, seed=1))
    before = values(model)
    optimizer.zero_grad()
    attach(ddp, optimizer)
    train(ddp, optimizer, rank, 2, seed=2)
    moved = float((model.aux.weight - before["aux.weight"]).abs().max())
    return {"line": line, "moved": moved, "apart": apart(model.aux.weight)}


def overflow(rank: int) -> dict[str, Any]:
    """Rank 1 overflows in step 3 while what stands first in the bucket is not used."""
    found = {}
    for name in ("Birder", "OneBitAdam"):
        for subset in (False, True):
            model = Trunk()
            optimizer = METHODS[name](model.last.parameters() if subset else model.parameters())
            ddp = DistributedDataParallel(model, find_unused_parameters=True)
            attachment = attach(ddp, optimizer, overlap=False)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            scales = []
            for step, x in enumerate(batches(rank, 6)):
                optimizer.zero_grad()
                loss = ddp(x, aux=False).square().mean() * (float("inf") if step == 3 and rank == 1 else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                scales.append((optimizer.steps, scaler.get_scale()))
            found[f"{name}, subset={subset}"] = scales
            attachment.close()
    return found


def refused_at_once(rank: int) -> dict[str, Any]:
    """What a method cannot do after its warm-up is refused in the first step."""
    found = {}
    for name in ("Birder", "OneBitAdam", "ZeroOneAdam", "CSER"):
        for how in ("clip", "data", "numpy", "none", "set", "row", "twice", "scaler", "skip", "save"):
            model = Trunk()
            optimizer = METHODS[name](model.parameters())
            ddp = DistributedDataParallel(model)
            attachment = attach(ddp, optimizer)
            scaler = torch.amp.GradScaler("cpu", enabled=how == "scaler")

            def script(m: Trunk = model, d: Any = ddp, o: Any = optimizer, s: Any = scaler, how: str = how) -> None:
                for x in batches(rank, 2):
                    o.zero_grad()
                    for _ in range(2 if how == "twice" else 1):
                        s.scale(d(x).square().mean()).backward()
                    grad = m.aux.weight.grad
                    assert grad is not None
                    if how == "clip":
                        nn.utils.clip_grad_norm_(m.parameters(), 1e6)
                    elif how == "data":
                        grad.data.mul_(0.5)
                    elif how == "numpy":
                        grad.numpy()[0, 0] += 1
                    elif how == "row":
                        grad.data[3] = 0
                    elif how == "none":
                        m.aux.weight.grad = None
                    elif how == "set":
                        m.aux.weight.grad = torch.zeros_like(grad)
                    elif how == "skip":
                        continue
                    elif how == "save":
                        o.state_dict()
                    s.step(o)

            found[f"{name}, {how}"] = (said(script), optimizer.steps)
            attachment.close()
    return found


def skipped_without_overlap(rank: int) -> dict[str, float]:
    found = {}
    for name in ("Birder", "CSER", "OneBitAdam"):
        ends = []
        for skip in (True, False):
            model = Trunk()
            optimizer = METHODS[name](model.parameters())
            ddp = DistributedDataParallel(model)
            attachment = attach(ddp, optimizer, overlap=False)
            for step, x in enumerate(batches(rank, 8)):
                if step in (2, 5) and not skip:
                    continue
                optimizer.zero_grad()
                ddp(x).square().mean().backward()
                if step not in (2, 5):
                    optimizer.step()
            ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
            attachment.close()
        found[name] = float((ends[0] - ends[1]).abs().max())
    return found


def resets(rank: int) -> dict[str, float]:
    """The state of before the first step, loaded after some steps, begins afresh."""
    found = {}
    for name, make in {**METHODS, **LOCAL}.items():
        ends = []
        for detour in (False, True):
            model = Trunk()
            optimizer = make(model.parameters())
            early = copy.deepcopy(optimizer.state_dict())
            ddp = DistributedDataParallel(model)
            attachment = attach(ddp, optimizer)
            start = copy.deepcopy(model.state_dict())
            if detour:
                train(ddp, optimizer, rank, 5, seed=7)
                model.load_state_dict(start)
                optimizer.load_state_dict(early)
            train(ddp, optimizer, rank, 5)
            ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
            attachment.close()
        found[name] = float((ends[0] - ends[1]).abs().max())
    return found


def joined(rank: int) -> dict[str, str]:
    found = {}
    for name in ("Birder", "OneBitAdam", "SLAMB"):
        model = Trunk()
        optimizer = METHODS[name](model.parameters())
        ddp = DistributedDataParallel(model)
        attach(ddp, optimizer)

        def script(d: Any = ddp, o: Any = optimizer) -> None:
            with Join([d]):
                train(d, o, rank, 3 + rank)

        found[name] = said(script)
    return found


def one_rank_is_behind(rank: int) -> str:
    """Rank 1 leaves out a step of a dense warm-up."""
    model = Trunk()
    optimizer = METHODS["OneBitAdam"](model.parameters())
    ddp = DistributedDataParallel(model)
    attach(ddp, optimizer, overlap=False)

    def script() -> None:
        for step, x in enumerate(batches(rank, 5)):
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            if step != 1 or rank == 0:
                optimizer.step()

    return f"{said(script)} after {optimizer.steps}"


def frozen_variance(rank: int) -> dict[str, str]:
    found = {}
    for name in ("OneBitAdam", "OneBitLAMB", "ZeroOneAdam"):
        model = Trunk()
        optimizer = METHODS[name](model.parameters())
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        attach(ddp, optimizer)
        train(ddp, optimizer, rank, 5, aux=False)
        found[name] = said(lambda d=ddp, o=optimizer: train(d, o, rank, 1, seed=3))  # type: ignore[misc]
    return found


def dense_against_torch(rank: int) -> float:
    """A layer that comes late, and goes, and comes: every parameter counts its own steps, as in torch."""
    ends = []
    for ours in (False, True):
        model = Trunk()
        optimizer: Any = (birder.AdamW if ours else torch.optim.AdamW)(model.parameters(), lr=1e-2, weight_decay=0.1)
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        if ours:
            attach(ddp, optimizer)
        optimizer.step()  # without any gradient
        for step, x in enumerate(batches(rank, 8)):
            optimizer.zero_grad()
            ddp(x, aux=step in (3, 4, 7)).square().mean().backward()
            optimizer.step()
            if ours and step == 4:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    return float((ends[0] - ends[1]).abs().max())


SCENARIOS = {
    f.__name__: f
    for f in (
        memory_layouts,
        two_optimizers,
        foreign_gradients_are_means,
        frozen,
        used_on_one_rank,
        frozen_at_attach,
        ignored_by_ddp,
        added_group,
        overflow,
        refused_at_once,
        skipped_without_overlap,
        resets,
        joined,
        frozen_variance,
        dense_against_torch,
        one_rank_is_behind,  # the last one: its ranks part in the middle of a pass
    )
}


def everything(rank: int, world: int) -> dict[str, Any]:
    return {name: scenario(rank) for name, scenario in SCENARIOS.items()}


@functools.cache
def world() -> list[dict[str, Any]]:
    return run_ranks(everything, 2)


def of(scenario: Callable[..., Any]) -> Any:
    """What rank 0 found."""
    return world()[0][scenario.__name__]


def test_the_order_of_elements_does_not_depend_on_memory_formats() -> None:
    assert all(of(memory_layouts).values()), of(memory_layouts)


def test_gradients_of_other_optimizers_parameters_are_averaged() -> None:
    found = of(two_optimizers)
    assert "another attached optimizer" in found.pop("shared")
    assert set(found.values()) == {0.0}
    assert of(foreign_gradients_are_means)


@pytest.mark.parametrize("name", [*METHODS, *LOCAL])
def test_a_parameter_without_gradient_stays(name: str) -> None:
    for overlap in (True, False):
        stays, others_move, state_stays, comes_back, spread = of(frozen)[f"{name}, overlap={overlap}"]
        assert others_move
        assert comes_back
        assert spread == 0.0
        if name not in SYNCED:  # ranks that differed when it was frozen meet once more
            assert stays
            assert state_stays


def test_a_layer_that_one_rank_uses_moves_on_both() -> None:
    found = of(used_on_one_rank)
    assert found["moved True"] > 0.005
    assert found["moved False"] > 0.005
    assert found["apart True"] == found["apart False"] == 0.0


@pytest.mark.parametrize("name", METHODS)
def test_unfreezing_is_refused_until_the_model_is_attached_again(name: str) -> None:
    line, kept, steps, spread, moved = of(frozen_at_attach)[name]
    assert "first.weight" in line
    assert "attach" in line
    assert kept
    assert steps
    assert spread == 0.0
    assert moved


def test_what_ddp_ignores_is_refused() -> None:
    assert "aux.weight" in of(ignored_by_ddp)


def test_a_group_that_was_added_takes_part_after_attach() -> None:
    found = of(added_group)
    assert "attach" in found["line"]
    assert found["moved"] == pytest.approx(1e-2, rel=0.1)  # two steps of its own lr, and weight decay
    assert found["apart"] == 0.0


def test_all_ranks_skip_when_one_overflows() -> None:
    for name, scales in of(overflow).items():
        assert scales == world()[1]["overflow"][name]
        assert [s for s, _ in scales] == [1, 2, 3, 3, 4, 5]
        assert scales[3][1] == 2.0


def test_what_cannot_work_is_refused_in_the_first_step() -> None:
    for name, (line, steps) in of(refused_at_once).items():
        if name == "OneBitAdam, save":  # nothing has been sent yet
            continue
        assert line, name
        assert steps == 0, name
        assert "\n" not in line
    assert "no_sync" in of(refused_at_once)["OneBitAdam, skip"][0]


def test_skipped_batches_leave_no_trace_without_overlap() -> None:
    assert set(of(skipped_without_overlap).values()) == {0.0}


def test_a_state_of_before_the_first_step_begins_afresh() -> None:
    assert set(of(resets).values()) == {0.0}


def test_join_is_refused_in_one_line() -> None:
    assert all("Join" in line for line in of(joined).values())


def test_ranks_at_different_steps_of_a_warm_up_are_told_so() -> None:
    assert all("different steps" in found["one_rank_is_behind"] for found in world())
    assert [found["one_rank_is_behind"][-1] for found in world()] == ["1", "1"]


def test_a_parameter_whose_variance_was_frozen_at_0_is_named() -> None:
    for line in of(frozen_variance).values():
        assert "warm-up" in line
        assert "aux." in line


def test_dense_methods_count_steps_as_torch() -> None:
    assert of(dense_against_torch) < 1e-6


@pytest.mark.parametrize("name", METHODS)
def test_one_process_lays_itself_out_anew(name: str) -> None:
    model = Trunk()
    model.first.requires_grad_(False)
    optimizer = METHODS[name](model.parameters())
    train(model, optimizer, 0, 2)
    model.first.requires_grad_(True)
    before = values(model)
    optimizer.zero_grad()
    refused = said(lambda: train(model, optimizer, 0, 3, seed=1))
    assert not refused
    assert not torch.equal(before["first.weight"], model.first.weight)
    assert optimizer.steps == 5
