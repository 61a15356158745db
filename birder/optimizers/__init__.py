"""Optimizers: one file for each method, `base.py` for what they share."""

from birder.optimizers.base import BucketOptimizer, Plan
from birder.optimizers.birder import Birder
from birder.optimizers.cser import CSER, overall_ratio
from birder.optimizers.dense import SGDM, AdamW, BertAdam
from birder.optimizers.error_feedback_sgd import EFSGD, QSparseLocalSGD
from birder.optimizers.lamb import LAMB
from birder.optimizers.onebit_adam import OneBitAdam
from birder.optimizers.onebit_lamb import OneBitLAMB
from birder.optimizers.slamb import SLAMB
from birder.optimizers.zero_one_adam import ZeroOneAdam

__all__ = [
    "CSER",
    "EFSGD",
    "LAMB",
    "SGDM",
    "SLAMB",
    "AdamW",
    "BertAdam",
    "Birder",
    "BucketOptimizer",
    "OneBitAdam",
    "OneBitLAMB",
    "Plan",
    "QSparseLocalSGD",
    "ZeroOneAdam",
    "overall_ratio",
]
