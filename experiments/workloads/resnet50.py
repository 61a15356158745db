"""ResNet-50 on ImageNet, or on synthetic images where only time and bytes are measured."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from experiments.workloads.base import Batch, Shard, all_sum, at_least
from experiments.workloads.files import image_folders, no_synthetic
from experiments.workloads.ordering import Shuffled, as_global, choose_out, generator
from launch.errors import UserError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
POOL = 4  # distinct synthetic batches: enough that no result can be cached, few enough to cost nothing


@dataclass(eq=False, repr=False)
class ResNet50(Shuffled):
    """torchvision's ResNet-50 (25,557,032 parameters with 1000 classes).

    data_path:        folder with train/<class>/ and val/<class>/; None: synthetic images.
    image_size:       side of the square crop in pixels, at least 32.
    workers:          loader processes per rank for real images.
    held_out:         training images that are held out, always the same ones (`held_out_set`). None or 0: none.
    eval_batch:       images per batch in `evaluate`.
    synthetic_images: images that one epoch of synthetic data stands for.
    allow_synthetic:  False makes a missing `data_path` an error.
    """

    name = "resnet50"
    network = "resnet50"  # as torchvision calls it
    metric = "top1"
    target = None  # the paper gives no accuracy that could be found
    sample = "images"

    data_path: str | None = None
    image_size: int = 224
    workers: int = 0
    held_out: int | None = None
    eval_batch: int = 64
    synthetic_images: int = 1_281_167
    allow_synthetic: bool = True

    def __post_init__(self) -> None:
        size = self.image_size
        at_least(32, image_size=size)
        at_least(0, workers=self.workers, held_out=self.held_out)
        at_least(1, eval_batch=self.eval_batch, synthetic_images=self.synthetic_images)
        self.synthetic = self.data_path is None
        self.data_name = f"synthetic {size}x{size} images" if self.synthetic else "ImageNet folder"
        self.num_classes = 1000
        self._kept: list[int] = []

    def check(self) -> None:
        if self.data_path is not None:
            image_folders(self.data_path)
        elif not self.allow_synthetic:
            raise no_synthetic("a folder with ImageNet's train/ and val/")

    def data_files(self) -> Sequence[Path]:
        return image_folders(self.data_path) if self.data_path is not None else ()

    def prepare(self, shard: Shard) -> None:
        if self.data_path is None:
            return
        from torchvision.datasets import ImageFolder

        self._train, test = (ImageFolder(folder) for folder in image_folders(self.data_path))
        self.num_classes = len(test.classes)
        self._kept, held = choose_out(len(self._train), self.held_out)
        self.eval_set = test, range(len(test))
        self.held_out_set = (self._train, held) if held else None

    def build_model(self) -> nn.Module:
        from torchvision.models import get_model

        return get_model(self.network, weights=None, num_classes=self.num_classes)

    @property
    def training_samples(self) -> int:
        return self.synthetic_images if self.synthetic else len(self._kept)

    def train_batches(
        self, shard: Shard, batch_per_rank: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        if self.synthetic:
            pool = _synthetic_pool(shard, batch_per_rank, seed, self.image_size, self.num_classes)
            steps = self.steps_per_epoch(shard.world_size, batch_per_rank)
            for step in range(start, steps):
                yield pool[(epoch * steps + step) % len(pool)]
            return
        from torchvision import transforms as T

        augment = T.Compose(self.augmentation())
        order = [
            [self._kept[i] for i in indices.tolist()]
            for _, indices in self.order(shard, batch_per_rank, seed=seed, epoch=epoch, start=start)
        ]
        yield from self._load(_Images(self._train, augment, seed, epoch), order, shard)

    def augmentation(self) -> list[Any]:
        """torchvision's transforms from a training image (PIL) to the tensor that the model sees."""
        from torchvision import transforms as T

        return [T.RandomResizedCrop(self.image_size), T.RandomHorizontalFlip(), *to_tensor()]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def scores(self, model: nn.Module, samples: tuple[Any, Sequence[int]], shard: Shard) -> dict[str, float]:
        """samples: an ImageFolder, and the numbers of images in it."""
        from torchvision import transforms as T

        folder, numbers = samples
        resize = T.Resize(round(self.image_size * 256 / 224))
        images = _Images(folder, T.Compose([resize, T.CenterCrop(self.image_size), *to_tensor()]), 0, 0)
        mine = list(numbers[shard.rank :: shard.world_size])
        batches = [mine[i : i + self.eval_batch] for i in range(0, len(mine), self.eval_batch)]
        sums = [0.0, 0.0, 0.0]
        for pixels, labels in self._load(images, batches, shard):
            best = model(pixels).topk(min(5, self.num_classes), dim=1).indices == labels[:, None]
            sums[0] += float(best[:, 0].sum())
            sums[1] += float(best.any(dim=1).sum())
            sums[2] += len(labels)
        top1, top5, count = all_sum(sums, shard)
        return {"top1": 100 * top1 / count, "top5": 100 * top5 / count}

    def _load(self, images: _Images, batches: list[list[int]], shard: Shard) -> Iterator[tuple[Tensor, Tensor]]:
        cuda = shard.device.type == "cuda"
        loader = DataLoader(
            images,
            batch_sampler=batches,
            num_workers=self.workers,
            pin_memory=cuda,
            generator=torch.Generator(),  # without it the loader draws from torch's global generator
        )
        try:
            for pixels, labels in loader:
                yield pixels.to(shard.device, non_blocking=cuda), labels.to(shard.device, non_blocking=cuda)
        except UserError as error:
            # A loader process puts its traceback before the words.
            raise UserError(str(error).rpartition("UserError: ")[2].strip()) from error


@functools.lru_cache(1)  # the same in every epoch
def _synthetic_pool(shard: Shard, batch: int, seed: int, size: int, classes: int) -> list[tuple[Tensor, Tensor]]:
    stream = generator("synthetic images", seed, shard.rank)
    pool = []
    for _ in range(POOL):
        images = torch.randn(batch, 3, size, size, generator=stream)
        labels = torch.randint(classes, (batch,), generator=stream)
        pool.append((images.to(shard.device), labels.to(shard.device)))
    return pool


def to_tensor() -> list[Any]:
    """From a PIL image to a tensor of ImageNet's mean 0 and spread 1."""
    from torchvision import transforms as T

    return [T.ToTensor(), T.Normalize(IMAGENET_MEAN, IMAGENET_STD)]


class _Images(Dataset[tuple[Tensor, int]]):
    """An ImageFolder whose random transforms depend on (seed, epoch, index) alone, in whatever process they run."""

    def __init__(self, folder: Any, transform: Any, seed: int, epoch: int) -> None:
        self.folder, self.transform, self.seed, self.epoch = folder, transform, seed, epoch

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        try:
            image, label = self.folder[index]
        except Exception as error:  # PIL raises SyntaxError and others, too
            raise UserError(f"data.path: {self.folder.samples[index][0]} is not a readable image ({error})") from error
        with as_global(generator("augment", self.seed, self.epoch, index)):
            return self.transform(image), label
