"""scikit-learn's digits: not one of the paper's data sets, but real and part of a package, so nothing is downloaded."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from experiments.workloads.ordering import generator
from experiments.workloads.small_images import SmallImages, Split
from launch.errors import UserError

TEST_IMAGES = 360


class Digits(SmallImages):
    """1,437 + 360 images of 8x8, 10 classes, split at random, always the same. Takes no `data_path`."""

    name = "digits"
    title = "scikit-learn digits"
    shape = (1, 8, 8)
    num_classes = 10
    needs_files = False

    def read(self) -> tuple[Split, Split]:
        package = find_spec("sklearn")
        if package is None or package.origin is None:
            raise UserError("the digits are a part of scikit-learn, which is not installed: pip install scikit-learn")
        # Only its file: importing the package takes a second on every rank.
        table = np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
        pixels = table[:, :-1].reshape(-1, *self.shape)  # 0..16
        images = torch.tensor(pixels * 255 / 16, dtype=torch.uint8)
        labels = torch.tensor(table[:, -1], dtype=torch.int64)
        order = torch.randperm(len(labels), generator=generator("digits split"))
        train, test = order[TEST_IMAGES:], order[:TEST_IMAGES]
        return (images[train], labels[train]), (images[test], labels[test])
