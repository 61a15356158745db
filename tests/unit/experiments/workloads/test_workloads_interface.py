"""What the training loop relies on, for every workload: batches as a pure function, equal counts, gradients, evaluation."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from experiments.workloads.base import Shard, Workload
from experiments.workloads.bert_squad import BertSquad
from experiments.workloads.digits import Digits
from experiments.workloads.glue import Glue
from experiments.workloads.gpt2 import GPT2
from experiments.workloads.image_folder import ImageFolder
from experiments.workloads.resnet50 import ResNet50
from experiments.workloads.swin import Swin
from experiments.workloads.wikipedia import Wikipedia
from launch.errors import UserError
from tests.helpers.workload_data import same, tensors, workloads

NAMES = sorted(workloads(Path()))
BATCH = 2


@pytest.fixture(scope="module")
def makers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], Workload]]:
    return workloads(tmp_path_factory.mktemp("data"))


@pytest.fixture(params=NAMES)
def make(request: pytest.FixtureRequest, makers: dict[str, Callable[[], Workload]]) -> Callable[[Shard], Workload]:
    def prepared(shard: Shard) -> Workload:
        workload = makers[request.param]()
        workload.check()
        workload.prepare(shard)
        return workload

    return prepared


@pytest.fixture(scope="module")
def prepared_once() -> dict[tuple[str, Shard], Workload]:
    return {}


@pytest.fixture
def kept(
    request: pytest.FixtureRequest, make: Callable[[Shard], Workload], prepared_once: dict[tuple[str, Shard], Workload]
) -> Callable[[Shard], Workload]:
    """One workload for each shard, for tests that need no second one."""

    def prepared(shard: Shard) -> Workload:
        key = (request.node.callspec.params["make"], shard)
        if key not in prepared_once:
            prepared_once[key] = make(shard)
        return prepared_once[key]

    return prepared


@pytest.mark.parametrize("kind", [BertSquad, Glue, GPT2, Wikipedia, ResNet50, Swin, Digits, ImageFolder])
@pytest.mark.parametrize("size", [0, -1])
def test_nothing_is_evaluated_in_batches_of_none(kind: type[Workload], size: int) -> None:
    """Of -1 images at once none would be looked at: 0 % of them are named right."""
    with pytest.raises(UserError, match=f"eval_batch={size} must be 1 or more"):
        kind(eval_batch=size)  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", [BertSquad, Glue, Wikipedia])
def test_a_vocabulary_has_room_for_its_special_tokens(kind: type[Workload]) -> None:
    with pytest.raises(UserError, match="vocab_size=3 must be 100 or more"):
        kind(vocab_size=3)  # type: ignore[call-arg]


def test_batches_are_a_function_of_seed_epoch_and_rank(make: Callable[[Shard], Workload]) -> None:
    shard = Shard(1, 2)
    first, again = make(shard), make(shard)
    before = torch.random.get_rng_state()
    one = list(first.train_batches(shard, BATCH, seed=3, epoch=1))
    assert torch.equal(before, torch.random.get_rng_state()), "torch's global generator was used"
    torch.manual_seed(99)
    two = list(again.train_batches(shard, BATCH, seed=3, epoch=1))
    assert len(one) == first.steps_per_epoch(2, BATCH) >= 1
    assert all(same(a, b) for a, b in zip(one, two, strict=True))


def test_start_resumes_exactly(kept: Callable[[Shard], Workload]) -> None:
    shard = Shard(0, 2)
    workload = kept(shard)
    whole = list(workload.train_batches(shard, BATCH, seed=0, epoch=2))
    for start in (1, len(whole) // 2, len(whole)):
        rest = list(workload.train_batches(shard, BATCH, seed=0, epoch=2, start=start))
        assert len(rest) == len(whole) - start
        assert all(same(a, b) for a, b in zip(rest, whole[start:], strict=True))


def test_epochs_and_seeds_differ(kept: Callable[[Shard], Workload]) -> None:
    shard = Shard()
    workload = kept(shard)
    if workload.name == "ptb":
        pytest.skip("the words of a text come in their order")

    def batches(seed: int, epoch: int) -> list[object]:
        return list(workload.train_batches(shard, BATCH, seed=seed, epoch=epoch))

    first = batches(0, 0)
    pool = workload.synthetic and workload.name in ("resnet50", "resnet18")
    others = [batches(1, 0)] if pool else [batches(1, 0), batches(0, 1)]
    assert all(not all(same(a, b) for a, b in zip(first, other, strict=True)) for other in others)


def test_ranks_see_equally_many_batches_and_different_samples(kept: Callable[[Shard], Workload]) -> None:
    shards = [Shard(rank, 3) for rank in range(3)]
    per_rank = [list(kept(shard).train_batches(shard, BATCH, seed=0, epoch=0)) for shard in shards]
    assert {len(batches) for batches in per_rank} == {kept(shards[0]).steps_per_epoch(3, BATCH)}
    assert not any(same(a, b) for a, b in zip(per_rank[0], per_rank[1], strict=True))
    assert {tensors(b)[0].shape for batches in per_rank for b in batches} == {tensors(per_rank[0][0])[0].shape}


def test_loss_is_finite_and_reaches_every_parameter(kept: Callable[[Shard], Workload]) -> None:
    shard = Shard()
    workload = kept(shard)
    torch.manual_seed(0)
    model = workload.build_model()
    batch = next(iter(workload.train_batches(shard, BATCH, seed=0, epoch=0)))
    loss = workload.loss(model, batch)
    assert loss.ndim == 0
    assert math.isfinite(loss.item())
    loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)


def test_model_depends_on_the_global_seed_alone(make: Callable[[Shard], Workload]) -> None:
    models = []
    for rank in range(2):
        workload = make(Shard(rank, 2))
        torch.manual_seed(5)
        models.append(workload.build_model())
    first, second = (list(model.parameters()) for model in models)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(p.dtype == torch.float32 for p in first)


def test_param_groups_hold_every_parameter_once(kept: Callable[[Shard], Workload]) -> None:
    workload = kept(Shard())
    model = workload.build_model()
    groups = workload.param_groups(model, 0.1)
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    if workload.name in ("bert_squad", "wikipedia", "glue"):
        without = {id(p) for group in groups if group["weight_decay"] == 0 for p in group["params"]}
        named = {id(p) for n, p in model.named_parameters() if n.endswith("bias") or "LayerNorm" in n}
        assert without == named


def test_evaluate_alone_and_split_over_ranks_agree(
    make: Callable[[Shard], Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks' sums, added by hand, give the metric that one rank computes."""
    whole = make(Shard())
    torch.manual_seed(1)
    model = whole.build_model().eval()
    with torch.no_grad():
        alone = whole.evaluate(model, Shard())
        if whole.synthetic:
            assert alone == {}
            return
        assert whole.metric in alone
        collected: list[list[float]] = []

        def join(values: list[float], shard: Shard) -> list[float]:
            collected.append(values)
            return [sum(parts) for parts in zip(*collected, strict=True)]

        for name, module in list(sys.modules.items()):  # wherever the metric of this workload is summed
            if name.startswith("experiments.workloads.") and hasattr(module, "all_sum"):
                monkeypatch.setattr(module, "all_sum", join)
        for rank in range(2):
            shard = Shard(rank, 2)
            split = make(shard).evaluate(model, shard)
    assert split == pytest.approx(alone, rel=1e-5)


def test_samples_counts_what_a_batch_holds(kept: Callable[[Shard], Workload]) -> None:
    workload = kept(Shard())
    batch = next(iter(workload.train_batches(Shard(), BATCH, seed=0, epoch=0)))
    expected = batch[0].numel() if workload.name == "ptb" else BATCH
    assert workload.samples(BATCH) == expected
