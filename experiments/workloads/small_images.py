"""Classification of small images held in memory: CIFAR-100, Fashion-MNIST, scikit-learn's digits, any image folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.errors import UserError
from experiments.workloads.base import Batch, Shard, Workload, all_sum
from experiments.workloads.files import check_image_folder, existing_dir, image_split, no_synthetic
from experiments.workloads.ordering import batch_indices, fixed_choice, generator, steps_per_epoch

# dataset: (name in tables, channels, side, classes); None: found from the files
DATASETS: dict[str, tuple[str, int, int, int] | None] = {
    "cifar100": ("CIFAR-100", 3, 32, 100),
    "fashion_mnist": ("Fashion-MNIST", 1, 28, 10),
    "digits": ("scikit-learn digits", 1, 8, 10),
    "image_folder": None,
}
# What must lie in data_path, and how to get it.
FILES = {
    "cifar100": (
        "cifar-100-python/train",
        "unpack cifar-100-python.tar.gz there, or run torchvision.datasets.CIFAR100(root, download=True) once",
    ),
    "fashion_mnist": (
        "FashionMNIST/raw/train-images-idx3-ubyte",
        "unpack the four archives to FashionMNIST/raw/ there, or run torchvision.datasets.FashionMNIST(root, "
        "download=True) once",
    ),
}
MODELS = ("resnet18", "small_cnn")
AUGMENTATIONS = ("none", "flip", "crop_flip")


class SmallImages(Workload):
    """The whole data set as uint8 tensors on the device; shuffling and augmentation on tensors.

    dataset:         cifar100 | fashion_mnist | digits | image_folder.
    data_path:       torchvision's root, or a folder with train/<class>/ and val/<class>/. Not used by `digits`; None:
                     random images of the data set's shape (time only).
    model:           resnet18 (CIFAR form: 3x3 stem, no max-pooling) | small_cnn (two convolutions, two linear layers).
    augment:         none | flip | crop_flip (zero padding of an eighth of the side, random crop, random flip).
    image_size:      side to which an image folder is resized; None: the size of its first image.
    train_images:    number of training images to use, always the same ones; None: all.
    target:          published accuracy, where there is one.
    allow_synthetic: False makes a missing `data_path` an error.
    """

    metric = "top1"
    sample = "images"

    def __init__(
        self,
        dataset: str,
        data_path: str | None = None,
        model: str = "small_cnn",
        augment: str = "none",
        image_size: int | None = None,
        train_images: int | None = None,
        eval_batch: int = 500,
        target: float | None = None,
        allow_synthetic: bool = True,
    ) -> None:
        for key, value, known in (
            ("dataset", dataset, tuple(DATASETS)),
            ("model", model, MODELS),
            ("augment", augment, AUGMENTATIONS),
        ):
            if value not in known:
                raise UserError(f"workload.{key}={value} is unknown: one of {', '.join(known)}")
        if image_size is not None and image_size < 8:
            raise UserError(f"workload.image_size={image_size} is too small: at least 8")
        self.name = self.dataset = dataset
        self.data_path = data_path
        self.model = model
        self.augment = augment
        self.image_size = image_size
        self.train_images = train_images
        self.eval_batch = eval_batch
        self.target = target
        self.allow_synthetic = allow_synthetic
        self.synthetic = data_path is None and dataset != "digits"
        facts = DATASETS[dataset]
        self.data_name = facts[0] if facts else f"image folder {Path(data_path).name}" if data_path else "image folder"
        if self.synthetic:
            self.data_name = f"synthetic images like {self.data_name}"

    def check(self) -> None:
        if self.dataset == "digits":
            return
        if self.data_path is None:
            if not self.allow_synthetic or self.dataset == "image_folder":
                raise no_synthetic(f"the folder of {self.data_name}")
        elif self.dataset == "image_folder":
            check_image_folder(self.data_path)
        else:
            file, how = FILES[self.dataset]
            root = existing_dir(self.data_path, how)
            # torchvision reads either the unpacked file or, for the MNIST family, nothing else.
            if not (root / file).is_file():
                raise UserError(f"data.path: no {file} in {root}: {how}")

    def prepare(self, shard: Shard) -> None:
        self.check()
        train, test, self.num_classes = self._read()
        keep = fixed_choice(len(train[1]), self.train_images, "train_images")
        train = (train[0][keep], train[1][keep]) if len(keep) < len(train[1]) else train
        # Per-channel mean and spread of the training images, on the 0..1 scale.
        pixels = train[0][:5000].float() / 255
        self._mean = pixels.mean((0, 2, 3)).view(1, -1, 1, 1).to(shard.device)
        self._std = pixels.std((0, 2, 3)).clamp_min(1e-3).view(1, -1, 1, 1).to(shard.device)
        self._train = (train[0].to(shard.device), train[1].to(shard.device))
        self._test = (test[0].to(shard.device), test[1].to(shard.device))

    def build_model(self) -> nn.Module:
        channels, side = self._train[0].shape[1:3]
        if self.model == "small_cnn":
            return _small_cnn(channels, side, self.num_classes)
        from torchvision.models import resnet18

        net = resnet18(weights=None, num_classes=self.num_classes)
        net.conv1 = nn.Conv2d(channels, 64, kernel_size=3, padding=1, bias=False)
        nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
        net.maxpool = nn.Identity()
        return net

    def steps_per_epoch(self, world_size: int, batch_per_rank: int) -> int:
        return steps_per_epoch(len(self._train[1]), world_size, batch_per_rank, self.data_name)

    def train_batches(
        self, shard: Shard, batch_per_rank: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        images, labels = self._train
        for step, indices in batch_indices(
            len(labels), shard, batch_per_rank, seed=seed, epoch=epoch, start=start, what=self.data_name
        ):
            on_device = indices.to(shard.device)
            stream = generator("augment", seed, epoch, shard.rank, step)
            yield self._normalise(augmented(images[on_device], self.augment, stream)), labels[on_device]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module, shard: Shard) -> dict[str, float]:
        if self.synthetic:
            return {}
        images, labels = (part[shard.rank :: shard.world_size] for part in self._test)
        correct = 0.0
        for first in range(0, len(labels), self.eval_batch):
            some = slice(first, first + self.eval_batch)
            correct += float((model(self._normalise(images[some])).argmax(1) == labels[some]).sum())
        correct, count = all_sum([correct, float(len(labels))], shard)
        return {"top1": 100 * correct / count}

    def _normalise(self, images: Tensor) -> Tensor:
        return (images.float() / 255 - self._mean) / self._std

    def _read(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], int]:
        """Training and test set as (uint8[N, C, H, W], int64[N]), and the number of classes."""
        facts = DATASETS[self.dataset]
        if facts is None:
            return self._read_folder()
        _, channels, side, classes = facts
        if self.dataset == "digits":
            return *_read_digits(), classes
        if self.synthetic:
            stream = generator("synthetic images")
            shape = (1024, channels, side, side)
            images = torch.randint(256, shape, generator=stream, dtype=torch.uint8)
            both = (images, torch.randint(classes, (1024,), generator=stream))
            return both, both, classes
        return *self._read_torchvision(channels), classes

    def _read_torchvision(self, channels: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        from torchvision import datasets

        kind = {"cifar100": datasets.CIFAR100, "fashion_mnist": datasets.FashionMNIST}[self.dataset]
        parts = []
        for train in (True, False):
            try:
                split = kind(str(Path(str(self.data_path)).expanduser()), train=train, download=False)
            except (OSError, RuntimeError, ValueError, EOFError) as error:
                raise UserError(f"data.path: cannot read {self.data_name}: {str(error).splitlines()[0]}") from error
            images = torch.as_tensor(split.data)
            images = images.unsqueeze(1) if channels == 1 else images.permute(0, 3, 1, 2).contiguous()
            parts.append((images, torch.as_tensor(split.targets)))
        return parts[0], parts[1]

    def _read_folder(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], int]:
        from torchvision import transforms as T
        from torchvision.datasets import ImageFolder

        root = existing_dir(str(self.data_path), "expected train/ and val/ in it")
        size = self.image_size
        parts = []
        for names in (("train",), ("val", "test")):
            folder = ImageFolder(image_split(root, names))
            size = size or min(folder[0][0].size)
            fit = T.Compose([T.Resize(size), T.CenterCrop(size), T.PILToTensor()])
            try:
                images = torch.stack([fit(image) for image, _ in folder])
            except OSError as error:
                raise UserError(f"data.path: an image in {folder.root} is not readable ({error})") from error
            parts.append((images, torch.tensor(folder.targets)))
        return parts[0], parts[1], len(folder.classes)


def augmented(images: Tensor, kind: str, stream: torch.Generator) -> Tensor:
    """uint8[B, C, H, W] -> the same shape, each image cropped and flipped at random by `stream` (a CPU generator)."""
    if kind == "none":
        return images
    count, channels, height, width = images.shape
    device = images.device
    if kind == "crop_flip":
        pad = height // 8
        padded = F.pad(images, (pad, pad, pad, pad))
        top, left = torch.randint(2 * pad + 1, (2, count, 1), generator=stream).to(device)
        rows = (top + torch.arange(height, device=device)).view(count, 1, height, 1)
        columns = (left + torch.arange(width, device=device)).view(count, 1, 1, width)
        image = torch.arange(count, device=device).view(count, 1, 1, 1)
        channel = torch.arange(channels, device=device).view(1, channels, 1, 1)
        images = padded[image, channel, rows, columns]
    flip = (torch.rand(count, generator=stream) < 0.5).to(device).view(count, 1, 1, 1)
    return torch.where(flip, images.flip(3), images)


def _read_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """1,437 training and 360 test images of 8x8, split at random, always alike."""
    from sklearn.datasets import load_digits

    data = load_digits()
    # Pixels are 0..16 in the source.
    images = torch.tensor(data.images * 255 / 16, dtype=torch.uint8).unsqueeze(1)
    labels = torch.tensor(data.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=generator("digits split"))
    train, test = order[360:], order[:360]
    return (images[train], labels[train]), (images[test], labels[test])


def _small_cnn(channels: int, side: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (side // 4) ** 2, 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )
