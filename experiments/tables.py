"""Makes tables, plots and pages from records alone.

    python experiments/tables.py [--results DIR] [--exp NAME] [--check]
    python experiments/tables.py --group GROUP [--verbose]

Without --results it updates results/published and results/local, and the figures of README and docs
(experiments/report/documents.py). --group prints the table of a group of runs and writes nothing.
Exit status: 0 success; 1 --check found a difference; 2 bad input.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script
    import _script  # noqa: F401

from experiments.cells import suite as suites
from experiments.records.record import LOCAL, PUBLISHED, read_all
from experiments.report import documents, figure, replay_page, tables
from experiments.runs import command
from launch.errors import UserError


def further(results: Path) -> dict[Path, bytes]:
    """Besides the tables of experiments: pages of suites that have a finished record, and of the published records the
    documents."""
    measured = {r.exp for r in read_all(results) if r.status == "completed"}
    pages = [replay_page.render(suites.load(name), results) for name in suites.names() if name in measured]
    pages += [documents.render(results)] if results.resolve() == PUBLISHED.resolve() else []
    return {path: content for page in pages for path, content in page.items()}


def write(results: Path, exp: str | None = None) -> list[Path]:
    """Brings everything made of a results folder up to date, or the tables of one experiment. Returns what it made."""
    return tables.write(results, exp, {} if exp else further(results))


def check(results: Path, exp: str | None = None) -> list[str]:
    """Names of the files on disk that differ from what the records say."""
    with figure.undrawn():
        return tables.check(results, exp, {} if exp else further(results))


@command.report_errors
def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__)
    parser.add_argument("--results", type=Path, help=f"results folder; default: the published one and {LOCAL}")
    parser.add_argument("--exp", help="this experiment only")
    parser.add_argument("--group", help="print the table of this group of runs, write nothing")
    parser.add_argument(
        "--verbose", action="store_true", help="with --group: also how it was measured and how to read it"
    )
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 if anything is out of date")
    args = parser.parse_args(argv)
    if args.verbose and args.group is None:
        raise UserError("--verbose is of the table of a group of runs: add --group=NAME")
    if args.group is not None and (args.check or args.exp):
        raise UserError("--group prints a table and writes nothing: leave out --check and --exp")
    own = Path(LOCAL)
    folders = [args.results] if args.results else [f for f in (PUBLISHED, own) if f.is_dir()]
    if args.exp and not args.results:
        folders = [f for f in folders if any(r.exp == args.exp for r in read_all(f))] or folders[:1]
    if args.check:
        wrong = [str(f / name) if len(folders) > 1 else name for f in folders for name in check(f, args.exp)]
        if wrong:
            print(f"out of date, run `make tables`: {', '.join(wrong)}", file=sys.stderr)
        return int(bool(wrong))
    if args.group is not None:
        tables.print_group(args.results or own, args.group, verbose=args.verbose)
        return 0
    written = [path for f in folders for path in write(f, args.exp)]
    print("\n".join(map(str, written)) or f"no tables: no completed run in {args.results or own}/records")
    return 0


if __name__ == "__main__":
    command.start(main)
