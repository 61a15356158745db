"""Classification of small images held in memory. The data sets are subclasses, one file each."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.workloads import cifar_models
from experiments.workloads.base import Batch, Shard, all_sum, at_least, one_of
from experiments.workloads.files import existing_dir, no_synthetic
from experiments.workloads.ordering import Shuffled, choose_out, fixed_choice, generator
from launch.errors import UserError

MODELS = ("resnet18", "small_cnn", *cifar_models.WIDE, *cifar_models.THIN)
AUGMENTATIONS = ("none", "flip", "crop_flip")

Split = tuple[Tensor, Tensor]  # uint8[N, C, H, W] images, int64[N] labels


@dataclass(eq=False, repr=False)
class SmallImages(Shuffled):
    """The whole data set as uint8 tensors on the device; shuffling and augmentation on tensors.

    A subclass gives `name`, `title`, `shape`, `num_classes` and `read`, and `check_files` where files are needed.

    data_path:       where the files lie; None: random images of the data set's shape (time only).
    model:           resnet18 (CIFAR form: 3x3 stem, no max-pooling) | small_cnn (two convolutions, two linear layers) |
                     wrn_40_8, wrn_10_2 (wide ResNets) | resnet110, resnet20, resnet8 (the CIFAR ResNets).
    augment:         none | flip | crop_flip (zero padding of an eighth of the side, random crop, random flip).
    train_images:    number of training images to use, always the same ones; None: all.
    held_out:        training images that are held out, always the same ones (`held_out_set`). None or 0: none.
    eval_batch:      images per batch in `evaluate`.
    allow_synthetic: False makes a missing `data_path` an error.
    """

    metric = "top1"
    sample = "images"

    title = ""  # of the data set, in tables
    shape = (0, 0, 0)  # channels, height, width
    num_classes = 0
    needs_files = True

    data_path: str | None = None
    model: str = "small_cnn"
    augment: str = "none"
    train_images: int | None = None
    held_out: int | None = None
    eval_batch: int = 500
    allow_synthetic: bool = True

    def __post_init__(self) -> None:
        one_of(MODELS, model=self.model)
        one_of(AUGMENTATIONS, augment=self.augment)
        at_least(1, train_images=self.train_images, eval_batch=self.eval_batch)
        at_least(0, held_out=self.held_out)
        self.synthetic = self.data_path is None and self.needs_files
        self.data_name = f"synthetic images like {self.title}" if self.synthetic else self.title

    @abstractmethod
    def read(self) -> tuple[Split, Split]:
        """Training and test set. Raises UserError when files are broken."""

    def check_files(self) -> None:
        """Cheap check of the files in `data_path`, which is not None here. Raises UserError."""

    def check(self) -> None:
        if not self.needs_files:
            return
        if self.data_path is not None:
            self.check_files()
        elif not self.allow_synthetic:
            raise no_synthetic(f"the folder of {self.title}")

    def prepare(self, shard: Shard) -> None:
        self.check()
        train, test = _synthetic(self.shape, self.num_classes) if self.synthetic else self.read()
        keep = fixed_choice(len(train[1]), self.train_images, "train_images")
        train = (train[0][keep], train[1][keep]) if len(keep) < len(train[1]) else train
        if self.held_out and not self.synthetic:  # random images have no accuracy
            kept, out = choose_out(len(train[1]), self.held_out)
            self.held_out_set = (train[0][out].to(shard.device), train[1][out].to(shard.device))
            train = (train[0][kept], train[1][kept])
        # Per-channel mean and spread of the training images, on the 0..1 scale.
        pixels = train[0][:5000].float() / 255
        self._mean = pixels.mean((0, 2, 3)).view(1, -1, 1, 1).to(shard.device)
        self._std = pixels.std((0, 2, 3)).clamp_min(1e-3).view(1, -1, 1, 1).to(shard.device)
        self._train, self.eval_set = (
            (images.to(shard.device), labels.to(shard.device)) for images, labels in (train, test)
        )

    def build_model(self) -> nn.Module:
        channels, side = self._train[0].shape[1:3]
        if self.model == "small_cnn":
            return _small_cnn(channels, side, self.num_classes)
        if self.model != "resnet18":
            return cifar_models.build(self.model, channels, self.num_classes)
        from torchvision.models import resnet18

        net = resnet18(weights=None, num_classes=self.num_classes)
        net.conv1 = nn.Conv2d(channels, 64, kernel_size=3, padding=1, bias=False)
        nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
        net.maxpool = nn.Identity()
        return net

    @property
    def training_samples(self) -> int:
        return len(self._train[1])

    def batch(self, indices: Tensor, shard: Shard, key: tuple[int, int, int, int]) -> Batch:
        (images, labels), on_device = self._train, indices.to(shard.device)
        return self._normalise(augmented(images[on_device], self.augment, generator("augment", *key))), labels[
            on_device
        ]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def scores(self, model: nn.Module, samples: Split, shard: Shard) -> dict[str, float]:
        images, labels = (part[shard.rank :: shard.world_size] for part in samples)
        correct = 0.0
        for first in range(0, len(labels), self.eval_batch):
            some = slice(first, first + self.eval_batch)
            correct += float((model(self._normalise(images[some])).argmax(1) == labels[some]).sum())
        correct, count = all_sum([correct, float(len(labels))], shard)
        return {"top1": 100 * correct / count}

    def _normalise(self, images: Tensor) -> Tensor:
        return (images.float() / 255 - self._mean) / self._std


class OfTorchvision(SmallImages):
    """A data set of torchvision's, whose files lie in `data_path` already: torchvision's root.

    A subclass gives `dataset`, the class in torchvision.datasets, `files` below the root, and `unpack`, how to get them.
    """

    dataset: str
    files: tuple[str, ...]
    unpack: str

    def check_files(self) -> None:
        how = f"{self.unpack}, or run torchvision.datasets.{self.dataset}(root, download=True) once"
        root = existing_dir(str(self.data_path), how)
        for file in self.files:
            if not (root / file).is_file():
                raise UserError(f"data.path: no {file} in {self.data_path}: {how}")

    def read(self) -> tuple[Split, Split]:
        from torchvision import datasets

        root, load = Path(str(self.data_path)).expanduser(), getattr(datasets, self.dataset)
        try:
            train, test = (_split(load(str(root), train=part, download=False)) for part in (True, False))
            for images, labels in (train, test):
                if (len(images), *self.shape) != (len(labels), *images.shape[1:]):
                    raise ValueError("images and labels that do not belong together")
                if not 0 <= int(labels.min()) <= int(labels.max()) < self.num_classes:
                    raise ValueError("labels of other classes")
        except (
            Exception
        ) as error:  # torchvision checks hashes, sizes and magic numbers, and unpickles: anything may go wrong
            raise UserError(f"data.path: the files in {root} are not {self.title}'s: unpack them again") from error
        return train, test


def _split(part: Any) -> Split:
    """The images and labels of one of torchvision's data sets: grey images [N, H, W], or colours last."""
    images = torch.as_tensor(part.data)
    images = images.unsqueeze(1) if images.dim() == 3 else images.permute(0, 3, 1, 2).contiguous()
    return images, torch.as_tensor(part.targets)


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


def _synthetic(shape: tuple[int, int, int], classes: int) -> tuple[Split, Split]:
    stream = generator("synthetic images")
    images = torch.randint(256, (1024, *shape), generator=stream, dtype=torch.uint8)
    both = (images, torch.randint(classes, (1024,), generator=stream))
    return both, both


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
