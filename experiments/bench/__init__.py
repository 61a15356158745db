"""Measurements of parts: kernels, hooks, the collectives of others."""

LARGE, LARGEST = 25_000_000, 100_000_000
"""Elements of fp32 at which kernels are measured on a GPU: about ResNet-50's and BERT-Base's parameters."""
