"""Runs that are made once: what is recorded is not run again, so that the same command goes on after an interruption."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.config import compose
from experiments.config.compose import Composed
from experiments.records import labels, privacy, record
from experiments.records.record import ResultRecord
from experiments.report import tables
from experiments.report.accuracy import HELD_OUT
from experiments.report.differences import distinguishing
from experiments.runs import command, start
from launch.errors import UserError
from launch.failure import RunFailed

OF_THE_CLUSTER = ("name", "nodes", "ranks_per_node", "link_gbps", "dilation")
DIVERGED = "the loss is "
"""How a reason begins that is the method's own doing (experiments/training/loop.py)."""


def identity(config: dict[str, Any]) -> str:
    """What two runs must share to be the same run: seed, shape, link and every key that may tell variants apart."""
    cluster = [config["cluster"].get(key) for key in OF_THE_CLUSTER]
    about = [config["exp"], config["seed"], config["scale"]["name"], cluster, distinguishing(config)]
    return json.dumps(about, sort_keys=True)


def name_of(composed: Composed) -> str:
    """The identity of the run that `composed` describes."""
    return identity(json.loads(json.dumps(privacy.clean(compose.resolve(composed), Path.cwd()))))


def counts(r: ResultRecord) -> bool:
    """Whether the run need not be tried again: it ended well, or its loss became no number."""
    return r.status == "completed" or diverged(r.reason)


def score(r: ResultRecord | None) -> float | None:
    """What a learning rate is chosen by, the larger the better; None for a run that did not end well."""
    if r is None or r.status != "completed":
        return None
    value = r.metric.get("all", {}).get(HELD_OUT, r.metric.get("value"))
    return None if value is None else float(value) * (1 if r.metric.get("higher_is_better", True) else -1)


@dataclass
class Recorded:
    """The runs of one experiment.

    dry_run: run nothing, say what would be.
    failed:  runs that failed otherwise than by their loss: they are tried again the next time.
    todo:    runs that were not recorded.
    """

    exp: str
    dry_run: bool = False
    failed: int = 0
    todo: int = 0
    known: dict[str, ResultRecord] = field(default_factory=dict)

    def read(self, results_dir: str) -> None:
        """Takes in all records there are. Of runs that are the same the latest counts, a good one before any other."""
        for r in record.read_all(results_dir):
            if r.exp == self.exp:
                name = identity(r.config)
                if r.status == "completed" or name not in self.known or self.known[name].status != "completed":
                    self.known[name] = r

    def run(self, what: str, composed: Composed, group: str | None = None, asked: bool = True) -> ResultRecord | None:
        """The record of `composed`, which is run if it is not there and it is asked for. None: there is none."""
        resolved = compose.resolve(composed)
        name = name_of(composed)
        title = f"{labels.method(resolved)}, {what}"
        if (there := self.known.get(name)) and counts(there):
            print(f"{title}: recorded, {told(there)}", flush=True)
            return there
        if not asked:
            return None
        self.todo += 1
        if self.dry_run:
            print(f"{title}: to run", flush=True)
            return None
        print(f"{title}: ", end="", flush=True)
        try:
            start.launch(composed, command=command.typed("run", composed.overrides), group=group)
        except (RunFailed, UserError) as error:
            command.report(error)
            self.failed += not (isinstance(error, RunFailed) and diverged(str(error)))
        self.read(resolved["results_dir"])
        return self.known.get(name)

    def close(self, results_dir: str) -> int:
        """Brings the experiment's tables up to date and says where they are and what failed. Returns the exit status."""
        return close(results_dir, self.exp, self.failed)


def close(results_dir: str, exp: str, failed: int, of: str = "", *, written: bool = True) -> int:
    """The end of a command that goes on where it stopped. written: whether there is anything new for the tables."""
    if written:
        tables.write(results_dir, exp)
        print(f"table:  {Path(results_dir) / 'tables' / f'{exp}.md'}")
    if failed:
        print(f"{failed}{of} runs failed: the same command tries them again", file=sys.stderr)
    return int(failed > 0)


def diverged(reason: str | None) -> bool:
    """Whether a failure is the method's own doing: its loss became no number."""
    return DIVERGED in (reason or "")


def told(r: ResultRecord) -> str:
    """What a run came to, in a few words."""
    if r.status != "completed":
        return f"failed: {r.reason}"
    if r.metric:
        return f"{r.metric['name']} {r.metric['value']:.2f}"
    return f"{r.timing.get('median_ms', 0):.0f} ms a step"
