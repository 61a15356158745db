"""Compares all methods on one task, each with a tuned learning rate.

    python experiments/all_methods.py data.path=ROOT [key=value ...]
    python experiments/all_methods.py data.path=ROOT --only tune --methods a

The rows are those of `compare` in conf/exp/methods.yaml with learning rates to try (`tune`). The parts:

    tune    every rate with the first seed; held-out training data decide
    seeds   the chosen rate with the other seeds
    time    all rows, interleaved on emulated links; no evaluation

Recorded runs are not run again, so the same command continues an interrupted table. If the time of one row is missing,
all rows are timed again, because only times of one world compare. A run whose loss diverged counts as done; a run that
failed otherwise is tried again. The same command in several terminals shares the runs of `tune` and `seeds`.
Exit status: 0 success; 1 a run failed, other than by divergence; 2 bad input; 130 Ctrl-C.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

if not __package__:  # run as a script
    import _script  # noqa: F401

from experiments import compare
from experiments.config import compose, sweeps
from experiments.config.compose import Composed
from experiments.config.sweeps import SweepRun
from experiments.records import labels
from experiments.report import methods_table
from experiments.report.methods_table import EXP
from experiments.runs import command, start
from experiments.runs.study import Study, SweepQueue, asked, outcome, refuse_name, refuse_not_waiting
from experiments.runs.tracked_comparison import TrackedComparison
from experiments.timing import plan as worlds
from launch.errors import UserError
from launch.words import say, there_are

PARTS = ("tune", "seeds", "time")
SEEDS = (0, 1, 2)
TIMING = (
    *("cluster=emulated", "cluster.link_gbps=0.1", "cluster.dilation=1"),
    *("+evaluate=false", "train.max_steps=99", "train.timing_warmup=3"),
    *("timing.mode=interleaved", "timing.rounds=10", "timing.steps=10"),
)
"""What timed rows have besides: 100 steps, or whole cycles of a method's own, on links of 100 Mbit/s."""


@dataclass(frozen=True)
class MethodRow:
    """One row of the table: what makes it, and the learning rates to try (none: it is only timed)."""

    overrides: tuple[str, ...]
    rates: tuple[float, ...]

    @property
    def optimizer(self) -> str:
        return next((o.partition("=")[2] for o in self.overrides if o.startswith("optimizer=")), "")


def variants(base: Composed, methods: Sequence[str] | None) -> list[MethodRow]:
    """The rows of the experiment, or those with an optimizer of `methods`. Raises UserError for an unknown one, or none."""
    rows = []
    for entry in compose.compared(base):
        overrides = [o for o in entry if not o.startswith("tune=")]
        tune = [o.partition("=")[2] for o in entry if o.startswith("tune=")]
        rows.append(MethodRow(tuple(overrides), tuple(map(float, json.loads(tune[0]))) if tune else ()))
    known = sorted({row.optimizer for row in rows})
    if unknown := [m for m in methods or () if m not in known]:
        raise UserError(f"experiment '{base.config.exp}' has no '{unknown[0]}'{there_are(unknown[0], known)}")
    if methods is not None and not methods:
        raise UserError(f"--methods is empty; there are: {', '.join(known)}")
    return [row for row in rows if methods is None or row.optimizer in methods]


@dataclass
class MethodsRequest:
    """What the command line asks for."""

    overrides: list[str]
    seeds: tuple[int, ...]
    parts: tuple[str, ...]
    dry_run: bool = False

    def compose(self, row: MethodRow, *more: str) -> Composed:
        """`row` with `more`. The user's own overrides come last and so win."""
        mine = compose.unless_given([f"wandb.group={EXP}", *more], self.overrides)
        return compose.compose([f"+exp={EXP}", *row.overrides, *mine, *self.overrides])

    def rows(self, variants: Sequence[MethodRow]) -> list[SweepRun]:
        """Of a study: every rate with the first seed, the best one with the others, as far as these parts are asked for."""
        every: list[SweepRun] = []
        for v in variants:
            every += sweeps.choosing((f"+exp={EXP}", *v.overrides), v.rates, self.seeds, self.seeds[:1])
        return [row for row in every if ("seeds" if row.candidates else "tune") in self.parts]


def time(study: Study, composed: list[Composed], asked_for: bool) -> None:
    """Times all rows in one world, unless each has its time already, or that is not asked for.

    With timing.mode=sequential each is timed in a separate run, if it lacks its time.
    """
    group = compose.new_name(EXP)
    if apart(composed) is not None:
        for c in composed:
            study.run("step time", c, group, asked_for)
        return
    group_there = study.together(composed)
    if group_there is None and not asked_for:
        return
    for c in composed:
        there = None if group_there is None else study.done(asked(c.overrides))
        words = "to run, interleaved" if there is None else f"recorded, {outcome(there)}"
        say(f"{labels.method(compose.resolve(c))}, step time: {words}")
    if group_there is None and not study.dry_run:
        with TrackedComparison(composed, group) as comparison:
            comparison.status, _ = compare.in_turns(composed, group)
            comparison.record([])
        study.read()
        study.failed += sum(study.done(asked(c.overrides)) is None for c in composed)


def apart(composed: Sequence[Composed]) -> str | None:
    """Why rows are timed in separate runs; None where they take turns. Raises UserError where that is not possible."""
    return worlds.reason_not_interleaved([compose.resolve(c) for c in composed], synthetic=False)


def all_methods(plan: MethodsRequest, methods: Sequence[str] | None) -> int:
    """Runs what is missing and prints the table. Returns the exit status; raises UserError before anything has run."""
    refuse_name(plan.overrides)
    base = compose.compose([f"+exp={EXP}", *plan.overrides])
    if any(compose.key_of(o) in ("optimizer", "optimizer.lr", "seed", "tune") for o in plan.overrides):
        raise UserError("optimizers, learning rates and seeds are the table's own: use --methods and --seeds")
    rows = variants(base, methods)
    resolved = compose.resolve(base)
    refuse_not_waiting(resolved)
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
    study = Study(EXP, resolved["results_dir"], (), resolved, plan.dry_run)
    grid = SweepQueue(plan.rows(rows), study, plan.overrides, EXP, patient=False)
    if plan.dry_run:
        grid.list()
    else:
        start.check_results(resolved)
        grid.run()
    time(study, timed, "time" in plan.parts)
    if plan.dry_run:
        return 0
    if scored := any(r.metric for r in study.known.values()):
        methods_table.show(study.results_dir)
    return study.close(written=scored)


@command.report_errors
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__, "Hydra overrides")
    parser.add_argument("--methods", help="optimizer names to keep, separated by commas; default: all")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="the first one is what rates are tuned with")
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of: {', '.join(PARTS)}")
    parser.add_argument("--dry-run", action="store_true", help="say what is recorded and what is to run, start nothing")
    options = parser.parse_intermixed_args(arguments)
    parts = tuple(p for p in options.only.split(",") if p)
    if not parts or set(parts) - set(PARTS):
        raise UserError(f"--only={options.only}: give some of {', '.join(PARTS)}")
    seeds = command.whole("seeds", options.seeds)
    if not seeds:
        raise UserError(f"--seeds={options.seeds}: give whole numbers, such as 0,1,2")
    plan = MethodsRequest(options.overrides, tuple(seeds), parts, options.dry_run)
    return all_methods(plan, command.names(options.methods))


if __name__ == "__main__":
    command.start(main)
