"""CIFAR-10."""

from __future__ import annotations

from pathlib import Path

from experiments.workloads.cifar100 import to_split
from experiments.workloads.small_images import SmallImages, Split, check_torchvision_files
from launch.errors import UserError


class Cifar10(SmallImages):
    """50,000 + 10,000 images of 32x32, 10 classes. `data_path` is torchvision's root (it holds cifar-10-batches-py/)."""

    name = "cifar10"
    title = "CIFAR-10"
    shape = (3, 32, 32)
    num_classes = 10

    def check_files(self) -> None:
        check_torchvision_files(
            str(self.data_path),
            "cifar-10-batches-py/data_batch_1",
            "unpack cifar-10-python.tar.gz there, or run torchvision.datasets.CIFAR10(root, download=True) once",
        )

    def read(self) -> tuple[Split, Split]:
        from torchvision.datasets import CIFAR10

        root = Path(str(self.data_path)).expanduser()
        try:
            train, test = (CIFAR10(str(root), train=part, download=False) for part in (True, False))
        except Exception as error:  # torchvision checks a hash, then unpickles: anything may go wrong in a broken file
            raise UserError(f"data.path: the files in {root} are not CIFAR-10's: unpack the archive again") from error
        return to_split(train), to_split(test)
