"""Puts all results on one page for a browser: `python experiments/page.py`.

Writes results/published/index.html, which holds plotly and needs no network.
Exit status: 0 success; 2 bad input.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script
    import _script  # noqa: F401

from experiments.records.record import PUBLISHED, read_all, write_file
from experiments.report import answered, html_page, pay
from experiments.runs import command
from launch.errors import UserError


@command.report_errors
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__)
    parser.add_argument("--results", default=str(PUBLISHED), help="folder of records; default: results/published")
    parser.add_argument("--out", type=Path, help="default: index.html in that folder")
    options = parser.parse_args(arguments)
    path = options.out or Path(options.results) / "index.html"
    try:
        from plotly.offline import get_plotlyjs

    except ImportError:
        raise UserError("plotly is not installed: pip install --group experiments") from None
    studies = answered.known_verdicts(Path(options.results))
    records = read_all(options.results)
    content = html_page.data(options.results, records, studies) | {"pay": pay.data(studies=studies)}
    write_file(path, html_page.html(content, html_page.measured(records), get_plotlyjs()).encode(), "the page")
    print(path)
    return 0


if __name__ == "__main__":
    command.start(main)
