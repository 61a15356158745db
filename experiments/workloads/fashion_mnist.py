"""Fashion-MNIST: not one of the paper's data sets, but small enough for several seeds on a few CPU cores."""

from __future__ import annotations

from experiments.workloads.small_images import OfTorchvision


class FashionMNIST(OfTorchvision):
    """60,000 + 10,000 images of 28x28, 10 classes. `data_path` is torchvision's root (it holds FashionMNIST/raw/)."""

    name = "fashion_mnist"
    title = "Fashion-MNIST"
    shape = (1, 28, 28)
    num_classes = 10
    dataset = "FashionMNIST"
    files = tuple(
        f"FashionMNIST/raw/{split}-{kind}-ubyte"
        for split in ("train", "t10k")
        for kind in ("images-idx3", "labels-idx1")
    )
    unpack = "unpack the four archives there (gunzip)"
