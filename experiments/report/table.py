"""One table, two renderers: `Table.markdown`, `Table.grid` and `Table.html` for pages, `Table.show` for a terminal. No torch.

A column is added in one place, the list of columns of its table (`speedup_table.columns`, `accuracy.columns`, ...):

    Column("95 % interval", short="± ms", value=lambda row: number(row.record.timing.get("interval_ms")))

`value` makes the text of a cell from an entry (a row of results) and gives `DASH` for what no record holds. `short` is the
heading on a terminal; `terminal=False` leaves the column to the page, which has room. `Table.of` fills the rows; a table
whose rows are text already is made with `Table.text(names, rows)`. A sentence about the table goes to `notes` (above
it) or `footnotes` (below it); both renderers show it.

Cells and notes are inline Markdown: **bold**, `code`, [text](target). A terminal shows their text, and a table that is wider
than the terminal gives way in this order: an interval goes to a second line of its cell; it is left out; columns are left
out, the last one first, and a line names them. No word is broken but one of a label that has no room then.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

Kind = Literal["plain", "caution", "strong", "failure"]
STYLES: dict[Kind, str] = {"plain": "dim", "caution": "yellow", "strong": "bold", "failure": "red"}
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
INTERVAL = re.compile(r" ([\[(][^\[\]()]*[\])])( =)?$")
WIDTH = 118
"""Characters of a line at most, and where nobody says how wide the terminal is, as in a pipe."""
NARROWEST = 40
CELL = 28
"""Characters of a cell's line that is not broken between words."""


def terminal() -> Console:
    """Where tables are printed: as wide as the terminal, within `NARROWEST` and `WIDTH`."""
    return Console(width=min(WIDTH, max(NARROWEST, shutil.get_terminal_size((WIDTH, 24)).columns)))


@dataclass(frozen=True)
class Note:
    """A sentence about a table. kind: caution (what the numbers are not), strong (what they say), failure (a failed run)."""

    text: str
    kind: Kind = "plain"

    @classmethod
    def of(cls, *texts: str | None, kind: Kind = "plain") -> list[Note]:
        """A note of each text that says anything."""
        return [cls(text, kind) for text in texts if text]

    @property
    def markdown(self) -> str:
        return self.text if self.kind == "plain" else f"**{self.text}**"

    def show(self, console: Console) -> None:
        console.print(_plain(self.text), style=STYLES[self.kind], markup=False, highlight=False)


@dataclass(frozen=True)
class Column:
    """One column. short: its heading on a terminal, default `name`; terminal: whether it is shown there at all.

    value: the cell's text from an entry of `Table.of`.
    """

    name: str
    align: Literal["left", "right"] = "right"
    short: str = ""
    terminal: bool = True
    value: Callable[[Any], str] | None = None


@dataclass(frozen=True)
class Table:
    """Rows of text under columns, with what is to be said of them. Raises ValueError for a row of another length.

    picture: what stands below all on a page in the tables folder, "![step time](../plots/x.png)".
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    notes: tuple[Note, ...] = ()
    footnotes: tuple[Note, ...] = ()
    picture: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table '{self.title}': {len(row)} cells under {len(self.columns)} columns: {row}")

    @classmethod
    def of(cls, columns: Sequence[Column], entries: Iterable[Any], **said: Any) -> Table:
        """One row for each entry, made by the columns' `value`. said: title, notes, footnotes, picture."""
        rows = tuple(tuple(c.value(entry) if c.value else "" for c in columns) for entry in entries)
        return cls(tuple(columns), rows, **said)

    @classmethod
    def text(cls, names: Sequence[str], rows: Iterable[Sequence[str]], **said: Any) -> Table:
        """A table of text under columns of these names, the first aligned left, the others right. said: as `of`."""
        first, *others = names
        head = (Column(first, "left"), *(Column(name) for name in others))
        return cls(head, tuple(map(tuple, rows)), **said)

    def grid(self) -> str:
        """The columns and rows alone, as Markdown."""
        ruler = [":--" if c.align == "left" else "--:" for c in self.columns]
        lines = [[c.name for c in self.columns], ruler, *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"

    def html(self) -> str:
        """The columns and rows alone, as HTML."""
        import pandas as pd  # which a start should not wait for

        return pd.DataFrame(self.rows, columns=[c.name for c in self.columns]).to_html(index=False, border=0)

    def pick(self, columns: Mapping[str, str]) -> Table:
        """These columns alone, under other headings: {name: heading}. Raises KeyError for an unknown name."""
        places = {c.name: place for place, c in enumerate(self.columns)}
        head = tuple(replace(self.columns[places[name]], name=heading) for name, heading in columns.items())
        return Table(head, tuple(tuple(row[places[name]] for name in columns) for row in self.rows))

    def markdown(self, level: int = 3) -> str:
        """A section of a page: heading, notes, grid, footnotes, with an empty line after each, and the picture."""
        lines = [f"{'#' * level} {self.title}", ""] if self.title else []
        lines += [*_paragraphs(self.notes), self.grid(), *_paragraphs(self.footnotes)]
        return "\n".join(lines) + f"{self.picture}\n" * bool(self.picture)

    def printed(self) -> tuple[list[str], list[list[str]]]:
        """Headings and rows as a terminal shows them."""
        kept = [place for place, c in enumerate(self.columns) if c.terminal]
        headings = [self.columns[place].short or self.columns[place].name for place in kept]
        return headings, [[_plain(row[place]) for place in kept] for row in self.rows]

    def show(self, console: Console, verbose: bool = True) -> None:
        """Prints the title, what the table says (strong notes), the grid, cautions and failures; verbose: all other notes."""
        said = [*self.notes, *self.footnotes]
        for note in [*[Note(self.title, "strong")] * bool(self.title), *(n for n in said if n.kind == "strong")]:
            note.show(console)
        lines, widths = self.laid_out(console.width)
        shown = Grid()
        for heading, column, width in zip(lines[0], [c for c in self.columns if c.terminal], widths):
            shown.add_column(Text(heading), justify=column.align, width=width, overflow="fold")
        for row in lines[1:]:
            shown.add_row(*map(Text, row[: len(widths)]))
        console.print(shown)
        if left_out := self.printed()[0][len(widths) :]:
            Note(f"Columns left out (terminal too narrow): {', '.join(left_out)}.").show(console)
        for note in said:
            if note.kind in ("caution", "failure") or (verbose and note.kind == "plain"):
                note.show(console)

    def drawn(self) -> str:
        """What `show` prints on the terminal that there is."""
        console = terminal()
        with console.capture() as printed:
            self.show(console)
        return "\n".join(line.rstrip() for line in printed.get().rstrip().splitlines())

    def laid_out(self, width: int) -> tuple[list[list[str]], list[int]]:
        """Headings and rows as they fit into `width` characters, and the widths of the columns that do."""
        headings, rows = self.printed()
        for interval in (r" \1\2", r"\2\n\1", r"\2"):  # inline, below the value, left out
            lines = [[line[0], *(INTERVAL.sub(interval, cell) for cell in line[1:])] for line in (headings, *rows)]
            columns = list(zip(*lines, strict=True))
            needed = [max([_longest(c[0].split()), *map(_needed, c[1:])]) for c in columns]
            if _whole(needed) <= width:
                break
        while len(needed) > 2 and _whole(needed) > width:
            needed.pop()
        if _whole(needed) > width:
            needed[0] = max(_longest(cell.split()) for cell in columns[0])
            needed[0] = max(1, needed[0] - max(0, _whole(needed) - width))  # a label may be broken, a number may not
        spare = max(0, width - _whole(needed))
        for place, column in enumerate(columns[: len(needed)]):
            more = min(spare, max(0, max(_longest(cell.split("\n")) for cell in column) - needed[place]))
            needed[place], spare = needed[place] + more, spare - more
        return lines, needed


def _paragraphs(notes: Sequence[Note]) -> list[str]:
    """Notes as Markdown, an empty line after each; failures are one list."""
    lines: list[str] = []
    for place, note in enumerate(notes):
        if note.kind == "failure":
            last = place + 1 == len(notes) or notes[place + 1].kind != "failure"
            lines += [f"- {note.text}", *[""] * last]
        else:
            lines += [note.markdown, ""]
    return lines


def _longest(parts: Iterable[str]) -> int:
    return max(map(len, parts), default=0)


def _needed(cell: str) -> int:
    """Characters that a cell's column must have, so that no word and no short line of it is broken."""
    return max(_longest(cell.split()), _longest(line for line in cell.split("\n") if len(line) <= CELL))


def _whole(widths: Sequence[int]) -> int:
    """Characters of a line of the grid: the columns with a space on both sides, and what stands between them."""
    return sum(widths) + 3 * len(widths) + 1


def _plain(text: str) -> str:
    return LINK.sub(r"\1", text).replace("**", "").replace("`", "")
