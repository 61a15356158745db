"""LAMB against a plain reference and against AdamW; what its ratio promises."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from birder import LAMB, AdamW, attach
from experiments.config import compose
from experiments.records import labels
from tests.helpers import reference, toy
from tests.helpers.ranks import run_ranks

STEPS, LR = 60, 0.01
DEEPSPEED = {"bias_correction": False, "min_coeff": 0.01, "max_coeff": 0.3}
VARIANTS = [{}, DEEPSPEED, {"phi": (0.5, 2.0), "weight_decay": 0.0}]


class Plain:
    """LAMB on the mean of the workers' gradients, tensor by tensor."""

    def __init__(self, params, bias_correction=True, min_coeff=0.0, max_coeff=None, phi=None, weight_decay=0.01):
        self.params, self.correct, self.bounds = params, bias_correction, (min_coeff, max_coeff)
        self.phi, self.decay, self.steps = phi, weight_decay, 0
        self.m = [torch.zeros_like(p) for p in params]
        self.v = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self, grads: list[list[torch.Tensor]]) -> None:
        self.steps += 1
        for i, (x, m, v) in enumerate(zip(self.params, self.m, self.v, strict=True)):
            g = sum(row[i] / len(grads) for row in grads)
            m.lerp_(g, 1 - 0.9)
            v.mul_(0.999).addcmul_(g, g, value=1 - 0.999)
            if self.correct:
                r = m / (v.sqrt() / (1 - 0.999**self.steps) ** 0.5 + 1e-6) / (1 - 0.9**self.steps)
            else:
                r = m / (v.sqrt() + 1e-6)
            r = torch.add(r, x, alpha=self.decay)
            size, length = torch.linalg.vector_norm(x), torch.linalg.vector_norm(r)
            c = torch.ones(())
            if size > 0 and length > 0:
                c = ((size.clamp(*self.phi) if self.phi else size) / length).clamp(*self.bounds)
            x.add_(r * c, alpha=-LR)


def plain_run(world: int, options: dict) -> torch.Tensor:
    torch.set_num_threads(1)
    model = toy.make()
    plain = Plain(list(model.parameters()), **options)
    for step in range(1, STEPS + 1):
        plain.step(reference.local_gradients(model, toy.loss, world, step))
    return toy.flat(model)


def hook_run(rank: int, world: int, options: dict) -> tuple:
    model = toy.make()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    optimizer = LAMB(model.parameters(), LR, **options)
    attachment = attach(ddp, optimizer)
    toy.train(ddp, optimizer, rank, range(1, STEPS + 1))
    return toy.flat(model).numpy(), attachment.counter.total / STEPS, optimizer.state_bytes()


def local_run(make, steps: int = STEPS) -> torch.Tensor:
    torch.set_num_threads(1)
    return toy.trained(make, steps)


@pytest.mark.parametrize("options", VARIANTS)
def test_equals_the_reference_bit_for_bit(options: dict) -> None:
    assert torch.equal(local_run(lambda p: LAMB(p, LR, **options)), plain_run(1, options))


def test_two_ranks_equal_the_reference_and_more_agree() -> None:
    """Two summands have one sum; with three the ring adds up in another order than the reference."""
    for world in (2, 3):
        results = run_ranks(hook_run, world, DEEPSPEED)
        expected = plain_run(world, DEEPSPEED).numpy()
        assert all((r[0] == results[0][0]).all() for r in results)
        # 60 steps of at most 0.01 * 0.3 times the rounding of a mean and of two norms, a few 2^-24 each.
        assert abs(results[0][0] - expected).max() <= (0 if world == 2 else 1e-4)
    size = sum(p.numel() for p in toy.make().parameters())
    assert results[0][1] == pytest.approx(2 * 2 / 3 * 4 * size, rel=1e-3)  # 2 (n-1)/n of the fp32 gradient
    assert 8 * size <= results[0][2] < 9 * size + 8 * 32 * 6  # m and v, each tensor padded to 32 elements


def test_with_the_ratio_forced_to_one_it_is_adamw() -> None:
    """lr (direction + decay x) in one sum instead of two: the same but for rounding."""
    forced = local_run(lambda p: LAMB(p, LR, eps=1e-8, min_coeff=1.0, max_coeff=1.0), 200)
    adamw = local_run(lambda p: AdamW(p, LR, eps=1e-8, weight_decay=0.01), 200)
    assert (forced - adamw).abs().max() <= 256 * torch.finfo(torch.float32).eps
    assert (forced - local_run(lambda p: LAMB(p, LR, eps=1e-8), 200)).abs().max() > 0.1


def moved(x: torch.Tensor, g: torch.Tensor, **options) -> float:
    """How far one step takes a tensor, in units of lr."""
    p = torch.nn.Parameter(x.clone())
    optimizer = LAMB([p], lr=0.01, weight_decay=0.0, **options)
    p.grad = g.clone()
    optimizer.step()
    return float((p.detach() - x).double().norm()) / 0.01


def test_a_tensor_moves_by_lr_times_its_own_length() -> None:
    gen = torch.Generator().manual_seed(0)
    direction = torch.randn(300, generator=gen)
    for length in (1e-2, 1.0, 50.0):
        for slope in (1e-2, 1.0, 1e4):  # whatever the gradient's size
            x = torch.randn(300, generator=gen) * length
            assert moved(x, direction * slope) == pytest.approx(float(x.norm()), rel=1e-3)


def test_bounds_of_norm_and_of_ratio() -> None:
    x, g = torch.full((100,), 3.0), torch.ones(100)  # |x| = 30; r = 1 everywhere in the first step, |r| = 10
    assert moved(x, g) == pytest.approx(30.0, rel=1e-4)
    assert moved(x, g, phi=(0.0, 5.0)) == pytest.approx(5.0, rel=1e-4)
    assert moved(x, g, phi=(40.0, 50.0)) == pytest.approx(40.0, rel=1e-4)
    assert moved(x, g, max_coeff=0.3) == pytest.approx(0.3 * 10, rel=1e-4)
    assert moved(x, g, min_coeff=6.0) == pytest.approx(6.0 * 10, rel=1e-4)
    # Without bias correction r = 0.1/sqrt(0.001), which the ratio takes out again unless it is bounded.
    assert moved(x, g, bias_correction=False) == pytest.approx(30.0, rel=1e-4)
    forced = {"min_coeff": 1.0, "max_coeff": 1.0}
    assert moved(x, g, bias_correction=False, **forced) == pytest.approx(10 * 10**0.5, rel=1e-4)


def test_tensors_of_length_zero_and_without_gradient() -> None:
    assert moved(torch.zeros(100), torch.ones(100)) == pytest.approx(10.0, rel=1e-4)  # c = 1
    assert moved(torch.ones(100), torch.zeros(100)) == 0.0
    p, q = torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(5))
    optimizer = LAMB([p, q], lr=0.1, weight_decay=0.5)
    p.grad = torch.ones(5)
    optimizer.step()
    assert (q == 1).all()
    assert (p < 1).all()


def test_resumed_equals_uninterrupted_bit_for_bit() -> None:
    torch.set_num_threads(1)
    model = toy.make()
    optimizer = LAMB(model.parameters(), LR)
    for step in range(1, 41):
        if step == 21:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        optimizer.zero_grad()
        toy.loss(model, 0, step).backward()
        optimizer.step()
    fresh = toy.make(seed=9)
    fresh.load_state_dict(saved[0])
    again = LAMB(fresh.parameters(), LR)
    again.load_state_dict(saved[1])
    toy.train(fresh, again, 0, range(21, 41))
    assert torch.equal(toy.flat(fresh), toy.flat(model))


def test_configurations_and_their_names_in_tables() -> None:
    for name, label, wire in (("lamb", "LAMB fp32", "fp32"), ("onebit_lamb", "1-bit LAMB", "1bit")):
        resolved = compose.resolve(compose.compose([f"optimizer={name}"]))
        assert labels.method(resolved) == label
        assert labels.wire(resolved) == wire
    resolved = compose.resolve(compose.compose(["optimizer=lamb", "optimizer.wire=bf16", "optimizer.phi=[0.0,10.0]"]))
    assert labels.method(resolved) == "LAMB bf16"
    assert resolved["optimizer"]["phi"] == [0.0, 10.0]
