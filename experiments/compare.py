"""Compares the methods of an experiment on this machine and prints their table.

    python experiments/compare.py +exp=resnet50 cluster.nodes=4 [key=value]
    python experiments/compare.py +exp=resnet50 --methods sgdm,birder
    python experiments/compare.py --paper cser

The variants are those that the experiment lists under `compare`. Records, tables and plots in `results` are brought up
to date. With synthetic data only times count: timing is interleaved in one world of ranks (experiments/timing/turns.py).
Otherwise each has its own run. `timing.mode` chooses. Under torchrun timing is interleaved in that world.

--paper compares all methods of a paper (conf/paper): bytes per step, rounds, step time and metric. A comparison that is
recorded is shown again, not run again, so the same command continues after an interruption.
Exit status: 0 success; 1 a run failed; 2 bad input; 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Sequence

if not __package__:  # run as a script
    import _script  # noqa: F401

from experiments.config import compose, papers
from experiments.config.compose import Composed
from experiments.records import labels
from experiments.report import speedup_table, tables
from experiments.report.table import Table
from experiments.runs import command, start
from experiments.runs.study import Study, jobs
from experiments.runs.tracked_comparison import TrackedComparison
from experiments.timing import calibrate, plan
from launch.errors import UserError
from launch.failure import RunFailed
from launch.spec import RunSpec
from launch.words import say, there_are

BY_NODES = "comm.topology=hierarchical"
"""Of a variant that is compared only where nodes have more than one rank."""


def variants(base: Composed, methods: list[str] | None) -> list[Composed]:
    """Every variant of the experiment, composed, in the world of torchrun if there is one. The user's own overrides come
    last and so win.

    methods: optimizer names (files in conf/optimizer) to keep; None keeps all. Raises UserError.
    """
    if not (lists := compose.compared(base)):
        raise UserError(f"experiment '{base.config.exp}' lists nothing to compare: add +exp=NAME, or use run.py")
    named = base.config.run_name is not None
    exp = [o for o in base.overrides if o.startswith("+exp=")]
    others = [o for o in base.overrides if o not in exp]
    if any(o.startswith("optimizer=") for o in others):
        raise UserError("compare.py chooses the optimizers: keep some of them with --methods NAME,NAME (make: OPT=...)")
    made = []
    for variant in lists:
        # Variants share everything, so a run name given by the user must tell them apart.
        words = ["no-communication" if v == "comm.enabled=false" else v.rpartition("=")[2] for v in variant]
        slug = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(words)).strip("-") or "variant"
        name = [f"run_name={base.config.run_name}-{slug}"] if named else []
        one = compose.compose([*exp, *variant, *others, *name])
        if start.under_torchrun():
            start.adopt_torchrun_world(one)
        if one.config.cluster.get("_target_") == labels.VIRTUAL and not one.config.comm.enabled:
            continue  # no bound without times
        # With one rank a node, nodes as workers are the ranks as workers: the same run once more.
        if BY_NODES not in variant or one.config.cluster.ranks_per_node != 1:
            made.append(one)
    known = sorted({m.choices["optimizer"] for m in made})
    if unknown := [m for m in methods or () if m not in known]:
        raise UserError(f"experiment '{base.config.exp}' compares no '{unknown[0]}'{there_are(unknown[0], known)}")
    if not (kept := [m for m in made if methods is None or m.choices["optimizer"] in methods]):
        raise UserError("--methods leaves nothing to compare")
    return kept


def compare(
    overrides: list[str],
    methods: list[str] | None,
    show: Callable[[str, str], list[Table]] | None = None,
) -> int:
    """Runs every variant and prints the table. Returns the exit status; raises UserError before anything has run.

    show: prints what was measured, from the results folder and the name of the group, and returns the tables that it has
          printed; default: `tables.print_group`.
    """
    base = compose.compose(overrides)
    chosen = variants(base, methods)
    # All are checked before the first one starts: a mistake shows now, not after an hour.
    workloads = [compose.check(variant) for variant in chosen]
    first = compose.resolve(chosen[0])
    apart = plan.reason_not_interleaved([compose.resolve(variant) for variant in chosen], workloads[0].synthetic)
    start.check_results(first)
    say(start.headline(chosen[0], workloads[0]))
    group = compose.new_name(first["exp"])
    # Made before a tracker begins: it may be refused.
    world = plan.make(chosen, group, run_name=base.config.run_name) if apart is None else None
    dry_run, waits = first["cluster"]["dry_run"], first["cluster"].get("wait", True)
    with contextlib.ExitStack() as until_the_end:

        def tracked() -> TrackedComparison:
            return until_the_end.enter_context(TrackedComparison(chosen, group))

        comparison_run = tracked() if apart is None and waits and not dry_run else None
        status, failed = in_turns(chosen, group, world) if apart is None else _one_by_one(chosen, group)
        if not waits:
            say("`make tables` prints the table once these jobs have ended; no tracker records it.")
        elif failed < len(chosen) and not dry_run:
            tables.write(first["results_dir"], first["exp"])
            printed = (show or tables.print_group)(first["results_dir"], group)
            # Runs that follow each other are tracked by themselves: the comparison adds the table.
            comparison_run = comparison_run or tracked()
            comparison_run.record(printed)
        if comparison_run is not None:
            comparison_run.status = status
    if failed and len(chosen) > 1:
        say(f"{failed} of {len(chosen)} runs failed or were not started", sys.stderr)
    return status


def _one_by_one(chosen: list[Composed], group: str) -> tuple[int, int]:
    """One run after the other. Returns the exit status and how many failed or were not started."""
    calibrate.settle(chosen)
    failed = status = 0
    for number, variant in enumerate(chosen, start=1):
        say(f"[{number}/{len(chosen)}] {labels.method(compose.resolve(variant))}")
        try:
            start.launch(variant, group=group)
        except RunFailed as error:
            status = command.report(error)
            failed += 1
        except UserError as error:
            # Bad input is bad for the rest too.
            status = command.report(error)
            failed += len(chosen) - number + 1
            break
    return status, failed


def in_turns(chosen: list[Composed], group: str, world: RunSpec | None = None) -> tuple[int, int]:
    """All in one world. Where a method breaks it, the others go on in another one. Returns as `_one_by_one`.

    world: the first one; None: it is made here.
    """
    left, failed, status, attempt = chosen, 0, 0, 0
    while left:
        attempt += 1
        spec = world if world is not None and attempt == 1 else plan.make(left, group, attempt)
        try:
            plan.launcher(spec.config).launch(spec)
        except RunFailed as error:
            status = command.report(error)
            blamed = plan.whose_turn(spec)
            kept = [c for c, v in zip(left, spec.config["variants"], strict=True) if blamed not in (None, v["id"])]
            failed += len(left) - len(kept)
            left = kept
            continue
        except UserError as error:
            return command.report(error), failed + len(left)
        lines = plan.failures(spec)
        for line in lines:
            status = command.report(RunFailed(line))
        return status, failed + len(lines)
    return status, failed


def of_paper(name: str, given: list[str], methods: list[str] | None, verbose: bool = False) -> int:
    """Runs and prints all comparisons of a paper; returns the worst exit status. Raises UserError before anything has run."""
    if any(o.startswith("+exp=") for o in given):
        raise UserError("experiments are the paper's own: python experiments/compare.py +exp=NAME runs one of them")
    paper = papers.load(name)
    parts = [(part, part.kept(given, methods)) for part in paper.asked(given)]
    known = {m for part in paper.parts for m in part.kept(given, None)}
    if unknown := [m for m in methods or () if m not in known]:
        raise UserError(f"'{name}' compares no '{unknown[0]}'{there_are(unknown[0], sorted(known))}")
    view, kinds = speedup_table.as_papers, ("speedup", "accuracy")
    status, show = 0, functools.partial(tables.print_group, view=view, kinds=kinds, verbose=verbose)
    for part, chosen in parts:
        if chosen:
            status = max(status, _part(part.given(given), chosen, show))
    return status


def _part(overrides: list[str], methods: list[str], show: Callable[[str, str], list[Table]]) -> int:
    """One comparison of a paper, unless it is recorded: then it is shown again. Returns as `compare`."""
    made = variants(compose.compose(overrides), methods)
    first = compose.resolve(made[0])
    study = Study(first["exp"], first["results_dir"], config=first)
    if first["cluster"]["dry_run"]:
        return compare(overrides, methods, show)
    if (group := study.together(made)) is None:
        if not first["cluster"].get("wait", True) and (waiting := jobs(made)):
            say(f"{study.exp}: not submitted again, SLURM's jobs have not ended: {', '.join(waiting)}")
            return 0
        return compare(overrides, methods, show)
    study.warn(made[0])
    say(f"{study.exp}: recorded as {group}; results_dir=FOLDER measures it again")
    show(study.results_dir, group)
    return int(any(r.status != "completed" for r in study.known.values() if r.group == group))


def join(overrides: list[str], methods: list[str] | None) -> int:
    """Times the variants as one rank of the world that torchrun has made. Returns as `compare`."""
    from experiments.timing import turns

    rank = int(os.environ["RANK"])
    base = compose.compose(overrides)
    chosen = variants(base, methods)
    for variant in chosen:
        workload = compose.check(variant, rank_zero=rank == 0)
    resolved = [compose.resolve(variant) for variant in chosen]
    if apart := plan.reason_not_interleaved(resolved, workload.synthetic):
        raise UserError(f"under torchrun timing is interleaved, and these are run apart: {apart}; use run.py for each")
    group = compose.new_name(resolved[0]["exp"])
    if rank == 0:
        start.check_results(resolved[0])
    made = plan.make(chosen, group, run_name=base.config.run_name) if rank == 0 else None
    status = 0
    with contextlib.ExitStack() as until_the_end:
        spec = until_the_end.enter_context(start.shared(made))
        if rank == 0:
            comparison_run = until_the_end.enter_context(TrackedComparison(chosen, spec.id))
        start.as_rank(spec, rank, turns.train, plan.write_failed)
        if rank == 0:
            tables.write(spec.config["results_dir"], spec.exp)
            comparison_run.record(tables.print_group(spec.config["results_dir"], group))
            for line in plan.failures(spec):
                status = command.report(RunFailed(line))
            comparison_run.status = status
    return status


@command.report_errors
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__, "Hydra overrides, +exp=NAME among them")
    parser.add_argument("--methods", help="optimizer names to keep, separated by commas; default: all")
    parser.add_argument(
        "--paper", choices=papers.names(), help="the methods of a paper, in the place of one experiment"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands, start nothing")
    parser.add_argument("--verbose", action="store_true", help="also how it was measured, and what was published")
    options = parser.parse_intermixed_args(arguments)
    methods = command.names(options.methods)
    overrides = [*options.overrides, *["cluster.dry_run=true"] * options.dry_run]
    if start.under_torchrun():
        if options.paper:
            raise UserError("--paper starts its runs itself: do not call it under torchrun")
        return join(overrides, methods)
    if options.paper:
        return of_paper(options.paper, overrides, methods, options.verbose)
    return compare(overrides, methods, functools.partial(tables.print_group, verbose=True) if options.verbose else None)


if __name__ == "__main__":
    command.start(main)
