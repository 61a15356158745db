"""Fashion-MNIST: not one of the paper's data sets, but small enough for several seeds on a few CPU cores."""

from __future__ import annotations

from pathlib import Path

import torch

from experiments.workloads.small_images import SmallImages, Split, check_torchvision_files
from launch.errors import UserError


class FashionMNIST(SmallImages):
    """60,000 + 10,000 images of 28x28, 10 classes. `data_path` is torchvision's root (it holds FashionMNIST/raw/)."""

    name = "fashion_mnist"
    title = "Fashion-MNIST"
    shape = (1, 28, 28)
    num_classes = 10

    def check_files(self) -> None:
        for split in ("train", "t10k"):
            for kind in ("images-idx3", "labels-idx1"):
                check_torchvision_files(
                    str(self.data_path),
                    f"FashionMNIST/raw/{split}-{kind}-ubyte",
                    "unpack the four archives there (gunzip), or run torchvision.datasets.FashionMNIST(root, "
                    "download=True) once",
                )

    def read(self) -> tuple[Split, Split]:
        from torchvision import datasets

        root = Path(str(self.data_path)).expanduser()
        try:
            train, test = (datasets.FashionMNIST(str(root), train=part, download=False) for part in (True, False))
        except Exception as error:  # torchvision asserts on sizes and magic numbers
            raise UserError(f"data.path: the files in {root} are not Fashion-MNIST's: unpack them again") from error
        return (train.data.unsqueeze(1), torch.as_tensor(train.targets)), (
            test.data.unsqueeze(1),
            torch.as_tensor(test.targets),
        )
