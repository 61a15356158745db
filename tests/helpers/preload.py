"""What every rank of a test needs, imported and compiled once in the server that the ranks are forked from."""

import importlib
import os

import torch
import torch.distributed as dist

os.environ.setdefault("OMP_NUM_THREADS", "1")

# DDP imports these when it is first used, which takes seconds.
for _name in (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.nn.parallel.distributed",
    "safetensors.torch",
    "hypothesis",
    "pytest",
    "experiments.training.loop",
):
    importlib.import_module(_name)

import birder  # noqa: E402,F401
from birder import kernels  # noqa: E402

assert dist.is_available()
_bits = kernels.encode(*torch.zeros(3, 64).unbind(), beta=0.9, eps=0.0, hold=False, seed=0, step=1, worker=0, start=0)
kernels.reduce_bits(_bits.view(1, -1), seed=0, step=1, start=0)
