"""Any folder of small images, one folder per class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from experiments.workloads.base import at_least
from experiments.workloads.files import image_folders
from experiments.workloads.ordering import fixed_choice
from experiments.workloads.small_images import SmallImages, Split
from launch.errors import UserError


@dataclass(eq=False, repr=False)
class ImageFolder(SmallImages):
    """`<data_path>/train/<class>/` and `val/<class>/` (or `test/`), resized to `image_size` and held in memory.

    For images that do not fit into memory, or need ImageNet's augmentation, use the workload `resnet50`.
    """

    name = "image_folder"
    image_size: int = 32

    def __post_init__(self) -> None:
        at_least(8, image_size=self.image_size)
        self.shape = (3, self.image_size, self.image_size)
        self.title = f"image folder {Path(self.data_path).name}" if self.data_path else "image folder"
        self.allow_synthetic = False
        super().__post_init__()

    def check_files(self) -> None:
        image_folders(str(self.data_path))

    def data_files(self) -> Sequence[Path]:
        return image_folders(str(self.data_path))

    def read(self) -> tuple[Split, Split]:
        train, test = image_folders(str(self.data_path))
        return self._split(train, self.train_images), self._split(test)

    def _split(self, folder: Path, limit: int | None = None) -> Split:
        """limit: images to decode, those that `prepare` would keep."""
        from torchvision import datasets
        from torchvision import transforms as T

        fit = T.Compose([T.Resize(self.image_size), T.CenterCrop(self.image_size), T.PILToTensor()])
        files = datasets.ImageFolder(str(folder), transform=fit)
        self.num_classes = len(files.classes)
        keep = fixed_choice(len(files), limit, "train_images")
        try:
            images = torch.stack([files[k][0] for k in keep])
        except Exception as error:  # PIL raises SyntaxError and others, too
            raise UserError(f"data.path: an image in {folder} is not readable ({error})") from error
        return images, torch.tensor(files.targets)[keep]
