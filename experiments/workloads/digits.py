"""scikit-learn's digits: not one of the paper's data sets, but real and part of a package, so nothing is downloaded."""

from __future__ import annotations

import torch

from experiments.workloads.ordering import generator
from experiments.workloads.small_images import SmallImages, Split

TEST_IMAGES = 360


class Digits(SmallImages):
    """1,437 + 360 images of 8x8, 10 classes, split at random, always alike. Takes no `data_path`."""

    name = "digits"
    title = "scikit-learn digits"
    shape = (1, 8, 8)
    num_classes = 10
    needs_files = False

    def read(self) -> tuple[Split, Split]:
        from sklearn.datasets import load_digits

        data = load_digits()
        images = torch.tensor(data.images * 255 / 16, dtype=torch.uint8).unsqueeze(1)  # 0..16 in the source
        labels = torch.tensor(data.target, dtype=torch.int64)
        order = torch.randperm(len(labels), generator=generator("digits split"))
        train, test = order[TEST_IMAGES:], order[:TEST_IMAGES]
        return (images[train], labels[train]), (images[test], labels[test])
