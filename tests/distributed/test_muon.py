"""Muon: torch's own, singular values, AdamW for the rest, the same on all ranks; groups; resume."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from birder import AdamW, Muon, attach
from birder.optim.muon import orthogonal
from tests.helpers import toy
from tests.helpers.ranks import run_ranks

LR, STEPS = 0.01, 8


@pytest.mark.parametrize("shape", [(8, 8), (5, 30), (40, 7)])
def test_singular_values_are_brought_near_1(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    assert torch.allclose(orthogonal(x).double(), u @ s.diag() @ v, atol=1e-4)
    assert 0.6 < s.min() < s.max() < 1.3


def test_it_is_torchs_but_for_bf16() -> None:
    """torch iterates in bf16; its rounding is a few percent of a step."""
    ours, theirs = (nn.Parameter(torch.randn(12, 20, generator=torch.Generator().manual_seed(1))) for _ in range(2))
    begun = ours.detach().clone()
    a = Muon([ours], lr=LR)
    b = torch.optim.Muon([theirs], lr=LR, adjust_lr_fn="match_rms_adamw")
    for step in range(STEPS):
        ours.grad = torch.randn(12, 20, generator=torch.Generator().manual_seed(step))
        theirs.grad = ours.grad.clone()
        a.step()
        b.step()
    assert (ours - theirs).norm() < 0.03 * (ours - begun).norm()


def test_embeddings_and_what_is_no_matrix_are_adamws() -> None:
    model, same = toy.make(), toy.make()
    groups = Muon.groups(model)
    assert [(g["muon"], len(g["params"])) for g in groups] == [(True, 2), (False, 4)]
    a = Muon(groups, lr=LR, weight_decay=0.1)
    rest = [p for name, p in same.named_parameters() if name not in ("first.weight", "second.weight")]
    b = AdamW(rest, lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    for net, optimizer in ((model, a), (same, b)):
        toy.loss(net, 0, 1).backward()
        optimizer.step()
    moved = dict(model.named_parameters())
    for name, p in same.named_parameters():
        assert torch.equal(moved[name], p) is ("weight" not in name or name == "embed.weight")


@pytest.mark.parametrize("listed", [list, iter, lambda named: (p for _, p in named)])
def test_groups_divides_every_form_of_parameters_that_torch_takes(listed: Callable[..., Any]) -> None:
    model = toy.make()
    named = list(model.named_parameters())
    optimizer = Muon(Muon.groups(model, [{"params": listed(named), "lr": 0.5}]))
    sizes = [(g["muon"], len(g["params"]), g["lr"]) for g in optimizer.param_groups]
    assert sizes == [(True, 2, 0.5), (False, len(named) - 2, 0.5)]
    assert [len(g["params"]) for g in Muon.groups(model, [{"params": model.first.weight}])] == [1]


class Untied(toy.Net):
    def get_output_embeddings(self) -> nn.Module:
        return self.second


@pytest.mark.parametrize("wrap", [lambda model: model, nn.Sequential, nn.DataParallel])
def test_the_output_layer_is_found_inside_a_wrapper_too(wrap: Callable[[nn.Module], nn.Module]) -> None:
    assert [(g["muon"], len(g["params"])) for g in Muon.groups(wrap(Untied()))] == [(True, 1), (False, 5)]


def hook_run(rank: int, world: int) -> dict[str, Any]:
    def build() -> tuple:
        model = toy.make()
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
        optimizer = Muon(Muon.groups(model), lr=LR)
        return model, ddp, optimizer, attach(ddp, optimizer, unit_mb=0.002)

    model, ddp, optimizer, attachment = build()
    toy.train(ddp, optimizer, rank, range(1, STEPS // 2 + 1))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    toy.train(ddp, optimizer, rank, range(STEPS // 2 + 1, STEPS + 1))
    again, ddp, optimizer, _ = build()
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    toy.train(ddp, optimizer, rank, range(STEPS // 2 + 1, STEPS + 1))
    elements = sum(p.numel() for p in model.parameters())
    kept = {name for u in optimizer.units for name in u.state}
    matrices = sum(u.padded for u in optimizer.units if u.group["muon"])
    state = sum(t.numel() for u in optimizer.units for t in u.state.values()), matrices, elements
    return {"x": toy.flat(model).numpy(), "again": toy.flat(again).numpy(), "sent": attachment.counter.total, "kept": kept,
            "state": state}  # fmt: skip


def test_ranks_agree_with_one_process_and_resume_bit_for_bit() -> None:
    model = toy.make()
    optimizer = Muon(Muon.groups(model), lr=LR)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        torch.stack([toy.loss(model, rank, step) for rank in range(2)]).mean().backward()
        optimizer.step()
    results = run_ranks(hook_run, 2)
    for r in results:
        assert (r["x"] == results[0]["x"]).all()
        assert (r["again"] == r["x"]).all()
        assert abs(r["x"] - toy.flat(model).numpy()).max() < 1e-3
        numel = r["state"][2]
        assert r["sent"] == STEPS * 4 * numel  # 2 (n-1)/n of fp32
        assert r["kept"] == {"m", "v"}


def test_a_group_that_is_added_is_checked() -> None:
    model = nn.Linear(4, 3)
    optimizer = Muon([model.weight])
    optimizer.add_param_group({"params": [model.bias], "muon": False})
    late = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="less than two dimensions"):
        optimizer.add_param_group({"params": [late.bias]})
    assert [group["muon"] for group in optimizer.param_groups] == [True, False]


def test_a_group_that_has_trained_keeps_its_kind() -> None:
    model = nn.Linear(4, 3, bias=False)
    optimizer = Muon([model.weight])
    model.weight.grad = torch.ones(3, 4)
    optimizer.step()
    optimizer.param_groups[0]["muon"] = False
    with pytest.raises(RuntimeError, match="muon=False of a group that has trained with True"):
        optimizer.step()
