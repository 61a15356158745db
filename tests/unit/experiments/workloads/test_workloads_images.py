"""Image workloads: sizes, splits, augmentation, and what they say about broken data."""

from __future__ import annotations

import io
import shutil
import struct
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from experiments.workloads.base import Shard
from experiments.workloads.cifar100 import Cifar100
from experiments.workloads.digits import Digits
from experiments.workloads.fashion_mnist import FashionMNIST
from experiments.workloads.files import fingerprint
from experiments.workloads.image_folder import ImageFolder
from experiments.workloads.ordering import fixed_choice, generator
from experiments.workloads.resnet50 import ResNet50
from experiments.workloads.small_images import SmallImages, augmented
from launch.errors import UserError
from tests.helpers.workload_data import cifar100_files, fashion_mnist, image_folder, same


def test_resnet50_has_the_real_size() -> None:
    model = ResNet50(image_size=32).build_model()
    assert sum(p.numel() for p in model.parameters()) == 25_557_032


def test_resnet18_has_the_cifar_form() -> None:
    workload = Cifar100(model="resnet18")
    workload.prepare(Shard())
    model = workload.build_model()
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 100)
    # torchvision's with 100 classes (11,227,812), its 7x7 stem replaced by 3x3.
    assert sum(p.numel() for p in model.parameters()) == 11_227_812 - 3 * 64 * (49 - 9)


def test_indices_of_all_ranks_are_one_permutation() -> None:
    workload = Digits(train_images=31)
    workload.prepare(Shard())
    seen = [
        int(i)
        for rank in range(3)
        for _, indices in workload.order(Shard(rank, 3), 5, seed=0, epoch=0, start=0)
        for i in indices
    ]
    assert len(seen) == len(set(seen)) == 30


def test_generator_depends_on_every_key() -> None:
    def draw(*keys: int | str) -> float:
        return float(torch.rand(1, generator=generator(*keys)))

    values = [draw("a", 0, 0), draw("b", 0, 0), draw("a", 1, 0), draw("a", 0, 1)]
    assert len(set(values)) == 4
    assert draw("a", 0, 0) == values[0]


def test_synthetic_images_repeat_a_small_pool_and_differ_between_ranks() -> None:
    workload = ResNet50(image_size=32, synthetic_images=100)
    batches = list(workload.train_batches(Shard(0, 2), 2, seed=0, epoch=0))
    assert len(batches) == 25
    assert batches[0][0] is batches[4][0]
    other = next(iter(ResNet50(image_size=32).train_batches(Shard(1, 2), 2, seed=0, epoch=0)))
    assert not same(batches[0], other)


def test_loader_processes_do_not_change_the_images(tmp_path: Path) -> None:
    image_folder(tmp_path / "data", train=3, val=1)
    shard = Shard()
    batches = []
    for workers in (0, 1):
        workload = ResNet50(str(tmp_path / "data"), image_size=32, workers=workers)
        workload.prepare(shard)
        batches.append(list(workload.train_batches(shard, 3, seed=0, epoch=0)))
    assert len(batches[0]) == 2
    assert all(same(a, b) for a, b in zip(*batches, strict=True))


def test_held_out_images_of_imagenet_are_not_trained_on_and_have_an_accuracy(tmp_path: Path) -> None:
    root = str(image_folder(tmp_path / "data", train=6, val=2))
    whole, less = (ResNet50(root, image_size=32, held_out=number) for number in (None, 5))
    seen = []
    for workload in (whole, less):
        workload.prepare(Shard())
        seen.append({x.numpy().tobytes() for x, _ in workload.train_batches(Shard(), 1, seed=0, epoch=0)})
    assert [len(images) for images in seen] == [12, 7]
    assert seen[1] < seen[0]

    evaluated = [0]

    class Last(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            evaluated[0] += len(images)
            return torch.tensor([[0.0, 1.0]]).expand(len(images), 2)

    assert whole.evaluate(Last(), Shard()) == {"top1": 50.0, "top5": 100.0}  # the second of two classes is among five
    assert evaluated == [4]  # those of val
    trained = sum(int(label) for _, label in less.train_batches(Shard(), 1, seed=0, epoch=0))
    found = less.evaluate(Last(), Shard())
    assert found == {**whole.evaluate(Last(), Shard()), "held_out": pytest.approx(100 * (6 - trained) / 5)}
    with pytest.raises(UserError, match="held_out=12 leaves nothing of 12"):
        ResNet50(root, image_size=32, held_out=12).prepare(Shard())


def test_a_copy_of_a_data_set_is_the_same_and_another_of_its_name_is_not(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "a" / "images", train=20, val=2)
    copy = shutil.copytree(root, tmp_path / "b" / "images")
    (copy / "train" / ".DS_Store").write_text("hidden")

    def known(path: Path) -> str:
        return fingerprint(ImageFolder(data_path=str(path)).data_files())

    first = known(root)
    assert known(copy) == first
    moved = copy / "train" / "class1" / "9.png"
    moved.rename(moved.with_name("other.jpg"))
    assert known(copy) != first
    text = tmp_path / "text.txt"
    assert len({fingerprint([text]) for content in ("one", "two", "three") if text.write_text(content)}) == 3


def test_a_part_of_an_image_folder_is_chosen_before_anything_is_decoded(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "data", train=6, val=2)
    (images, labels), test = ImageFolder(str(root)).read()
    assert (len(images), len(test[0])) == (12, 4)
    kept = fixed_choice(12, 5, "train_images")
    for k, name in enumerate(sorted((root / "train").rglob("*.png"))):
        if k not in kept:
            name.write_bytes(b"no image")
    part = ImageFolder(str(root), train_images=5)
    (some, of), again = part.read()
    assert same((some, of), (images[kept], labels[kept]))
    assert same(test, again)
    part.prepare(Shard())
    assert same(part._train, (some, of))


def test_crops_and_flips_are_shifts_of_the_image() -> None:
    image = torch.arange(1, 65, dtype=torch.uint8).view(1, 1, 8, 8).repeat(200, 1, 1, 1)
    out = augmented(image, "crop_flip", generator("test"))
    assert out.shape == image.shape
    inner = torch.nn.functional.pad(image[0, 0], (1, 1, 1, 1))
    windows = [inner[y : y + 8, x : x + 8] for y in range(3) for x in range(3)]
    allowed = {tuple(w.flatten().tolist()) for w in windows} | {tuple(w.flip(1).flatten().tolist()) for w in windows}
    assert {tuple(one.flatten().tolist()) for one in out} == allowed  # 200 draws of 18 kinds


def test_digits_are_learned() -> None:
    workload = Digits()
    shard = Shard()
    workload.prepare(shard)
    torch.manual_seed(0)
    model = workload.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(8):
        for batch in workload.train_batches(shard, 32, seed=0, epoch=epoch):
            optimizer.zero_grad()
            workload.loss(model, batch).backward()
            optimizer.step()
    with torch.no_grad():
        assert workload.evaluate(model.eval(), shard)["top1"] > 90


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    (train, labels), (test, test_labels) = Digits().read()
    found = torch.cat([train, test]).flatten(1).double() * 16 / 255
    rows = torch.cat([found.round(), torch.cat([labels, test_labels]).unsqueeze(1)], 1).int()
    wanted = load_digits()
    expected = torch.cat([torch.tensor(wanted.data), torch.tensor(wanted.target).unsqueeze(1)], 1).int()
    assert sorted(rows.tolist()) == sorted(expected.tolist())


def test_digits_split_has_no_image_twice() -> None:
    workload = Digits()
    (train, _), (test, _) = workload.read()
    assert (len(train), len(test)) == (1437, 360)
    assert not {bytes(i.numpy().tobytes()) for i in train} & {bytes(i.numpy().tobytes()) for i in test}


def test_train_images_takes_the_same_part_always() -> None:
    parts = []
    for _ in range(2):
        workload = Digits(train_images=50)
        workload.prepare(Shard())
        parts.append(workload._train[1])
    assert len(parts[0]) == 50
    assert torch.equal(*parts)


def test_fashion_mnist_reads_the_idx_files(tmp_path: Path) -> None:
    workload = FashionMNIST(str(fashion_mnist(tmp_path)))
    workload.check()
    (images, labels), (test, _) = workload.read()
    assert images.shape == (64, 1, 28, 28)
    assert images.dtype == torch.uint8
    assert labels.dtype == torch.int64
    assert len(test) == 20
    workload.prepare(Shard())
    assert torch.equal(workload.eval_set[0], test)
    assert torch.equal(workload._train[0], images)
    seen = workload._normalise(images)  # by what is trained on, not by what is tested
    assert (float(seen.mean()), float(seen.std())) == pytest.approx((0.0, 1.0), abs=1e-3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ResNet50(image_size=31), "image_size=31"),
        (lambda: ResNet50(workers=-1), "workers=-1"),
        (lambda: Digits(model="vgg"), "resnet18, small_cnn"),
        (lambda: Digits(augment="blur"), "none, flip, crop_flip"),
        (lambda: Digits(train_images=0), "train_images=0"),
        (lambda: ImageFolder("x", image_size=4), "image_size=4"),
    ],
)
def test_arguments_out_of_range(make: type, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make()


@pytest.mark.parametrize("kind", [ResNet50, ImageFolder])
def test_missing_and_empty_folders(kind: type, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder"):
        kind(str(tmp_path / "absent")).check()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no folder .*train"):
        kind(str(tmp_path / "empty")).check()
    (tmp_path / "empty" / "train").mkdir()
    with pytest.raises(UserError, match="is empty"):
        kind(str(tmp_path / "empty")).check()
    (tmp_path / "empty" / "train" / "cats").mkdir()
    with pytest.raises(UserError, match="holds no image"):
        kind(str(tmp_path / "empty")).check()
    root = image_folder(tmp_path / "odd")
    (root / "val" / "class1").rename(root / "val" / "other")
    with pytest.raises(UserError, match="same classes"):
        kind(str(root)).check()


def broken_inside() -> bytes:
    """A PNG with a part of an unknown kind: what PIL raises of it is no OSError."""
    pixels = torch.randint(256, (200, 200, 3), generator=generator("noise"), dtype=torch.uint8).numpy()
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    head, mark, rest = written.getvalue().rpartition(b"IDAT")
    return head + bytes(len(mark)) + rest


@pytest.mark.parametrize("content", [b"no image", broken_inside()], ids=["no image", "broken inside"])
@pytest.mark.parametrize(
    ("kind", "more"), [(ResNet50, {}), (ResNet50, {"workers": 1}), (ImageFolder, {})], ids=["alone", "loader", "folder"]
)
def test_broken_image(kind: type, more: dict[str, int], content: bytes, tmp_path: Path) -> None:
    root = image_folder(tmp_path / "data", train=1, val=1)
    (root / "train" / "class0" / "0.png").write_bytes(content)
    workload = kind(str(root), image_size=32, **more)
    workload.check()

    def read_all() -> None:
        workload.prepare(Shard())
        list(workload.train_batches(Shard(), 2, seed=0, epoch=0))

    with pytest.raises(UserError, match=r"^data\.path: .*(not readable|not a readable)"):
        read_all()


@pytest.mark.parametrize("kind", [Cifar100, FashionMNIST])
def test_torchvision_data_missing_or_broken(kind: type[SmallImages], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="download=True"):
        kind(str(tmp_path)).check()
    root = cifar100_files(tmp_path / "c") if kind is Cifar100 else fashion_mnist(tmp_path / "f")
    if kind is FashionMNIST:
        (root / "FashionMNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(b"\0" * 8)
    workload = kind(str(root))
    workload.check()
    with pytest.raises(UserError, match="are not"):
        workload.prepare(Shard())


@pytest.mark.parametrize("wrong", ["labels of another split", "a class that there is not", "images of another size"])
def test_images_and_labels_that_do_not_belong_together(tmp_path: Path, wrong: str) -> None:
    raw = fashion_mnist(tmp_path) / "FashionMNIST" / "raw"
    images, labels = raw / "train-images-idx3-ubyte", raw / "train-labels-idx1-ubyte"
    if wrong == "labels of another split":
        labels.write_bytes((raw / "t10k-labels-idx1-ubyte").read_bytes())
    elif wrong == "a class that there is not":
        labels.write_bytes(labels.read_bytes()[:-1] + bytes([77]))
    else:
        content = images.read_bytes()
        images.write_bytes(content[:8] + struct.pack(">II", 14, 56) + content[16:])
    with pytest.raises(UserError, match="are not Fashion-MNIST's: unpack them again"):
        FashionMNIST(str(tmp_path)).prepare(Shard())


@pytest.mark.parametrize("kind", [ResNet50, Cifar100, FashionMNIST])
def test_paper_scale_needs_data(kind: type) -> None:
    with pytest.raises(UserError, match=r"data\.path"):
        kind(allow_synthetic=False).check()


def test_too_little_data_for_the_ranks() -> None:
    workload = Digits(train_images=20)
    workload.prepare(Shard())
    with pytest.raises(UserError, match=r"lower train\.batch_per_rank"):
        workload.steps_per_epoch(4, 8)


def test_held_out_images_are_neither_trained_on_nor_tested() -> None:
    workload = Digits(held_out=100)
    workload.prepare(Shard())
    plain = Digits()
    plain.prepare(Shard())
    seen = [images for images, _ in workload.train_batches(Shard(), 7, seed=0, epoch=0)]
    assert len(seen) == (1437 - 100) // 7
    known = {part.numpy().tobytes() for part in workload.held_out_set[0]}
    trained = {part.numpy().tobytes() for part in workload._train[0]}
    assert len(known - trained) == 100  # no two of the digits are alike
    assert torch.equal(workload.eval_set[0], plain.eval_set[0])

    model = workload.build_model().eval()
    with torch.no_grad():
        found = workload.evaluate(model, Shard())
        images, labels = workload.held_out_set
        right = float((model(workload._normalise(images)).argmax(1) == labels).float().mean())
    assert found["held_out"] == pytest.approx(100 * right)
    assert set(found) == {"top1", "held_out"}
    with pytest.raises(UserError, match="held_out=1437 leaves nothing of 1437"):
        Digits(held_out=1437).prepare(Shard())
