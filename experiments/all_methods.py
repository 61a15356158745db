"""All methods on one task: `python experiments/all_methods.py data.path=ROOT [key=value ...] [--methods a,b] [--only tune]`.

For each row of `compare` in conf/exp/methods.yaml that has learning rates to try (`tune`):

    tune    one run with each rate and the first seed; the best on the held-out part of the training set is chosen
    seeds   the chosen rate with the other seeds
    time    all rows on emulated links, in turns in one world (experiments/compare.py), nothing evaluated

Runs that are recorded are not run again, so that an interrupted table is gone on with by the same command; when the time of
one row is missing all take their turns again, for only then they can be compared. A run whose loss became no number is
recorded and counts; one that failed otherwise is tried again. Exit status: 0; 1 a run failed otherwise than by its loss; 2
bad input; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

if not __package__:  # run as a script
    import _script  # noqa: F401

from experiments import compare
from experiments.config import compose
from experiments.config.compose import Composed
from experiments.records import labels
from experiments.records.record import ResultRecord
from experiments.report import methods_table
from experiments.report.methods_table import EXP
from experiments.runs import command, recorded
from experiments.runs.recorded import Recorded, counts, name_of, score, told
from experiments.runs.tracked_comparison import TrackedComparison
from experiments.timing import plan as worlds
from launch.errors import UserError

PARTS = ("tune", "seeds", "time")
SEEDS = (0, 1, 2)
TIMING = (
    *("cluster=emulated", "cluster.link_gbps=0.1", "cluster.dilation=1"),
    *("+evaluate=false", "train.max_steps=99", "train.timing_warmup=3"),
    *("timing.mode=interleaved", "timing.rounds=10", "timing.steps=10"),
)
"""What timed rows have besides: 100 steps, or whole cycles of a method's own, on links of 100 Mbit/s as they are."""


@dataclass(frozen=True)
class Variant:
    """One row of the table: what makes it, and the learning rates to try (none: it is only timed)."""

    overrides: tuple[str, ...]
    rates: tuple[float, ...]

    @property
    def optimizer(self) -> str:
        return next((o.partition("=")[2] for o in self.overrides if o.startswith("optimizer=")), "")


def variants(base: Composed, methods: Sequence[str] | None) -> list[Variant]:
    """The rows of the experiment, or those with an optimizer of `methods`. Raises UserError for an unknown one."""
    rows = []
    for entry in compose.compared(base):
        overrides = [o for o in entry if not o.startswith("tune=")]
        tune = [o.partition("=")[2] for o in entry if o.startswith("tune=")]
        rows.append(Variant(tuple(overrides), tuple(map(float, json.loads(tune[0]))) if tune else ()))
    known = sorted({row.optimizer for row in rows})
    if unknown := [m for m in methods or () if m not in known]:
        raise UserError(f"experiment '{base.config.exp}' has no '{unknown[0]}'; it has: {', '.join(known)}")
    return [row for row in rows if methods is None or row.optimizer in methods]


@dataclass
class Plan:
    """What the command line asks for, and what has become of it."""

    overrides: list[str]
    seeds: tuple[int, ...]
    parts: tuple[str, ...]
    dry_run: bool = False
    runs: Recorded = field(init=False)

    def __post_init__(self) -> None:
        self.runs = Recorded(EXP, self.dry_run)

    def compose(self, row: Variant, *more: str) -> Composed:
        """`row` with `more`. The user's own overrides come last and so win."""
        mine = compose.unless_given([f"wandb.group={EXP}", *more], self.overrides)
        return compose.compose([f"+exp={EXP}", *row.overrides, *mine, *self.overrides])

    def run(self, part: str, what: str, composed: Composed, group: str | None = None) -> ResultRecord | None:
        """The record of `composed`, which is run if it is not there and its part is asked for. None: there is none."""
        return self.runs.run(what, composed, group, asked=part in self.parts)

    def time(self, composed: list[Composed]) -> None:
        """Times all rows in one world, unless each has its time already, or that part is not asked for.

        With timing.mode=sequential each has a run of its own, if it lacks its time.
        """
        group = compose.new_name(EXP)
        if apart(composed) is not None:
            for c in composed:
                self.run("time", "step time", c, group)
            return
        there = [self.runs.known.get(name_of(c)) for c in composed]
        titles = [f"{labels.method(compose.resolve(c))}, step time" for c in composed]
        if all(r is not None and counts(r) for r in there):
            for title, r in zip(titles, there, strict=True):
                assert r is not None
                print(f"{title}: recorded, {told(r)}", flush=True)
        elif "time" in self.parts:
            self.runs.todo += len(composed)
            for title in titles:
                print(f"{title}: to run, in turns", flush=True)
            if not self.dry_run:
                self._take_turns(composed, group)

    def _take_turns(self, composed: list[Composed], group: str) -> None:
        results_dir = compose.resolve(composed[0])["results_dir"]
        with TrackedComparison(composed, group) as comparison:
            comparison.status, _ = compare.in_turns(composed, group)
            comparison.record(results_dir, [])
        self.runs.read(results_dir)
        for c in composed:
            found = self.runs.known.get(name_of(c))
            self.runs.failed += found is None or not counts(found)


def apart(composed: Sequence[Composed]) -> str | None:
    """Why rows are timed in runs of their own; None where they take turns. Raises UserError where that is not possible."""
    return worlds.why_runs([compose.resolve(c) for c in composed], synthetic=False)


def train(plan: Plan, row: Variant) -> None:
    """Tunes one row and trains it with the other seeds."""
    first, *others = plan.seeds
    best: tuple[float, float] | None = None
    for lr in row.rates:
        composed = plan.compose(row, f"optimizer.lr={lr:g}", f"seed={first}")
        found = score(plan.run("tune", f"lr {lr:g}, seed {first}", composed))
        if found is not None and (best is None or found > best[0]):
            best = (found, lr)
    if best is None:
        return
    rate = f"optimizer.lr={best[1]:g}"
    for seed in others:
        plan.run("seeds", f"lr {best[1]:g}, seed {seed}", plan.compose(row, rate, f"seed={seed}"))


def all_methods(plan: Plan, methods: Sequence[str] | None) -> int:
    """Runs what is missing and prints the table. Returns the exit status; raises UserError before anything has run."""
    base = compose.compose([f"+exp={EXP}", *plan.overrides])
    if any(o.split("=")[0] in ("optimizer", "optimizer.lr", "seed", "tune") for o in plan.overrides):
        raise UserError("optimizers, learning rates and seeds are the table's own: use --methods and --seeds")
    rows = variants(base, methods)
    resolved = compose.resolve(base)
    if compose.workload(resolved).synthetic:
        raise UserError("the table is of accuracies and needs real data: give data.path=ROOT (make methods DATA=ROOT)")
    # All are checked before the first one starts: a mistake shows now, not after an hour.
    for row in rows:
        compose.check(plan.compose(row, *(f"optimizer.lr={lr:g}" for lr in row.rates[:1])))
        compose.check(plan.compose(row, *TIMING))
    # What a step costs does not depend on the rate: the smallest one, with which the loss stays a number.
    rates = [[f"optimizer.lr={min(row.rates):g}"] if row.rates else [] for row in rows]
    timed = [plan.compose(row, *TIMING, *rate) for row, rate in zip(rows, rates, strict=True)]
    apart(timed)
    results_dir = resolved["results_dir"]
    if Path(results_dir).is_dir():
        plan.runs.read(results_dir)
    for row in rows:
        train(plan, row)
    plan.time(timed)
    if plan.dry_run:
        print(f"{plan.runs.todo} runs to do at least, of {len(rows)} methods")
        return 0
    if scored := any(r.metric for r in plan.runs.known.values()):
        methods_table.show(results_dir)
    return recorded.close(results_dir, EXP, plan.runs.failed, written=scored)


@command.told
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line's work and exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", help="optimizer names to keep, separated by commas; default: all")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="the first one is what rates are tuned with")
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--dry-run", action="store_true", help="say what is recorded and what is to run, start nothing")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides")
    options = parser.parse_intermixed_args(arguments)
    parts = tuple(p for p in options.only.split(",") if p)
    if not parts or set(parts) - set(PARTS):
        raise UserError(f"--only={options.only}: give some of {', '.join(PARTS)}")
    if not all(s.isdigit() for s in options.seeds.split(",")):
        raise UserError(f"--seeds={options.seeds}: give whole numbers, such as 0,1,2")
    seeds = tuple(dict.fromkeys(int(s) for s in options.seeds.split(",")))
    plan = Plan(options.overrides, seeds, parts, options.dry_run)
    return all_methods(plan, command.names(options.methods))


if __name__ == "__main__":
    command.start(main)
