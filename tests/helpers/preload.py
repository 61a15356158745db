"""What every rank of a test needs, imported and compiled once in the server that the ranks are forked from."""

import gc
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


def compile_kernels() -> None:
    """Calls each fused kernel with the types that ranks call it with. What is missing here, each rank compiles for itself."""
    n, draw = 64, {"seed": 0, "step": 1, "start": 0}
    x, y, z = torch.zeros(3, n).unbind()
    active, bits = torch.ones(n, dtype=torch.bool), torch.zeros(n // 8, dtype=torch.uint8)
    for g in (x, x.bfloat16()):
        kernels.encode(g, y, z, beta=0.9, eps=0.0, hold=False, worker=0, **draw)
    for workers in (2, 3):  # powers of two are served otherwise
        kernels.reduce_bits(torch.zeros(workers, n // 8, dtype=torch.uint8), **draw)
    kernels.owned(bits, n=2, worker=0, **draw)
    kernels.assemble(bits.view(2, -1), **draw)
    kernels.apply_bits([x], [0], bits, lr=0.1, decay=0.1, active=active)
    kernels.unseen_blocks(x, active, 32)
    kernels.add_message(x, y, None)
    kernels.add_momentum(x, y, z, beta=0.9, mask=None)
    messages = kernels.split_signs(x, torch.ones(1), None)
    kernels.add_average(x, messages, None)
    kernels.write_signs(x, messages, None)
    kernels.average_signs(bits.view(1, -1), torch.ones(1))
    kernels.pack_signs(x)
    kernels.move_adam([x], [y], [z], rate=0.1, correction=1.0, eps=1e-8, keep=1.0)
    for error in (torch.zeros(n), torch.zeros(n, dtype=torch.int8)):
        kernels.modulate(x, error)
        law = {"beta1": 0.9, "beta2": 0.9, "scale": 1.0, "eps": 1e-8, "hold": False}
        kernels.modulate_adam(x, y, z, error, None, **law)
        kernels.serve_sigma(bits.view(1, -1), error, gamma=1.0)


assert dist.is_available()
compile_kernels()
gc.collect()
gc.freeze()  # or every rank would look through what was imported here, and copy it
