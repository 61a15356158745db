"""The dense baselines reduce to torch's optimizers."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from birder import SGDM, AdamW, BertAdam, attach
from experiments.config import compose
from experiments.records import labels
from tests.helpers import toy
from tests.helpers.ranks import run_ranks

PAIRS = [
    (lambda p: SGDM(p, 0.1, weight_decay=0.01), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01)),
    (
        lambda p: SGDM(p, 0.1, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    ),
    (lambda p: AdamW(p, 0.01), lambda p: torch.optim.AdamW(p, 0.01, foreach=True)),
]

# AdamW only: torch divides by the bias correction in another order.
EPSILONS = 64


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=["SGDM", "Nesterov", "AdamW"])
def test_equals_torch(ours, theirs):
    ends = [toy.trained(make, 30) for make in (ours, theirs)]
    exact = ours is not PAIRS[2][0]
    assert (ends[0] - ends[1]).abs().max() <= (0 if exact else EPSILONS * torch.finfo(torch.float32).eps)


def test_memory_of_another_order_is_no_other_parameter():
    """A transposed weight, and one in channels-last memory: the moments stand in logical order."""
    ends = []
    for make in (AdamW, torch.optim.AdamW):
        gen = torch.Generator().manual_seed(0)
        weights = torch.randn(7, 5, generator=gen).t(), torch.randn(4, 3, 2, 2, generator=gen)
        params = [torch.nn.Parameter(w.to(memory_format=torch.channels_last) if w.dim() == 4 else w) for w in weights]
        optimizer = make(params, 0.01)
        for _ in range(5):
            for p in params:
                p.grad = torch.randn(p.shape, generator=gen)
            optimizer.step()
        assert not any(p.is_contiguous() for p in params)
        ends.append(torch.cat([p.detach().reshape(-1) for p in params]))
    assert (ends[0] - ends[1]).abs().max() <= EPSILONS * torch.finfo(torch.float32).eps


LONG = [
    (SGDM, torch.optim.SGD, {"momentum": 0.8, "weight_decay": 0.03, "nesterov": True}, 0),
    (SGDM, torch.optim.SGD, {"momentum": 0.0, "weight_decay": 0.03}, 0),
    (AdamW, torch.optim.AdamW, {"betas": (0.7, 0.95), "eps": 1e-5, "weight_decay": 0.2}, EPSILONS),
]


@pytest.mark.parametrize(("ours", "theirs", "options", "epsilons"), LONG, ids=["Nesterov", "SGD", "AdamW"])
def test_equals_torch_for_long_with_groups_and_a_moving_learning_rate(ours, theirs, options, epsilons):
    """400 steps; biases without weight decay at half the learning rate; a tensor without gradient until step 100.

    torch's AdamW counts the steps of each tensor from its first gradient on, so the late tensor is for SGDM only.
    """
    ends = []
    for make in (ours, theirs):
        model = toy.make()
        weights = [p for n, p in model.named_parameters() if not n.endswith("bias")]
        biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
        groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0, "lr": 0.01}]
        optimizer = make(groups, lr=0.02, **options)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
        for step in range(1, 401):
            optimizer.zero_grad()
            toy.loss(model, 0, step).backward()
            if ours is SGDM and step < 100:
                model.scale.grad = None
            optimizer.step()
            schedule.step()
        ends.append(toy.flat(model))
    assert (ends[0] - ends[1]).abs().max() <= epsilons * torch.finfo(torch.float32).eps
    assert (ends[0] - toy.flat(toy.make())).abs().max() > 0.1


def test_nesterov_and_plain_momentum_are_told_apart_in_tables():
    names = ["sgdm_nesterov", "sgdm"]
    resolved = [compose.resolve(compose.compose([f"optimizer={name}"])) for name in names]
    assert [r["optimizer"].get("nesterov", False) for r in resolved] == [True, False]
    assert [labels.method(r) for r in resolved] == ["SGDM Nesterov fp32", "SGDM fp32"]


def test_bertadam_clips_each_tensor_and_corrects_no_bias():
    p, q = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(4))
    optimizer = BertAdam([p, q], lr=1.0, weight_decay=0.0, eps=0.0)
    p.grad, q.grad = torch.full((4,), 100.0), torch.full((4,), 0.1)
    optimizer.step()
    # m/sqrt(v) = 0.1 g / sqrt(0.001 g^2) whatever the gradient's size
    assert torch.allclose(p, torch.full((4,), -(10**0.5)), rtol=1e-5)
    assert torch.allclose(q, p, rtol=1e-5)
    m = optimizer.units[0].views(optimizer.units[0].state["m"])
    assert sorted(float(t.norm()) for t in m) == pytest.approx([0.1 * 0.2, 0.1 * 1.0], rel=1e-4)


def train(rank: int, world: int, wire: str, own: bool) -> tuple:
    model = toy.make()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    sent = 0
    if own:
        optimizer: torch.optim.Optimizer = SGDM(model.parameters(), 0.1, wire=wire)
        attachment = attach(ddp, optimizer)
    else:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    toy.train(ddp, optimizer, rank, range(1, 31))
    if own:
        sent = attachment.counter.total
    return toy.flat(model).numpy(), sent


def test_the_hook_in_fp32_is_plain_ddp_bit_for_bit():
    ours, theirs = run_ranks(train, 2, "fp32", True), run_ranks(train, 2, "fp32", False)
    assert (ours[0][0] == theirs[0][0]).all()


@pytest.mark.parametrize(("wire", "tolerance"), [("bf16", 3e-2), ("fp16", 4e-3)])
def test_a_half_wire_sends_half_and_stays_near(wire, tolerance):
    # Rounding of the wire (2^-8, 2^-11 relative) over 30 steps of lr 0.1 with gradients of size 1.
    full, half = run_ranks(train, 3, "fp32", True), run_ranks(train, 3, wire, True)
    assert half[0][1] * 2 == pytest.approx(full[0][1], rel=1e-3)  # rounded down in every collective
    assert all((r[0] == half[0][0]).all() for r in half)
    difference = abs(half[0][0] - full[0][0]).max()
    assert 0 < difference < tolerance
