"""CIFAR-100."""

from __future__ import annotations

from experiments.workloads.small_images import OfTorchvision


class Cifar100(OfTorchvision):
    """50,000 + 10,000 images of 32x32, 100 classes. `data_path` is torchvision's root (it holds cifar-100-python/)."""

    name = "cifar100"
    target = None  # the paper's accuracy could not be found
    title = "CIFAR-100"
    shape = (3, 32, 32)
    num_classes = 100
    dataset = "CIFAR100"
    files = ("cifar-100-python/train",)
    unpack = "unpack cifar-100-python.tar.gz there"
