"""Text for messages of one line. Needs no package, so that commands without a configuration need none."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LISTED = 180
"""Characters of a list of names in a message."""


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


def there_are(wrong: str, known: Iterable[str], or_else: str = "") -> str:
    """What follows on "no experiment 'digts'": the names there are, and which of them was probably meant.

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
    return f"; there are: {', '.join(listed) or 'none'}{more}{or_else}" + (
        f"; did you mean {near[0]}?" if meant else ""
    )
