"""ResNet-18 on ImageNet, or on synthetic images where only time and bytes are measured."""

from __future__ import annotations

from experiments.workloads.resnet50 import ResNet50


class ResNet18(ResNet50):
    """torchvision's ResNet-18 (11,689,512 parameters with 1000 classes); data and arguments are those of `ResNet50`."""

    name = "resnet18"
    network = "resnet18"
