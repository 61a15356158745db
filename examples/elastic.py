"""Training that survives a lost node. Start this on each node:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=1:2 \\
        --nproc-per-node 2 --max-restarts=3 --rdzv-backend=c10d \\
        --rdzv-endpoint=HOST:29500 --rdzv-id=anything examples/elastic.py FOLDER

When a node is lost, torchrun restarts the ranks of the others as a smaller world. They resume from the last checkpoint
in FOLDER, which all nodes must see. Every new worker gets the mean of the old workers' moments. The batch keeps its
size. Prints the step and the world size after every restart, and the loss.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    import _script  # noqa: F401

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from birder import Birder, attach, checkpoint
from birder.checkpoint import elastic

STEPS, BATCH, EVERY = 2000, 96, 50


def batch(step: int) -> tuple[Tensor, Tensor]:
    """This rank's share of points in the plane, and whether they lie inside the unit circle."""
    x = torch.randn(BATCH, 2, generator=torch.Generator().manual_seed(step))
    mine = x[dist.get_rank() :: dist.get_world_size()]
    return mine, (mine.square().sum(1) < 1).long()


def go_on(folder: Path, model: nn.Module, optimizer: Birder) -> int:
    """The step of the newest checkpoint, which is loaded; 0 where there is none."""
    found = checkpoint.restore(folder, any_world=True)
    if found is None:
        return 0
    model.load_state_dict(found.shared["model"])
    optimizer.load_state_dict(elastic.state(optimizer, found))
    if dist.get_rank() == 0:
        print(f"step {found.step} of {found.world_size} ranks, now {dist.get_world_size()}", flush=True)
    return found.step


def main(folder: Path, steps: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = Birder(model.parameters(), lr=1e-3)
    ddp = DistributedDataParallel(model)
    attach(ddp, optimizer)
    for step in range(go_on(folder, model, optimizer) + 1, steps + 1):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
        if step % EVERY == 0:
            checkpoint.save(folder, step, {"model": model.state_dict()}, {"optimizer": optimizer.state_dict()})
        if step == steps and dist.get_rank() == 0:  # after a restart at the very end no step is left
            print(f"step {steps}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("error: which folder for checkpoints? examples/elastic.py FOLDER")
    if not all(steps.isdecimal() for steps in sys.argv[2:]):
        sys.exit(f"error: {sys.argv[2]} is not a number of steps: examples/elastic.py FOLDER [STEPS]")
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else STEPS)
