"""Text for messages of one line. Needs no package, so that commands without a configuration need none."""

from __future__ import annotations


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
