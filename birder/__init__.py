"""Communication-efficient data-parallel training for PyTorch DDP.

optimizer = Birder(model.parameters(), lr=1e-3)
ddp = DistributedDataParallel(model)
attach(ddp, optimizer)
"""

from birder.comm import Topology
from birder.ddp import Attachment, attach
from birder.optimizers import SGDM, AdamW, BertAdam, Birder, BucketOptimizer, OneBitAdam, Plan

__version__ = "0.1.0"

__all__ = [
    "SGDM",
    "AdamW",
    "Attachment",
    "BertAdam",
    "Birder",
    "BucketOptimizer",
    "OneBitAdam",
    "Plan",
    "Topology",
    "attach",
]
