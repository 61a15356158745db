"""What tests ask of every command."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest


def refused(
    main: Callable[[Sequence[str]], int], arguments: Sequence[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bad input ends a command with status 2 and one line, which holds `words`."""
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert words in shown.err
    assert shown.err.count("\n") == 1
