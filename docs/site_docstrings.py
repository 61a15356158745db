"""An extension of griffe: lines `name: what it is` of a docstring become a list, as they are meant to be read."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ENTRY = re.compile(r"^(`?\*{0,2}\w+`?(?:, `?\w+`?)*):\s+(\S.*)$")
"""One name, or several with commas: a sentence with a colon has spaces between its words."""


def listed(text: str) -> str:
    """A docstring whose paragraphs of entries are lists; all else stays."""
    return "\n\n".join(_paragraph(part) for part in text.split("\n\n"))


def _paragraph(text: str) -> str:
    lines = text.split("\n")
    if not ENTRY.match(lines[0]) or not all(ENTRY.match(line) or line.startswith(" ") for line in lines):
        return text
    return "\n".join(ENTRY.sub(r"- `\1`: \2", line).replace("``", "`") for line in lines)


class Entries(Extension):
    """Applies `listed` to every docstring."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)
