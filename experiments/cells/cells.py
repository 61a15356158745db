"""Many measurements in one world: what the workers of experiments/paper_table.py and experiments/bench_suite.py share.

A cell is one method on one number of nodes: a replay model behind DDP, an optimizer and its communication, a few steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import birder
from birder import BucketOptimizer
from experiments.cells.replay import ReplayModel
from experiments.cells.timelines import Timeline
from experiments.records import record
from experiments.training import presence, step_profile
from experiments.training.nic import NicMeter
from launch.emulated.network import GOODPUT
from launch.spec import RunSpec

TIMEOUT_S, SILENCE_S = 300.0, 60.0
"""How long a collective may take, and how long a node may answer nobody."""


@contextlib.contextmanager
def world() -> Iterator[None]:
    """This process as the rank that torchrun's environment names, with one thread, on gloo."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    presence.start(store, rank, size, silence_s=SILENCE_S, join_s=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        yield
        dist.barrier()
        presence.stop()
    finally:
        dist.destroy_process_group()


class Setup:
    """Model, DDP, optimizer and hook of one method.

    connect: makes the attachment; given DDP and the optimizer, whose units and buckets have `mb` MB.
    """

    def __init__(
        self,
        model: ReplayModel,
        optimizer: BucketOptimizer,
        connect: Callable[[DistributedDataParallel, BucketOptimizer, float], Any],
        mb: float,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        # All nodes start from zeros: DDP need not send rank 0's parameters over a link as slow as an emulated one.
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=mb, gradient_as_bucket_view=True, init_sync=False)
        self.attachment = connect(self.ddp, optimizer, mb)
        self._warm_up()

    def _warm_up(self) -> None:
        """DDP's final buckets, compiled kernels, open connections: without waiting, and mostly without sending."""
        with self.attachment.paused():
            for _ in range(2):
                self._backward()
        if isinstance(self.optimizer, birder.OneBitAdam):  # on to the compression stage, past the dense one
            for unit in self.optimizer.units:
                unit.state["v"].fill_(1.0)
            self.optimizer.steps = self.optimizer.warmup_steps
        if self.optimizer.compressed:
            self.step()

    def _backward(self) -> None:
        self.optimizer.zero_grad()
        trace, began = self.optimizer.pipeline.trace, time.perf_counter()
        self.ddp(torch.zeros(1)).sum().backward()
        trace.add("compute", None, began, time.perf_counter())

    def step(self) -> dict[str, float]:
        """One optimizer step, and what it took here in milliseconds of this machine's clock."""
        began = time.perf_counter()
        self._backward()
        self.optimizer.step()
        wall = time.perf_counter() - began
        spans = self.optimizer.pipeline.trace.last
        parts = {"encode": 0.0, "wire": 0.0, "exposed_wire": 0.0, **step_profile.split(spans)}
        parts |= {"wall": wall, "update": sum(s.seconds for s in spans if s.kind == "apply")}
        return {f"{name}_ms": 1000 * seconds for name, seconds in parts.items()}

    def close(self) -> None:
        """Ends what the setup started."""
        self.attachment.close()


def measure(setup: Setup, steps: int) -> list[dict[str, Any]]:
    """Runs `steps` steps on every node; what each node found, the same list everywhere.

    steps: what `Setup.step` returns, for each; sent, collectives: of all steps; nic: (sent, received) or None.
    """
    nic, counter = NicMeter(), setup.attachment.counter
    dist.barrier()
    counter.reset()
    nic.resume()
    taken = [setup.step() for _ in range(steps)]
    nic.pause()
    mine = {"steps": taken, "sent": counter.inter, "collectives": counter.collectives, "nic": nic.total}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


class Node:
    """One process, standing for a node: the plan of cells that the RunSpec's configuration holds under `exp`."""

    def __init__(self, spec: RunSpec, exp: str) -> None:
        self.spec, self.exp = spec, exp
        self.plan: dict[str, Any] = spec.config[exp]
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        path = spec.path / record.LINK_FILE
        self.link: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        self.rate = float(self.link.get("mbit_per_s") or GOODPUT * float(self.plan["mbit"]))
        """Mbit/s of the links: what the launcher measured; where nothing crosses a link, what it should give."""
        self._template = record.from_spec(spec, device="cpu") if self.rank == 0 else None

    def write(
        self,
        id: str,
        method: Any,
        timeline: Timeline,
        measured: list[dict[str, Any]],
        *,
        gpus: int,
        about: dict[str, Any],
        dilation: float,
        gbit: float | None,
        comm: dict[str, Any],
        split: Sequence[str],
        **more: Any,
    ) -> None:
        """Writes the record of a cell, on rank 0.

        method: the row, with label, wire, optimizer, overlap. measured: what `measure` returned. gpus: that a node is.
        about: what the configuration says of the cell. gbit: Gbit/s that the link stands for. split: keys for `timing`.
        more: other fields of the record.
        """
        assert self._template is not None
        dilation = round(dilation, 6)
        config = {
            **self.spec.config,
            self.exp: about,
            "optimizer": method.optimizer,
            "workload": {**self.spec.config["workload"], "timeline": timeline.name, "dilation": dilation},
            "comm": {"enabled": method.wire != "none", "overlap": method.overlap, **comm},
        }
        made = dataclasses.replace(
            self._template,
            id=id,
            time=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            config=config,
            optimizer=method.optimizer["_target_"].rpartition(".")[2],
            method=method.label,
            wire=method.wire,
            data={"name": f"replay of {timeline.name}", "synthetic": True},
            link={**record.LINK, **self.link, "link_gbps": gbit, "dilation": dilation},
            timing=timing(measured, timeline.batch_per_gpu * gpus * self.size, split),
            bytes_per_step=sent(measured),
            collectives_per_step=round(measured[0]["collectives"] / len(measured[0]["steps"]), 2),
            **more,
        )
        record.write(made, self.spec.config["results_dir"])


def timing(nodes: Sequence[dict[str, Any]], samples: int, keys: Sequence[str]) -> dict[str, Any]:
    """The record's `timing`; a step is as long as that of the slowest node. `keys`: of the split. samples: of all nodes."""
    count = len(nodes[0]["steps"])

    def slowest(key: str) -> list[float]:
        return sorted(max(n["steps"][i][key] for n in nodes) for i in range(count))

    walls = slowest("wall_ms")
    median = statistics.median(walls)
    return {
        "steps": count,
        "median_ms": round(median, 3),
        "p10_ms": round(walls[0], 3),
        "p90_ms": round(walls[-1], 3),
        "samples_per_s": round(1000 * samples / median, 3),
        "split": {key: round(statistics.median_high(slowest(key)), 3) for key in keys},
    }


def sent(nodes: Sequence[dict[str, Any]]) -> dict[str, int | None]:
    """The record's `bytes_per_step`: per node and step."""
    per = len(nodes[0]["steps"]) * len(nodes)
    nics = [n["nic"] for n in nodes]
    known = all(nic is not None for nic in nics)
    return {
        "payload_intra": 0,
        "payload_inter": round(sum(n["sent"] for n in nodes) / per),
        "nic_tx": round(sum(nic[0] for nic in nics) / per) if known else None,
        "nic_rx": round(sum(nic[1] for nic in nics) / per) if known else None,
    }
