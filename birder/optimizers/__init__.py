"""Optimizers: one file for each method, `base.py` for what they share."""

from birder.optimizers.base import BucketOptimizer, Plan
from birder.optimizers.birder import Birder
from birder.optimizers.dense import SGDM, AdamW, BertAdam
from birder.optimizers.onebit_adam import OneBitAdam

__all__ = ["SGDM", "AdamW", "BertAdam", "Birder", "BucketOptimizer", "OneBitAdam", "Plan"]
