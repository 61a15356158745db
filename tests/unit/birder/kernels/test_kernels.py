"""Kernels: the generator's published test vectors, fused equals reference, the law of the stochastic sign."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birder import kernels
from birder.kernels import reference
from birder.kernels.implements import implements
from birder.kernels.philox import MASK_STREAM, philox4x32, uniform16
from tests.helpers import kernel_checks
from tests.helpers.reference import draws

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


def test_a_mask_holds_what_is_drawn_below_its_limit():
    """SLAMB's smallest fraction is a limit of 2: one more would send half as much again."""
    drawn = draws(np.arange(8000), seed=5, step=3, stream=MASK_STREAM)
    for limit in (0, int(drawn[7]), 2**16):
        mask = kernels.random_mask(8000, limit, seed=5, step=3, start=0, device=torch.device("cpu"))
        assert torch.equal(mask, drawn < limit)


@settings(max_examples=40)
@given(
    bytes_=st.integers(0, 700),
    dtype=st.sampled_from(kernel_checks.DTYPES),
    seed=st.integers(0, 2**64 - 1),
    hold=st.booleans(),
    eps=st.sampled_from([0.0, 1e-8, 1e-3]),
    ours=st.booleans(),
)
def test_fused_encode_equals_the_reference(bytes_, dtype, seed, hold, eps, ours):
    kernel_checks.encode(cpu, "cpu", 8 * bytes_, dtype, seed, hold, eps, ours)


def test_half_precision_gradients_are_taken_as_they_are():
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        g = patterns.view(dtype)  # every number that the type has
        results = []
        for gradient in (g, g.float()):
            m, b = torch.zeros(len(g)), torch.zeros(len(g))
            bits = cpu.encode(gradient, m, b, beta=0.5, eps=0.0, hold=False, seed=1, step=1, worker=0, start=0)
            results.append((bits, m, b))
        for mine, wide in zip(*results, strict=True):
            assert torch.equal(mine, wide)


@settings(max_examples=25)
@given(workers=st.integers(1, 70), bytes_=st.integers(0, 300), seed=st.integers(0, 2**63))
def test_fused_server_and_signs_equal_the_reference(workers, bytes_, seed):
    kernel_checks.server(cpu, "cpu", workers, bytes_, seed)
    kernel_checks.signs(cpu, "cpu", workers, bytes_, seed)


def test_fused_server_counts_more_workers_than_a_byte_holds():
    for workers in (254, 255, 256, 257, 600):
        kernel_checks.server(cpu, "cpu", workers, 20)


@settings(max_examples=25)
@given(
    bytes_=st.integers(0, 700),
    workers=st.integers(1, 9),
    masked=st.booleans(),
    seed=st.integers(0, 2**63),
    spoilt=st.booleans(),
)
def test_fused_error_feedback_equals_the_reference(bytes_, workers, masked, seed, spoilt):
    kernel_checks.feedback(cpu, "cpu", 8 * bytes_, workers, masked, seed, spoilt and bytes_ > 0)


def test_the_sum_has_one_order():
    from birder.kernels.cpu import _total

    x = torch.rand(1024 * 1024 + 5, dtype=torch.float64)  # three levels
    total = reference.tree_sum(x)
    assert _total(x.clone().numpy()) == float(total)
    assert abs(float(total) - float(x.sum())) < 1e-12 * float(total)
    z = torch.rand(1024 * 1024 + 8)
    assert float(cpu.add_message(z.clone(), torch.zeros_like(z), None)) == float(reference.sum_squares(z))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_fused_update_equals_the_reference(dtype, partial, decay):
    kernel_checks.apply(cpu, "cpu", dtype, decay, partial)


@pytest.mark.parametrize("module", [cpu, reference])
def test_what_is_not_active_keeps_every_bit(module):
    for start in (0.0, -0.0):
        p = torch.full((16,), start)
        bits = torch.tensor([0, 255], dtype=torch.uint8)
        module.apply_bits([p], [0], bits, lr=0.1, decay=0.0, active=torch.zeros(16, dtype=torch.bool))
        assert torch.equal(p.signbit(), torch.full((16,), start).signbit())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep", [1.0, 0.99])
def test_fused_adam_equals_the_reference(dtype, keep):
    kernel_checks.moved_adam(cpu, "cpu", dtype, keep)


@pytest.mark.parametrize("numel", [0, 8, 1024, 1025, 5000])
def test_fused_unseen_blocks_equal_the_reference(numel):
    kernel_checks.unseen(cpu, "cpu", numel, 1024)


def test_more_elements_than_an_int32_counts():
    count = 2**28 + 3  # bytes of 8 elements each
    rows = torch.zeros(2, count, dtype=torch.uint8)
    rows[0] = 255
    out = cpu.reduce_bits(rows, seed=1, step=1, start=0)
    end = 1000
    assert torch.equal(out[-end:], reference.reduce_bits(rows[:, -end:], seed=1, step=1, start=8 * (count - end)))


def test_numbers_of_elements_must_make_whole_bytes():
    z = torch.zeros(12)
    for call in (
        lambda: kernels.pack_signs(z),
        lambda: kernels.binarize(z, seed=0, step=1, worker=0, start=0),
        lambda: kernels.split_signs(z, torch.tensor(1.0), None),
        lambda: kernels.split_signs(torch.zeros(24), torch.tensor(1.0), None, parts=2),
        lambda: kernels.encode(z, z, z, beta=0.9, eps=0.0, hold=False, seed=0, step=1, worker=0, start=0),
    ):
        with pytest.raises(ValueError, match="multiple of 8"):
            call()


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
    kernel_checks.certain_signs(cpu, "cpu", 1 << 18)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8, 64])
def test_server_draws_plus_one_with_the_share_of_ones(workers):
    n, ones_of = 1 << 17, range(0, workers + 1, max(1, workers // 4))
    for ones in ones_of:
        rows = torch.zeros(workers, n // 8, dtype=torch.uint8)
        rows[:ones] = 255
        bits = cpu.reduce_bits(rows, seed=3, step=1, start=0)
        # Enough of them to see how it rounds.
        assert torch.equal(bits, reference.reduce_bits(rows, seed=3, step=1, start=0))
        out = int(reference.unpack(bits).sum(dtype=torch.int64))
        p = ones / workers
        if ones in (0, workers):
            assert out == n * p
        else:
            assert abs(out - n * p) < SIGMAS * (n * p * (1 - p)) ** 0.5 + n * 2.0**-17


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_every_worker_decides_equally_often(workers):
    n = 1 << 17
    for lone in range(workers):
        rows = torch.zeros(workers, n // 8, dtype=torch.uint8)
        rows[lone] = 255
        out = int(reference.unpack(cpu.reduce_bits(rows, seed=4, step=1, start=40)).sum(dtype=torch.int64))
        p = 1 / workers
        assert abs(out - n * p) < SIGMAS * (n * p * (1 - p)) ** 0.5 + n * 2.0**-17


def test_workers_and_server_draw_independently():
    n = 1 << 18
    half = torch.zeros(n)
    a = reference.unpack(reference.binarize(half, seed=1, step=1, worker=0, start=0)).float() * 2 - 1
    for other in ({"worker": 1, "step": 1}, {"worker": 0, "step": 2}):
        b = reference.unpack(reference.binarize(half, seed=1, start=0, **other)).float() * 2 - 1
        assert abs(float((a * b).sum())) < SIGMAS * n**0.5


@pytest.mark.parametrize("lr", [0.1, np.float32(0.1), torch.tensor(0.1)], ids=["python", "numpy", "tensor"])
def test_back_ends_get_pythons_numbers(lr):
    """Triton compiles for no others."""
    given = {}

    @implements(reference.apply_bits)
    def apply_bits(params, offsets, bits, o):
        given.update(vars(o))

    apply_bits([], [], None, lr=lr, decay=lr, active=None)
    assert {name: type(value) for name, value in given.items()} == {"lr": float, "decay": float, "active": type(None)}
