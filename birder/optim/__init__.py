"""Optimizers: one file for each method, `base.py` for what they share."""

from birder.optim.adam import AdamW, BertAdam
from birder.optim.base import BucketOptimizer
from birder.optim.birder import Birder
from birder.optim.contract import Plan
from birder.optim.cser import CSER, overall_ratio
from birder.optim.ef21_sgdm import EF21SGDM
from birder.optim.ef_sgd import EFSGD
from birder.optim.efficient_adam import EfficientAdam
from birder.optim.lamb import LAMB
from birder.optim.lion import Lion
from birder.optim.muon import Muon
from birder.optim.onebit_adam import OneBitAdam
from birder.optim.onebit_lamb import OneBitLAMB
from birder.optim.qsparse import QSparseLocalSGD
from birder.optim.sgdm import SGDM
from birder.optim.sigma_delta import SigmaDeltaAdam
from birder.optim.slamb import SLAMB, SLAMBv1, SLAMBv2
from birder.optim.sparse_loco import SparseLoCo
from birder.optim.zero_one_adam import DeepSpeedZeroOneAdam, ZeroOneAdam
