"""Lines on a terminal: as wide as it is, words whole; a pipe gets every message in one line."""

from __future__ import annotations

import io

import pytest

from launch.words import broken, manual, say

PATH = "results/local/records/20261125-230437-a-run-whose-name-is-longer-than-any-terminal-is-wide.json"


def test_lines_fit_and_words_stay_whole() -> None:
    lines = broken(f"error: no record of experiment digits in {PATH}: run make digits first", 60).splitlines()
    assert [line for line in lines if len(line) > 60] == [f"  {PATH}:"]
    assert lines[0] == "error: no record of experiment digits in"
    assert all(line.startswith("  ") for line in lines[1:])
    assert broken("as long as it is", None) == "as long as it is"


def test_a_pipe_gets_one_line_and_a_command_is_never_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "word " * 40 + "end"
    out = io.StringIO()
    say(said, out)
    assert out.getvalue() == f"{said}\n"
    monkeypatch.setenv("COLUMNS", "80")
    out = io.StringIO()
    say(f"{said}:\n  python experiments/run.py {PATH} {said}", out)
    *prose, command = out.getvalue().splitlines()
    assert len(prose) > 1
    assert max(map(len, prose)) <= 80
    assert command == f"  python experiments/run.py {PATH} {said}"


def test_help_is_as_wide_as_the_terminal_and_keeps_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    doc = "One two three four five six seven eight nine ten eleven\ntwelve.\n\n    key    meaning\n\nThe end\nof it.\n"
    assert manual(doc).splitlines() == [
        "One two three four five six seven eight nine ten eleven",
        "twelve.",
        "",
        "    key    meaning",
        "",
        "The end of it.",
    ]
