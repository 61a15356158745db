"""Sizes at which kernels are measured on a GPU: elements of fp32. Needs no torch."""

LARGE, LARGEST = 25_000_000, 100_000_000
"""About ResNet-50's and BERT-Base's parameters."""
