"""Birder's one-phase form: the law of two phases from half the bytes. Against the reference: test_birder.py."""

from __future__ import annotations

import pytest
import torch

from birder import kernels
from experiments.records import labels
from tests.distributed.test_birder import of_a_step, virtually

FALSE_ALARM = 1e-6  # the chance that a statistical test here fails for correct code with another seed; seeds are fixed
SIGMAS = 4.9  # two-sided normal quantile of FALSE_ALARM


def test_half_the_bytes_and_half_the_collectives() -> None:
    world = 4
    one, two = virtually(world, {"reduce": "one_phase"}), virtually(world, {})
    assert len({of_a_step(r)[0] for r in one}) == 1  # every worker sends equally much
    for results, phases in ((one, 1), (two, 2)):
        flags = of_a_step(results[0])[0] - phases * (world - 1) * results[0]["padded"] / 8 / world
        assert 0 <= flags < 16  # what the map of seen coordinates sends; the bits themselves are exact
    assert of_a_step(one[0])[1] <= one[0]["units"] + 1 < of_a_step(two[0])[1]


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_every_worker_is_drawn_equally_often_for_every_word(n: int) -> None:
    """Frequency of +1 in each coordinate is k/n, whichever k workers say +1."""
    steps, groups = 3000, 4
    words = n * groups
    marked = torch.arange(n) % 3 == 0  # the workers that say +1 everywhere
    rows = (marked.unsqueeze(1) * 255).to(torch.uint8).expand(n, 4 * words).contiguous()
    plus = torch.zeros(32 * words)
    for step in range(steps):
        draw = {"seed": 11, "step": step, "start": 32 * 7}
        sent = torch.stack([kernels.owned(rows[i], n=n, worker=i, **draw) for i in range(n)])
        assert sent.shape == (n, 4 * groups)
        plus += kernels.unpack(kernels.assemble(sent, **draw))
    share = marked.float().mean().item()
    spread = (share * (1 - share) / steps) ** 0.5
    # All 32 bits of a word move together: n * groups independent frequencies are looked at.
    assert ((plus / steps - share).abs() < (SIGMAS + 1) * spread).all()


def test_what_is_sent_is_what_is_assembled() -> None:
    """With all workers alike the result is their common message, whoever was drawn."""
    bits = torch.randint(0, 256, (4 * 3 * 5,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    draw = {"seed": 2**63 + 5, "step": 9, "start": 2**33}
    sent = torch.stack([kernels.owned(bits, n=3, worker=i, **draw) for i in range(3)])
    assert torch.equal(kernels.assemble(sent, **draw), bits)


def test_both_forms_have_the_same_law() -> None:
    """Two samples of +1 frequencies over coordinates, one of each form, from the same workers' ratios."""
    n, size, steps = 4, 32 * 4 * 40, 60
    gen = torch.Generator().manual_seed(0)
    u = torch.rand(n, size, generator=gen) * 2 - 1
    totals = {"one": torch.zeros(size), "two": torch.zeros(size)}
    for step in range(steps):
        draw = {"seed": 5, "step": step}
        bits = torch.stack([kernels.binarize(u[i], worker=i, start=0, **draw) for i in range(n)])
        sent = torch.stack([kernels.owned(bits[i], n=n, worker=i, start=0, **draw) for i in range(n)])
        totals["one"] += kernels.unpack(kernels.assemble(sent, start=0, **draw))
        totals["two"] += kernels.unpack(kernels.reduce_bits(bits, start=0, **draw))
    expected = (1 + u.mean(0)) / 2
    variance = (expected * (1 - expected) / steps).clamp(min=1e-9)
    for total in totals.values():
        # Mean of squared standard scores is 1; over 5120 nearly independent coordinates its spread is sqrt(2/5120).
        chi = ((total / steps - expected).square() / variance).mean().item()
        assert abs(chi - 1) < SIGMAS * (2 / size) ** 0.5 + 0.02
    difference = (totals["one"] - totals["two"]).sum().item() / (size * steps)
    assert abs(difference) < SIGMAS * (2 * variance.mean().item() / size) ** 0.5


def test_tables_call_it_this_projects_own() -> None:
    config = {"optimizer": {"_target_": "birder.Birder", "reduce": "one_phase"}, "comm": {"topology": "hierarchical"}}
    assert labels.method(config) == "Birder one-phase (this project's) hierarchical"
    assert labels.method({"optimizer": {"_target_": "birder.Birder", "reduce": "two_phase"}}) == "Birder"
