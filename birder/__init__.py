"""Communication-efficient data-parallel training for PyTorch DDP.

optimizer = Birder(model.parameters(), lr=1e-3)
ddp = DistributedDataParallel(model)
attach(ddp, optimizer)
"""

from birder.comm import Topology
from birder.ddp import Attachment, attach
from birder.optimizers import (
    CSER,
    EFSGD,
    LAMB,
    SGDM,
    SLAMB,
    AdamW,
    BertAdam,
    Birder,
    BucketOptimizer,
    OneBitAdam,
    OneBitLAMB,
    Plan,
    QSparseLocalSGD,
    ZeroOneAdam,
    overall_ratio,
)

__version__ = "0.1.0"

__all__ = [
    "CSER",
    "EFSGD",
    "LAMB",
    "SGDM",
    "SLAMB",
    "AdamW",
    "Attachment",
    "BertAdam",
    "Birder",
    "BucketOptimizer",
    "OneBitAdam",
    "OneBitLAMB",
    "Plan",
    "QSparseLocalSGD",
    "Topology",
    "ZeroOneAdam",
    "attach",
    "overall_ratio",
]
