"""Runs a grid of settings, learning rates and seeds of one experiment.

    python experiments/sweep.py sweep=cser_cifar100 data.path=ROOT [key=value]
    python experiments/sweep.py sweep=cser_cifar100 --methods a,b --dry-run

The grid is conf/sweep/NAME.yaml. Where it chooses a learning rate (`choose`), the other seeds run with the best rate only.
Recorded runs are not run again, so the same command continues an interrupted sweep. A run whose loss diverged counts as done.
Type the same command in several terminals, one for each GPU or core, to share the runs. --published counts the runs of
results/published as done and so extends a published study. The experiment's table is written at the end. In W&B the runs are
the group sweep-NAME.
Exit status: 0 success; 1 a run failed, other than by divergence; 2 bad input; 130 Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script
    import _script  # noqa: F401

from experiments.config import compose, sweeps
from experiments.config.sweeps import SweepRun
from experiments.records.record import PUBLISHED
from experiments.report import accuracy
from experiments.report.table import terminal
from experiments.runs import command, start
from experiments.runs.study import Study, SweepQueue, refuse_name, refuse_not_waiting
from launch.errors import UserError


def sweep(
    rows: Sequence[SweepRun],
    exp: str,
    given: Sequence[str],
    dry_run: bool,
    others: Sequence[Path] = (),
    wandb_group: str | None = None,
) -> int:
    """Runs what is missing. Returns the exit status; raises UserError before anything has run.

    others: as in `Study`. wandb_group: as in `SweepQueue`.
    """
    refuse_name(given)
    own = {"exp", "optimizer", "optimizer.lr", "seed", *varied(rows)}
    if wrong := [o for o in given if compose.key_of(o) in own]:
        raise UserError(f"{wrong[0]} is the sweep's own: use --methods, --rates and --seeds")
    if not rows:
        raise UserError("nothing is left to run: --methods, --rates or --seeds are empty")
    first = compose.resolve(compose.compose([*rows[0].overrides, *given]))
    if any(row.candidates for row in rows):
        refuse_not_waiting(first)
    if first["scale"]["name"] == "paper" and not any(o.startswith("scale=") for o in (*rows[0].overrides, *given)):
        raise UserError(
            "with data and a GPU scale=auto is paper: say scale=quick, for which the study's settings are, "
            "or scale=paper"
        )
    by, tables = chosen_by(rows), int(first["parity"]["choose_seeds"])
    if first["workload"].get("held_out") and by not in (None, tables):
        raise UserError(
            f"this sweep chooses learning rates by {by} of its seeds (choose_seeds), and the tables of {exp} by {tables}: "
            f"say parity.choose_seeds={by} in conf/exp/{exp}.yaml or in the sweep's overrides"
        )
    # One of each method is checked before the first one starts: a mistake shows now, not after an hour.
    for row in {
        tuple(o for o in row.overrides if not o.startswith(("optimizer.", "seed="))): row for row in rows
    }.values():
        compose.check(compose.compose([*row.overrides, *given]))
    study = Study(exp, first["results_dir"], others, first, dry_run)
    grid = SweepQueue(rows, study, given, wandb_group, waits=first["cluster"].get("wait", True))
    if dry_run:
        grid.list()
        return 0
    start.check_results(first)
    grid.run()
    for scored in accuracy.build([r for row in rows if (r := grid.of(row.overrides)) is not None]):
        accuracy.as_table(scored).show(terminal(), verbose=False)
    return study.close(f" of {len(rows)}", written=len(grid.tried) > study.failed)


def chosen_by(rows: Sequence[SweepRun]) -> int | None:
    """How many seeds choose between rates whose runs are rows themselves, so that tables choose again; None: nothing does."""
    own = {row.overrides for row in rows}
    every = [rate for row in rows if len(row.candidates) > 1 for rate in row.candidates if own.issuperset(rate)]
    return max(map(len, every), default=None)


def varied(rows: Sequence[SweepRun]) -> set[str]:
    """The optimizer's arguments that differ between rows of one optimizer: what is typed would undo that in all of them."""
    values: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        keys = {compose.key_of(o): o for o in row.overrides}
        for key in keys:
            if key.startswith("optimizer."):
                values.setdefault((keys["optimizer"], key), set()).add(keys[key])
    return {key for (_, key), different in values.items() if len(different) > 1}


@command.report_errors
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__, "sweep=NAME, and Hydra overrides")
    parser.add_argument("--methods", help="optimizer names to keep, separated by commas; default: all")
    parser.add_argument("--rates", help="learning rates instead of the sweep's")
    parser.add_argument("--seeds", help="seeds instead of the sweep's")
    parser.add_argument("--dry-run", action="store_true", help="say what is recorded and what is to run, start nothing")
    parser.add_argument("--published", action="store_true", help="what is in results/published counts as recorded")
    options = parser.parse_intermixed_args(arguments)
    named = [o.partition("=")[2] for o in options.overrides if o.startswith("sweep=")]
    if len(named) != 1:
        raise UserError(f"say which sweep: sweep=NAME, one of {', '.join(sweeps.names())}")
    chosen = sweeps.load(named[0])
    rates, seeds = command.numbers("rates", options.rates), command.whole("seeds", options.seeds)
    rows = sweeps.rows(chosen, command.names(options.methods), rates, seeds)
    given = [o for o in options.overrides if not o.startswith("sweep=")]
    others = [PUBLISHED] if options.published else []
    return sweep(rows, chosen.exp, given, options.dry_run, others, f"sweep-{Path(named[0]).stem}")


if __name__ == "__main__":
    command.start(main)
