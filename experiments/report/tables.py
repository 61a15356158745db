"""Tables and plots from records alone (`experiments/tables.py` is the command).

The same records give the same bytes. Writes `<results>/tables/<exp>.md` and `<results>/plots/<exp>*.png`, and removes
those it wrote before whose records are gone.
"""

from __future__ import annotations

import functools
import json
import shlex
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from experiments.records.record import LOCAL, ROOT, ResultRecord, place, read_all, write_file
from experiments.report import (
    accuracy,
    accuracy_page,
    answered,
    figure,
    gaps,
    methods_table,
    plots,
    published,
    sentences,
    speedup,
    speedup_table,
    time_to_loss,
)
from experiments.report.formats import DASH
from experiments.report.table import Table, terminal
from launch.errors import UserError
from launch.words import program


def render(records: Sequence[ResultRecord], results_dir: Path, whole: bool = True) -> dict[str, bytes]:
    """All tables and plots of `records`: path below `results_dir` -> content. Reads curves, writes nothing.

    whole: these are all records of the folder, so that pictures of all experiments can be drawn.
    """
    files: dict[str, bytes] = {}

    def drawn(name: str, png: bytes | None) -> bool:
        if png is not None:
            files[f"plots/{name}.png"] = png
        return png is not None

    pages: dict[str, dict[str, list[str]]] = defaultdict(lambda: {"methods": [], "timed": [], "scored": []})
    for table in speedup.build(list(records)):
        pages[table.records[0].exp]["timed"].append(speedup_table.as_table(table).markdown())
        drawn(f"{table.slug}_step_time", plots.step_times(table))
    for scores in accuracy.build(list(records)):
        plot = drawn(f"{scores.slug}_curve", plots.loss_curves(scores, results_dir))
        pages[scores.first.exp]["scored"].append(accuracy.as_table(scores, plot).markdown())
    for of_all in methods_table.build(records):
        pages[methods_table.EXP]["methods"].append(methods_table.as_table(of_all).markdown())
        against = gaps.against_bytes(of_all)
        drawn(of_all.plot_name, None if against is None else plots.against_bytes(against))
    if whole:
        studies = accuracy_page.studies(records)
        race = time_to_loss.build(studies, results_dir)
        drawn("accuracy", plots.accuracies(studies))
        drawn("accuracy_bytes", plots.accuracies_by_bytes(studies))
        drawn("time_to_loss", None if race is None else plots.time_to_loss(race))
    for exp, sections in sorted(pages.items()):
        beside = functools.partial(published.sections, exp)
        page = sentences.page("experiment", mark=figure.MARK, exp=exp, dash=DASH, published=beside, **sections)
        files[f"tables/{exp}.md"] = page.encode()
    return files


def write(results_dir: str | Path, exp: str | None = None, more: Mapping[Path, bytes] | None = None) -> list[Path]:
    """Brings tables and plots up to date with the records, of one experiment or of all. Returns what it made.

    more: further files that belong to them.
    """
    found, stale = _made(results_dir, exp, more)
    written = save(found)
    for path in stale:
        path.unlink(missing_ok=True)  # another command may bring them up to date, too
    return written


def check(results_dir: str | Path, exp: str | None = None, more: Mapping[Path, bytes] | None = None) -> list[str]:
    """Names of the tables and plots on disk that differ from what the records say: changed, missing or left over."""
    found, stale = _made(results_dir, exp, more)
    wrong = differing(found) + stale
    return [p.relative_to(results_dir if p.is_relative_to(results_dir) else ROOT).as_posix() for p in wrong]


def _made(
    results_dir: str | Path, exp: str | None, more: Mapping[Path, bytes] | None
) -> tuple[dict[Path, bytes], list[Path]]:
    """What the records say, and what was made here and whose records are gone; of one experiment these are not known."""
    results = Path(results_dir)
    if not results.is_dir():
        raise UserError(f"no results folder at {results}: give --results DIR")
    everything = read_all(results)
    records = [r for r in everything if exp in (None, r.exp)]
    if exp is not None and not records:
        raise UserError(f"no record of experiment {exp!r} in {results / 'records'}")
    files = render(records, results, len(records) == len(everything))
    there = (results / answered.VERDICTS).is_file()
    if (exp is None or there) and ((said := answered.verdicts(everything)) or there):
        lines = ",\n".join(json.dumps(study, ensure_ascii=False) for study in said)
        files[answered.VERDICTS.as_posix()] = f"[{lines}]\n".encode()
    found = {results / name: content for name, content in files.items()} | dict(more or {})
    ours = [] if exp else [*(results / "tables").glob("*.md"), *(results / "plots").glob("*.png")]
    return found, sorted(p for p in ours if p not in found and figure.MARK.encode() in p.read_bytes())


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
    kinds:   of the papers' numbers next to it, "speedup" and "accuracy".
    verbose: also how it was measured, how to read it, and what was published.
    """
    results = Path(results_dir)
    console = console or terminal()
    everything = read_all(results)
    records = [r for r in everything if r.group == group]
    if not records:
        raise UserError(f"no record of group {group!r} in {results / 'records'}")
    timed = speedup.build(records, group)
    printed: list[Table] = []
    if not timed:  # virtual workers
        for scored in accuracy.build(records):
            printed.append(accuracy.as_table(scored))
            printed[-1].show(console, verbose)
    for table in timed:
        known = published.records(results, table.records[0].exp)
        theirs = published.matching(table, known)
        printed.append(view(table, theirs))
        printed[-1].show(console, verbose)
        for note in published.note(table, theirs, known) if verbose else ():
            note.show(console)
    exps = sorted({r.exp for r in records})
    for exp in exps if verbose else ():
        for sentence in (said for kind in kinds for said in published.quoted(exp, kind)):
            console.print(sentence, style="dim", markup=False, highlight=False)
    places = [("record", place(results, r.id)) for r in records]
    places += [("table", results / "tables" / f"{exp}.md") for exp in exps]
    places += [("plot", path) for path in plots_of(everything, results, group)]
    for what, path in places:
        if path.is_file():
            console.print(f"{what + ':':<8}{path}", soft_wrap=True, markup=False, highlight=False)
    if not verbose:
        folder = "" if str(results) == LOCAL else f" --results {shlex.quote(str(results))}"
        again = f"{program('python')} experiments/tables.py{folder} --group {group} --verbose"
        console.print("more:   " + again, style="dim", soft_wrap=True, markup=False, highlight=False)
    return printed


def plots_of(everything: Sequence[ResultRecord], results: Path, group: str) -> list[Path]:
    """Where the plots of a group of runs lie, or would. everything: the records of `results`."""
    timed = [t for t in speedup.build(list(everything)) if t.group == group]
    scored = [t for t in accuracy.build(list(everything)) if group in {r.group for c in t.cells for r in c.records}]
    drawn = [*(f"{t.slug}_step_time" for t in timed), *(f"{t.slug}_curve" for t in scored)]
    return [results / "plots" / f"{name}.png" for name in drawn]


# ---- files on disk ----------------------------------------------------------------------------------------------------


def save(files: Mapping[Path, bytes]) -> list[Path]:
    """Brings files up to date: path -> content. Returns their paths, in order."""
    for path in differing(files):
        write_file(path, files[path], "plot" if path.suffix == ".png" else "page")
    return sorted(files)


def differing(files: Mapping[Path, bytes]) -> list[Path]:
    """Those that are missing on disk, or show something else there."""
    return sorted(path for path, content in files.items() if not _same(path, content))


def _same(path: Path, content: bytes) -> bool:
    """The same text, or a plot of the same data: another version of matplotlib draws other bytes."""
    if not path.is_file():
        return False
    found = path.read_bytes()
    return figure.digest(found) == figure.digest(content) if path.suffix == ".png" else found == content
