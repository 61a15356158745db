"""What ordinary training scripts do: torch's behaviour, or one line in the first step in which it goes wrong.

One world of two ranks for all of it: each scenario is a function of the rank, and the tests read what it found. Layers that
are frozen or not used: test_frozen_layers.py; `averaged`: test_averaged.py.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from birder import attach
from tests.helpers.ordinary import LOCAL, METHODS, Trunk, apart, batches, said, train
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import slow

FEW = ("Birder", "OneBitLAMB", "CSER")
"""Of the scenarios of every method what `make test` runs."""


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


def chosen(few: bool) -> dict[str, Callable[..., Any]]:
    return {name: make for name, make in {**METHODS, **LOCAL}.items() if (name in FEW) == few}


def memory_layouts(rank: int, few: bool) -> dict[str, bool]:
    same = {}
    for name, make in chosen(few).items():
        found = []
        ways = (("contiguous", False, True), ("other", False, True), ("other", True, True))
        for layout, view, overlap in (*ways, ("other", False, False), ("other", True, False)):
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
        # Norms of tensors are added up in the order of memory. On some processors torch's fused AdamW rounds an element that
        # stands at the end of the memory in another way than the others.
        gap = {"OneBitLAMB": 1e-5, "SLAMB": 1e-5, "AdamW": 1e-7}.get(name, 0.0)
        same[name] = all(float((found[0] - other).abs().max()) <= gap for other in found[1:])
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


def resets(rank: int, few: bool) -> dict[str, float]:
    """The state of before the first step, loaded after some steps, begins afresh."""
    found = {}
    for name, make in chosen(few).items():
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
    model = Trunk()
    ddp = DistributedDataParallel(model)
    attach(ddp, METHODS["Birder"](model.parameters())).close()

    def closed() -> None:
        with Join([ddp], divide_by_initial_world_size=False):
            train(ddp, torch.optim.SGD(model.parameters(), lr=0.01), rank, 3 + rank)

    return found | {"closed": said(closed)}


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


def first_step_is_skipped(rank: int) -> list[str]:
    """By rank 1, by nobody where each step has one more forward pass, by all: with and without overlap."""

    def script(overlap: bool, skips: Callable[[int], bool], more: bool) -> None:
        model = Trunk()
        optimizer = METHODS["Birder"](model.parameters())
        ddp = DistributedDataParallel(model)
        attachment = attach(ddp, optimizer, overlap=overlap)
        try:
            for step, x in enumerate(batches(rank, 3)):
                optimizer.zero_grad()
                ddp(x).square().mean().backward()
                if more:
                    ddp(x)
                if not skips(step):
                    optimizer.step()
        finally:
            attachment.close()

    return [
        said(functools.partial(script, overlap, skips, more))
        for overlap, skips, more in (
            (True, lambda step: step == 0 and rank == 1, False),
            (False, lambda step: step == 0 and rank == 1, False),
            (True, lambda step: False, True),
            (False, lambda step: False, True),
            (False, lambda step: step == 0, False),
        )
    ]


def one_rank_goes_back(rank: int) -> list[str]:
    """Rank 1 makes a step again, that of before ranks meet or the last one of a warm-up, and the other one waits for its
    message; attached again before that, or not."""
    found = []
    for name, again in (("QSparse", True), ("OneBitAdam", False)):
        model = Trunk()
        optimizer = (METHODS | LOCAL)[name](model.parameters())
        ddp = DistributedDataParallel(model)
        attach(ddp, optimizer)
        train(ddp, optimizer, rank, 2)
        state = copy.deepcopy(optimizer.state_dict())
        train(ddp, optimizer, rank, 1)
        if again:
            ddp = DistributedDataParallel(model)
            attach(ddp, optimizer)
        if rank == 1:
            optimizer.load_state_dict(state)
        found.append(said(functools.partial(train, ddp, optimizer, rank, 1)))
    return found


SCENARIOS: dict[str, Callable[[int], Any]] = {
    f.__name__: f
    for f in (
        two_optimizers,
        foreign_gradients_are_means,
        overflow,
        refused_at_once,
        skipped_without_overlap,
        joined,
        first_step_is_skipped,
        one_rank_goes_back,  # these are the last ones: their ranks part in the middle of a pass
        one_rank_is_behind,
    )
}


OF_EVERY_METHOD = (memory_layouts, resets)


def everything(rank: int, world: int, few: bool) -> dict[str, Any]:
    found = {f.__name__: f(rank, few) for f in OF_EVERY_METHOD}
    return found | ({name: scenario(rank) for name, scenario in SCENARIOS.items()} if few else {})


@functools.cache
def world(few: bool = True) -> list[dict[str, Any]]:
    return run_ranks(everything, 2, few)


def of(scenario: Callable[..., Any], few: bool = True) -> Any:
    """What rank 0 found."""
    return world(few)[0][scenario.__name__]


@pytest.mark.parametrize("few", [True, slow(False)])
def test_the_order_of_elements_does_not_depend_on_memory_formats(few: bool) -> None:
    found = of(memory_layouts, few)
    assert all(found.values()), found
    assert set(found) == set(chosen(few))


def test_gradients_of_other_optimizers_parameters_are_averaged() -> None:
    found = of(two_optimizers)
    assert "another attached optimizer" in found.pop("shared")
    assert set(found.values()) == {0.0}
    assert of(foreign_gradients_are_means)


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


@pytest.mark.parametrize("few", [True, slow(False)])
def test_a_state_of_before_the_first_step_begins_afresh(few: bool) -> None:
    assert set(of(resets, few).values()) == {0.0}


def test_join_is_refused_in_one_line() -> None:
    assert all("Join" in line for line in of(joined).values())


def test_ranks_at_different_steps_of_a_warm_up_are_told_so() -> None:
    assert all("different steps" in found["one_rank_is_behind"] for found in world())
    assert [found["one_rank_is_behind"][-1] for found in world()] == ["1", "1"]
    assert all("different steps" in line for found in world() for line in found["one_rank_goes_back"])


def test_ranks_of_which_one_skips_the_first_step_do_not_wait() -> None:
    """DDP's ranks wait for each other in the forward pass after it, where buckets are made again."""
    for found in world():
        *skipped, more, without_overlap, all_skip = found["first_step_is_skipped"]
        assert all("different steps" in line for line in skipped)
        assert more == without_overlap == all_skip == ""
