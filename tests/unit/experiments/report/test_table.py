"""One table, two renderers: the page and the terminal show the same text."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from experiments.report.table import Column, Note, Table


def example() -> Table:
    columns = [
        Column("method", "left", value=lambda entry: entry[0]),
        Column("step time, ms", short="step ms", value=lambda entry: f"**{entry[1]}**"),
        Column("record", terminal=False, value=lambda entry: f"[{entry[0]}](../records/x.json)"),
    ]
    notes = (Note("Emulated.", "caution"), Note("Read `this`."))
    failures = (Note("a failed: x | y", "failure"), Note("b failed: z", "failure"))
    entries = [("one | two", 12), ("[three]", 3)]
    return Table.of(columns, entries, title="A title", notes=notes, footnotes=(*failures, Note("It pays.", "strong")))


def test_the_page() -> None:
    assert example().markdown() == (
        "### A title\n\n**Emulated.**\n\nRead `this`.\n\n"
        "| method | step time, ms | record |\n| :-- | --: | --: |\n"
        "| one \\| two | **12** | [one \\| two](../records/x.json) |\n"
        "| [three] | **3** | [[three]](../records/x.json) |\n\n"
        "- a failed: x | y\n- b failed: z\n\n**It pays.**\n"
    )


def test_the_terminal() -> None:
    out = io.StringIO()
    example().show(Console(file=out, width=60))
    text = out.getvalue()
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert lines == [["one | two", "12"], ["[three]", "3"]]
    assert text.startswith("A title\nEmulated.\nRead this.\n")
    assert "step ms" in text
    assert "record" not in text
    assert text.endswith("a failed: x | y\nb failed: z\nIt pays.\n")


def test_text_under_names_and_rows_of_another_length() -> None:
    assert Table.text(["a", "b"], [["1", "2"]]).grid() == "| a | b |\n| :-- | --: |\n| 1 | 2 |\n"
    with pytest.raises(ValueError, match="table 't': 1 cells under 2 columns"):
        Table.text(["a", "b"], [["1"]], title="t")
