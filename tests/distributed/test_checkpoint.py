"""Optimizer state and checkpoints: resumed equals uninterrupted, bit for bit; a torn one is never taken."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from birder import SGDM, AdamW, BertAdam, Birder, OneBitAdam, attach, checkpoint
from tests.helpers import toy
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import slow

MAKERS = {
    "sgdm": lambda p: SGDM(p, 0.1),
    "adamw": lambda p: AdamW(p, 0.01),
    "bertadam": lambda p: BertAdam(p, 0.01),
    "onebit_adam": lambda p: OneBitAdam(p, 0.01, warmup_steps=6),
    "birder": lambda p: Birder(p, 0.01),
}
STEPS = 16


def build(kind: str, hierarchical: bool = False):
    model = toy.make()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    optimizer = MAKERS[kind](model.parameters())
    attachment = attach(ddp, optimizer, unit_mb=0.0008, hierarchical=hierarchical)
    return model, ddp, optimizer, attachment


def advance(rank, ddp, optimizer, first: int, last: int) -> None:
    toy.train(ddp, optimizer, rank, range(first, last + 1))


def interrupted(rank: int, world: int, kind: str, folder: str, at: int, hierarchical: bool) -> tuple:
    model, ddp, optimizer, _ = build(kind, hierarchical)
    advance(rank, ddp, optimizer, 1, at)
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    checkpoint.save(folder, at, {"model": parameters}, {"optimizer": optimizer.state_dict()})
    advance(rank, ddp, optimizer, at + 1, STEPS)

    fresh, ddp, optimizer, attachment = build(kind, hierarchical)
    with attachment.paused():
        toy.loss(ddp, rank, 1).backward()
    ddp.zero_grad()
    found = checkpoint.latest(folder)
    assert found is not None
    assert found[0] == at
    shared, local = checkpoint.load(found[1])
    fresh.load_state_dict(shared["model"])
    optimizer.load_state_dict(local["optimizer"])
    assert optimizer.steps == at
    advance(rank, ddp, optimizer, at + 1, STEPS)
    return toy.flat(model).numpy(), toy.flat(fresh).numpy()


# 1-bit Adam: within the warm-up, at its last step, and in the compressed stage.
CASES = [(k, 8, False) for k in MAKERS] + [
    ("onebit_adam", 3, False),
    ("onebit_adam", 6, False),
    ("birder", 1, False),
    ("birder", 8, True),
    ("onebit_adam", 8, True),
]
FAST = [("onebit_adam", 8, True), ("birder", 8, True), ("onebit_adam", 3, False)]


@pytest.mark.parametrize(("kind", "at", "hierarchical"), [case if case in FAST else slow(*case) for case in CASES])
def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path, kind, at, hierarchical):
    results = run_ranks(interrupted, 4, kind, str(tmp_path), at, hierarchical, ranks_per_node=2)
    for straight, resumed in results:
        assert (straight == resumed).all()
        assert (straight == results[0][0]).all()


def write(rank: int, world: int, folder: str, steps: list[int]) -> None:
    for step in steps:
        checkpoint.save(
            folder, step, {"x": torch.full((5,), float(step))}, {"r": torch.tensor(rank), "t": [1, {"a": 2}]}
        )


def read(rank: int, world: int, folder: str) -> tuple:
    found = checkpoint.latest(folder)
    assert found is not None
    shared, local = checkpoint.load(found[1])
    return found[0], float(shared["x"][0]), int(local["r"]), local["t"]


def test_the_newest_is_kept_and_every_rank_reads_its_own(tmp_path):
    run_ranks(write, 2, str(tmp_path), [1, 2, 3])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    assert run_ranks(read, 2, str(tmp_path)) == [(3, 3.0, 0, [1, {"a": 2}]), (3, 3.0, 1, [1, {"a": 2}])]


def test_no_checkpoint_is_no_error(tmp_path):
    assert checkpoint.latest(tmp_path / "nothing") is None


def test_another_number_of_ranks_is_refused(tmp_path):
    run_ranks(write, 2, str(tmp_path), [1])
    with pytest.raises(ValueError, match="saved by 2 ranks, this run has 1"):
        checkpoint.load(tmp_path / "step-00000001")


def test_state_of_another_shape_is_refused():
    def make(size: int, workers: int = 1) -> Birder:
        optimizer = Birder([torch.nn.Parameter(torch.zeros(size))])
        optimizer.bind()
        return optimizer

    state = make(100).state_dict()
    with pytest.raises(ValueError, match="another shape of parameter 0"):
        make(200).load_state_dict(state)
    earlier = {key: value for key, value in state.items() if key != "layout"}  # as versions before saved it
    with pytest.raises(ValueError, match="saved m of unit 0 has 128 elements, this run has 224"):
        make(200).load_state_dict(earlier)
    make(100).load_state_dict(earlier)
    state["signature"] = [4, 1]
    with pytest.raises(ValueError, match="saved with 4 workers"):
        make(100).load_state_dict(state)
    with pytest.raises(ValueError, match="holds"):
        OneBitAdam([torch.nn.Parameter(torch.zeros(100))], warmup_steps=1).load_state_dict(make(100).state_dict())


def test_a_state_dict_survives_torch_save(tmp_path):
    p = torch.nn.Parameter(torch.zeros(50))
    optimizer = Birder([p], lr=0.1)
    p.grad = torch.randn(50)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    q = torch.nn.Parameter(p.detach().clone())
    other = Birder([q], lr=0.5)
    other.load_state_dict(torch.load(tmp_path / "o.pt"))
    assert other.param_groups[0]["lr"] == 0.1
    for x, o in ((p, optimizer), (q, other)):
        x.grad = torch.ones(50)
        o.step()
    assert torch.equal(p, q)
    assert not dist.is_initialized()
