"""Workloads of the other papers: sizes of the models, mixing of images, GPT-2's text, GLUE's files and metrics."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.workloads import cifar_models, gpt2, swin
from experiments.workloads.base import Shard
from experiments.workloads.cifar10 import Cifar10
from experiments.workloads.cifar100 import Cifar100
from experiments.workloads.glue import Glue
from experiments.workloads.gpt2 import GPT2
from experiments.workloads.resnet18 import ResNet18
from experiments.workloads.swin import Swin
from experiments.workloads.wikipedia import Wikipedia
from launch.errors import UserError
from tests.helpers.workload_data import image_folder, text_file


def size(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_sizes_of_the_papers_models() -> None:
    """On the meta device: nothing is allocated. Millions as published: 35.7, 1.7, 11.7, 88, 124 and 335 to 340."""
    with torch.device("meta"):
        assert size(cifar_models.build("wrn_40_8", 3, 100)) == 35_794_484
        assert size(cifar_models.build("resnet110", 3, 10)) == 1_727_962
        assert size(ResNet18().build_model()) == 11_689_512
        assert size(Swin().build_model()) == 87_768_224


class _Vocabulary:
    """Stands for a tokenizer of so many pieces."""

    def __init__(self, pieces: int) -> None:
        self.pieces = pieces

    def __len__(self) -> int:
        return self.pieces


def test_sizes_of_the_papers_language_models() -> None:
    with torch.device("meta"):
        workload = GPT2()
        workload.tokenizer = _Vocabulary(50_257)
        assert size(workload.build_model()) == 124_439_808
        # With its pooler and next-sentence head BERT-Large is 336.2 M; pre-training here has neither.
        pre_training, fine_tuning = Wikipedia(preset="large"), Glue("mrpc", preset="large")
        for bert in (pre_training, fine_tuning):
            bert.tokenizer = _Vocabulary(30_522)
        assert size(pre_training.build_model()) == 335_174_458
        # The published encoder with its pooler, and the classifier.
        assert size(fine_tuning.build_model()) == 335_141_888 + 2 * 1024 + 2


@pytest.mark.parametrize("name", [*cifar_models.WIDE, *cifar_models.THIN])
def test_depth_is_in_the_name(name: str) -> None:
    """He et al. count 3x3 convolutions and the linear layer, Zagoruyko and Komodakis all convolutions."""
    with torch.device("meta"):
        modules = list(cifar_models.build(name, 3, 10).modules())
    convolutions = [m for m in modules if isinstance(m, torch.nn.Conv2d)]
    depth = int(name.removeprefix("resnet").removeprefix("wrn_").partition("_")[0])
    assert len(convolutions) == (depth if name.startswith("wrn") else depth - 1)
    assert sum(m.kernel_size == (1, 1) for m in convolutions) == (3 if name.startswith("wrn") else 0)


@pytest.mark.parametrize("name", ["wrn_10_2", "resnet8"])
def test_small_image_networks_learn(name: str) -> None:
    """Images are told apart by their brightness within a few steps."""
    torch.manual_seed(0)
    model = cifar_models.build(name, 3, 2)
    labels = torch.arange(16) % 2
    images = 0.1 * torch.randn(16, 3, 16, 16) + labels.view(-1, 1, 1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(12):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2


def cifar10_files(root: Path, count: int = 20) -> Path:
    """cifar-10-batches-py as torchvision unpickles it (hashes will not match)."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        data = {"data": np.full((count, 3072), 7, dtype=np.uint8), "labels": [3] * count}
        (folder / name).write_bytes(pickle.dumps(data))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(i) for i in range(10)]}))
    return root


def test_cifar10_reads_the_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR10

    workload = Cifar10(str(cifar10_files(tmp_path)), model="resnet8")
    workload.check()
    with pytest.raises(UserError, match=r"are not CIFAR-10's"):  # the hashes
        workload.read()
    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr(CIFAR10, "_load_meta", lambda self: None)
    (images, labels), (test, _) = workload.read()
    assert images.shape == (100, 3, 32, 32)
    assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
    assert len(test) == 20
    with pytest.raises(UserError, match="download=True"):
        Cifar10(str(tmp_path / "cifar-10-batches-py")).check()


def test_swin_mixes_within_the_batch() -> None:
    """Shares of classes sum to 1 and are those of at most two images; the same draw gives the same batch."""
    workload = Swin(preset="tiny", image_size=32, synthetic_images=64)
    plain = Swin(preset="tiny", image_size=32, synthetic_images=64, mix=False)
    batches = list(workload.train_batches(Shard(), 4, seed=0, epoch=0))
    raw = list(plain.train_batches(Shard(), 4, seed=0, epoch=0))
    kinds = set()
    for (images, shares), (before, labels) in zip(batches, raw, strict=True):
        assert shares.shape == (4, 1000)
        assert torch.allclose(shares.sum(1), torch.ones(4))
        assert int((shares > 0).sum(1).max()) <= 2
        partners = labels.roll(1)
        share = shares[torch.arange(4), labels]
        assert bool(((shares[torch.arange(4), partners] + share) >= 0.999).all())
        cut = bool(((images == before) | (images == before.roll(1, 0))).all())
        kinds.add("cutmix" if cut else "mixup")
    assert kinds == {"cutmix", "mixup"}  # 16 batches: the chance of one kind alone is 2**-15


def test_swin_decays_matrices_only(tmp_path: Path) -> None:
    model = Swin(preset="tiny").build_model()
    decayed, plain = Swin().param_groups(model, 0.05)
    names = {id(p): name for name, p in model.named_parameters()}
    assert plain["weight_decay"] == 0
    assert all("relative_position" not in names[id(p)] and p.ndim > 1 for p in decayed["params"])
    assert any("relative_position" in names[id(p)] for p in plain["params"])


def test_swin_trains_on_a_folder_with_more_than_one_loader(tmp_path: Path) -> None:
    """RandAugment and erasing depend on (seed, epoch, image) alone."""
    image_folder(tmp_path / "data", train=3, val=1)
    batches = []
    for _ in range(2):
        workload = Swin(str(tmp_path / "data"), preset="tiny", image_size=32)
        workload.prepare(Shard())
        batches.append(list(workload.train_batches(Shard(), 3, seed=0, epoch=1)))
        torch.manual_seed(len(batches))
    assert all(torch.equal(a, b) for one, two in zip(*batches, strict=True) for a, b in zip(one, two, strict=True))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_file(tmp_path_factory.mktemp("gpt2") / "text.txt")


def test_gpt2_reads_the_text_in_its_order(text: Path) -> None:
    workload = GPT2(preset="tiny", data_path=str(text), seq_len=32, vocab_size=400)
    workload.prepare(Shard())
    whole = workload.tokenizer.decode(torch.cat([workload._train, workload.eval_set]).flatten().tolist())
    assert len(whole) > 2000
    assert text.read_text().startswith(whole)  # the end of the text is evaluated on
    assert len(workload.tokenizer) == 400
    again = GPT2(preset="tiny", data_path=str(text), seq_len=32, vocab_size=400)
    again.prepare(Shard(1, 2))
    assert torch.equal(again._train, workload._train)
    assert torch.equal(again.eval_set, workload.eval_set[1::2])


def test_gpt2_holds_sequences_out_before_those_it_is_evaluated_on(text: Path) -> None:
    whole = GPT2(preset="tiny", data_path=str(text), seq_len=32, vocab_size=400)
    part = GPT2(preset="tiny", data_path=str(text), seq_len=32, vocab_size=400, held_out=3)
    for workload in (whole, part):
        workload.prepare(Shard())
    assert torch.equal(torch.cat([part._train, part.held_out_set]), whole._train)
    assert torch.equal(part.eval_set, whole.eval_set)
    model = whole.build_model().eval()
    with torch.no_grad():
        found, plain = part.evaluate(model, Shard()), whole.evaluate(model, Shard())
        kept = part.scores(model, whole._train[-3:], Shard())
    assert found == {**plain, "held_out": kept["perplexity"]}
    with pytest.raises(UserError, match="leaves nothing"):
        GPT2(preset="tiny", data_path=str(text), seq_len=32, vocab_size=400, held_out=10**6).prepare(Shard())


def test_gpt2_predicts_the_next_token(text: Path) -> None:
    """Equal logits give the logarithm of the vocabulary; the first token of a sequence is not predicted."""
    workload = GPT2(preset="tiny", data_path=str(text), seq_len=32, vocab_size=400)
    workload.prepare(Shard())
    tokens = workload._train[:2].long()

    class Knows(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> object:
            logits = torch.nn.functional.one_hot(input_ids.roll(-1, 1), 400) * 100.0
            return type("Out", (), {"logits": logits})

    assert workload.loss(Knows(), tokens).item() < 1e-6
    model = workload.build_model()
    for p in model.parameters():
        torch.nn.init.zeros_(p)
    with torch.no_grad():
        assert workload.evaluate(model.eval(), Shard())["perplexity"] == pytest.approx(400, rel=1e-4)


def test_gpt2_bad_input(tmp_path: Path) -> None:
    for options, words in (
        ({"preset": "xl"}, "medium, small, mini, micro, tiny"),
        ({"seq_len": 2000}, "1024 positions"),
        ({"seq_len": 4}, "seq_len=4"),
        ({"init": "zero"}, "pretrained or random"),
        ({"vocab_size": 100}, "vocab_size=100"),
        ({"valid_fraction": 0.0}, "valid_fraction"),
        ({"documents": 0}, "documents=0"),
        ({"held_out": -1}, "held_out=-1"),
    ):
        with pytest.raises(UserError, match=words):
            GPT2(**options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="does not exist"):
        GPT2(data_path=str(tmp_path / "absent")).check()
    (tmp_path / "a.txt").write_text("too short a text")
    with pytest.raises(UserError, match="too few"):
        GPT2(preset="tiny", data_path=str(tmp_path), seq_len=16).prepare(Shard())
    assert gpt2.PRESETS["tiny"]["n_positions"] == 256


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Cifar100(model="wrn_40"), "wrn_40_8, wrn_10_2, resnet110"),
        (lambda: Swin(preset="large"), "base, tiny"),
        (lambda: Swin(drop_path=1.0), "drop_path"),
        (lambda: Swin(image_size=16), "image_size=16"),
        (lambda: Swin(allow_synthetic=False).check(), r"data\.path"),
        (lambda: ResNet18(workers=-1), "workers=-1"),
    ],
)
def test_image_arguments_out_of_range(make: type, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make()


def test_swin_presets_differ_in_size_only() -> None:
    assert set(swin.PRESETS["base"]) == set(swin.PRESETS["tiny"])
