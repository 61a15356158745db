"""The compressors behind CSER, QSparse-local-SGD and EF-SGD: their delta, what they lose, what travels. No ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from birder import EFSGD
from birder.comm import SingleProcess, run
from birder.optim.sparse import COMPRESSORS, SHARED, Largest, SentOwn
from tests.helpers import reference_cser, toy

FALSE_ALARM = (
    1e-6  # the chance that the statistical test here fails for correct code with another seed; the seed is fixed
)
SIGMAS = 4.9  # two-sided normal quantile of FALSE_ALARM
SIZES = (1000, 1, 37, 500)
"""Of the parameters whose elements are one vector here."""


def vectors() -> dict[str, Tensor]:
    """Of the kinds that gradients are: alike, with heavy tails, mostly zero, all equal in size."""
    g = torch.Generator().manual_seed(2)
    n = sum(SIZES)
    normal = torch.randn(n, generator=g)
    return {
        "normal": normal,
        "heavy tails": normal / torch.rand(n, generator=g).clamp_min(1e-3),
        "sparse": normal * (torch.rand(n, generator=g) < 0.05),
        "signs": normal.sign(),
    }


def optimizer(compressor: str, **options) -> EFSGD:
    """One that holds the vector as its parameters' elements, in several units."""
    made = EFSGD([torch.nn.Parameter(torch.zeros(n)) for n in SIZES], block=20, compressor=compressor, **options)
    made.bind(unit_mb=0.003)
    return made


def lost(compressor: str, v: Tensor, ratio: int, step: int) -> float:
    """|C(v) - v|^2 / |v|^2"""
    made = optimizer(compressor)
    assert len(made.units) > 1
    left, start = 0.0, len(v)
    for unit in made.units:  # the last parameter first
        flat = unit.zeros()
        for i, p in enumerate(unit.params):
            start -= p.numel()
            unit.view(flat, i).copy_(v[start : start + p.numel()])
        before = flat.clone()
        run(made.comm, made.send(unit, flat, ratio, step)).add_own(flat, -1)
        assert torch.equal(flat[flat != 0], before[flat != 0])  # what is left is as it was
        left += float(flat.square().sum())
    return left / float(v.square().sum())


@pytest.mark.parametrize("ratio", [1, 2, 7, 64, 5000])
@pytest.mark.parametrize("kind", vectors())
def test_top_k_keeps_its_delta_on_every_vector(kind: str, ratio: int) -> None:
    """Of every parameter the largest are kept, so that the bound holds for each draw, not only on average."""
    assert lost("top_k", vectors()[kind], ratio, 1) <= 1 - 1 / ratio + 1e-6  # rounding of the sums


@pytest.mark.parametrize("compressor", SHARED)
def test_draws_lose_one_minus_delta_on_average(compressor: str) -> None:
    """An equality: E |C(v) - v|^2 = (1 - 1/R) |v|^2, here from 300 draws."""
    v, ratio, draws = vectors()["normal"], 4, 300
    found = torch.tensor([lost(compressor, v, ratio, step) for step in range(1, draws + 1)])
    spread = float(found.std()) / draws**0.5
    assert abs(float(found.mean()) - (1 - 1 / ratio)) < SIGMAS * spread


def test_top_k_loses_least() -> None:
    v = vectors()["heavy tails"]
    assert lost("top_k", v, 16, 1) < 0.2 < min(lost(c, v, 16, 1) for c in SHARED)


def test_of_equals_the_first_are_kept() -> None:
    """torch's own topk leaves the choice open, and it may differ between devices."""
    v = torch.tensor([1.0, -2.0, 2.0, 0.0, 2.0, -3.0, 0.0, 0.0])
    for ratio, places in ((8, [5]), (4, [1, 5]), (3, [1, 2, 5]), (2, [1, 2, 4, 5]), (1, list(range(8)))):
        assert Largest.choose(v, (0,), (8,), ratio, torch.float32).places.tolist() == places


def test_what_is_not_finite_is_kept_first_and_in_its_place() -> None:
    """A parameter that is NaN comes with weight decay: as in torch it spoils nothing but itself."""
    v = torch.tensor([1.0, torch.nan, 2.0, torch.inf, 5.0, torch.nan, 0.0, 0.0])
    for ratio, places in ((8, [1]), (4, [1, 3]), (2, [1, 3, 4, 5]), (1, list(range(8)))):
        assert Largest.choose(v, (0,), (8,), ratio, torch.float32).places.tolist() == places


def test_places_and_values_survive_their_message() -> None:
    v = vectors()["normal"]
    for wire, size in ((torch.float32, 8), (torch.bfloat16, 6), (torch.float16, 6)):
        own = Largest.choose(v, (0, 1000, 1001, 1038), SIZES, 7, wire)
        k = sum(-(-n // 7) for n in SIZES)
        assert own.places.numel() == k
        message = own.message(wire)
        assert message.numel() == -(-k * size // 4) * 4
        back = Largest.read(message, k, wire)
        assert torch.equal(back.places, own.places)
        assert torch.equal(back.values, own.values)


def test_the_reference_finds_the_same_elements() -> None:
    v = vectors()["heavy tails"]
    own = Largest.choose(v, (0, 1000, 1001, 1038), SIZES, 7, torch.float32)
    parts = list(torch.arange(len(v)).split(list(SIZES)))
    assert torch.equal(own.places.sort().values, reference_cser.largest(v[None], 7, parts)[0].nonzero().flatten())


def test_what_rounding_takes_stays_in_the_error() -> None:
    """mean + rest = v to the last bit of the rest, with values of 16 bits too."""
    v = vectors()["normal"]
    own = Largest.choose(v, (0, 1000, 1001, 1038), SIZES, 7, torch.bfloat16)
    sent = run(SingleProcess(), SentOwn.exchange(own, len(v), torch.bfloat16))
    rest = v.clone()
    sent.add_own(rest, -1)
    assert int((rest[own.places] != 0).sum()) > 0
    both = rest.clone()
    sent.add_mean(both)
    assert torch.equal(both, v)
    change = torch.zeros_like(v)
    sent.add_mean(change)
    sent.add_own(change, -1)
    assert torch.equal(change, torch.zeros_like(v))  # one rank: nobody else to agree with


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
@pytest.mark.parametrize("compressor", SHARED)
def test_so_it_does_where_all_ranks_choose_the_same(compressor: str, wire: str) -> None:
    made, v = optimizer(compressor, wire=wire), vectors()["normal"]
    unit = made.units[-1]
    flat = v[: unit.padded].clone()
    sent = run(made.comm, made.send(unit, flat, 3, 1))
    rest = flat.clone()
    sent.add_own(rest, -1)
    assert 0 < int((rest != flat).sum()) == sent.mean.numel()
    assert float(rest[rest != flat].abs().sum()) > 0
    both = rest.clone()
    sent.add_mean(both)
    assert torch.equal(both, flat)
    change = torch.zeros_like(flat)
    sent.add_mean(change)
    sent.add_own(change, -1)
    assert torch.equal(change, torch.zeros_like(flat))


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_steps_too_small_for_fp16_add_up_until_they_are_sent(compressor: str) -> None:
    """Half of the smallest number of fp16 is 3e-8."""
    x = torch.nn.Parameter(torch.zeros(64))
    made = EFSGD([x], lr=1e-3, momentum=0.0, nesterov=False, ratio=2, block=8, compressor=compressor, wire="fp16")
    for _ in range(200):
        x.grad = torch.full((64,), 1e-5)
        made.step()
    assert float(x.detach().double().mean()) == pytest.approx(-200 * 1e-8, rel=0.05)


def test_ratio_one_is_sgd() -> None:
    for compressor in COMPRESSORS:
        a, b = toy.make(), toy.make()
        ours = EFSGD(a.parameters(), lr=0.1, ratio=1, compressor=compressor)
        theirs = torch.optim.SGD(b.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        for step in range(1, 6):
            for model, optimizer_ in ((a, ours), (b, theirs)):
                optimizer_.zero_grad()
                toy.loss(model, 0, step).backward()
                optimizer_.step()
        # lr times a sum against a sum of products: rounding alone.
        assert torch.allclose(toy.flat(a), toy.flat(b), rtol=0, atol=1e-6)


@pytest.mark.parametrize("compressor", ["blocks", "random_k", "top_k"])
def test_a_group_whose_rate_is_zero_stays_and_its_error_waits(compressor: str) -> None:
    """As torch's optimizers freeze by lr = 0: what EF-SGD has withheld is not added either, and not lost."""
    torch.manual_seed(0)
    x = torch.nn.Parameter(torch.randn(64))
    made = EFSGD([x], lr=0.1, momentum=0.0, ratio=8, block=8, compressor=compressor)
    first = x.detach().clone()

    def step(lr: float) -> None:
        made.param_groups[0]["lr"] = lr
        x.grad = torch.ones(64)
        made.step()

    for _ in range(3):
        step(0.1)
    before, error = x.detach().clone(), made.units[0].state["error"].clone()
    assert error.abs().max() > 0.1
    for _ in range(3):
        step(0.0)
    assert torch.equal(x, before)
    assert torch.equal(made.units[0].state["error"], error)
    step(0.1)
    # Every gradient of the four steps with a rate was sent or is withheld still.
    assert torch.allclose(first - x + made.units[0].state["error"], torch.full((64,), 0.4))
