"""Tables and plots from records alone (`experiments/tables.py` is the command).

The same records give the same bytes. Writes `<results>/tables/<exp>.md` and `<results>/plots/<exp>*.png`, and removes
those it wrote before whose records are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from experiments.records.record import LOCAL, ResultRecord, place, read_all, write_file
from experiments.report import (
    accuracy,
    accuracy_page,
    against_bytes,
    bytes_plot,
    evidence,
    figure,
    glance,
    methods_table,
    plots,
    published,
    speedup,
    speedup_table,
    time_to_loss,
)
from experiments.report.formats import DASH
from experiments.report.table import Table, terminal
from launch.errors import UserError

NOTES = """\
Speedup = t_baseline / t_method, medians of the step time on the same machine: of methods in turns where the table says so,
with intervals, else of runs made one after the other, without; the baselines are the fp32 and the bf16 all-reduce of the
same table. The run without communication is the bound for any method. Payload is counted where it is sent, NIC traffic is
read from the interface. {dash} means that no record holds the number. Sizes are decimal (1 MB = 10^6 bytes).
"""


def render(records: Sequence[ResultRecord], results_dir: Path) -> dict[str, bytes]:
    """All tables and plots of `records`: path below `results_dir` -> content. Reads curves, writes nothing."""
    files: dict[str, bytes] = {}
    pages: dict[str, list[str]] = {}
    for table in speedup.build(list(records)):
        pages.setdefault(table.records[0].exp, []).append(speedup_table.markdown(table))
        if (png := plots.step_times(table)) is not None:
            files[f"plots/{table.slug}_step_time.png"] = png
    timed = set(pages)
    scores: dict[str, list[str]] = {}
    for scored in accuracy.build(list(records)):
        png = plots.loss_curves(scored, results_dir)
        if png is not None:
            files[f"plots/{scored.slug}_curve.png"] = png
        section = accuracy.markdown(scored, plot=png is not None)
        scores.setdefault(scored.cells[0].records[0].exp, []).append(section)
    studies = accuracy_page.studies(records)
    race = time_to_loss.build(studies, results_dir)
    drawn = {"accuracy": glance.picture(studies), "accuracy_bytes": bytes_plot.picture(studies)}
    drawn["time_to_loss"] = None if race is None else time_to_loss.picture(race)
    files |= {f"plots/{name}.png": png for name, png in drawn.items() if png is not None}
    for exp in sorted(timed | set(scores)):
        text = [f"<!-- {figure.MARK} from the records; do not edit. -->", f"# {exp}", ""]
        if exp == methods_table.EXP:
            for methods in methods_table.build(records):
                text += ["## All methods", "", methods_table.markdown(methods)]
                against = against_bytes.build(methods)
                if against is not None and (png := plots.against_bytes(against)) is not None:
                    files[methods.plot_name] = png
        if exp in timed:
            text += ["## Time and bytes", "", NOTES.format(dash=DASH)]
            text += [
                *_paragraphs(published.beside(exp, "speedup")),
                *published.tables_beside(exp, "speedup"),
                *pages[exp],
            ]
        if exp in scores:
            text += ["## Accuracy", "", *_paragraphs(published.beside(exp, "accuracy"))]
            text += [*published.tables_beside(exp, "accuracy"), *scores[exp]]
        files[f"tables/{exp}.md"] = ("\n".join(text).rstrip() + "\n").encode()
    return files


def write(results_dir: str | Path, exp: str | None = None) -> list[Path]:
    """Brings tables and plots up to date with the records, of one experiment or of all. Returns what it wrote."""
    results = Path(results_dir)
    files = render(_records(results, exp), results)
    for name, content in files.items():
        if not same(results / name, content):  # a picture of the same data has other bytes with another matplotlib
            write_file(results / name, content, "table" if name.endswith(".md") else "plot")
    if exp is None:
        for stale in _stale(results, files):
            stale.unlink()
    return [results / name for name in sorted(files)]


def check(results_dir: str | Path, exp: str | None = None) -> list[str]:
    """Names of the tables and plots on disk that differ from what the records say: changed, missing or left over."""
    results = Path(results_dir)
    files = render(_records(results, exp), results)
    wrong = [name for name, content in sorted(files.items()) if not same(results / name, content)]
    return wrong + ([p.relative_to(results).as_posix() for p in _stale(results, files)] if exp is None else [])


def print_group(
    results_dir: str | Path,
    group: str,
    console: Console | None = None,
    view: Callable[[speedup.SpeedupTable, speedup.SpeedupTable | None], Table] = speedup_table.closing,
    kinds: Sequence[str] = ("speedup",),
    verbose: bool = False,
) -> list[Table]:
    """Prints what a group of runs has come to: the verdict, the table, where records, table and plot lie. Raises UserError.

    Returns the tables that it has printed.

    view:    what is shown of the measured table and of the published one of the same setting (None: there is none).
    kinds:   of the papers' numbers beside it, "speedup" and "accuracy".
    verbose: also how it was measured, how to read it, and what was published.
    """
    results = Path(results_dir)
    console = console or terminal()
    records = [r for r in read_all(results) if r.group == group]
    if not records:
        raise UserError(f"no record of group {group!r} in {results / 'records'}")
    timed = speedup.build(records, group)
    printed: list[Table] = []
    if not timed:  # virtual workers
        for scored in accuracy.build(records):
            printed.append(accuracy.as_table(scored))
            printed[-1].show(console, verbose)
    for table in timed:
        known = evidence.records(results, table.records[0].exp)
        theirs = evidence.matching(table, known)
        printed.append(view(table, theirs))
        printed[-1].show(console, verbose)
        for note in evidence.note(table, theirs, known) if verbose else ():
            note.show(console)
    for exp in sorted({r.exp for r in records}) if verbose else ():
        for sentence in (said for kind in kinds for said in published.beside(exp, kind)):
            console.print(sentence, style="dim", markup=False, highlight=False, soft_wrap=True)
    print_places(console, results, group)
    if not verbose:
        folder = "" if str(results) == LOCAL else f" --results {results}"
        again = f"python experiments/tables.py{folder} --group {group} --verbose"
        console.print("more:   " + again, style="dim", soft_wrap=True, markup=False, highlight=False)
    return printed


def print_places(console: Console, results: Path, group: str) -> None:
    """Says where the records, the table and the plots of a group of runs lie."""
    everything = read_all(results)
    records = [r for r in everything if r.group == group]
    places = [("record", place(results, r.id)) for r in records]
    places += [("table", results / "tables" / f"{exp}.md") for exp in sorted({r.exp for r in records})]
    places += [("plot", path) for path in plots_of(everything, results, group)]
    for what, path in places:
        if path.is_file():
            console.print(f"{what + ':':<8}{path}", soft_wrap=True, markup=False, highlight=False)


def plots_of(everything: Sequence[ResultRecord], results: Path, group: str) -> list[Path]:
    """Where the plots of a group of runs lie, or would. everything: the records of `results`."""
    drawn = [f"{t.slug}_step_time.png" for t in speedup.build(list(everything)) if t.group == group]
    drawn += [
        f"{t.slug}_curve.png"
        for t in accuracy.build(list(everything))
        if any(r.group == group for cell in t.cells for r in cell.records)
    ]
    return [results / "plots" / name for name in drawn]


def _records(results: Path, exp: str | None) -> list[ResultRecord]:
    if not results.is_dir():
        raise UserError(f"no results folder at {results}: give --results DIR")
    records = [r for r in read_all(results) if exp in (None, r.exp)]
    if exp is not None and not records:
        raise UserError(f"no record of experiment {exp!r} in {results / 'records'}")
    return records


def _paragraphs(sentences: Sequence[str]) -> list[str]:
    return [line for sentence in sentences for line in (sentence, "")]


def same(path: Path, content: bytes, mark: str = figure.MARK) -> bool:
    """Whether a file shows what `content` shows: the same text, a plot of the same data."""
    if not path.is_file():
        return False
    found = path.read_bytes()
    return figure.digest(found, mark) == figure.digest(content, mark) if path.suffix == ".png" else found == content


def _stale(results: Path, files: dict[str, bytes]) -> list[Path]:
    ours = [*(results / "tables").glob("*.md"), *(results / "plots").glob("*.png")]
    gone = [p for p in ours if p.relative_to(results).as_posix() not in files]
    return sorted(p for p in gone if figure.MARK.encode() in p.read_bytes())
