"""The papers' claims with a verdict: `python experiments/claims.py` writes docs/claims.md from the published records.

The same records give the same bytes. `--check` writes nothing and says whether the page is that of the records.
Exit status: 0; 1 --check found a difference; 2 bad input.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script
    import _script  # noqa: F401

from experiments.records.record import ROOT, write_file
from experiments.report import claims_page
from experiments.runs import command

PAGE = ROOT / "docs" / "claims.md"


@command.told
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line's work and exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the page differs")
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    made = claims_page.text()
    if options.check:
        same = options.out.is_file() and options.out.read_text(encoding="utf-8") == made
        wrong = f"{options.out} is not that of the records: python experiments/claims.py"
        print("as the records have it" if same else wrong)
        return int(not same)
    write_file(options.out, made.encode(), "the page of claims")
    print(options.out)
    return 0


if __name__ == "__main__":
    command.start(main)
