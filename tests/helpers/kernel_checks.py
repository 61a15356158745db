"""What every back end of the kernels must do: bit for bit what the reference does on the same inputs.

Each check takes the module to be checked and the device that its tensors live on; the reference runs on the CPU.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from birder.kernels import bits as message
from birder.kernels import reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def same(found: Tensor, expected: Tensor) -> None:
    """Equal in every bit; NaN is equal to NaN, and 0 to -0."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert torch.equal(found.isnan().cpu(), expected.isnan())
    assert torch.equal(found.cpu().nan_to_num(), expected.nan_to_num())


def gradient(numel: int, dtype: torch.dtype, gen: torch.Generator) -> Tensor:
    """Of all sizes that the type can hold, with zeros, NaN and infinities among them."""
    digits = 30 if dtype is not torch.float16 else 7
    g = torch.randn(numel, generator=gen) * 10.0 ** torch.randint(-digits, min(digits, 30), (numel,), generator=gen)
    g[::3] = 0.0
    g[1::17], g[2::19], g[5::23] = float("nan"), float("-inf"), float("inf")
    return g.to(dtype)


def encode(
    module: ModuleType,
    device: str,
    numel: int,
    dtype: torch.dtype,
    seed: int = 1,
    hold: bool = False,
    eps: float = 0.0,
    ours: bool = False,
) -> None:
    """ours: with this project's options, two betas and low-discrepancy bits."""
    gen = torch.Generator().manual_seed(seed % 2**31)
    g = gradient(numel, dtype, gen)
    b = torch.rand(numel, generator=gen)
    m = b * (2 * torch.rand(numel, generator=gen) - 1)
    b[::6] = m[::6] = 0.0
    law: dict[str, Any] = {"beta": 0.95, "eps": eps, "hold": hold}
    if ours:
        law |= {"beta2": 0.999, "scale": 1.7, "shift": seed % 2**16}
    # Counters beyond 32 bits, key and step with their highest bit set.
    counter: dict[str, Any] = {
        "seed": seed,
        "step": 2**32 - 1 - seed % 100,
        "worker": seed % 1000,
        "start": 8 * (seed % 2**45),
    }
    mine = g.to(device), m.to(device, copy=True), b.to(device, copy=True)
    expected = reference.encode(g, m, b, **law, **counter)
    same(module.encode(*mine, **law, **counter), expected)
    same(mine[1], m)
    same(mine[2], b)
    assert m.isfinite().all()
    assert ours or (m.abs() <= b).all()


def certain_signs(module: ModuleType, device: str, numel: int) -> None:
    """Where all gradients so far had one sign, u is 1 or -1, and the bit is that sign in every draw."""
    sign = torch.where(torch.arange(numel) % 3 == 0, 1.0, -1.0)
    m, b = torch.zeros(numel, device=device), torch.zeros(numel, device=device)
    for step in range(1, 6):
        g = (sign * (1e-20 + torch.rand(numel, generator=torch.Generator().manual_seed(step)))).to(device)
        bits = module.encode(g, m, b, beta=0.95, eps=0.0, hold=False, seed=step, step=step, worker=step, start=0)
        same(bits, reference.pack(sign > 0))


def server(module: ModuleType, device: str, workers: int, count: int, seed: int = 1) -> None:
    gen = torch.Generator().manual_seed(seed % 2**31)
    rows = torch.randint(0, 256, (workers, count), generator=gen, dtype=torch.uint8)
    draw: dict[str, Any] = {"seed": seed, "step": 2, "start": 8 * (seed % 2**40)}
    same(module.reduce_bits(rows.to(device), **draw), reference.reduce_bits(rows, **draw))
    draw["shift"] = seed % 2**16
    same(module.reduce_bits(rows.to(device), **draw), reference.reduce_bits(rows, **draw))


def shaped(shape: tuple[int, ...], gen: torch.Generator) -> list[Tensor]:
    """A tensor of that shape in each of the orders that memory may have."""
    x = torch.randn(shape, generator=gen)
    orders = [x, x.flip(0)[: max(len(x) - 1, 1)]]
    if len(shape) == 4:
        orders.append(x.contiguous(memory_format=torch.channels_last))
    if len(shape) == 5:
        orders.append(x.contiguous(memory_format=torch.channels_last_3d))
    if len(shape) > 1:
        orders.append(x.transpose(0, 1).contiguous().transpose(0, 1))
        orders.append(torch.randn(*shape[:-1], 2 * shape[-1], generator=gen)[..., ::2])  # with gaps
    return orders


SHAPES = [(0,), (1,), (7,), (8,), (33,), (3, 5), (2, 3, 4, 5), (5, 4, 2, 3, 2), (2051,), (64, 65)]


def unit(device: str, dtype: torch.dtype) -> tuple[list[Tensor], list[int], int]:
    """Parameters of all shapes and orders, where each begins in a flat buffer, and that buffer's elements.

    The largest are of several programs each; on the CPU, where these are interpreted, of fewer.
    """
    gen = torch.Generator().manual_seed(0)
    params = [t.to(dtype) for shape in (*SHAPES, (8 if device == "cpu" else 40, 70, 3, 3)) for t in shaped(shape, gen)]
    params.append(torch.randn(100, generator=gen).to(dtype)[3:])  # its address is no multiple of 16
    offsets, end = [], 64
    for p in params:
        offsets.append(end)
        end += -(-p.numel() // 32) * 32
    return params, offsets, end


def moved(tensors: list[Tensor], device: str) -> list[Tensor]:
    """Copies on that device, in the same order of memory."""
    out = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in tensors]
    for mine, t in zip(out, tensors, strict=True):
        mine.copy_(t)
    return out


def apply(module: ModuleType, device: str, dtype: torch.dtype, decay: float, partial: bool) -> None:
    params, offsets, end = unit(device, dtype)
    bits = torch.randint(0, 256, (end // 8,), dtype=torch.uint8)
    active = torch.rand(end) > 0.5 if partial else None
    mine = moved(params, device)
    moving = None if active is None else active.to(device)
    before = [p.clone() for p in params]
    for _ in range(2):  # the second time with a table that is there already
        module.apply_bits(mine, offsets, bits.to(device), lr=0.3, decay=decay, active=moving)
        reference.apply_bits(params, offsets, bits, lr=0.3, decay=decay, active=active)
    for found, expected, old in zip(mine, params, before, strict=True):
        same(found, expected)
        assert partial or expected.numel() == 0 or not torch.equal(expected, old)


def taken(
    module: ModuleType, device: str, dtype: torch.dtype, scaled: bool, screen: bool, shifted: bool = False
) -> None:
    """Gradients come into the flat buffer at their places, and nothing else is written. shifted: one not at 16 bytes."""
    grads, offsets, end = unit(device, dtype)
    for i, g in enumerate(grads):
        g[-1:] = float("nan") if i % 2 else float("-inf")
    factor = torch.tensor(0.37) if scaled else None
    expected, found = torch.full((end,), 5.0), torch.full((end + 1,), 5.0, device=device)
    found = found[1:] if shifted else found[:-1]
    there = None if factor is None else factor.to(device)
    reference.take(expected, grads, offsets, factor=factor, screen=screen)
    module.take(found, moved(grads, device), offsets, factor=there, screen=screen)
    same(found, expected)
    assert expected.isfinite().all() == screen


def draws(module: ModuleType, device: str, numel: int, seed: int = 1) -> None:
    """What is drawn and nothing else: signs, masks, blocks."""
    gen = torch.Generator().manual_seed(seed % 2**31)
    counter: dict[str, Any] = {"seed": seed, "step": 2**32 - 1 - seed % 100, "start": 8 * (seed % 2**45)}
    u = torch.rand(numel, generator=gen) * 2 - 1
    u[::3], u[1::7] = 1.0, -1.0
    same(
        module.binarize(u.to(device), worker=seed % 999, **counter), reference.binarize(u, worker=seed % 999, **counter)
    )
    turned: dict[str, Any] = {**counter, "worker": 0, "shift": 2**16 - 1 - seed % 100}
    same(module.binarize(u.to(device), **turned), reference.binarize(u, **turned))
    for odd, limit in ((0, 6554), (3, 0), (5, 65536)):
        found = module.random_mask(numel + odd, limit, device=torch.device(device), **counter)
        same(found, reference.random_mask(numel + odd, limit, device=torch.device("cpu"), **counter))
    for ratio in (1, 3, 1000):
        options: dict[str, Any] = {"seed": seed, "step": 7, "stream": 2}
        first, count = seed % 2**40, numel // 8
        found = module.chosen_blocks(first, count, ratio, device=torch.device(device), **options)
        same(found, reference.chosen_blocks(first, count, ratio, device=torch.device("cpu"), **options))


def one_phase(module: ModuleType, device: str, workers: int, groups: int, seed: int = 1) -> None:
    """What each worker sends, and what all of them make of it."""
    gen = torch.Generator().manual_seed(seed % 2**31)
    rows = torch.randint(0, 256, (workers, 4 * workers * groups), generator=gen, dtype=torch.uint8)
    draw: dict[str, Any] = {"seed": seed, "step": 2, "start": 32 * (seed % 2**40), "turn": seed % workers}
    sent = [reference.owned(row, n=workers, worker=i, **draw) for i, row in enumerate(rows)]
    for i, row in enumerate(rows):
        same(module.owned(row.to(device), n=workers, worker=i, **draw), sent[i])
    every = torch.stack(sent)
    same(module.assemble(every.to(device), **draw), reference.assemble(every, **draw))


def unseen(module: ModuleType, device: str, numel: int, block: int) -> None:
    b = (torch.rand(numel) - 0.5) * (torch.rand(numel) > 0.998)
    b[:1] = float("nan")
    active = torch.rand(numel) > 0.5
    found = module.unseen_blocks(b.to(device), active.to(device), block)
    same(found, reference.unseen_blocks(b, active, block))
    assert found.tolist() == [bool(((b.abs() > 0) & ~active)[i : i + block].any()) for i in range(0, numel, block)]


def errors(numel: int, steps: bool, limit: int, gen: torch.Generator) -> Tensor:
    """What earlier bits may have left, as fp32 or in int8's steps."""
    error = (torch.rand(numel, generator=gen) * 2 - 1) * limit
    return (error * reference.UNITS[limit]).round().to(torch.int8) if steps else error


def modulated(
    module: ModuleType,
    device: str,
    numel: int,
    dtype: torch.dtype,
    steps: bool,
    limit: int,
    hold: bool = False,
    seed: int = 1,
) -> None:
    """The worker's side: with V or without it, from a gradient and from moments that are there already, and from u alone."""
    gen = torch.Generator().manual_seed(seed + numel)
    g = gradient(numel, dtype, gen)
    m, v, error = torch.randn(numel, generator=gen), torch.rand(numel, generator=gen), errors(numel, steps, limit, gen)
    v[::6] = m[::6] = 0.0
    shared = torch.rand(numel, generator=gen)
    shared[::7] = 0.0
    law: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "scale": 1.7, "eps": 1e-8 * hold, "hold": hold}
    kept: dict[str, Any] = {"weight": 0.37 if limit == 2 else 1.0, "limit": limit, "dither": 0.61}
    mine = [t.to(device, copy=True) for t in (m, v, error)]
    for V, given in ((shared, g), (None, g), (shared, None), (None, None)):
        common, there = (None if t is None else t.to(device) for t in (V, given))
        expected = reference.modulate_adam(given, m, v, error, V, **law, **kept)
        same(module.modulate_adam(there, *mine, common, **law, **kept), expected)
        for found, state in zip(mine, (m, v, error), strict=True):
            same(found, state)
        assert m.isfinite().all()
    u = torch.rand(numel, generator=gen) * 2 - 1
    u[::3], u[1::7] = 1.0, -1.0
    for _ in range(3):
        same(module.modulate(u.to(device), mine[2], **kept), reference.modulate(u, error, **kept))
        same(mine[2], error)
        assert (reference.widened(error, limit).abs() <= limit + 0.02).all()


def served(module: ModuleType, device: str, workers: int, count: int, steps: bool, seed: int = 1) -> None:
    gen = torch.Generator().manual_seed(seed + workers)
    rows = torch.randint(0, 256, (workers, count), generator=gen, dtype=torch.uint8)
    error = errors(8 * count, steps, 1, gen)
    mine = error.to(device, copy=True)
    for gamma in (1.0, workers**0.5):
        expected = reference.serve_sigma(rows, error, gamma=gamma, dither=0.3)
        same(module.serve_sigma(rows.to(device), mine, gamma=gamma, dither=0.3), expected)
        same(mine, error)


def signs(module: ModuleType, device: str, workers: int, count: int, seed: int = 1) -> None:
    gen = torch.Generator().manual_seed(seed % 2**31)
    rows = torch.randint(0, 256, (workers, count), generator=gen, dtype=torch.uint8)
    scales = torch.rand(workers, generator=gen)
    same(module.average_signs(rows.to(device), scales.to(device)), reference.average_signs(rows, scales))
    z = torch.randn(8 * count, generator=gen)
    z[::5], z[1::5], z[2::7] = 0.0, -0.0, float("nan")
    same(module.pack_signs(z.to(device)), reference.pack_signs(z))


def feedback(
    module: ModuleType, device: str, numel: int, workers: int, masked: bool, seed: int = 1, spoilt: bool = False
) -> None:
    """A whole 1-bit all-reduce with error feedback, every kernel of it; `spoilt`: with a NaN in the message."""
    gen = torch.Generator().manual_seed(seed % 2**31)
    mask = torch.rand(numel, generator=gen) > 0.3 if masked else None
    flags = None if mask is None else mask.to(device)
    g, m, error = (torch.randn(numel, generator=gen) * 10.0**k for k in (0, -1, 1))
    error[::11] = g[::11] = m[::11] = 0.0
    if spoilt:
        g[numel // 2] = float("nan")
    mine = error.to(device, copy=True)

    squares = reference.add_message(error, g, mask)
    same(module.add_message(mine, g.to(device), flags), squares)
    same(mine, error)
    squares = reference.add_momentum(error, g, m, beta=0.9, mask=mask)
    same(module.add_momentum(mine, g.to(device), m.to(device), beta=0.9, mask=flags), squares)
    same(mine, error)

    scale = (squares / max(numel, 1)).sqrt().float()
    parts = next(k for k in (4, 3, 2, 1) if numel // 8 % k == 0)
    before = error.clone()
    sent = reference.split_signs(error, scale, mask, parts=parts)
    found = module.split_signs(mine, scale.to(device), flags, parts=parts)
    same_messages(found, sent, numel // parts)
    same(mine, error)
    # One message or several: the same bits, and the scale behind the bits of each.
    whole = module.split_signs(before.to(device, copy=True), scale.to(device), flags)
    bits = message.bits_of(sent, numel // parts)
    same(message.bits_of(whole, numel).cpu(), bits.reshape(1, -1))
    same(message.scales_of(sent), scale.expand(parts))
    given = torch.full_like(sent, 7).to(device).view(-1)
    kept = module.split_signs(before.to(device, copy=True), scale.to(device), flags, parts=parts, out=given)
    assert kept.data_ptr() == given.data_ptr()
    same_messages(kept, sent, numel // parts)

    rows = message.new_messages(workers, numel, torch.device("cpu"))
    rows.copy_(torch.randint(0, 256, rows.shape, generator=gen, dtype=torch.uint8))
    message.scales_of(rows).copy_(torch.rand(workers, generator=gen))
    squares = reference.add_average(error, rows, mask)
    same(module.add_average(mine, rows.to(device), flags), squares)
    same(mine, error)
    same(module.add_message(mine, torch.zeros_like(mine), None), squares)

    message.scales_of(sent).copy_(torch.rand(parts, generator=gen))
    out, mine = torch.empty(numel), torch.empty(numel, device=device)
    reference.write_signs(out, sent, mask)
    module.write_signs(mine, sent.to(device), flags)
    same(mine, out)
    if not masked:
        each = message.scales_of(sent).unsqueeze(1).expand(parts, numel // parts)
        same(out, torch.where(reference.unpack(bits.reshape(-1)).bool(), each.reshape(-1), -each.reshape(-1)))


def same_messages(found: Tensor, expected: Tensor, elements: int) -> None:
    """Their bits and scales; what lies between them is nobody's."""
    assert found.shape == expected.shape == (len(expected), message.message_bytes(elements))
    same(message.bits_of(found, elements), message.bits_of(expected, elements))
    same(message.scales_of(found), message.scales_of(expected))


def moved_adam(module: ModuleType, device: str, dtype: torch.dtype, keep: float) -> None:
    gen = torch.Generator().manual_seed(0)
    params, _, _ = unit(device, dtype)
    m = [torch.randn(p.shape, generator=gen) for p in params]
    v = [torch.rand(p.shape, generator=gen) * 10.0 ** -(9 * torch.rand(p.shape, generator=gen)) for p in params]
    for x, y in zip(m, v, strict=True):
        x.view(-1)[::5] = y.view(-1)[::5] = 0.0
    mine = [moved(tensors, device) for tensors in (params, m, v)]
    law: dict[str, Any] = {"rate": 1.3e-3, "correction": 0.77, "eps": 1e-8, "keep": keep}
    for _ in range(2):
        reference.move_adam(params, m, v, **law)
        module.move_adam(*mine, **law)
    for found, expected in zip(mine[0], params, strict=True):
        same(found, expected)
