"""Will compression pay here? Asks before anything in the training changes.

    torchrun --nproc-per-node 2 examples/predict.py
    torchrun --nproc-per-node 2 examples/predict.py --measure

Records a few steps of two ranks and prints the predicted step time of every method: with the communication there is, then on
16 nodes that are not there. --measure then trains with each method and prints measured times next to the predicted ones.
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable

if __name__ == "__main__":
    import _script  # noqa: F401

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import birder
import birder.predict

MEASURED = ("fp32", "bf16", "powersgd1", "birder", "birder_one_phase", "onebit_adam", "none")
WARMUP = 5
"""Steps before the measured ones: DDP rebuilds its buckets, 1-bit Adam begins to compress."""


def training(method: str = "fp32") -> tuple[DistributedDataParallel, Callable[[], None]]:
    """A small text classifier, made for this example, in plain PyTorch; and one training step of it under a method."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, dropout=0.0)
    model = nn.Sequential(
        nn.Embedding(8000, 128), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(128, 50)
    )
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if method.startswith("birder"):
        optimizer = birder.Birder(model.parameters(), lr=1e-4, reduce="one_phase" if "one" in method else "two_phase")
    elif method == "onebit_adam":
        optimizer = birder.OneBitAdam(model.parameters(), lr=1e-4, warmup_steps=1)
    # torch's PowerSGD on gloo wants one bucket: docs/troubleshooting.md.
    ddp = DistributedDataParallel(model, bucket_cap_mb=1000 if method == "powersgd1" else None)
    if isinstance(optimizer, birder.BucketOptimizer):
        birder.attach(ddp, optimizer)
    elif method == "bf16":
        ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif method == "powersgd1":
        state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    words, labels = torch.randint(0, 8000, (8, 64)), torch.randint(0, 50, (8,))

    def step() -> None:
        optimizer.zero_grad()
        with ddp.no_sync() if method == "none" else contextlib.nullcontext():
            nn.functional.cross_entropy(ddp(words).mean(1), labels).backward()
        optimizer.step()

    return ddp, step


def measure(steps: int) -> dict[str, float]:
    """ms per step of every method: medians over steps of the slowest rank, the methods interleaved."""
    built = {name: training(name)[1] for name in MEASURED}
    times: dict[str, list[float]] = {name: [] for name in MEASURED}
    for _ in range(WARMUP + steps):
        for name, step in built.items():
            dist.barrier()
            begin = time.perf_counter()
            step()
            times[name].append(1000 * (time.perf_counter() - begin))
    ranks: list[dict[str, list[float]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, times)
    slowest = {name: [max(of) for of in zip(*(r[name] for r in ranks), strict=True)] for name in MEASURED}
    return {name: statistics.median(found[WARMUP:]) for name, found in slowest.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="training steps to measure")
    parser.add_argument("--measure", action="store_true", help="then train with each method")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    ddp, step = training()

    advice = birder.predict.advise(ddp, step, options.steps)
    there = advice.at(link_gbps=10, nodes=16, ranks_per_node=8)
    if dist.get_rank() == 0:
        print(advice)
        print()
        print(there)
    if options.measure:
        expected, found = advice.here, measure(options.steps)
        if dist.get_rank() == 0:
            print(f"\n{'switched on':17}  predicted ms        interval  measured ms  difference")
            for name, ms in found.items():
                row = expected[name]
                interval = f"{row.low:.4g} to {row.high:.4g}"
                print(f"{name:17}  {row.ms:12.4g}  {interval:>14}  {ms:11.4g}  {100 * (row.ms / ms - 1):+9.1f}%")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
