"""Chooses a learning rate for each of several methods, with the same budget.

    python experiments/tune.py +exp=NAME optimizer=a,b,c budget=8 \\
        held_out=N [key=value ...]

    budget    trials of each method; default 8
    held_out  training data kept back to choose by, in the workload's unit
    span      rates from lr/span to lr*span, evenly in the logarithm; lr is
              the configuration's; default 10
    rungs     lengths of training, each twice the one before; default 3
    seeds     runs with the chosen rate, each with its own seed; default 5

Every trial trains at the shortest length first. The better half continues at the next length (optuna's
SuccessiveHalvingPruner). Each training is a run with its whole schedule and a record. Recorded runs are not run again, so the
same command continues after an interruption. Test data decide nothing. In W&B the runs are the group tune-NAME.
Exit status: 0 success; 1 a run failed, other than by divergence; 2 bad input; 130 Ctrl-C.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

if not __package__:  # run as a script
    import _script  # noqa: F401

from pydantic import Field

from experiments.config import compose, validate
from experiments.config.compose import Composed
from experiments.config.kinds import Count, CountOrZero, doc
from experiments.config.schema import Section
from experiments.records import labels
from experiments.report.accuracy import HELD_OUT
from experiments.report.formats import DASH
from experiments.report.table import Column, Note, Table, terminal
from experiments.runs import command, start
from experiments.runs.study import Study, refuse_name, refuse_not_waiting, score
from experiments.tracking import start as tracking
from experiments.tracking.tracked import About
from launch.errors import UserError
from launch.words import say

EDGE = 0.1
"""A best rate within this share of an end of the range, in the logarithm, is at its edge."""


class Budget(Section):
    """The tuner's keys."""

    budget: Count = doc("trials of each method, the same for all", 8)
    held_out: Count | None = doc(
        "how much of the training data is kept back to choose by, in the workload's unit", None
    )
    span: Annotated[float, Field(strict=True, gt=1, le=1e6)] = doc("rates are tried from lr/span to lr*span", 10.0)
    rungs: Count = doc("lengths of training: each twice the one before, up to the whole", 3)
    seeds: CountOrZero = doc("with how many seeds the chosen rate is then trained", 5)


@dataclass(frozen=True)
class TuneRequest:
    """What the command line asks for."""

    optimizers: tuple[str, ...]
    overrides: tuple[str, ...]
    keys: Budget = field(default_factory=Budget)
    dry_run: bool = False

    @classmethod
    def of(cls, arguments: Sequence[str], dry_run: bool = False) -> TuneRequest:
        """Raises UserError for values that are missing, out of range or not numbers."""
        given = [(argument, compose.key_of(argument), argument.partition("=")[2]) for argument in arguments]
        if wrong := [a for a, key, _ in given if key in ("optimizer.lr", "seed", "train.max_steps", "train.epochs")]:
            raise UserError(f"{wrong[0]}: rates, seeds and lengths are the tuner's own; give span=, seeds= and rungs=")
        refuse_name(arguments)
        own = {key: command.value(value) for _, key, value in given if key in Budget.model_fields}
        validate.check_section(Budget, own)
        names = [value for _, key, value in given if key == "optimizer"]
        chosen = tuple(dict.fromkeys(command.names(names[-1] if names else "") or ()))
        if not chosen:
            raise UserError("give the methods to tune: optimizer=a,b,c")
        rest = tuple(a for a, key, _ in given if key not in Budget.model_fields and key != "optimizer")
        return cls(chosen, rest, Budget.model_validate(own), dry_run)

    @property
    def wandb_group(self) -> str:
        """The group of all runs in W&B, unless the user gives another one: the same after an interruption."""
        named = [o.partition("=")[2] for o in self.overrides if compose.key_of(o) == "exp"]
        return f"tune-{named[-1] if named else 'custom'}"

    def compose(self, optimizer: str, *more: str) -> Composed:
        kept = [] if self.keys.held_out is None else [f"++workload.held_out={self.keys.held_out}"]
        group = compose.unless_given([f"wandb.group={self.wandb_group}"], self.overrides)
        return compose.compose([*self.overrides, f"optimizer={optimizer}", *kept, *group, *more])


@dataclass
class Tuned:
    """What has become of one method. rates: those tried at the whole length; low, high: the range."""

    optimizer: str
    label: str
    low: float
    high: float
    tried: list[float] = field(default_factory=list)
    whole: int = 0
    best: float | None = None
    score: float | None = None

    @property
    def warning(self) -> str | None:
        """What to do where the best rate is at the edge of those tried, or there is none."""
        if self.best is None:
            return f"{self.label}: no rate from {self.low:g} to {self.high:g} ended with a number: widen it with span="
        place = math.log(self.best / self.low) / math.log(self.high / self.low)
        if EDGE <= place <= 1 - EDGE and min(self.tried) < self.best < max(self.tried):
            return None
        end = "smallest" if place < 0.5 else "largest"
        return f"{self.label}: the best rate, {self.best:g}, is among the {end} that were tried: widen the range with span="


def lengths(resolved: dict[str, Any], rungs: int) -> list[str]:
    """The overrides for each length of training, the shortest first: the last one is the configuration's own."""
    train = resolved["train"]
    key = "epochs" if train["max_steps"] is None else "max_steps"
    values = sorted({max(1, round(int(train[key]) / 2**k)) for k in range(rungs)})
    return [f"train.{key}={value}" for value in values]


def tune(request: TuneRequest, optimizer: str, runs: Study) -> Tuned:
    """Makes the trials of one method."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    resolved = compose.resolve(request.compose(optimizer))
    lr = float(resolved["optimizer"]["lr"])
    found = Tuned(optimizer, labels.method(resolved), lr / request.keys.span, lr * request.keys.span)
    rungs = lengths(resolved, request.keys.rungs)

    def objective(trial: optuna.Trial) -> float:
        rate = float(f"{trial.suggest_float('lr', found.low, found.high, log=True):.3g}")
        found.tried.append(rate)
        value = -math.inf
        for k, length in enumerate(rungs):
            composed = request.compose(optimizer, f"optimizer.lr={rate!r}", "seed=0", length)
            said = score(runs.run(f"trial {trial.number + 1}: lr {rate:g}, {length.removeprefix('train.')}", composed))
            if said is None:
                raise optuna.TrialPruned  # its loss diverged, or nothing was run
            value = said
            trial.report(value, 2**k)
            if k + 1 < len(rungs) and trial.should_prune():
                raise optuna.TrialPruned
        found.whole += 1
        if found.score is None or value > found.score:
            found.best, found.score = rate, value
        return value

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # The same places of the range for every method, spread evenly, whatever the trials before them gave.
        sampler = optuna.samplers.QMCSampler(scramble=True, seed=0, warn_independent_sampling=False)
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
        study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
        study.optimize(objective, n_trials=request.keys.budget)
    return found


def tune_all(request: TuneRequest) -> int:
    """Tunes every method, trains the chosen rates and prints them. Exit status; raises UserError before anything has run."""
    made = {name: request.compose(name) for name in request.optimizers}
    resolved = {name: compose.resolve(one) for name, one in made.items()}
    first = resolved[request.optimizers[0]]
    refuse_not_waiting(first)
    for name, one in made.items():
        workload = compose.check(one)
        if workload.synthetic:
            raise UserError("tuning is of accuracies and needs real data: give data.path=ROOT")
        if not resolved[name]["workload"].get("held_out"):
            raise UserError("rates are chosen by a part of the training data that is held out: give held_out=N")
    runs = Study(first["exp"], first["results_dir"], (), first, request.dry_run)
    if not request.dry_run:
        start.check_results(first)
    tuned = [tune(request, name, runs) for name in request.optimizers]
    for method in tuned:
        if method.best is None:
            continue
        length = lengths(resolved[method.optimizer], request.keys.rungs)[-1]
        for seed in range(request.keys.seeds):
            composed = request.compose(method.optimizer, f"optimizer.lr={method.best!r}", f"seed={seed}", length)
            runs.run(f"chosen: lr {method.best:g}, seed {seed}", composed)
    if request.dry_run:
        say(f"at least {runs.todo} runs to do, of {len(tuned)} methods: the first ones decide how many follow")
        return 0
    table = as_table(tuned, request)
    table.show(terminal())
    track(table, first)
    return runs.close()


def track(table: Table, config: dict[str, Any]) -> None:
    """The table as a tracked run in the group of the trials."""
    name = compose.new_name(config["exp"], "tune")
    folder = Path(config["output_dir"]) / config["exp"] / name
    run = tracking.start(About(name, None, "tuning", {k: v for k, v in config.items() if k != "optimizer"}, folder))
    run.table("tuned", *table.printed())
    run.finish({})


def as_table(tuned: Sequence[Tuned], request: TuneRequest) -> Table:
    """What was chosen for each method, and from how much."""
    columns = [
        Column("method", "left", value=lambda t: t.label),
        Column("lr", value=lambda t: DASH if t.best is None else f"{t.best:g}"),
        Column(HELD_OUT, value=lambda t: DASH if t.score is None else f"{abs(t.score):.2f}"),
        Column("range", value=lambda t: f"{t.low:.3g} to {t.high:.3g}"),
        Column("trials", value=lambda t: f"{len(t.tried)}"),
        Column("at whole length", value=lambda t: f"{t.whole}"),
    ]
    warned = tuple(Note(f"Warning: {t.warning}.", "caution") for t in tuned if t.warning)
    title = f"{request.keys.budget} trials of each method, chosen by a part of the training data that was held out"
    return Table.of(columns, tuned, title=title, footnotes=warned)


@command.report_errors
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__, "the keys above, and Hydra overrides")
    parser.add_argument("--dry-run", action="store_true", help="say what is recorded and what is to run, start nothing")
    options = parser.parse_intermixed_args(arguments)
    return tune_all(TuneRequest.of(options.overrides, options.dry_run))


if __name__ == "__main__":
    command.start(main)
