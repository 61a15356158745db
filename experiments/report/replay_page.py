"""The page of a suite, from records alone: tables/<suite>.md of a results folder, its picture, what a terminal shows of it.

Which sections a page has, in which order and with which columns, stands in the suite's YAML (`report`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from experiments.cells.suite import Section, Suite
from experiments.report import replay_words, sentences
from experiments.report.replay_plots import plot
from experiments.report.replay_sections import SECTIONS, Block
from experiments.report.replayed import Results, load
from experiments.report.sentences import hardware
from experiments.report.table import Note, Table, terminal


def mark(suite: Suite) -> str:
    """What a page and a picture say of their origin."""
    return f"Made by {suite.report.made_by}"


def paths(suite: Suite, results_dir: str | Path) -> tuple[Path, Path]:
    """Where page and picture lie."""
    base = Path(results_dir)
    return base / "tables" / f"{suite.name}.md", base / "plots" / f"{suite.report.plot.file}.png"


def render(suite: Suite, results_dir: str | Path) -> dict[Path, bytes]:
    """Page and, where a cell has been measured, picture: path -> content. Raises UserError."""
    results, (page, picture) = load(suite, results_dir), paths(suite, results_dir)
    drawn = {picture: plot(results, mark(suite))} if results.records else {}
    return {page: markdown(results).encode(), **drawn}


def markdown(results: Results) -> str:
    """The page."""
    suite, report = results.suite, results.suite.report
    first = next(iter(results.records.values()), None)
    blocks = [block for section in report.sections for block in _blocks(results, section)]
    return sentences.page(
        "suite",
        mark=mark(suite),
        title=report.title,
        caveats=first and replay_words.caveats(results),
        about=first and report.about.format(hardware=hardware(first)),
        rounds=replay_words.rounds(results),
        blocks=[block.markdown() if isinstance(block, Table) else f"{block}\n" for block in blocks],
    )


def show(
    suite: Suite,
    results_dir: str | Path,
    *,
    device: str = "cpu",
    kernels_only: bool = False,
    console: Console | None = None,
) -> None:
    """Prints what the page says, caveats first: its sections for a terminal, the kernels of `device`, where the files are."""
    results = load(suite, results_dir)
    results = replace(results, kernels={d: r for d, r in results.kernels.items() if d == device})
    console = console or terminal()
    if results.records and not kernels_only:
        Note(replay_words.caveats(results), "caution").show(console)
        for said, cautious in replay_words.rounds(results):
            Note(said, "caution" if cautious else "plain").show(console)
    for section in suite.report.sections:
        if section.terminal and (section.kind == "kernels" or not kernels_only):
            for block in _blocks(results, section):
                if isinstance(block, Table):
                    block.show(console)
                else:
                    text = block if block.startswith("- ") else block.lstrip("# ").replace("\n", " ")
                    Note(text, "strong" if block.startswith("#") else "plain").show(console)
    for path in paths(suite, results_dir):
        if path.is_file():
            console.print(str(path), soft_wrap=True, markup=False, highlight=False)


def _blocks(results: Results, section: Section) -> Iterator[Block]:
    made = list(SECTIONS[section.kind](results, section))
    if made and section.heading:
        yield f"## {section.heading}"
        yield from [section.note] if section.note else []
    yield from made
