"""Sigma-delta kernels: fused equals reference, the bound on the error of a whole run, int8 that loses nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from birder.kernels import reference as sigma
from birder.kernels import unpack
from tests.helpers import kernel_checks

cpu = pytest.importorskip("birder.kernels.cpu")

TINY = 2e-4
"""What rounding of fp32 adds to a bound over the steps here."""


@settings(max_examples=60)
@given(
    bytes_=st.integers(0, 400),
    dtype=st.sampled_from(kernel_checks.DTYPES),
    steps=st.booleans(),
    limit=st.sampled_from([1, 2]),
    hold=st.booleans(),
    seed=st.integers(0, 2**30),
)
def test_fused_equals_the_reference(bytes_: int, dtype: torch.dtype, steps: bool, limit: int, hold: bool, seed: int):
    kernel_checks.modulated(cpu, "cpu", 8 * bytes_, dtype, steps, limit, hold=hold, seed=seed)


@settings(max_examples=40)
@given(workers=st.integers(1, 600), count=st.integers(0, 300), steps=st.booleans(), seed=st.integers(0, 2**30))
def test_fused_server_equals_the_reference(workers: int, count: int, steps: bool, seed: int):
    kernel_checks.served(cpu, "cpu", workers, count, steps, seed=seed)


def inputs(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """u[steps, workers, 8] with errors of workers and server to begin with; |u| up to 1, constants and corners among them."""
    workers, steps = draw(st.integers(1, 9)), draw(st.integers(1, 120))
    gen = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
    u = torch.rand(steps, workers, 8, generator=gen) * 2 - 1
    u[:, :, 0] = draw(st.floats(-1, 1, width=32))
    u[:, :, 1] = torch.sign(u[:, :, 1])
    u[:, :, 2] = draw(st.sampled_from([-1.0, 0.0, 1.0]))
    u[steps // 2 :, :, 3] = 1.0
    return u, torch.rand(workers, 8, generator=gen) * 2 - 1, torch.rand(8, generator=gen) * 2 - 1


runs = st.composite(inputs)()


def signs(bits: Tensor) -> Tensor:
    return unpack(bits).float() * 2 - 1


@settings(max_examples=60)
@given(run=runs, spread=st.booleans())
def test_with_gain_1_the_error_of_the_whole_run_is_at_most_2(run: tuple[Tensor, Tensor, Tensor], spread: bool):
    """|sum_t q_t - sum_t mean_i u_i(t)| <= 2 after every step where errors start at 0, else <= 4."""
    u, e, s = run
    e, s = e * spread, s * spread
    off = torch.zeros(8, dtype=torch.float64)
    for now in u:
        rows = torch.stack([sigma.modulate(now[i], e[i]) for i in range(len(now))])
        q = signs(sigma.serve_sigma(rows, s, gamma=1.0))
        off += q.double() - now.double().mean(0)
        assert (off.abs() <= (4 if spread else 2) + TINY).all()


@settings(max_examples=30)
@given(run=runs)
def test_with_gain_1_no_clip_changes_anything(run: tuple[Tensor, Tensor, Tensor]):
    u, e, s = run
    for now in u:
        z = now + e
        rows = torch.stack([sigma.modulate(now[i], e[i]) for i in range(len(now))])
        assert ((z - signs(rows)).abs() <= 1 + 1e-6).all()
        a = signs(rows).mean(0) + s
        q = signs(sigma.serve_sigma(rows, s, gamma=1.0))
        assert ((a - q).abs() <= 1 + 1e-6).all()


@settings(max_examples=30)
@given(run=runs)
def test_one_phase_is_bounded_by_what_its_workers_hold(run: tuple[Tensor, Tensor, Tensor]):
    """Owners in turn: |r_i| <= 2 for all times, and the sum of all that is owed is what the run is off by."""
    u, e, _ = run
    n = u.shape[1]
    r = torch.zeros_like(e)
    off = torch.zeros(8, dtype=torch.float64)
    for t, now in enumerate(u):
        owner = t % n
        for i in range(n):
            bits = sigma.modulate(now[i], r[i], weight=1 / n, limit=2)
            if i == owner:
                q = signs(bits)
        r[owner] -= q
        off += q.double() - now.double().mean(0)
        assert (r.abs() <= 2).all()
        assert torch.allclose(off, -r.double().sum(0), atol=TINY)


@pytest.mark.parametrize("value", [0.0003, -0.002, 0.01, 0.77])
def test_int8_loses_no_u_however_small(value: float):
    """A constant u of a tenth of a step of int8: its sum arrives all the same, for the dither goes round."""
    steps, total = 6000, torch.zeros(8)
    error = torch.zeros(8, dtype=torch.int8)
    for t in range(steps):
        dither = (t * 0.6180339887) % 1
        total += signs(sigma.modulate(torch.full((8,), value), error, dither=dither))
    assert (total - value * steps).abs().max() < 2 + 0.002 * steps * 0.1
    rounded, lost = torch.zeros(8, dtype=torch.int8), torch.zeros(8)
    for _ in range(steps):
        lost += signs(sigma.modulate(torch.full((8,), value), rounded))
    assert value != 0.0003 or lost.abs().max() <= 1  # the control: rounded to nearest, it never arrives
