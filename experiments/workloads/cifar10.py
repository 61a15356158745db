"""CIFAR-10."""

from __future__ import annotations

from experiments.workloads.small_images import OfTorchvision


class Cifar10(OfTorchvision):
    """50,000 + 10,000 images of 32x32, 10 classes. `data_path` is torchvision's root (it holds cifar-10-batches-py/)."""

    name = "cifar10"
    title = "CIFAR-10"
    shape = (3, 32, 32)
    num_classes = 10
    dataset = "CIFAR10"
    files = ("cifar-10-batches-py/data_batch_1",)
    unpack = "unpack cifar-10-python.tar.gz there"
