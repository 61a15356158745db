"""Text for messages. Needs no package, so that commands without a configuration need none."""

from __future__ import annotations

import difflib
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

LISTED = 180
"""Characters of a list of names in a message."""
WIDEST = 118
"""Characters of a line of a help text, however wide the terminal is."""


def say(text: str, file: TextIO | None = None) -> None:
    """Prints `text` at once. On a terminal, lines are broken between words; a pipe or a log gets them whole.

    A line that begins with a space is a command or a path: it is never broken, so that it can be copied.
    file: default standard output. Its terminal's width counts, or COLUMNS where that is set.
    """
    file = sys.stdout if file is None else file
    columns = _columns(file)
    lines = [line if line.startswith(" ") else broken(line, columns) for line in str(text).split("\n")]
    print("\n".join(lines), file=file, flush=True)


def broken(line: str, columns: int | None, indent: str = "  ") -> str:
    """`line` in lines of at most `columns` characters, those after the first with `indent`. None: one line.

    Only spaces are broken at: paths, options and numbers stay whole, longer than `columns` if need be.
    """
    if columns is None or len(line) <= columns:
        return line
    return textwrap.fill(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def manual(doc: str | None) -> str:
    """A docstring as a help text: paragraphs as wide as the terminal, indented lines as they stand."""
    columns = min(WIDEST, shutil.get_terminal_size().columns) - 2
    parts: list[str] = []
    for line in (doc or "").strip().splitlines():
        if parts and all(text and not text.startswith(" ") for text in (parts[-1], line)):
            parts[-1] += f" {line}"
        else:
            parts.append(line)
    return "\n".join(broken(part, columns, "") for part in parts)


def _columns(file: TextIO) -> int | None:
    """Characters of a line of the terminal that `file` writes to; None where it writes to no terminal."""
    try:
        return max(40, int(os.environ["COLUMNS"]))
    except (KeyError, ValueError):
        pass
    try:
        return max(40, os.get_terminal_size(file.fileno()).columns)
    except (OSError, ValueError, AttributeError):
        return None


def count(number: int, what: str) -> str:
    """1 node, 2 nodes."""
    return f"{number} {what}" + "s" * (number != 1)


def one_line(text: str, longest: int = 150) -> str:
    """The first line of `text` that says something, escaped and shortened."""
    return shortened(next((line.strip() for line in text.splitlines() if line.strip()), "unknown error"), longest)


def shortened(text: str, longest: int = 60) -> str:
    """`text`, escaped, and its beginning where it is longer."""
    text = escaped(text)
    return text if len(text) <= longest else text[: longest - 3] + "..."


def escaped(text: str) -> str:
    """`text` without line breaks and control characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def typed_path(path: Path) -> str:
    """A path as the user would type it: relative where it lies below the working directory."""
    return shlex.quote(os.path.relpath(path) if path.absolute().is_relative_to(Path.cwd()) else str(path))


def program(name: str) -> str:
    """A program of this environment as the user would type it: by its path where a shell finds another one, or none."""
    own, found = Path(sys.executable).with_name(name), shutil.which(name)
    there = found is not None and Path(found).parent == own.parent
    return name if there or not own.exists() else typed_path(own)


def there_are(wrong: str, known: Iterable[str], or_else: str = "") -> str:
    """What follows on "no experiment 'digts'": which name was probably meant, and the names there are.

    All names where they fit into a message, else those nearest to `wrong` and how many more there are. or_else: what may be
    given in place of a name.
    """
    names = list(dict.fromkeys(known))
    near = sorted(names, key=lambda name: -difflib.SequenceMatcher(None, wrong.lower(), name.lower()).ratio())
    listed = names
    if len(", ".join(names)) > LISTED:
        listed = near.copy()
        while len(", ".join(listed)) > LISTED:
            listed.pop()
    more = f" and {len(names) - len(listed)} more" * (len(listed) < len(names))
    meant = difflib.get_close_matches(wrong.lower(), [name.lower() for name in near[:1]], cutoff=0.6)
    guess = f"; did you mean {near[0]}? There are: " if meant else "; there are: "
    return f"{guess}{', '.join(listed) or 'none'}{more}{or_else}"
