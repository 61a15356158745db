"""CIFAR-100."""

from __future__ import annotations

from pathlib import Path

import torch

from experiments.workloads.small_images import SmallImages, Split, check_torchvision_files
from launch.errors import UserError


class Cifar100(SmallImages):
    """50,000 + 10,000 images of 32x32, 100 classes. `data_path` is torchvision's root (it holds cifar-100-python/)."""

    name = "cifar100"
    target = None  # the paper's accuracy could not be found
    title = "CIFAR-100"
    shape = (3, 32, 32)
    num_classes = 100

    def check_files(self) -> None:
        check_torchvision_files(
            str(self.data_path),
            "cifar-100-python/train",
            "unpack cifar-100-python.tar.gz there, or run torchvision.datasets.CIFAR100(root, download=True) once",
        )

    def read(self) -> tuple[Split, Split]:
        from torchvision.datasets import CIFAR100

        root = Path(str(self.data_path)).expanduser()
        try:
            train, test = (CIFAR100(str(root), train=part, download=False) for part in (True, False))
        except Exception as error:  # torchvision checks a hash, then unpickles: anything may go wrong in a broken file
            raise UserError(f"data.path: the files in {root} are not CIFAR-100's: unpack the archive again") from error
        return to_split(train), to_split(test)


def to_split(part: object) -> Split:
    """The images and labels of one of torchvision's CIFAR data sets."""
    images = torch.as_tensor(part.data).permute(0, 3, 1, 2).contiguous()  # type: ignore[attr-defined]
    return images, torch.as_tensor(part.targets)  # type: ignore[attr-defined]
