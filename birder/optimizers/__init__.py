"""Optimizers: one file for each method, `base.py` for what they share."""

from birder.optimizers.adam import AdamW, BertAdam
from birder.optimizers.base import BucketOptimizer
from birder.optimizers.birder import Birder
from birder.optimizers.contract import Plan
from birder.optimizers.cser import CSER, overall_ratio
from birder.optimizers.ef21_sgdm import EF21SGDM
from birder.optimizers.ef_sgd import EFSGD
from birder.optimizers.lamb import LAMB
from birder.optimizers.lion import Lion
from birder.optimizers.muon import Muon
from birder.optimizers.onebit_adam import OneBitAdam
from birder.optimizers.onebit_lamb import OneBitLAMB
from birder.optimizers.qsparse import QSparseLocalSGD
from birder.optimizers.sgdm import SGDM
from birder.optimizers.sigma_delta import SigmaDeltaAdam
from birder.optimizers.slamb import SLAMB, SLAMBv1, SLAMBv2
from birder.optimizers.sparse_loco import SparseLoCo
from birder.optimizers.zero_one_adam import DeepSpeedZeroOneAdam, ZeroOneAdam
