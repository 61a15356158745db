"""The link between nodes, as ranks see it: emulated links are set to a rate, others are measured."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from birder.comm.collectives import backend_for
from experiments.records import labels
from experiments.training.world import gathered
from launch.errors import UserError
from launch.files import Tail
from launch.spec import RunSpec

FREE_MBIT = 40_000.0
"""The rate of a link that is not to slow anything down: while methods warm up."""
ANSWER_S = 120.0
"""How long the supervisor of emulated nodes may take to set and measure a rate."""
PROBE_MB, PROBES = 16, 3
"""Size of a message of the probe, MiB, and how many are timed after a first one."""


def ask(run_dir: Path, request: str) -> None:
    """Has the supervisor of emulated nodes obey a line of launch/emulated/inside.py, and waits until it has.

    For one rank, while the others send nothing. Raises RuntimeError when it could not, or does not answer.
    """
    done, new = Tail(run_dir / "control.done"), ""
    with open(run_dir / "control", "a") as control:
        control.write(request + "\n")
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        new += done.rest()
        for line in new.splitlines(keepends=True):
            if line.startswith(request) and line.endswith("\n"):
                if why := line[len(request) :].strip(": \n"):
                    raise RuntimeError(f"the emulated link could not be set ({request}): {why}")
                return
        time.sleep(0.02)
    raise RuntimeError(f"nobody set the emulated link ({request}) within {ANSWER_S:.0f} s")


def of_run(spec: RunSpec, device: torch.device) -> dict[str, Any] | None:
    """What a record says of the link of a run on a real network: its rate is probed. None for any other run.

    Called on every rank, same result on all. What the user says of the link (`cluster.link`) is kept.
    """
    if spec.nodes < 2 or labels.cluster(spec.config) in ("local", "emulated") or labels.is_virtual(spec.config):
        return None
    rate = probe(spec.ranks_per_node, device)
    said = dict(spec.config["cluster"].get("link") or {})
    found = {"kind": "network", "dilation": 1.0, "probed_mbit_per_s": rate}
    if rate is not None and said.get("mbit_per_s") is None:
        found |= {"mbit_per_s": rate, "measured": True}
    return {**found, **said}


def probe(per_node: int, device: torch.device) -> float | None:
    """Mbit/s that one node receives while every node sends to the next one, by the backend's own sends.

    The first rank of each node takes part; median over messages, the slowest node's. None with a single node.
    """
    rank, nodes = dist.get_rank(), dist.get_world_size() // per_node
    if nodes < 2:
        return None
    world = dist.group.WORLD
    assert world is not None
    if backend_for(world, device) == "gloo":  # which sends none of a GPU's tensors
        device = torch.device("cpu")
    sent = torch.zeros(PROBE_MB * 2**20, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    took = []
    for number in range(1 + PROBES):
        dist.barrier()
        began = time.perf_counter()
        if rank % per_node == 0:
            pair = [
                dist.P2POp(dist.isend, sent, (rank + per_node) % (nodes * per_node)),
                dist.P2POp(dist.irecv, received, (rank - per_node) % (nodes * per_node)),
            ]
            for work in dist.batch_isend_irecv(pair):
                work.wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        if number:
            took.append(time.perf_counter() - began)
    mine = statistics.median(took) if rank % per_node == 0 else 0.0
    return round(8e-6 * PROBE_MB * 2**20 / max(gathered(mine)), 1)


def capacity(config: dict[str, Any], dilation: float) -> float:
    """The rate in Mbit/s of emulated links at this dilation. Raises UserError where the machine cannot carry it."""
    from launch.emulated import launcher

    cluster = config["cluster"]
    mbit = float(cluster["link_gbps"]) * 1000 / dilation
    try:
        launcher.check_capacity(int(cluster["nodes"]), float(cluster["link_gbps"]), mbit, cluster["max_total_gbps"])
    except UserError as error:
        raise UserError(f"{error} (time dilation {dilation:g} was measured)") from None
    return mbit
