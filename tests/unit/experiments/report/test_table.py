"""One table, two renderers: the page and the terminal show the same text."""

from __future__ import annotations

import io
import os

import pytest
from rich.console import Console

from experiments.report.table import Column, Note, Table, terminal


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
    assert text.startswith("A title\nIt pays.\n")  # what it says comes first
    assert "step ms" in text
    assert "record" not in text
    assert text.endswith("Emulated.\nRead this.\na failed: x | y\nb failed: z\n")
    out = io.StringIO()
    example().show(Console(file=out, width=60), verbose=False)
    assert out.getvalue() == text.replace("Read this.\n", "")


def test_text_under_names_and_rows_of_another_length() -> None:
    assert Table.text(["a", "b"], [["1", "2"]]).grid() == "| a | b |\n| :-- | --: |\n| 1 | 2 |\n"
    with pytest.raises(ValueError, match="table 't': 1 cells under 2 columns"):
        Table.text(["a", "b"], [["1"]], title="t")


def wide() -> Table:
    columns = [
        Column("method", "left", value=lambda entry: entry),
        Column("step time, median (p10–p90), ms", short="step ms (p10–p90)", value=lambda _: "1251 (1215–1291)"),
        Column("speedup vs fp32", short="vs fp32", value=lambda _: "1.64x [1.58, 1.70] ="),
        Column("speedup vs bf16", short="vs bf16", value=lambda _: "0.61x [0.59, 0.63]"),
        Column("of bound", value=lambda _: "34 % [33, 35]"),
        Column("payload/node/step", value=lambda _: "153 MB + 76.7 MB within the node"),
        Column("NIC tx", value=lambda _: "154 MB"),
    ]
    return Table.of(columns, ["no communication", "Birder one-phase hierarchical (this project's)"])


def printed(table: Table, width: int) -> str:
    out = io.StringIO()
    table.show(Console(file=out, width=width))
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 118, 160])
def test_a_terminal_of_any_width_gets_whole_words(width: int) -> None:
    text = printed(wide(), width)
    assert max(map(len, text.splitlines())) <= width
    headings, rows = wide().printed()
    whole = {word for line in (headings, *rows) for cell in line for word in cell.split()} | {"="}
    grid = [line for line in text.splitlines() if line.startswith(("│", "┃"))]
    assert {word for line in grid for word in line.strip("│┃").replace("│", " ").replace("┃", " ").split()} <= whole
    assert "1251" in text


def test_a_label_that_is_wider_than_the_terminal_takes_no_digit_of_a_number() -> None:
    label = "Birder (optimizer.a_long_name.weight_decay=0.0001)"
    text = printed(Table.text(("method", "step ms"), [(label, "12345.6")]), 40)
    assert max(map(len, text.splitlines())) <= 40
    assert "12345.6 │" in text
    shown = "".join(line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│"))
    assert shown == label.replace(" ", "")


def test_what_gives_way_in_a_narrow_terminal() -> None:
    """First the place of an interval, then the interval, then the last columns, which are named."""
    assert "0.61x [0.59, 0.63]" in printed(wide(), 160)
    for width, interval in ((118, True), (80, False)):
        text = printed(wide(), width)
        assert "0.61x [0.59, 0.63]" not in text
        assert "0.61x" in text
        assert ("[0.59, 0.63]" in text) == interval
        assert "1.64x =" in text  # a tie is one without its interval too
    assert "Columns left out" not in printed(wide(), 118)
    assert "Columns left out (terminal too narrow): " in printed(wide(), 60)


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("300", 118), ("10", 40), (None, 118)])
def test_the_width_of_a_terminal(columns: str | None, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    else:
        monkeypatch.setattr("shutil.get_terminal_size", lambda fallback: os.terminal_size(fallback))
    assert terminal().width == width
