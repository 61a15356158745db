"""Kernels: the generator's published test vectors, fused equals reference, the law of the stochastic sign."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birder.kernels import reference
from birder.kernels.philox import philox4x32, uniform16
from tests.reference import draws

cpu = pytest.importorskip("birder.kernels.cpu")

# Known answers of Random123 for philox4x32, 10 rounds.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_gives_the_published_answers(counter, key, answer):
    words = philox4x32(tuple(torch.tensor([c]) for c in counter), key)
    assert tuple(int(w) for w in words) == answer


def test_draws_depend_on_the_element_alone():
    whole = uniform16(64, seed=5, step=3, stream=2, start=0, device=torch.device("cpu"))
    part = uniform16(16, seed=5, step=3, stream=2, start=24, device=torch.device("cpu"))
    assert torch.equal(whole[24:40], part)
    assert torch.equal(whole, draws(np.arange(64), seed=5, step=3, stream=2))
    for other in ({"seed": 6}, {"step": 4}, {"stream": 1}):
        changed = uniform16(64, **{"seed": 5, "step": 3, "stream": 2, **other}, start=0, device=torch.device("cpu"))
        assert not torch.equal(whole, changed)


def test_elements_beyond_2_to_the_35_have_numbers_of_their_own():
    low = uniform16(8, seed=1, step=1, stream=0, start=0, device=torch.device("cpu"))
    high = uniform16(8, seed=1, step=1, stream=0, start=2**35, device=torch.device("cpu"))  # block number 2^32
    assert not torch.equal(low, high)


@settings(max_examples=25, deadline=None)
@given(
    bytes_=st.integers(0, 700),
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(1, 2**32 - 1),
    worker=st.integers(0, 1000),
    hold=st.booleans(),
    eps=st.sampled_from([0.0, 1e-8, 1e-3]),
)
def test_fused_encode_equals_the_reference(bytes_, seed, step, worker, hold, eps):
    gen = torch.Generator().manual_seed(seed % 2**31)
    g = torch.randn(8 * bytes_, generator=gen) * 10.0 ** torch.randint(-30, 30, (8 * bytes_,), generator=gen)
    g[::3] = 0.0
    g[1::17], g[2::19] = float("nan"), float("-inf")
    b = torch.rand(8 * bytes_, generator=gen)
    m = b * (2 * torch.rand(8 * bytes_, generator=gen) - 1)
    b[::6] = m[::6] = 0.0
    options = {
        "beta": 0.95,
        "eps": eps,
        "hold": hold,
        "seed": seed,
        "step": step,
        "worker": worker,
        "start": 8 * (seed % 2**40),
    }
    m2, b2 = m.clone(), b.clone()
    expected = reference.encode(g, m, b, **options)
    assert torch.equal(cpu.encode(g, m2, b2, **options), expected)
    assert torch.equal(m, m2)
    assert torch.equal(b, b2)
    assert torch.isfinite(m).all()
    assert (m.abs() <= b).all()


@settings(max_examples=25, deadline=None)
@given(workers=st.integers(1, 70), bytes_=st.integers(0, 300), seed=st.integers(0, 2**63))
def test_fused_server_and_signs_equal_the_reference(workers, bytes_, seed):
    gen = torch.Generator().manual_seed(seed % 2**31)
    rows = torch.randint(0, 256, (workers, bytes_), generator=gen, dtype=torch.uint8)
    scales = torch.rand(workers, generator=gen)
    options = {"seed": seed, "step": 2, "start": 8 * (seed % 1000)}
    assert torch.equal(cpu.reduce_bits(rows, **options), reference.reduce_bits(rows, **options))
    assert torch.equal(cpu.average_signs(rows, scales), reference.average_signs(rows, scales))
    z = torch.randn(8 * bytes_, generator=gen)
    z[::5] = 0
    assert torch.equal(cpu.pack_signs(z), reference.pack_signs(z))


@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (3, 5), (2, 3, 4, 5)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("partial", [False, True])
def test_fused_apply_equals_the_reference(shape, layout, partial):
    p = torch.randn(shape)
    if len(shape) == 4:
        p = p.contiguous(memory_format=layout)
    bits = torch.randint(0, 256, ((p.numel() + 7) // 8,), dtype=torch.uint8)
    active = torch.rand(p.numel()) > 0.5 if partial else None
    q = p.clone(memory_format=torch.preserve_format)
    reference.apply_bits(p, bits, lr=0.3, decay=0.01, active=active)
    cpu.apply_bits(q, bits, lr=0.3, decay=0.01, active=active)
    assert torch.equal(p, q)


@pytest.mark.parametrize("numel", [8, 1024, 1025, 5000])
def test_fused_unseen_blocks_equal_the_reference(numel):
    b = torch.rand(numel) * (torch.rand(numel) > 0.998)
    active = torch.rand(numel) > 0.5
    found = cpu.unseen_blocks(b, active, 1024)
    assert torch.equal(found, reference.unseen_blocks(b, active, 1024))
    assert [bool(x) for x in found] == [bool(((b > 0) & ~active)[i : i + 1024].any()) for i in range(0, numel, 1024)]


def test_pack_and_unpack_are_inverse():
    flags = torch.rand(8 * 11) > 0.5
    assert torch.equal(reference.unpack(reference.pack(flags)).bool(), flags)


# The chance that one of these fails for a correct implementation, with another seed; the seeds are fixed.
FALSE_ALARM = 1e-6
SIGMAS = 4.9  # two-sided normal quantile of FALSE_ALARM


@pytest.mark.parametrize("u", [-0.9, -0.31, -1e-3, 0.0, 1e-3, 0.5, 0.99])
def test_frequency_of_plus_one_is_half_of_one_plus_u(u):
    n = 1 << 20
    bits = reference.binarize(torch.full((n,), u), seed=11, step=1, worker=0, start=0)
    p = (1 + u) / 2
    ones = int(reference.unpack(bits).sum(dtype=torch.int64))
    assert abs(ones - n * p) < SIGMAS * (n * p * (1 - p)) ** 0.5 + n * 2.0**-17


def test_certain_signs_never_flip():
    n = 1 << 20
    u = torch.ones(n)
    u[::2] = -1
    for step in range(1, 5):
        signs = reference.unpack(reference.binarize(u, seed=step, step=step, worker=step, start=0)).float() * 2 - 1
        assert torch.equal(signs, u)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8, 64])
def test_server_draws_plus_one_with_the_share_of_ones(workers):
    n, ones_of = 1 << 17, range(0, workers + 1, max(1, workers // 4))
    for ones in ones_of:
        rows = torch.zeros(workers, n // 8, dtype=torch.uint8)
        rows[:ones] = 255
        out = int(reference.unpack(cpu.reduce_bits(rows, seed=3, step=1, start=0)).sum(dtype=torch.int64))
        p = ones / workers
        if ones in (0, workers):
            assert out == n * p
        else:
            assert abs(out - n * p) < SIGMAS * (n * p * (1 - p)) ** 0.5 + n * 2.0**-17


def test_workers_and_server_draw_independently():
    n = 1 << 18
    half = torch.zeros(n)
    a = reference.unpack(reference.binarize(half, seed=1, step=1, worker=0, start=0)).float() * 2 - 1
    for other in ({"worker": 1, "step": 1}, {"worker": 0, "step": 2}):
        b = reference.unpack(reference.binarize(half, seed=1, start=0, **other)).float() * 2 - 1
        assert abs(float((a * b).sum())) < SIGMAS * n**0.5
