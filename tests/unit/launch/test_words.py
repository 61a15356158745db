"""Lines on a terminal: as wide as it is, words whole; a pipe gets every message in one line."""

from __future__ import annotations

import io
import os
import shlex
import sys
from pathlib import Path

import pytest

from launch.words import broken, manual, program, say, typed_path

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


def test_a_program_is_typed_so_that_the_shell_finds_that_of_this_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = tmp_path / "an environment" / "bin", tmp_path / "other"
    for folder in (own, other):
        folder.mkdir(parents=True)
        (folder / "python").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    monkeypatch.chdir(tmp_path)
    for path, typed in [
        ([own, other], "python"),
        ([other, own], "an environment/bin/python"),
        ([], "an environment/bin/python"),
    ]:
        monkeypatch.setenv("PATH", os.pathsep.join(map(str, path)))
        assert shlex.split(program("python")) == [typed]
    monkeypatch.chdir(other)
    assert shlex.split(program("python")) == [str(own / "python")]
    assert program("wandb") == "wandb"  # this environment has none


def test_a_command_with_a_folder_of_any_name_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("plain", "a b", "it's"):
        assert shlex.split(typed_path(tmp_path / name)) == [name]
        assert shlex.split(typed_path(tmp_path.parent / name)) == [str(tmp_path.parent / name)]
