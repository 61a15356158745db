"""What a change of the number of workers costs: `python studies/resize.py [--seeds 5] [--publish]`.

Trains scikit-learn's digits on virtual workers with several methods. Every run trains on n workers up to the change. Then it
continues three times, with the same batches in all:

    unchanged   on n workers
    mean        on k workers, states by birder.checkpoint.elastic, as with
                resume_resize=average
    zeros       on k workers, with the common state and zeros for the rest

The result is the loss over all training images after each later step, as a share of the unchanged run's. The table and the
losses ({method, before, after, rule, seed, losses}) go to results/local/tables/resize.md and results/local/resize.jsonl.
--publish writes to results/published, and the table into docs/elastic.md. It takes about 4 minutes on 2 cores.
Exit status: 0 success; 2 bad input.
"""

from __future__ import annotations

import copy
import json
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a script
    import _script  # noqa: F401

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from birder import BucketOptimizer
from birder.checkpoint import elastic
from experiments.config import compose
from experiments.records.record import LOCAL, PUBLISHED, write_file
from experiments.report import documents, metrics, tables
from experiments.report.formats import DASH
from experiments.report.table import Table, terminal
from experiments.runs import command
from experiments.training.method import Length
from experiments.training.virtual import VirtualMethod
from experiments.workloads.base import Shard
from experiments.workloads.digits import Digits
from launch.errors import UserError

METHODS = {"birder": "Birder", "onebit_adam": "1-bit Adam"}
"""Variants of conf/exp/methods_digits.yaml, with its learning rates, constant here. 0/1 Adam is none of them: it diverges
at a constant rate, unchanged too."""
CHANGE, STEPS = 100, 160
"""After which step the number changes, and after which the run ends."""
SOON, LATER = slice(0, 20), slice(-20, None)
"""Of the steps after the change."""
FILE = "resize.jsonl"
PAGE = "tables/resize.md"
"""Of a results folder; docs/elastic.md has its table."""
CHANGES = {4: (2, 3), 2: (8,)}
"""Workers before: after."""
RULES = ("unchanged", "mean", "zeros")
BATCH = 48
"""Of all workers together."""


@dataclass(frozen=True)
class Lengths:
    """Steps until the change, and in all."""

    change: int = CHANGE
    steps: int = STEPS


class ResizedWorld:
    """A method on virtual workers, at a constant learning rate. start: parameters, instead of those of the seed."""

    def __init__(
        self, config: dict[str, Any], workload: Digits, workers: int, steps: int, start: dict[str, Tensor] | None = None
    ) -> None:
        cluster = config["cluster"] | {"nodes": workers, "ranks_per_node": 1}
        train = config["train"] | {"batch_per_rank": BATCH // workers, "max_steps": steps, "epochs": steps}
        self.config, self.workload = config | {"cluster": cluster, "train": train}, workload
        seed = int(config["seed"])
        torch.manual_seed(seed)
        net = workload.build_model()
        if start is not None:
            net.load_state_dict(start)
        length = Length(self.config, workload, workers)
        ddp = DistributedDataParallel(net)
        self.method = VirtualMethod(self.config, workload, ddp, Shard(), length, seed)
        self.ranks = self.method.ranks
        everything = workload.steps_per_epoch(1, 1)
        self._all = next(workload.train_batches(Shard(), everything, seed=0, epoch=0))

    def train(self, steps: range, look: bool = False) -> list[float]:
        """The loss over all training images after each step, where one looks."""
        stream, losses = self.method.batches(Shard(), steps.start - 1), []
        for _ in steps:
            self.method.step(stream)
            if look:
                with self.ranks.averaged(), torch.no_grad():
                    losses.append(float(self.workload.loss(self.ranks.model.module, self._all)))
        return losses

    def parameters(self) -> dict[str, Tensor]:
        """Where workers' models differ, their mean."""
        with self.ranks.averaged():
            return {name: p.detach().clone() for name, p in self.ranks.model.module.state_dict().items()}

    def states(self) -> list[dict[str, Any]]:
        return [copy.deepcopy(optimizer.state_dict()) for optimizer in self.ranks.optimizers]

    def take(self, states: list[dict[str, Any]], rule: str) -> None:
        """Continues from the states of another number of workers."""
        for optimizer in self.ranks.optimizers:
            state = elastic.resize(optimizer, states)
            optimizer.load_state_dict(forgotten(optimizer, state) if rule == "zeros" else state)


def forgotten(optimizer: BucketOptimizer, state: dict[str, Any]) -> dict[str, Any]:
    """`state` with zeros for what was every worker's or every server's own."""
    for unit in state["units"]:
        for name, tensor in unit.items():
            if optimizer.carried[name] != "copy":
                tensor.zero_()
    return state


def measure(method: str, seed: int, lengths: Lengths | None = None) -> list[dict[str, Any]]:
    """One line for each change and rule: {method, before, after, rule, seed, losses}."""
    lengths = lengths or Lengths()
    config = settings(method, seed)
    workload = Digits()
    workload.prepare(Shard())
    lines = []
    for before, afters in CHANGES.items():
        world = ResizedWorld(config, workload, before, lengths.steps)
        world.train(range(1, lengths.change + 1))
        start, states = world.parameters(), world.states()
        remaining = range(lengths.change + 1, lengths.steps + 1)
        unchanged = world.train(remaining, look=True)
        for after in afters:
            for rule in RULES:
                if rule == "unchanged":
                    losses = unchanged
                else:
                    new = ResizedWorld(config, workload, after, lengths.steps, start)
                    new.take(states, rule)
                    losses = new.train(remaining, look=True)
                row = {"method": method, "before": before, "after": after, "rule": rule, "seed": seed}
                lines.append({**row, "losses": [round(loss, 6) for loss in losses]})
    return lines


def settings(method: str, seed: int) -> dict[str, Any]:
    """The resolved configuration of a variant of methods_digits."""
    exp = ["+exp=methods_digits", "scale=quick"]
    variants = [list(v) for v in compose.compose(exp).config.compare]
    chosen = next(v for v in variants if v[0] == f"optimizer={method}")
    return compose.resolve(compose.compose([*exp, *chosen, f"seed={seed}"]))


def study(seeds: int) -> list[dict[str, Any]]:
    """The lines of every method and seed. Says what is done."""
    lines = []
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for method, name in METHODS.items():
        for seed in range(seeds):
            lines += measure(method, seed)
            print(f"{name}, seed {seed}", flush=True)
    dist.destroy_process_group()
    return lines


# ---- the table --------------------------------------------------------------------------------------------------------


def table(lines: Iterable[dict[str, Any]]) -> Table:
    """A row for each method and change."""
    means: dict[tuple[Any, ...], dict[int, float]] = {}
    for line in lines:
        for name, part in (("soon", SOON), ("later", LATER)):
            key = (line["method"], line["before"], line["after"], line["rule"], name)
            means.setdefault(key, {})[line["seed"]] = statistics.fmean(line["losses"][part])
    rows = []
    for method, before, after in dict.fromkeys(key[:3] for key in means):
        of = {key[3:]: value for key, value in means.items() if key[:3] == (method, before, after)}
        base = {when: of["unchanged", when] for when in ("soon", "later")}
        cells = [f"{statistics.fmean(base['soon'].values()):.3f}"]
        for rule, when in (("mean", "soon"), ("zeros", "soon"), ("mean", "later"), ("zeros", "later")):
            cells.append(share(of[rule, when], base[when]))
        rows.append([f"{METHODS[method]}, {before} → {after}", *cells])
    soon, later = f"steps 1 to {SOON.stop}", f"the last {-LATER.start} of {STEPS - CHANGE} steps"
    names = ["method, workers", f"loss unchanged, {soon}", f"`mean`, {soon}", f"`zeros`, {soon}"]
    return Table.text([*names, f"`mean`, {later}", f"`zeros`, {later}"], rows)


def share(values: dict[int, float], base: dict[int, float]) -> str:
    """By how much the losses differ from the unchanged runs', by seed; or how many are NaN or inf."""
    lost = sum(not (math.isfinite(value) and math.isfinite(base[seed])) for seed, value in values.items())
    if lost:
        return f"diverged in {lost} of {len(values)} runs"
    found = metrics.difference(values, base, relative=True)
    return found.text(relative=True) if found else DASH


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that `write` made; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def page(lines: Sequence[dict[str, Any]]) -> str:
    """The text of `PAGE`."""
    return f"# What a change of the number of workers costs\n\n## Losses\n\n{table(lines).grid()}"


def write(lines: Sequence[dict[str, Any]], folder: Path) -> None:
    """Writes the losses and their table into a results folder."""
    write_file(folder / FILE, "".join(json.dumps(line) + "\n" for line in lines).encode(), "losses")
    write_file(folder / PAGE, page(lines).encode(), "table of losses")


@command.report_errors
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind (default: 5)")
    parser.add_argument("--publish", action="store_true", help="write into the repository: results/published, docs/")
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        raise UserError("--seeds is a number of 1 or more")
    lines = study(options.seeds)
    write(lines, PUBLISHED if options.publish else Path(LOCAL))
    if options.publish:
        tables.save(documents.render())
    table(lines).show(terminal())
    return 0


if __name__ == "__main__":
    command.start(main)
