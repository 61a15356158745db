"""Text for messages of one line. Needs no package, so that commands without a configuration need none."""

from __future__ import annotations


def one_line(text: str, longest: int = 150) -> str:
    """The first line of `text` that says something, escaped and shortened."""
    first = escaped(next((line.strip() for line in text.splitlines() if line.strip()), "unknown error"))
    return first if len(first) <= longest else first[: longest - 3] + "..."


def escaped(text: str) -> str:
    """`text` without line breaks and control characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
