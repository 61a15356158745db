"""The templates of `pages`: documents, pages of a results folder, sentences. All text that is not a number. No torch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

FOLDER = Path(__file__).with_name("pages")


def environment(trim: bool = True) -> Environment:
    """What a template names and nobody gives is an error. trim: a line that is a block alone leaves no line behind."""
    return Environment(
        loader=FileSystemLoader(FOLDER),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=trim,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def page(name: str, **given: Any) -> str:
    """A page of a results folder, tables/<name>.md, of what its template is given. It ends with one line break."""
    return _plain().get_template(f"results/tables/{name}.md.j2").render(**given).rstrip() + "\n"


@functools.cache
def _plain() -> Environment:
    return environment()
