"""Publishes runs: `python experiments/publish.py GROUP`, or `--exp NAME` for every run of an experiment.

Moves their records and curves from results/local to results/published. Then brings the tables and plots of both up to date.
Only runs of committed code are evidence: a group with a run of uncommitted code is refused. Afterwards, commit
results/published. A later record takes the place of a published one of the same name, with a line that says so; an older one
is refused. Exit status: 0 success; 1 moved, but not all tables are up to date; 2 bad input, nothing was moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script
    import _script  # noqa: F401

from experiments import tables
from experiments.records.record import LOCAL, PUBLISHED, ResultRecord, place, read_all, write_file
from experiments.runs import command
from launch.errors import UserError
from launch.failure import RunFailed
from launch.words import say


def chosen(own: Path, group: str | None, exp: str | None) -> list[ResultRecord]:
    """The records to publish. Raises UserError when there are none, or one of them is not evidence."""
    what = f"group '{group}'" if group else f"experiment '{exp}'"
    there = read_all(own)
    found = [r for r in there if (r.group == group if group else r.exp == exp)]
    if not found:
        kind, names = (
            ("groups", {r.group for r in there if r.group}) if group else ("experiments", {r.exp for r in there})
        )
        raise UserError(f"no record of {what} in {own / 'records'}; {kind} there: {', '.join(sorted(names)) or 'none'}")
    for r in found:
        if r.git.get("dirty") is not False:
            state = "changed code" if r.git.get("dirty") else "code of an unknown commit"
            raise UserError(f"{what} is not published: {r.id} ran {state}; commit, run it again, publish that")
        if not place(own, r.id).is_file():
            raise UserError(f"{what} is not published: the record of {r.id} has another name than {place(own, r.id)}")
        if r.curve is not None and not (own / r.curve).is_file():
            raise UserError(f"{what} is not published: {r.id} names the curve {own / r.curve}, which is not there")
    return found


def publish(own: Path, published: Path, group: str | None = None, exp: str | None = None) -> list[Path]:
    """Moves records and curves and renews the tables of both folders. Returns the published records. Raises UserError."""
    if own.resolve() == published.resolve():
        raise UserError(f"--results and --published are the same folder, {published}: there is nothing to move")
    found = chosen(own, group, exp)
    # Read before anything is moved: else the tables, which come last, would be the first to find what is broken there.
    there = {r.id: r for r in read_all(published)}
    replaced = [(there[r.id], r) for r in found if r.id in there and there[r.id] != r]
    for old, new in replaced:
        if old.time >= new.time:
            raise UserError(
                f"{new.id} is published already, of {old.time}, and another one in {own} of {new.time}: remove one"
            )
    names = [name for r in found for name in (r.curve, f"records/{r.id}.json") if name is not None]
    for name in names:  # all are there before any goes; a record comes after its curve
        write_file(published / name, (own / name).read_bytes(), "published file")
    for name in reversed(names):
        (own / name).unlink()
    for old, new in replaced:
        say(f"{old.id}: what was published of {old.time} is replaced by that of {new.time}")
    for folder in (published, own):
        try:
            tables.write(folder)
        except UserError as error:  # a curve of another run that is gone
            raise RunFailed(
                f"the runs are published, and the tables of {folder} are not up to date: {error}"
            ) from error
    return [place(published, r.id) for r in found]


@command.report_errors
def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__)
    parser.add_argument("group", nargs="?", help="a group of runs, as the table of a comparison names it")
    parser.add_argument(
        "--exp", help="every run of this experiment instead (runs without a group: methods, bench, paper)"
    )
    parser.add_argument("--results", type=Path, default=Path(LOCAL), help=f"where the runs are; default: {LOCAL}")
    parser.add_argument("--published", type=Path, default=PUBLISHED, help="where they go; default: results/published")
    args = parser.parse_args(argv)
    if bool(args.group) == bool(args.exp):
        raise UserError("name one group of runs, or one experiment: make publish GROUP=NAME, make publish EXP=NAME")
    for path in publish(args.results, args.published, args.group, args.exp):
        print(path)
    return 0


if __name__ == "__main__":
    command.start(main)
