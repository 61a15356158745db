"""This project's options of Birder: low-discrepancy bits and a second beta. Off by default."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from birder import Birder, kernels
from birder.kernels import reference, weyl
from experiments.config import compose
from experiments.records import labels
from tests.distributed.test_birder import of_a_step, oracle_run, virtually
from tests.helpers.tiers import slow

FALSE_ALARM = 1e-6  # the chance that a statistical test here fails for correct code with another seed; seeds are fixed
SIGMAS = 4.9  # two-sided normal quantile of FALSE_ALARM
BOTH = {"bits": "weyl", "beta2": 0.999}
ROUNDING = 1e-5
"""What rounding in another order makes of parameters of size 1 over the steps of a test; a step is 0.01."""


@pytest.mark.parametrize(("nodes", "local"), [slow(1, 1), slow(3, 1), (2, 2)])
def test_without_bits_the_mean_of_u_is_applied(nodes: int, local: int) -> None:
    options = {"bits": "none", "beta2": 0.999, "weight_decay": 0.1}
    results = virtually(nodes * local, options, local if local > 1 else None)
    given = {"lr": 0.01, "beta2": 0.999, "weight_decay": 0.1, "exact": True}
    x = oracle_run(nodes, local, given).numpy()
    # lr u is rounded once here (x - lr u in one operation), twice in the reference: of the same sizes as x.
    assert all(np.allclose(r["x"], x, rtol=0, atol=ROUNDING) for r in results)
    assert all((r["x"] == results[0]["x"]).all() for r in results)


def test_u_on_every_rank_without_bits_is_the_mean_over_all_ranks() -> None:
    both, flat = virtually(4, {"bits": "none", "intra": "u"}, 2), virtually(4, {"bits": "none"})
    assert all((r["x"] == both[0]["x"]).all() for r in both)
    assert np.allclose(both[0]["x"], flat[0]["x"], rtol=0, atol=ROUNDING)  # added up in another order


@pytest.mark.slow
def test_u_on_every_rank_takes_both_options() -> None:
    results = virtually(4, {**BOTH, "intra": "u"}, 2)
    assert all((r["x"] == results[0]["x"]).all() for r in results)


def test_bytes_and_collectives_stay_as_they_are() -> None:
    ours, theirs = (virtually(3, options) for options in (BOTH, {}))
    assert [of_a_step(r) for r in ours] == [of_a_step(r) for r in theirs]


def test_over_a_full_period_a_threshold_takes_every_value_equally_often() -> None:
    """So that of 2^32 steps exactly the share (1+u)/2, in units of 2^-16, gives +1."""
    for by in (weyl.PHI, weyl.ROOT):
        for first in (0, 1, 40_503):
            # The steps first + k 2^16: 2^16 such classes make up a full period.
            seen = {weyl.turned(first + k * 2**16, by=by) for k in range(2**16)}
            assert seen == set(range(2**16))
    # A draw in the upper half of a word, and the word goes round.
    h, step = 51_234, 77_777
    word = ((h << 16) + step * weyl.PHI) % 2**32
    assert word >> 16 == (h + weyl.turned(step)) % 2**16


@pytest.mark.parametrize("u", [-1.0, -0.7, 0.0, 0.25, 1.0])
def test_a_bit_of_one_step_has_the_law_of_independent_bits(u: float) -> None:
    n, p = 1 << 18, (1 + u) / 2
    for step in (1, 2, 1000):
        shift = weyl.turned(step)
        bits = kernels.binarize(torch.full((n,), u), seed=7, step=weyl.STEP, worker=0, start=0, shift=shift)
        ones = int(kernels.unpack(bits).sum(dtype=torch.int64))
        assert abs(ones - n * p) <= SIGMAS * (n * p * (1 - p)) ** 0.5 + n * 2.0**-17


def test_over_steps_errors_cancel_instead_of_adding_up() -> None:
    size, steps = 512, 1000
    u = torch.rand(size, generator=torch.Generator().manual_seed(0)) * 2 - 1
    error = {"weyl": -steps * (1 + u) / 2, "independent": -steps * (1 + u) / 2}
    for step in range(1, steps + 1):
        turned = {"step": weyl.STEP, "shift": weyl.turned(step)}
        for name, draw in (("weyl", turned), ("independent", {"step": step})):
            error[name] += kernels.unpack(kernels.binarize(u, seed=3, worker=0, start=0, **draw))
    # The count of a rotation by the golden ratio is off by at most about log(1000); that of independent bits by sqrt(pq T),
    # on average over p 12.9, with a spread of about 0.6 over 512 coordinates.
    assert error["weyl"].abs().max() < 6
    assert error["independent"].square().mean().sqrt() > 9


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, slow(4), slow(8)])
def test_two_phases_have_the_mean_of_the_workers_over_steps(n: int) -> None:
    """Workers that differ: a server that depended on the workers' thresholds would be off by 0.1 and more."""
    size, steps = 256, 500
    gen = torch.Generator().manual_seed(n)
    u = (torch.rand(size, generator=gen) * 1.2 - 0.6 + 0.5 * torch.randn(n, size, generator=gen)).clamp(-1, 1)
    total = torch.zeros(size)
    for step in range(1, steps + 1):
        draw = {"seed": 5, "step": weyl.STEP, "start": 0}
        apart = [weyl.turned(step, worker=i, workers=n) for i in range(n)]
        rows = torch.stack([kernels.binarize(u[i], worker=0, shift=apart[i], **draw) for i in range(n)])
        total += kernels.unpack(kernels.reduce_bits(rows, shift=weyl.turned(step, by=weyl.ROOT), **draw))
    error = total / steps - (1 + u.mean(0)) / 2
    # Independent bits: 0.5/sqrt(500) = 0.022 for each coordinate; here several times less.
    assert error.square().mean().sqrt() < 0.01
    assert error.abs().max() < 0.05


@pytest.mark.parametrize("n", [2, 3, 8])
def test_one_phase_takes_every_word_from_each_worker_in_turn(n: int) -> None:
    groups = 5
    rows = ((torch.arange(n) % 3 == 0).unsqueeze(1) * 255).to(torch.uint8).expand(n, 4 * n * groups).contiguous()
    plus = torch.zeros(32 * n * groups)
    for step in range(4, 4 + n):
        draw = {"seed": 11, "step": weyl.STEP, "start": 32 * 7, "turn": step % n}
        sent = torch.stack([kernels.owned(rows[i], n=n, worker=i, **draw) for i in range(n)])
        plus += kernels.unpack(kernels.assemble(sent, **draw))
    assert (plus == len(range(0, n, 3))).all()


def test_two_betas_are_both_corrected_and_clipped() -> None:
    beta, beta2 = 0.9, 0.999
    p = torch.nn.Parameter(torch.zeros(32))
    optimizer = Birder([p], lr=1.0, beta=beta, beta2=beta2)
    gen = torch.Generator().manual_seed(0)
    m = b = torch.zeros(32)
    for step in range(1, 30):
        p.grad = torch.randn(32, generator=gen)
        m, b = beta * m + (1 - beta) * p.grad, beta2 * b + (1 - beta2) * p.grad.abs()
        optimizer.step()
        state = optimizer.units[0].state
        assert torch.allclose(state["m"], m, rtol=1e-6)
        assert torch.allclose(state["b"], b, rtol=1e-6)
        averages = optimizer.averages(optimizer.param_groups[0], step)
        u = reference.ratio(torch.zeros(32), m / beta, b / beta2, **averages)
        wanted = (m / (1 - beta**step) / (b / (1 - beta2**step))).clamp(-1, 1)
        # To a few roundings; m and b of zero gradients are those of the step before them.
        assert torch.allclose(u, wanted, atol=1e-5)
        if step == 1:
            assert torch.equal(p.detach(), -p.grad.sign())  # u is the sign: no bit is left to chance


def train(optimizer: Birder, p: torch.nn.Parameter, steps: range) -> None:
    for step in steps:
        p.grad = torch.randn(200, generator=torch.Generator().manual_seed(step)) + 0.1
        optimizer.step()


@pytest.mark.parametrize("reduce", ["two_phase", "one_phase"])
def test_resumed_equals_uninterrupted(reduce: str) -> None:
    straight, first = (torch.nn.Parameter(torch.zeros(200)) for _ in range(2))
    train(Birder([straight], lr=0.1, reduce=reduce, **BOTH), straight, range(20))
    stopped = Birder([first], lr=0.1, reduce=reduce, **BOTH)
    train(stopped, first, range(9))
    second = torch.nn.Parameter(first.detach().clone())
    resumed = Birder([second], lr=0.1, reduce=reduce, **BOTH)
    resumed.load_state_dict(copy.deepcopy(stopped.state_dict()))
    train(resumed, second, range(9, 20))
    assert torch.equal(straight, second)


def test_state_from_before_there_was_a_second_beta_is_taken() -> None:
    p = torch.nn.Parameter(torch.zeros(200))
    optimizer = Birder([p], lr=0.1)
    train(optimizer, p, range(3))
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        del group["beta2"]
    optimizer.load_state_dict(state)
    train(optimizer, p, range(3, 5))
    assert optimizer.param_groups[0]["beta2"] is None


def test_an_experiment_has_them_off_and_tables_call_them_this_projects_own() -> None:
    resolved = compose.resolve(compose.compose(["+exp=digits"]))
    assert (resolved["optimizer"]["bits"], resolved["optimizer"]["beta2"]) == ("independent", None)
    assert labels.method(resolved) == "Birder"
    ours = ["optimizer.bits=weyl", "optimizer.beta2=0.999", "optimizer.reduce=one_phase"]
    resolved = compose.resolve(compose.compose(["+exp=digits", *ours]))
    assert labels.method(resolved) == "Birder one-phase, weyl bits, two betas (this project's)"
    resolved = compose.resolve(compose.compose(["+exp=digits", "optimizer.bits=none"]))
    assert labels.method(resolved) == "Birder without bits (this project's)"
    assert labels.wire(resolved) == "fp32"
