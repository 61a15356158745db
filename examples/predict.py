"""Will compression pay here? Asks before anything is changed: two ranks on this machine, then 16 nodes that are not there.

torchrun --nproc-per-node 2 examples/predict.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import birder
import birder.predict


def main() -> None:
    """A small text classifier, made for this example, in plain PyTorch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="training steps to measure")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, dropout=0.0)
    model = nn.Sequential(
        nn.Embedding(8000, 128), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(128, 50)
    )
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    words, labels = torch.randint(0, 8000, (8, 64)), torch.randint(0, 50, (8,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(words).mean(1), labels).backward()
        optimizer.step()

    advice = birder.predict.advise(ddp, step, options.steps)
    there = advice.at(link_gbps=10, nodes=16, ranks_per_node=8)
    if dist.get_rank() == 0:
        print(advice)
        print()
        print(there)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
