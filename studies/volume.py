"""What 0/1 Adam sends over a whole run, from its schedule alone: `python studies/volume.py [--steps 118000,152511]`.

Prints the tables beside the published numbers and writes them to tables/zero_one_adam_volume.md of the results folder.
Nothing is trained. Exit status: 0; 2 bad input.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

if not __package__:  # run as a script
    import _script  # noqa: F401

from experiments.records.record import LOCAL
from experiments.report import volume
from experiments.report.volume import Setting
from experiments.runs import command
from launch.errors import UserError


def parse(arguments: Sequence[str] | None) -> tuple[Setting, list[int], argparse.Namespace]:
    """The command line. Raises UserError for numbers out of range."""
    default = Setting()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", default=",".join(map(str, volume.LENGTHS)), help="lengths of the run, separated by commas"
    )
    parser.add_argument("--kappa", type=int, default=default.kappa, help="variance rounds before their gap doubles")
    parser.add_argument("--freeze", type=int, default=default.warmup_steps, help="last step with a variance round")
    parser.add_argument(
        "--doubling", type=int, default=default.local_doubling, help="steps before the interval doubles"
    )
    parser.add_argument("--limit", type=int, default=default.local_limit, help="largest interval between syncs")
    parser.add_argument("--results", default=LOCAL, help="results folder")
    parser.add_argument("--print-only", action="store_true", help="write no file")
    options = parser.parse_args(arguments)
    numbers = options.steps.split(",")
    if not all(n.strip().isdigit() and int(n) > 0 for n in numbers):
        raise UserError(f"--steps must be whole numbers above 0, such as 118000,152511, not '{options.steps}'")
    for name in ("kappa", "freeze", "doubling", "limit"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} must be at least 1, not {getattr(options, name)}")
    setting = Setting(options.kappa, options.freeze, options.doubling, options.limit)
    return setting, [int(n) for n in numbers], options


@command.told
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line's work and exit status."""
    setting, lengths, options = parse(arguments)
    volume.show(setting, lengths)
    if not options.print_only:
        print(f"table: {volume.write(setting, lengths, options.results)}")
    return 0


if __name__ == "__main__":
    command.start(main)
