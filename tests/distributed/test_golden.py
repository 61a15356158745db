"""Every method's parameters, checkpoint and bytes after some steps, as hashes that were kept: on real and on virtual ranks.

`python -m tests.distributed.test_golden` writes the file for processors of this vendor again, or says in it that it holds for
this machine too. Run it where a change is meant to change bits.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from birder import Topology, VirtualRanks, attach
from tests.distributed.habits.methods import FEW, METHODS, OURS
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import slow

STEPS, UNIT_MB = 12, 0.0008
WORLDS = {"flat 2": Topology(2, 1), "flat 4": Topology(4, 1), "nodes 2x2": Topology(2, 2)}
MORE = {"OneBitAdam bf16": ("OneBitAdam", {"wire": "bf16"}), "SLAMB hold": ("SLAMB", {"unseen": "hold"})}
MORE |= {"CSER bf16": ("CSER", {"wire": "bf16"}), "EFSGD top-k": ("EFSGD", {"compressor": "top_k"})}
MORE |= {"Birder bits": ("Birder", {"bits": "sigma_delta"}), "Birder u no bits": ("Birder u", {"bits": "none"})}
MORE |= {"SigmaDeltaAdam shared": ("SigmaDeltaAdam", {"variance": "shared"})}
MORE |= {"ZeroOneAdam decay": ("ZeroOneAdam", {"weight_decay": 0.1})}
MORE |= {"ZeroOneAdam deepspeed decay": ("ZeroOneAdam deepspeed", {"weight_decay": 0.1})}
NAMES = [name for name in [*OURS, *MORE] if name != "EfficientAdam"]  # which came later, and is held to its reference
PROCESSOR = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
MAKER = re.search(r"^vendor_id\s*:\s*(\S+)", PROCESSOR, re.MULTILINE)
KEPT = Path(__file__).with_name(f"golden_{MAKER[1] if MAKER else None}.json")
MACHINE = (
    f"torch {torch.__version__.split('+')[0]}, {torch.backends.cpu.get_cpu_capability()}, {MAKER[1] if MAKER else None}"
)
"""The last bits of norms depend on how many numbers the processor adds at a time, those of torch's roots on its maker."""


class Sizes(nn.Module):
    """Odd sizes; a parameter larger than a unit, one of one element, rows without a gradient, one without any."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(23, 9), (37, 9), (37,), (5, 37), (5,), (1,), (3, 2, 5), (7,)]
        values = [numbers(0, i, shape) for i, shape in enumerate(shapes)]
        self.parts = nn.ParameterList([nn.Parameter(v) for v in values])

    def forward(self, rank: int, step: int) -> Tensor:
        used = list(self.parts)[:-1]
        grads = [numbers(1000 * step + 10 * rank + 1, i, p.shape) for i, p in enumerate(used)]
        grads[0][17:] = 0.0
        return torch.stack([(p * g).sum() for p, g in zip(used, grads, strict=True)]).sum()


def numbers(seed: int, i: int, shape: Any) -> Tensor:
    """In [-1, 1), the same on every machine."""
    k = torch.arange(int(torch.Size(shape).numel()), dtype=torch.int64) + 7919 * seed + 104729 * i + 1
    k = (k * 2654435761) % 2**32
    k = ((k ^ (k >> 15)) * 2246822519) % 2**32
    return (((k ^ (k >> 13)) % 2**16).float() / 2**15 - 1.0).view(shape)


def make(name: str, model: nn.Module) -> Any:
    base, more = MORE.get(name, (name, {}))
    return METHODS[base].make(model.parameters(), **more)


def wrapped() -> tuple[nn.Module, DistributedDataParallel]:
    model = Sizes()
    return model, DistributedDataParallel(model, bucket_cap_mb=0.0005, find_unused_parameters=True)


def digest(tensors: list[Tensor]) -> str:
    found = hashlib.sha256()
    for t in tensors:
        found.update(f"{t.dtype}{tuple(t.shape)}".encode())
        found.update(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def state_of(optimizer: Any) -> str:
    return digest([unit[key] for unit in optimizer.state_dict()["units"] for key in sorted(unit)])


def real(rank: int, world: int, names: list[str], hierarchical: bool) -> dict[str, tuple]:
    results = {}
    for name in names:
        model, ddp = wrapped()
        optimizer = make(name, model)
        attachment = attach(ddp, optimizer, hierarchical=hierarchical and optimizer.compressed, unit_mb=UNIT_MB)
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            ddp(rank, step).backward()
            optimizer.step()
        optimizer.pipeline.wait()
        sent = (attachment.counter.intra, attachment.counter.inter, attachment.counter.collectives)
        results[name] = (digest(list(model.parameters())), state_of(optimizer), *sent)
        attachment.close()
    return results


def virtual(rank: int, world: int, names: list[str], topology: Topology, hierarchical: bool) -> dict[str, list]:
    results = {}
    for name in names:
        model, ddp = wrapped()
        optimizers = [make(name, model) for _ in range(topology.world_size)]
        nodes = hierarchical and optimizers[0].compressed
        ranks = VirtualRanks(ddp, optimizers, topology=topology, hierarchical=nodes, unit_mb=UNIT_MB)
        for step in range(1, STEPS + 1):
            for i in range(ranks.size):
                with ranks.turn(i):
                    ddp(i, step).backward()
            ranks.step()
        sent = ranks.counter.intra, ranks.counter.inter, ranks.counter.collectives
        each = []
        for i in range(ranks.size):
            with ranks.turn(i):
                mine = optimizers[i if optimizers[i].steps else 0]  # one stands for all ranks of a dense method
                each.append((digest(list(model.parameters())), state_of(mine)))
        results[name] = [*map("/".join, zip(*each, strict=True)), *sent]
    return results


def together(results: list[dict[str, tuple]], name: str) -> list:
    """[hashes of every rank's parameters, of its state, bytes within nodes, between them, collectives of a rank]"""
    mine = [found[name] for found in results]
    hashes = ["/".join(r[k] for r in mine) for k in (0, 1)]
    return [*hashes, sum(r[2] for r in mine), sum(r[3] for r in mine), mine[0][4]]


def run_real(world: str, names: list[str]) -> dict[str, list]:
    shape = WORLDS[world]
    nodes = shape.ranks_per_node > 1
    found = {}
    for some in parts(names):
        results = run_ranks(real, shape.world_size, some, nodes, ranks_per_node=shape.ranks_per_node)
        found |= {name: together(results, name) for name in some}
    return found


def run_virtual(world: str, names: list[str]) -> dict[str, list]:
    shape, found = WORLDS[world], {}
    for some in parts(names):
        found |= run_ranks(virtual, 1, some, shape, shape.ranks_per_node > 1)[0]
    return found


def parts(names: list[str]) -> list[list[str]]:
    """A few at a time: on a busy machine a call must not take too long."""
    return [names[i : i + 8] for i in range(0, len(names), 8)]


@functools.cache
def kept() -> dict[str, Any]:
    if not KEPT.is_file():
        pytest.skip(f"no {KEPT.name}")
    found = json.loads(KEPT.read_text())
    if MACHINE not in found["machines"]:
        pytest.skip(f"{KEPT.name} holds for {' and '.join(found['machines'])}, this is {MACHINE}")
    return found


CASES = [
    *((how, "flat 2", "few") for how in (run_real, run_virtual)),
    *(
        slow(how, world, "all")
        for how in (run_real, run_virtual)
        for world in WORLDS
        if (how, world) != (run_real, "flat 4")
    ),
    slow(run_real, "flat 4", "few"),  # the others on 4 real ranks: in "nodes 2x2"
]


@pytest.mark.long
@pytest.mark.parametrize(("how", "world", "which"), CASES)
def test_parameters_checkpoint_and_bytes_are_those_that_were_kept(how: Any, world: str, which: str) -> None:
    expected = kept()[world]
    names = FEW if which == "few" else NAMES
    found = how(world, names)
    assert {name: found[name] for name in names} == {name: expected[name] for name in names}


def test_every_method_is_among_them() -> None:
    assert {world: set(kept()[world]) for world in WORLDS} == {world: set(NAMES) for world in WORLDS}


if __name__ == "__main__":
    made = {world: run_real(world, NAMES) for world in WORLDS}
    before = json.loads(KEPT.read_text()) if KEPT.is_file() else {}
    same = made == {world: before.get(world) for world in WORLDS}
    lines = [f'"machines": {json.dumps(sorted({MACHINE, *before["machines"]}) if same else [MACHINE])}']
    for world in WORLDS:
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in made[world].items())
        lines.append(f"{json.dumps(world)}: {{\n{rows}\n}}")
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
