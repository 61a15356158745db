"""Swin Transformer on ImageNet, or on synthetic images where only time and bytes are measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.workloads.base import Batch, Shard, one_of
from experiments.workloads.ordering import as_global, generator
from experiments.workloads.resnet50 import ResNet50, to_tensor
from launch.errors import UserError
from launch.words import shortened

# preset: arguments of torchvision's SwinTransformer. base: Swin-B (Liu et al., 2021), 87,768,224 parameters
PRESETS: dict[str, dict[str, Any]] = {
    "base": {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32], "window_size": [7, 7]},
    "tiny": {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]},
}
MIXUP, CUTMIX = 0.8, 1.0  # parameters of their beta distributions


@dataclass(eq=False, repr=False)
class Swin(ResNet50):
    """torchvision's Swin Transformer with the augmentation of its paper; data and further arguments as in `ResNet50`.

    Training images: random crop and flip, RandAugment of two operations, random erasing of one image in four; each batch
    mixed by MixUp or CutMix, drawn again in every epoch.

    preset:          base (Swin-B) | tiny.
    drop_path:       probability to drop the last block for a sample (stochastic depth); earlier ones less.
    label_smoothing: of the loss.
    mix:             whether batches are mixed.
    """

    name = "swin"

    preset: str = "base"
    drop_path: float = 0.5
    label_smoothing: float = 0.1
    mix: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(PRESETS, preset=self.preset)
        for key, value in (("drop_path", self.drop_path), ("label_smoothing", self.label_smoothing)):
            if not 0 <= value < 1:
                raise UserError(f"workload.{key}={shortened(str(value))} must be in [0, 1)")

    def build_model(self) -> nn.Module:
        from torchvision.models import SwinTransformer

        return SwinTransformer(
            patch_size=[4, 4],
            stochastic_depth_prob=self.drop_path,
            num_classes=self.num_classes,
            **PRESETS[self.preset],
        )

    def augmentation(self) -> list[Any]:
        from torchvision import transforms as T

        crop = [T.RandomResizedCrop(self.image_size), T.RandomHorizontalFlip(), T.RandAugment(2, 9)]
        return [*crop, *to_tensor(), T.RandomErasing(0.25)]

    def train_batches(
        self, shard: Shard, batch_per_rank: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        """Yields (images, labels), or (images, float[B, classes] shares of the classes) where batches are mixed."""
        batches = super().train_batches(shard, batch_per_rank, seed=seed, epoch=epoch, start=start)
        for step, (images, labels) in enumerate(batches, start):
            if self.mix:
                with as_global(generator("mix", seed, epoch, shard.rank, step)):
                    images, labels = self._mixed(images, labels)
            yield images, labels

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels, label_smoothing=self.label_smoothing)

    def decays(self, name: str, parameter: nn.Parameter) -> bool:
        """Matrices do; biases, normalisation and tables of relative positions do not."""
        return parameter.ndim > 1 and "relative_position" not in name

    def _mixed(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        from torchvision.transforms import v2

        kind, alpha = (v2.MixUp, MIXUP) if torch.rand(()) < 0.5 else (v2.CutMix, CUTMIX)
        return kind(alpha=alpha, num_classes=self.num_classes)(images, labels)
