"""All-reduce in 4 and 8 bits: equal to a reference in one process, whatever the buckets; bytes; what is not finite."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from birder.comm import Topology
from birder.hooks.block_scaled import BlockScaled, block_scaled_hook, decode, encode
from birder.predict import METHODS, Cluster, Costs, Gradient, IntraNode, Link, Timeline, simulate
from tests.helpers import toy
from tests.helpers.ranks import run_ranks

BLOCK, STEPS, WORLD = 16, 6, 3
CASES = [(code, kept) for code in ("int4", "fp8") for kept in (False, True)]


def rounded(x: np.ndarray, code: str) -> np.ndarray:
    """(2) and back of one block, by hand."""
    largest = {"int4": 7.0, "fp8": 448.0}[code]
    s = float(torch.tensor(np.abs(x).max() / np.float32(largest)).bfloat16())
    if s < 1.2e-38:
        return np.zeros_like(x)
    c = np.clip(x * (np.float32(1.0) / np.float32(s)), -largest, largest)
    c = np.round(c) if code == "int4" else torch.from_numpy(c).to(torch.float8_e4m3fn).float().numpy()
    return (c * np.float32(s)).astype(np.float32)


def in_blocks(x: np.ndarray, code: str) -> np.ndarray:
    return np.concatenate([rounded(part, code) for part in x.reshape(-1, BLOCK)])


def reference(gradients: list[np.ndarray], errors: list[np.ndarray], code: str, kept: bool) -> np.ndarray:
    """The mean of the gradients of all ranks, fp32[d] each; changes `errors`."""
    d, n = len(gradients[0]), len(gradients)
    sent = []
    for i, g in enumerate(gradients):
        a = g + errors[i] if kept else g
        a = np.pad(a, (0, -d % (n * BLOCK)))
        sent.append(in_blocks(a, code))
        errors[i] = (a - sent[i])[:d]
    total = sent[0]
    for row in sent[1:]:
        total = total + row
    return in_blocks(total / np.float32(n), code)[:d]


@functools.cache
def batches() -> torch.Tensor:
    return torch.randn(STEPS, WORLD, 40, generator=torch.Generator().manual_seed(3))


class Linear(torch.nn.Module):
    """x . w in three pieces, one of them laid out column by column: the gradient is the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = torch.nn.Parameter(torch.zeros(7)), torch.nn.Parameter(torch.zeros(21))
        self.b = torch.nn.Parameter(torch.zeros(4, 3).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:7] * self.a).sum() + (x[7:19] * self.b.t().reshape(-1)).sum() + (x[19:] * self.c).sum()


def averaged(rank: int, world: int) -> dict[Any, Any]:
    """Gradients of every step, in the order of memory, and what was sent."""
    found = {}
    for code, kept in CASES:
        model = Linear()
        ddp = DistributedDataParallel(model, bucket_cap_mb=1)
        state = BlockScaled(code, block=BLOCK, error_feedback=kept)
        places = {model.a: range(7), model.b: range(7, 19), model.c: range(19, 40)}
        rows, orders = [], []

        def hook(state: BlockScaled, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
            orders.append([i for p in bucket.parameters() for i in places[p]])  # noqa: B023
            return block_scaled_hook(state, bucket)

        hook.__annotations__.update(bucket=torch.distributed.GradBucket)
        hook.__annotations__["return"] = torch.futures.Future[torch.Tensor]
        ddp.register_comm_hook(state, hook)
        for step in range(STEPS):
            model.zero_grad(set_to_none=step % 2 == 0)
            ddp(batches()[step, rank]).backward()
            rows.append(torch.cat([model.a.grad, model.b.grad.t().reshape(-1), model.c.grad]).numpy())
        found[code, kept] = (rows, orders), state.counter.total, state.counter.collectives, state.state_bytes()
        state.close()
    return found


@functools.cache
def runs() -> list[dict[Any, Any]]:
    return run_ranks(averaged, WORLD)


@pytest.mark.parametrize(("code", "kept"), CASES)
def test_equals_the_reference_and_is_the_same_on_all_ranks(code: str, kept: bool) -> None:
    errors = np.zeros((WORLD, 40), np.float32)
    orders = runs()[0][code, kept][0][1]
    assert orders[0] != orders[1]  # DDP has built its buckets anew
    for step, order in enumerate(orders):
        ordered = list(errors[:, order])
        wanted = reference([batches()[step, rank].numpy()[order] for rank in range(WORLD)], ordered, code, kept)
        errors[:, order] = ordered
        for r in runs():
            assert np.array_equal(r[code, kept][0][0][step][order], wanted), step


@pytest.mark.parametrize(("code", "kept"), CASES)
def test_bytes_are_those_of_codes_and_scales(code: str, kept: bool) -> None:
    blocks = WORLD * -(-40 // (WORLD * BLOCK))
    each = blocks // WORLD * (BLOCK // (2 if code == "int4" else 1) + 2)
    for r in runs():
        _, sent, collectives, state = r[code, kept]
        assert sent == STEPS * 2 * (WORLD - 1) * each
        assert collectives == STEPS * 2
        assert state == 4 * 40 * kept
    if code == "int4":
        assert each * WORLD < 2 * 40 / 2.5  # less than half of what bf16 takes


@pytest.mark.parametrize("code", ["int4", "fp8"])
def test_an_element_is_off_by_half_a_code_at_most_and_zero_stays_zero(code: str) -> None:
    x = torch.randn(2, 64 * BLOCK, generator=torch.Generator().manual_seed(1)) * torch.logspace(
        -30, 30, 64
    ).repeat_interleave(BLOCK)
    x[0, :BLOCK] = 0.0
    back = decode(encode(x, code, BLOCK), code, BLOCK)
    largest = x.view(2, -1, BLOCK).abs().amax(-1, keepdim=True)
    off = (back - x).view(2, -1, BLOCK).abs() / largest.clamp(min=1e-38)
    assert float(off.max()) < (0.5 / 7 if code == "int4" else 1 / 16) * 1.01
    assert float(off.max()) > 0.01
    assert (back[0, :BLOCK] == 0).all()


def spoiled(rank: int, world: int, kept: bool) -> list[np.ndarray]:
    model = Linear()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state := BlockScaled(block=BLOCK, error_feedback=kept), block_scaled_hook)
    rows = []
    for bad in (float("nan"), float("inf"), 1.0):
        model.zero_grad()
        batch = torch.ones(40)
        batch[0] = bad if rank == 1 else 1.0
        ddp(batch).backward()
        rows.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).numpy())
    copied = copy.deepcopy(ddp)
    assert copied.module.a.equal(model.a)
    state.close()
    return rows


@pytest.mark.parametrize("kept", [False, True])
def test_what_is_not_finite_reaches_all_ranks_and_is_gone_in_the_next_step(kept: bool) -> None:
    for rows in run_ranks(spoiled, 2, kept):
        for row in rows[:2]:
            assert not np.isfinite(row[0])
            assert np.isfinite(row).sum() >= 40 - BLOCK
        assert np.abs(rows[2] - 1).max() < 0.01


def differing(rank: int, world: int, options: list[dict[str, Any]]) -> str:
    ddp = DistributedDataParallel(Linear())
    ddp.register_comm_hook(state := BlockScaled(**options[rank]), block_scaled_hook)
    with pytest.raises(RuntimeError) as caught:
        ddp(torch.ones(40)).backward()
    state.close()
    return str(caught.value)


@pytest.mark.parametrize("other", [{"code": "fp8"}, {"code": "int4", "block": 64}])
def test_ranks_with_other_codes_are_refused_in_the_first_backward_pass(other: dict[str, Any]) -> None:
    """gloo ended the process where a message had another size than the receiver's, NCCL waits for the rest of it."""
    for said in run_ranks(differing, 2, [{"code": "int4"}, other]):
        assert "ranks [1] differ from rank 0 in code, block or error_feedback" in said


def of_other_kinds(rank: int, world: int) -> tuple[str, float]:
    """What backward says of sparse gradients; how far off complex ones are, of 1."""
    found: list[DistributedDataParallel] = []
    for part in (torch.nn.Embedding(9, 4, sparse=True), torch.nn.Linear(4, 4, dtype=torch.complex64)):
        found.append(ddp := DistributedDataParallel(part))
        ddp.register_comm_hook(BlockScaled("fp8", block=BLOCK, error_feedback=True), block_scaled_hook)
    with pytest.raises(RuntimeError) as caught:
        found[0](torch.arange(3)).sum().backward()
    weight = found[1].module.weight
    for _ in range(2):
        weight.grad = None
        torch.view_as_real(found[1](torch.ones(4, dtype=torch.complex64))).sum().backward()
    return str(caught.value), float((weight.grad - (1 + 1j)).abs().max())


def test_sparse_gradients_are_refused_and_complex_ones_averaged() -> None:
    for said, off in run_ranks(of_other_kinds, 2):
        assert "sparse=False" in said
        assert "\n" not in said
        assert off < 0.1


def failing(rank: int, world: int) -> tuple[str, bool]:
    """What is said, and whether the next one has the same process group."""
    ddp = DistributedDataParallel(Linear())
    ddp.register_comm_hook(state := BlockScaled(block=BLOCK), block_scaled_hook)

    def lost(*_: Any) -> torch.Tensor:
        raise RuntimeError("connection lost")

    state.reduce = lost  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as caught:
        ddp(torch.ones(40)).backward()
    state.close()
    after = DistributedDataParallel(Linear())
    after.register_comm_hook(other := BlockScaled(block=BLOCK), block_scaled_hook)
    after(torch.ones(40)).backward()
    other.close()
    names = [s.link.group.group_name for s in (state, other) if s.link.group is not None]
    return str(caught.value), len(set(names)) == 1


def test_what_fails_on_the_thread_is_raised_as_it_is() -> None:
    """A future that holds an exception makes DDP complain that it cannot cast it to a tensor. Messages may still come."""
    for said, same_group in run_ranks(failing, 2):
        assert "connection lost" in said
        assert "cast" not in said
        assert not same_group


def trained(rank: int, world: int) -> dict[str, tuple[float, np.ndarray]]:
    """What torch's own optimizer makes of each hook: distance from fp32, and the parameters."""
    ends: dict[str, np.ndarray] = {}
    for name in ("fp32", "int4", "int4 kept", "fp8"):
        model = toy.make()
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
        if name != "fp32":
            state = BlockScaled(name.split()[0], block=32, error_feedback="kept" in name)
            ddp.register_comm_hook(state, block_scaled_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
        toy.train(ddp, optimizer, rank, range(1, 41))
        ends[name] = toy.flat(model).numpy()
    moved = np.abs(ends["fp32"] - toy.flat(toy.make()).numpy()).mean()
    return {name: (float(np.abs(end - ends["fp32"]).mean() / moved), end) for name, end in ends.items()}


def test_torchs_optimizer_trains_with_it_and_feedback_brings_it_nearer() -> None:
    first, second = run_ranks(trained, 2)
    for name, (off, end) in first.items():
        assert np.array_equal(end, second[name][1])
        assert off < {"fp32": 1e-9, "int4": 0.2, "int4 kept": 0.1, "fp8": 0.05}[name], name
    assert first["int4 kept"][0] < first["int4"][0]


def unused(rank: int, world: int) -> list[dict[str, np.ndarray]]:
    """Errors after each step, of a model whose `c` is used in the first and the third."""
    model = Linear()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    state = BlockScaled("int4", block=BLOCK, error_feedback=True)
    ddp.register_comm_hook(state, block_scaled_hook)
    model.forward = functools.partial(used_part, model)  # type: ignore[method-assign]
    kept = []
    for step in range(3):
        model.zero_grad()
        ddp(batches()[step, rank], step != 1).backward()
        kept.append({name: state._errors[p].numpy().copy() for name, p in model.named_parameters()})
    state.close()
    return kept


def used_part(model: Linear, x: torch.Tensor, whole: bool) -> torch.Tensor:
    return Linear.forward(model, x) if whole else (x[:7] * model.a).sum() + (x[7:19] * model.b.t().reshape(-1)).sum()


def test_a_layer_that_no_rank_uses_keeps_its_error() -> None:
    """DDP leaves its gradient None: an error that was sent with it would be lost."""
    for first, second, third in run_ranks(unused, 2):
        assert np.abs(first["c"]).max() > 0
        assert np.array_equal(first["c"], second["c"])
        assert not np.array_equal(first["a"], second["a"])
        assert not np.array_equal(second["c"], third["c"])


def closed_and_made_again(rank: int, world: int) -> list[str]:
    """The process groups of some models, one after the other, as in the cells of a notebook."""
    groups = []
    for _ in range(4):
        ddp = DistributedDataParallel(Linear())
        ddp.register_comm_hook(state := BlockScaled(block=BLOCK), block_scaled_hook)
        ddp(torch.ones(40)).backward()
        state.close()
        assert state.link.group is not None
        groups.append(state.link.group.group_name)
    return groups


def test_a_closed_one_leaves_its_process_group_to_the_next() -> None:
    """One that is forgotten keeps its threads and connections."""
    for groups in run_ranks(closed_and_made_again, 2):
        assert len(groups) == 4
        assert len(set(groups)) == 1


def counted(rank: int, size: int, code: str) -> int:
    ddp = DistributedDataParallel(torch.nn.Linear(256, 256, bias=False))
    state = BlockScaled(code, topology=Topology(2, 2))
    ddp.register_comm_hook(state, block_scaled_hook)
    ddp(torch.ones(1, 256)).sum().backward()
    state.close()
    return state.counter.inter


@pytest.mark.parametrize("code", ["int4", "fp8"])
def test_nodes_of_several_ranks_send_what_is_predicted(code: str) -> None:
    gradient = Gradient("p", (256, 256), 1.0)
    about = IntraNode(0.0, 0.0, 0.0, "none")
    timeline = Timeline("made", "made", "cpu", "fp32", 1, 1, 1.0, 1.0, (gradient,), about, source="a test")
    predicted = simulate(timeline, Cluster(2, 2, Link(1.0), ring=False), METHODS[code], Costs())
    assert sum(run_ranks(counted, 4, code)[:2]) == predicted.nic_bytes
